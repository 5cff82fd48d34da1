"""The alerts panel of the overview, and the banner of a hang above it: missing and waiting ranks, and time left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize
from ddpwatch.core.units import duration_text, percent, plural
from ddpwatch.view.alerts.format import MARKS, mark_of, message_of
from ddpwatch.view.allreduce import share_lately
from ddpwatch.view.cells import Cell, Level, columns_of, fit, line_columns
from ddpwatch.view.layout import bar, wrap

if TYPE_CHECKING:
    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

BAR_COLUMNS: Final = 24
"""Width, in terminal cells, of the bar to the timeout; it is shown from twice this width on."""
MAX_ROWS: Final = 7
"""Max. height of the banner of a hang, in rows."""
ROOMY_ROWS: Final = 8
"""Rows from which on the first alert is shown with its advice, even if others do not fit."""
_INDENT: Final = 2
"""Indent of wrapped lines, in terminal cells: the width of the mark before the first one."""


def stuck_rank(run_view: RunView) -> int | None:
    """The first rank that the others wait for in a hang; None = there is no hang, or no rank to blame."""
    hang = run_view.hang
    return hang.finding.ranks[0] if hang is not None and hang.finding.ranks else None


def hang_lines(run_view: RunView, columns: int) -> list[Line]:
    """The banner of a hang, in place of its alert; empty = there is none."""
    alert = run_view.hang
    if alert is None:
        return []
    finding, facts = alert.finding, alert.finding.evidence
    mark, level, _ = MARKS[finding.severity]
    headline, _, doing = sanitize(finding.message, NOTE_CHARS).partition(". ")
    headline = headline.partition(", timeout in ")[0]  # which the last line shows
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
    """Time waited against the timeout."""
    waited_s = float(facts.get("waiting_s", 0.0))
    timeout_s = float(facts.get("timeout_s", 0.0))
    if not timeout_s:
        return [Cell(f"  has been waiting for {duration_text(waited_s)}; the timeout of torch is unknown", Level.DIM)]
    left_s = float(facts.get("left_s", timeout_s - waited_s))
    line = [Cell("  ")]
    if columns >= 2 * BAR_COLUMNS:
        line += [Cell(bar(1.0 - left_s / timeout_s, BAR_COLUMNS), level), Cell("▏ ", Level.DIM)]
    if left_s <= 0:
        return [*line, Cell("the timeout has expired", level)]
    line += [Cell(f"{duration_text(left_s)} left", level), Cell(f" of {duration_text(timeout_s)}")]
    what = " until torch aborts the job"
    return [*line, Cell(what)] if line_columns(line) + columns_of(what) <= columns else line


def alert_panel(run_view: RunView, columns: int, rows: int) -> list[Line]:
    """The open alerts but the hang in the banner, most urgent first; what does not fit is counted in the last line."""
    return _Panel(run_view, columns, rows).lines(rows)


def alert_rows(run_view: RunView, columns: int, most: int) -> int:
    """Rows that the panel fills of at most `most`."""
    panel = _Panel(run_view, columns, most)
    lines = panel.lines(most)
    return len(lines) if len(lines) < most and panel.lines(len(lines)) == lines else most


class _Panel:
    """The panel at a width in columns. Texts are wrapped once, however many heights up to `most` rows are tried."""

    def __init__(self, run_view: RunView, columns: int, most: int) -> None:
        self._run_view, self._columns = run_view, columns
        self._hang = run_view.hang
        self._alerts = [alert for alert in run_view.alerts if alert is not self._hang]
        shown = self._alerts[: max(most, 0)]
        self._messages = [_message(alert, columns) for alert in shown]
        self._advice = [_advice(alert, columns) for alert in shown]

    def lines(self, rows: int) -> list[Line]:
        """At most `rows` lines."""
        run_view, columns, alerts = self._run_view, self._columns, self._alerts
        if self._hang is not None and not alerts:
            return [[Cell("✔ no other alert", Level.DIM)]][:rows]
        if not alerts:
            return [fit(line, columns) for line in _nothing(run_view, columns)[:rows]]
        lines: list[Line] = []
        if not run_view.fresh and rows > len(alerts):
            over = "✔ no active alert" if run_view.at is None else "✔ no active alert at this step"
            lines.append(fit([Cell(over, Level.OK)], columns))
        for place, block in enumerate(self._blocks(rows, rows - len(lines))):
            after = len(alerts) - place - 1
            if len(lines) + len(block) + bool(after) > rows:
                # The first one is cut rather than left out.
                shown = _cut(block, rows - bool(after) - len(lines), columns) if not place else []
                more = after + (not shown)
                lines += shown
                if more and len(lines) < rows:
                    lines.append([Cell(f"… {plural(more, 'more alert')}", Level.DIM, "show('alerts')")])
                return lines
            lines += block
        return lines

    def _blocks(self, number: int, rows: int) -> list[list[Line]]:
        """Lines of each of the first alerts: all messages, then advice as far as it fits; in a roomy panel the first
        alert has its advice in any case.
        """
        blocks = self._messages[: max(number, 0)]
        taken = sum(map(len, blocks))
        for place, advice in enumerate(self._advice[: len(blocks)]):
            taken += len(advice)
            if taken > rows and (place or rows < ROOMY_ROWS):
                break
            blocks[place] = [*blocks[place], *advice]
        return blocks


def _message(alert: Alert, columns: int) -> list[Line]:
    mark, level, _ = mark_of(alert)
    shade = Level.DIM if alert.stale else Level.PLAIN
    first, *rest = wrap(f"{alert.finding.rule}: {message_of(alert)}", max(columns - _INDENT, 10)) or [""]
    lines: list[Line] = [[Cell(f"{mark} ", level, "show('alerts')"), Cell(first, shade)]]
    lines += [[Cell(" " * _INDENT), Cell(text, shade)] for text in rest]
    return [fit(line, columns) for line in lines]


def _advice(alert: Alert, columns: int) -> list[Line]:
    if alert.stale or not alert.finding.advice:
        return []
    texts = wrap(sanitize(alert.finding.advice, NOTE_CHARS), max(columns - _INDENT, 10))
    return [fit([Cell(" " * _INDENT), Cell(text, Level.DIM)], columns) for text in texts]


def _cut(block: list[Line], rows: int, columns: int) -> list[Line]:
    """The first lines of a block, with an ellipsis if lines are cut off."""
    shown = block[: max(0, rows)]
    if not shown or len(shown) == len(block):
        return shown
    return [*shown[:-1], [*fit(shown[-1], columns - 2), Cell(" …")]]


def _nothing(run_view: RunView, columns: int) -> list[Line]:
    if run_view.monitor.behind:
        return [[Cell("… evaluating earlier steps", Level.DIM)]]
    if run_view.too_early:
        return [[Cell("… too few steps to evaluate yet", Level.DIM)]]
    if share_lately(run_view) and run_view.figures is not None:
        share, steps = percent(run_view.figures.share), plural(run_view.figures.steps, "step")
        text = f"all-reduce took {share} of the last {steps}; if it lasts, an alert opens"
        lines: list[Line] = [[Cell("· no alert yet", Level.PLAIN)]]
        return lines + [[Cell(part, Level.DIM)] for part in wrap(text, max(columns, 10))]
    lines = [[Cell("✔ no alerts", Level.OK)]]
    suspected = run_view.monitor.book.unproven.get(rules.STRAGGLER)
    if suspected and run_view.at is None:
        worst = max(suspected, key=lambda finding: finding.cost or 0.0)
        cost = f" ({percent(worst.cost)})" if worst.cost else ""
        text = f"inconclusive: {sanitize(worst.subject, NAME_CHARS)} looks slower{cost}, within noise"
        lines += [[Cell(part, Level.DIM)] for part in wrap(text, max(columns, 10))]
    else:
        lines.append([Cell(f"{len(DETECTORS)} rules check every step", Level.DIM)])
    return lines
