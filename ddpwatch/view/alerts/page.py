"""The alerts page: a list of all alerts, and the details of one."""

from __future__ import annotations

from datetime import timezone
from typing import TYPE_CHECKING, Final

from ddpwatch.core.alerts.hang_alerts import WAITED, WAITING, waited_s
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.limits import StragglerLimits
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize
from ddpwatch.core.units import UNPROVEN, count, duration, duration_text, moment_of, percent, ranks_text, size
from ddpwatch.view.alerts.format import mark_of, message_of
from ddpwatch.view.cells import Cell, Level, columns_of, fit, pad, plain
from ddpwatch.view.layout import capped, facts, heading, paragraph
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from datetime import tzinfo

    from ddpwatch.core.alerts.model import Alert, Moment
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

SELECTED: Final = "▌"
TEXT_COLUMNS: Final = 100
"""Line width in columns of an alert that is copied as text."""
SINCE_FROM_COLUMNS: Final = 100
"""Width in columns from which on the list has the column SINCE."""
STATE_FROM_COLUMNS: Final = 60
"""Width in columns from which on the list has the column STATE."""
RULE_FROM_COLUMNS: Final = 44
"""Width in columns from which on the list has the column RULE."""
# Widths of the columns SINCE and STATE, in terminal cells.
_SINCE_COLUMNS: Final = 12
_LASTED_COLUMNS: Final = 14
_UNITS: Final = {"ms": " ms", "percent": "%", "s": " s"}
"""Units by the last part of a name of evidence, as they follow a number."""
_WORDS: Final = {WAITED: "waited", WAITING: "waiting ranks"}
"""Names of evidence that would read alike without their units."""
_IDS: Final = frozenset({"pid", "rank", "port", "step", "id", "seq"})
"""Last parts of names of identifiers, which are written without thousands separators, as in other programs."""


def all_alerts(run_view: RunView) -> list[Alert]:
    """Open alerts, the most urgent first; then those closed by the step of the view, the newest first."""
    at = run_view.at
    past = [
        alert
        for alert in run_view.closed
        if alert.closed is not None and (at is None or (alert.closed.step or 0) <= at)
    ]
    return [*run_view.alerts, *reversed(past)]


def alert_list(
    run_view: RunView, columns: int, rows: int, *, selected: int, first: int, zone: tzinfo = timezone.utc
) -> list[Line]:
    """One line per alert from number `first` on, with a mark at number `selected`; at most `rows` lines."""
    alerts = all_alerts(run_view)
    if not alerts:
        return capped(_calm(run_view, columns), rows)
    rule_columns = max(columns_of(alert.finding.rule) for alert in alerts) + 2
    room = rows - 1
    first = min(max(first, 0), len(alerts) - 1)
    rest = len(alerts) - first - room
    shown = alerts[first : first + (room - 1 if rest > 0 else room)]
    widths = _widths(columns, rule_columns)
    what = Cell(f"WHAT   ↑ {count(first)} more" if first else "WHAT", Level.DIM)
    lines = [[Cell("    "), *(Cell(pad(title, width), Level.DIM) for title, width in widths.items()), what]]
    for place, alert in enumerate(shown, first):
        is_open = place < len(run_view.alerts)
        mark = Cell(SELECTED if place == selected else " ", Level.KEY)
        lines.append([mark, *_entry(run_view, alert, widths, zone, is_open=is_open)])
    if rest > 0:
        lines.append([Cell(f"  … {count(rest + 1)} more", Level.DIM)])
    return [fit(line, columns) for line in lines][: max(rows, 0)]


def alert_detail(alert: Alert, columns: int, *, zone: tzinfo = timezone.utc) -> list[Line]:
    """All about one alert: message, advice, times, evidence and the rule's own description."""
    finding, seen = alert.finding, alert.seen
    mark, level, _ = mark_of(alert)
    state = "closed" if alert.closed else "open" if seen is None else f"open, but not seen since {_step(seen)}"
    lines: list[Line] = [
        [
            Cell(f"{mark} ", level),
            Cell(finding.rule, Level.STRONG),
            Cell(f"  {finding.severity.word} · {state}", level),
        ],
        [],
        *paragraph(sanitize(finding.message, NOTE_CHARS), columns, Level.STRONG if seen is None else Level.DIM),
        [],
    ]
    if finding.advice:
        lead = [Cell("what to try ", Level.OK)]
        lines += [*paragraph(sanitize(finding.advice, NOTE_CHARS), columns, lead=lead), []]
    lines += [*facts(alert_facts(alert, zone), columns), []]
    if finding.evidence:
        lines += [heading("evidence", columns), *_evidence(finding.evidence, columns), []]
    if text := next((detector.text for detector in DETECTORS if detector.rule == finding.rule), ""):
        lines += [heading("what this rule checks", columns), *paragraph(text, columns, Level.DIM)]
    return [fit(line, columns) for line in lines]


def alert_text(alert: Alert, *, zone: tzinfo = timezone.utc) -> str:
    """The details as plain text to copy, without control characters but line ends."""
    return "\n".join(plain(line) for line in alert_detail(alert, TEXT_COLUMNS, zone=zone)) + "\n"


def _calm(run_view: RunView, columns: int) -> list[Line]:
    """Text in place of an empty list: no alert, and the rules that were evaluated."""
    names = ", ".join(detector.rule for detector in DETECTORS)
    when = "" if run_view.at is None else f" at step {count(run_view.at)}"
    hurt = run_view.damage is not None and run_view.damage.alerts
    mark = Cell("▲ ", Level.WARN) if hurt else Cell("● ", Level.OK)
    line = [mark, Cell(f"No alerts{' that could be read' * hurt}{when}.", Level.STRONG)]
    text = f"{len(DETECTORS)} rules check every step: {names}."
    return [fit(line, columns), *paragraph(text, columns, Level.DIM, lead=[Cell("  ")])]


def _widths(columns: int, rule_columns: int) -> dict[str, int]:
    """Widths of the columns for which there is room, by title."""
    wanted = (
        ("SINCE", SINCE_FROM_COLUMNS, _SINCE_COLUMNS),
        ("STATE", STATE_FROM_COLUMNS, _LASTED_COLUMNS),
        ("RULE", RULE_FROM_COLUMNS, rule_columns),
    )
    return {title: width for title, least, width in wanted if columns >= least}


def _entry(run_view: RunView, alert: Alert, widths: dict[str, int], zone: tzinfo, *, is_open: bool) -> Line:
    mark, level, _ = mark_of(alert)
    texts = {
        "SINCE": _clock(alert.began, zone) or _step(alert.began),
        "STATE": _lasted(run_view, alert, is_open=is_open),
        "RULE": alert.finding.rule,
    }
    bright = is_open and not alert.stale
    line = [Cell(f" {mark} ", level if bright else Level.DIM)]
    for title, width in widths.items():
        line.append(Cell(pad(texts[title], width), Level.STRONG if bright and title == "RULE" else Level.DIM))
    return [*line, Cell(message_of(alert), Level.PLAIN if bright else Level.DIM)]


def _lasted(run_view: RunView, alert: Alert, *, is_open: bool) -> str:
    if is_open and run_view.at is not None:
        return "was open"
    lasted_s = _between_s(alert.began, alert.closed or run_view.now)
    return f"{'open' if is_open else 'ended,'} {duration(lasted_s)}"


def _between_s(first: Moment, last: Moment) -> float:
    """By the clock of the ranks where it is known: a viewer may have attached late."""
    if first.unix_ns and last.unix_ns:
        return (last.unix_ns - first.unix_ns) / 1e9
    return (last.now_ns - first.now_ns) / 1e9


def alert_facts(alert: Alert, zone: tzinfo = timezone.utc) -> list[tuple[str, str]]:
    """Times, ranks, phases and cost of an alert, as names and texts. A stale alert was last seen before it was last
    found: its rule finds it as long as enough of the earlier steps are in its window.
    """
    finding, seen = alert.finding, alert.seen
    end = alert.closed or seen or alert.last
    lasted = f", after {duration_text(_between_s(alert.began, end))}" if end is not seen or seen.unix_ns else ""
    pairs = [("since", _moment_text(alert.began, zone))]
    if alert.closed is None:
        pairs.append(("last seen", f"{_moment_text(end, zone, alert.since)}{lasted}"))
    else:
        # The alert outlasts its episode by the close delay.
        if waited := waited_s(finding):
            pairs.append(("lasted", f"at least {waited:.1f} s"))
        after = "" if waited else f", {duration_text(_between_s(alert.began, end))} after it began"
        pairs.append(("closed", f"{_moment_text(end, zone, alert.since)}{after}"))
    if alert.closed and finding.from_step is not None and finding.upto_step is not None:
        pairs.insert(1, ("seen in", f"steps {count(finding.from_step)} to {count(finding.upto_step)}"))
    if finding.ranks:
        pairs.append(("ranks", ranks_text(finding.ranks)))
    if finding.phase:
        phases = alert.phases[: len(PHASES)] or (finding.phase,)
        pairs.append(("phase", sanitize(", then ".join(phases), NAME_CHARS)))
    if finding.cost is not None and finding.cost >= StragglerLimits.MIN_COST_SHARE:
        pairs.append(("cost", f"{percent(finding.cost)} of the job's time while the alert was open"))
    return pairs


def _moment_text(moment: Moment, zone: tzinfo, since: Moment | None = None) -> str:
    clock, step = _clock(moment, zone), _step(moment, since)
    return f"{clock} {zone.tzname(moment_of(moment.unix_ns)) or ''}, {step}" if clock else step


def _step(moment: Moment, since: Moment | None = None) -> str:
    if moment.step is None and since is not None and since.step is not None:
        return "step unknown"
    return "before step 0" if moment.step is None else f"step {count(moment.step)}"


def _clock(moment: Moment, zone: tzinfo) -> str:
    at = moment_of(moment.unix_ns)
    return f"{at.astimezone(zone):%H:%M:%S}" if at else ""


def _evidence(evidence: dict[str, float | int | str], columns: int) -> list[Line]:
    """Numbers aligned by their last digit, texts by their first character."""
    entries = [(sanitize(name, NAME_CHARS), value) for name, value in evidence.items()]
    labels = {name: _label(name) for name, _ in entries}
    numbers = {name: _number(name, value) for name, value in entries if not isinstance(value, str)}
    label_columns = min(max(columns_of(label) for label in labels.values()) + 2, columns // 2)
    number_columns = max((columns_of(number) for number, _ in numbers.values()), default=0)
    lines: list[Line] = []
    for name, value in entries:
        lead = Cell(pad(labels[name], label_columns), Level.DIM)
        if name in numbers:
            number, unit = numbers[name]
            lines.append([lead, Cell(pad(number, number_columns, right=True)), Cell(unit, Level.DIM)])
        else:
            lines += paragraph(sanitize(str(value), NOTE_CHARS) or UNPROVEN, columns, lead=[lead])
    return lines


def evidence_facts(evidence: dict[str, float | int | str]) -> list[tuple[str, str]]:
    """Evidence of an alert, as names and texts with their units."""
    pairs = []
    for raw, value in evidence.items():
        name = sanitize(raw, NAME_CHARS)
        text = sanitize(value, NOTE_CHARS) if isinstance(value, str) else "".join(_number(name, value))
        pairs.append((_label(name), text or UNPROVEN))
    return pairs


def _label(name: str) -> str:
    if name in _WORDS:
        return _WORDS[name]
    stem, _, unit = name.rpartition("_")
    return (stem if stem and unit in (*_UNITS, "bytes") else name).replace("_", " ")


def _number(name: str, value: float | int) -> tuple[str, str]:  # noqa: PYI041 - counts stay whole numbers
    unit = name.rpartition("_")[2]
    if unit in _IDS and isinstance(value, int):
        return str(value), ""
    if "bytes" in name and value >= 0:
        return size(value), ""
    if isinstance(value, float):
        return f"{value:,.2f}", _UNITS.get(unit, "")
    return count(value), _UNITS.get(unit, "")
