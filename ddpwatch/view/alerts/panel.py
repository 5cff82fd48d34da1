"""What is wrong, in the few lines that the overview has for it.

A hang on top of everything: who has not arrived, who waits, what the missing rank is doing, and how long is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rules
from ddpwatch.core.alerts.hangs import is_hang
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize
from ddpwatch.core.units import duration, percent, plural
from ddpwatch.view.alerts.format import MARKS, mark_of, message_of
from ddpwatch.view.allreduce import share_lately
from ddpwatch.view.cells import Cell, Level, columns_of, fit, line_columns
from ddpwatch.view.layout import bar, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

BAR_COLUMNS: Final = 24
MAX_ROWS: Final = 7
LOOKS: Final = 2
"""A hang that was not found in so many looks is over; rules are asked as often as ranks tell."""
ORDER: Final = (rules.UNEVEN_BATCH, rules.DESYNC, rules.STALL, rules.TIMEOUT)
"""What says most about who it is comes first."""


def hang_of(run_view: RunView) -> Alert | None:
    """The alert on a hang that goes on; None = there is none, the run has ended, or an earlier step is looked at.

    One that is over stays open for a while, lest it flaps; what is on top is what is wrong now.
    """
    if run_view.at is not None or run_view.condition == "ended":
        return None
    since_ns = run_view.now.now_ns - LOOKS * run_view.state.beat_ns
    found = [alert for alert in run_view.alerts if is_hang(alert.finding) and alert.last.now_ns >= since_ns]
    return min(found, key=lambda alert: ORDER.index(alert.finding.rule), default=None)


def stuck_rank(run_view: RunView) -> int | None:
    """The first rank that the others wait for in a hang; None = there is no hang, or nobody to blame."""
    hang = hang_of(run_view)
    return hang.finding.ranks[0] if hang is not None and hang.finding.ranks else None


def hang_lines(run_view: RunView, columns: int) -> list[Line]:
    """The hang in a few lines; none if there is none. In place of the alert, whose words these are."""
    alert = hang_of(run_view)
    if alert is None:
        return []
    finding, facts = alert.finding, alert.finding.evidence
    mark, level, _ = MARKS[finding.severity]
    headline, _, doing = sanitize(finding.message, NOTE_CHARS).partition(". ")
    headline = headline.partition(", timeout in ")[0]  # which the clock tells
    lines: list[Line] = [
        [Cell("  " if place else f"{mark} ", level), Cell(text, Level.STRONG)]
        for place, text in enumerate(wrap(headline, max(columns - 2, 10)))
    ]
    lines += [[Cell("  "), Cell(text, Level.WARN)] for text in (wrap(doing, max(columns - 2, 10)) if doing else [])]
    lines = lines[: MAX_ROWS - 1]
    key: Line = (
        [Cell("   "), Cell("x", Level.KEY, "open_stuck"), Cell(" its stack", Level.DIM)] if finding.ranks else []
    )
    lines.append([*_clock(facts, columns - line_columns(key), level), *key])
    return [fit(line, columns) for line in lines]


def _clock(facts: dict[str, float | int | str], columns: int, level: Level) -> Line:
    """How long they have waited, of how long they may."""
    waited_s = float(facts.get("waiting_s", 0.0))
    timeout_s = float(facts.get("timeout_s", 0.0))
    if not timeout_s:
        return [Cell(f"  waiting for {duration(waited_s)}; how long torch waits is not known", Level.DIM)]
    left_s = float(facts.get("left_s", timeout_s - waited_s))
    line = [Cell("  ")]
    if columns >= 2 * BAR_COLUMNS:
        line += [Cell(bar(1.0 - left_s / timeout_s, BAR_COLUMNS), level), Cell("▏ ", Level.DIM)]
    if left_s <= 0:
        return [*line, Cell("the timeout is over", level)]
    line += [Cell(f"{duration(left_s)} left", level), Cell(f" of {duration(timeout_s)}")]
    what = " until torch ends the job"
    return [*line, Cell(what)] if line_columns(line) + columns_of(what) <= columns else line


ROOMY_ROWS: Final = 8
"""From here on the first alert is told with its advice, whatever there is besides."""
_INDENT: Final = 2


def alert_box(run_view: RunView, columns: int, rows: int) -> list[Line]:
    """The open alerts, most urgent first, whole sentences; what does not fit is counted in the last line.

    A hang has a place of its own above, and is not told twice.
    """
    return _Sheet(run_view, columns).box(rows)


def alert_rows(run_view: RunView, columns: int, most: int) -> int:
    """How many rows the box makes use of, where it may have so many."""
    sheet = _Sheet(run_view, columns)
    lines = sheet.box(most)
    return len(lines) if len(lines) < most and sheet.box(len(lines)) == lines else most


class _Sheet:
    """What is to be told, in so many columns. Each text is broken into lines once, however many rows are tried."""

    def __init__(self, run_view: RunView, columns: int) -> None:
        self._run_view, self._columns = run_view, columns
        self._hang = hang_of(run_view)
        self._alerts = [alert for alert in run_view.alerts if alert is not self._hang]
        self._known: dict[tuple[object, int], list[Line]] = {}

    def box(self, rows: int) -> list[Line]:
        """In so many rows at most."""
        run_view, columns, alerts = self._run_view, self._columns, self._alerts
        if self._hang is not None and not alerts:
            return [[Cell("✔ nothing else is wrong", Level.DIM)]][:rows]
        if not alerts:
            return [fit(line, columns) for line in _nothing(run_view, columns)[:rows]]
        lines: list[Line] = []
        if not run_view.fresh and rows > len(alerts):
            over = "✔ nothing is wrong by now" if run_view.at is None else "✔ nothing was wrong any more"
            lines.append(fit([Cell(over, Level.OK)], columns))
        for place, block in enumerate(self._blocks(min(len(alerts), rows), rows - len(lines))):
            after = len(alerts) - place - 1
            if len(lines) + len(block) + bool(after) > rows:
                # The first one is shown as far as it goes: nothing would be worse than half of it.
                shown = _cut(block, rows - bool(after) - len(lines), columns) if not place else []
                more = after + (not shown)
                return [*lines, *shown, *([_more(more)] if more and len(lines) + len(shown) < rows else [])]
            lines += block
        return lines

    def _blocks(self, count: int, rows: int) -> list[list[Line]]:
        """Each of the first alerts by itself. What is wrong goes before what to do about it, of which the first ones
        have as much as fits after that; the very first also where there is room for it, and not for all the others.
        """
        blocks = [self._block(place, advice=False) for place in range(count)]
        taken = sum(map(len, blocks))
        for place in range(count):
            advised = self._block(place, advice=True)
            taken += len(advised) - len(blocks[place])
            if taken > rows and (place or rows < ROOMY_ROWS):
                break
            blocks[place] = advised
        return blocks

    def _block(self, place: int, *, advice: bool) -> list[Line]:
        return [*self._part(_message, place), *(self._part(_advice, place) if advice else [])]

    def _part(self, drawn: Callable[[Alert, int], list[Line]], place: int) -> list[Line]:
        known = self._known.get((drawn, place))
        if known is None:
            known = self._known[drawn, place] = drawn(self._alerts[place], self._columns)
        return known


def _message(alert: Alert, columns: int) -> list[Line]:
    mark, level, _ = mark_of(alert)
    reported = Level.DIM if alert.stale else Level.PLAIN
    first, *rest = wrap(f"{alert.finding.rule}: {message_of(alert)}", max(columns - _INDENT, 10)) or [""]
    lines: list[Line] = [[Cell(f"{mark} ", level, "show('alerts')"), Cell(first, reported)]]
    lines += [[Cell(" " * _INDENT), Cell(text, reported)] for text in rest]
    return [fit(line, columns) for line in lines]


def _advice(alert: Alert, columns: int) -> list[Line]:
    """None for a stale alert."""
    if alert.stale:
        return []
    reported = (
        wrap(sanitize(alert.finding.advice, NOTE_CHARS), max(columns - _INDENT, 10)) if alert.finding.advice else []
    )
    return [fit([Cell(" " * _INDENT), Cell(text, Level.DIM)], columns) for text in reported]


def _cut(block: list[Line], rows: int, columns: int) -> list[Line]:
    """Its first lines; that there are more shows at the end of the last one."""
    shown = block[: max(0, rows)]
    if not shown or len(shown) == len(block):
        return shown
    return [*shown[:-1], [*fit(shown[-1], columns - 2), Cell(" …")]]


def _more(number: int) -> Line:
    return [Cell(f"… {plural(number, 'more alert')}", Level.DIM, "show('alerts')")]


def _nothing(run_view: RunView, columns: int) -> list[Line]:
    if run_view.monitor.behind:
        return [[Cell("… judging the steps before", Level.DIM)]]
    if run_view.too_early:
        return [[Cell("… too few steps to judge yet", Level.DIM)]]
    if share_lately(run_view) and run_view.figures is not None:
        share, steps = percent(run_view.figures.share), plural(run_view.figures.steps, "step")
        text = f"all-reduce took {share} of the last {steps}; that is told as an alert if it lasts"
        lines: list[Line] = [[Cell("· nothing lasting is wrong", Level.PLAIN)]]
        return lines + [[Cell(part, Level.DIM)] for part in wrap(text, max(columns, 10))]
    lines = [[Cell("✔ nothing is wrong", Level.OK)]]
    suspected = run_view.monitor.book.unproven.get(rules.STRAGGLER)
    if suspected and run_view.at is None:
        worst = max(suspected, key=lambda finding: finding.cost or 0.0)
        cost = f" ({percent(worst.cost)})" if worst.cost else ""
        text = f"unproven: {sanitize(worst.subject, NAME_CHARS)} looks slower{cost}, inside the noise"
        lines += [[Cell(part, Level.DIM)] for part in wrap(text, max(columns, 10))]
    else:
        lines.append([Cell(f"{len(DETECTORS)} rules look at every step", Level.DIM)])
    return lines
