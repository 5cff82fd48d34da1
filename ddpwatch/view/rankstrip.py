"""The own work of one rank over its last steps, and how much of it is beyond the middle rank's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.numbers import count, ms, plural
from ddpwatch.core.timeline import NOT_KNOWN
from ddpwatch.view.cells import Cell, Level
from ddpwatch.view.prose import heading
from ddpwatch.view.spark import EIGHTHS
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.view.cells import Line
    from ddpwatch.view.columns import Row
    from ddpwatch.view.picture import Picture

STRIP_ROWS: Final = 4
MOST_STEPS: Final = 150
BASE: Final = "░"
ROOM_ABOVE: Final = 4 / 3
"""The usual step leaves a quarter of the height free."""
_LABEL_COLUMNS: Final = 8
_PER_ROW: Final = 8
"""Heights that a cell can show."""


def rank_strip(picture: Picture, row: Row, columns: int) -> list[Line]:
    """One column a step, the newest at the right; nothing where there are no steps to show.

    Up to the middle rank's work a column is shaded, beyond it solid, so that it reads without colour.
    """
    self_ns, middle_ns = _series(picture, row, min(columns - _LABEL_COLUMNS - 1, MOST_STEPS))
    if not len(self_ns):
        return []
    most_ns = float(max(self_ns.max(), np.median(self_ns) * ROOM_ABOVE, 1.0))
    eighths = STRIP_ROWS * _PER_ROW
    heights = np.rint(self_ns / most_ns * eighths).astype(np.int64)
    middles = np.rint(middle_ns / most_ns * eighths).astype(np.int64)
    title = f"own work, last {plural(len(self_ns), 'step')}"
    lines = [heading(title, columns, f"{BASE} up to the middle rank's, █ beyond")]
    for place in reversed(range(STRIP_ROWS)):
        label = {STRIP_ROWS - 1: f"{ms(most_ns)} ms", 0: "0"}.get(place, "")
        lines.append([Cell(f"{label:>{_LABEL_COLUMNS}} ", Level.DIM), *_cells(heights, middles, place * _PER_ROW)])
    last = picture.last_step
    if last is not None and len(self_ns) >= _LABEL_COLUMNS * 2:
        at = f"step {count(last)}"
        lines.append([Cell(" " * (_LABEL_COLUMNS + 1) + at.rjust(len(self_ns)), Level.DIM)])
    return lines


def _series(picture: Picture, row: Row, most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Own work of the rank and of the middle one in the last steps that both have."""
    timeline, rank = picture.timeline, row.state
    nothing = np.empty(0)
    if rank.rank not in timeline.ranks or picture.last_step is None or most < 1:
        return nothing, nothing
    steps = timeline.steps(picture.last_step, most)
    excess = timeline.excess(steps)[timeline.ranks.index(rank.rank)]
    known = rank.steps.holds(steps) & (excess != NOT_KNOWN)
    steps, excess = steps[known], excess[known]
    self_ns = np.zeros(len(steps))
    for phase in PHASES:
        if phase != "sync":
            self_ns += rank.steps.column(f"{phase}_ns", steps)
    # Less than would count as slow is shown as none: noise is not to be looked at.
    counts = excess >= picture.limits.straggler.share * 100.0
    return self_ns, np.where(counts, timeline.series("middle_ns", steps), self_ns)


def _cells(heights: NDArray[np.int64], middles: NDArray[np.int64], floor: int) -> Line:
    """One row of the strip: runs of columns that mean the same."""
    line: Line = []
    for height, middle in zip(heights.tolist(), middles.tolist(), strict=True):
        filled = min(max(height - floor, 0), _PER_ROW)
        beyond = height > middle and floor + filled > middle
        glyph = EIGHTHS[filled] if beyond else BASE if filled > _PER_ROW // 2 else " "
        level = Level.WARN if beyond and filled else Level.PLAIN
        if line and line[-1].level is level:
            line[-1] = line[-1]._replace(text=line[-1].text + glyph)
        else:
            line.append(Cell(glyph, level))
    return line
