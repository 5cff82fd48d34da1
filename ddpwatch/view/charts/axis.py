"""Scales of charts: where the axis ends, and round numbers for its ticks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

OUTLIER: Final = 5.0
"""Values more than this many times the 95th percentile do not set the scale."""
ROOM_ABOVE: Final = 2.0
"""With such outliers the scale ends at this many times the 95th percentile."""
ROWS_PER_TICK: Final = 2
"""Min. distance of two ticks of the vertical axis, in rows."""
MAX_INTERVALS: Final = 4
"""Max. number of intervals between ticks of the vertical axis."""
STEP_LABEL_COLUMNS: Final = 14
"""Min. distance of two labels of the step axis, in terminal cells."""
LEAST: Final = 1e-12
"""Smaller values count as 0."""
MOST: Final = 1e15
"""Larger values are drawn as this, so that their sums stay finite."""
_ROUND: Final = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 10.0)
_THOUSANDS: Final = ("", "k", "M", "G", "T", "P")


def scale_top(values: NDArray[np.float64], marks: Sequence[float] = ()) -> float:
    """The end of a scale from 0 that shows the values, and the marks with some room above."""
    known = values[np.isfinite(values) & (values > 0)]
    top = 0.0
    if len(known):
        nearly_all = float(np.quantile(known, 0.95))
        top = float(known.max())
        if top > OUTLIER * nearly_all:
            top = ROOM_ABOVE * nearly_all
    top = max([top, *(mark * 1.1 for mark in marks if math.isfinite(mark))])
    return top if top > LEAST else 1.0


def round_ticks(top: float, rows: int) -> list[float]:
    """Two to five ticks from 0 to at least `top`, depending on the rows."""
    intervals = min(max(rows // ROWS_PER_TICK, 1), MAX_INTERVALS)
    apart = _round_up(top / intervals)
    return [place * apart for place in range(math.ceil(top / apart - 1e-9) + 1)]


def round_steps(per_column: int) -> int:
    """Number of steps between two labels under a chart."""
    # A multiple of ten, because 1.5 or 2.5 steps make no label.
    return round(_round_up(STEP_LABEL_COLUMNS * per_column / 10)) * 10


def tick_text(value: float, unit: str) -> str:
    """A tick with its unit: `20 %`, `2.5k ms`."""
    thousands = 0
    while value >= 10_000 and thousands < len(_THOUSANDS) - 1:
        value /= 1000
        thousands += 1
    number = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return f"{number}{_THOUSANDS[thousands]} {unit}".rstrip()


def _round_up(value: float) -> float:
    """The next round number."""
    power = 10.0 ** math.floor(math.log10(value))
    return next((part * power for part in _ROUND if part * power >= value * (1 - 1e-9)), 10 * power)
