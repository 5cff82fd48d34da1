"""What is wrong, in the few lines that the overview has for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.numbers import percent, plural
from ddpwatch.core.text import NAME_CHARS, NOTE_CHARS, tame
from ddpwatch.core.window import ENOUGH_STEPS
from ddpwatch.view.alerts import MARKS
from ddpwatch.view.cells import Cell, Level, fit
from ddpwatch.view.prose import wrap

if TYPE_CHECKING:
    from ddpwatch.core.alerts import Alert
    from ddpwatch.view.cells import Line
    from ddpwatch.view.picture import Picture

ROOMY_ROWS: Final = 8
"""From here on the advice is told, too."""
_INDENT: Final = 2


def alert_box(picture: Picture, columns: int, rows: int) -> list[Line]:
    """The open alerts, most urgent first, whole sentences; what does not fit is counted in the last line."""
    if not picture.alerts:
        return [fit(line, columns) for line in _nothing(picture, columns)[:rows]]
    lines: list[Line] = []
    for place, alert in enumerate(picture.alerts):
        block = _block(alert, columns, advice=rows >= ROOMY_ROWS)
        after = len(picture.alerts) - place - 1
        if len(lines) + len(block) + bool(after) > rows:
            # The first one is shown as far as it goes: nothing would be worse than half of it.
            shown = _cut(block, rows - bool(after), columns) if not lines else []
            more = after + (not shown)
            return [*lines, *shown, *([_more(more)] if more and len(lines) + len(shown) < rows else [])]
        lines += block
    return lines


def _block(alert: Alert, columns: int, *, advice: bool) -> list[Line]:
    mark, level, _ = MARKS[alert.finding.severity]
    width = max(columns - _INDENT, 10)
    message = tame(alert.finding.message, NOTE_CHARS)
    first, *rest = wrap(f"{alert.finding.rule}: {message}", width) or [""]
    lines: list[Line] = [[Cell(f"{mark} ", level, "show('alerts')"), Cell(first)]]
    lines += [[Cell(" " * _INDENT), Cell(text)] for text in rest]
    if advice and alert.finding.advice:
        told = wrap(tame(alert.finding.advice, NOTE_CHARS), width)
        lines += [[Cell(" " * _INDENT), Cell(text, Level.DIM)] for text in told]
    return [fit(line, columns) for line in lines]


def _cut(block: list[Line], rows: int, columns: int) -> list[Line]:
    """Its first lines; that there are more shows at the end of the last one."""
    shown = block[: max(0, rows)]
    if not shown or len(shown) == len(block):
        return shown
    return [*shown[:-1], [*fit(shown[-1], columns - 2), Cell(" …")]]


def _more(number: int) -> Line:
    return [Cell(f"… {plural(number, 'more alert')}", Level.DIM, "show('alerts')")]


def _nothing(picture: Picture, columns: int) -> list[Line]:
    figures = picture.figures
    if picture.watch.behind:
        return [[Cell("… judging the steps before", Level.DIM)]]
    if figures is None or figures.last_step < picture.limits.judge.warmup_steps + ENOUGH_STEPS:
        return [[Cell("… too few steps to judge yet", Level.DIM)]]
    lines: list[Line] = [[Cell("✔ nothing is wrong", Level.OK)]]
    suspected = picture.watch.book.unproven.get("straggler")
    if suspected and picture.at is None:
        worst = max(suspected, key=lambda finding: finding.cost or 0.0)
        cost = f" ({percent(worst.cost)})" if worst.cost else ""
        text = f"unproven: {tame(worst.subject, NAME_CHARS)} looks slower{cost}, inside the noise"
        lines += [[Cell(part, Level.DIM)] for part in wrap(text, max(columns, 10))]
    else:
        lines.append([Cell(f"{len(DETECTORS)} rules look at every step", Level.DIM)])
    return lines
