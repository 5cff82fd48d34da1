"""Round numbers for the axes of a chart."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

OUTLIER: Final = 5.0
"""Values so many times above nearly all others do not set the scale."""
NEARLY_ALL: Final = 0.95
ROOM_ABOVE: Final = 2.0
"""Where they do not, it ends at so many times what nearly all stay below."""
ROWS_PER_TICK: Final = 2
MAX_INTERVALS: Final = 4
STEP_LABEL_COLUMNS: Final = 14
LEAST: Final = 1e-12
"""What is smaller is nothing."""
MOST: Final = 1e15
"""Larger values are drawn as this: sums of them stay numbers."""
_ROUND: Final = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 10.0)
_THOUSANDS: Final = ("", "k", "M", "G", "T", "P")


def scale_top(values: NDArray[np.float64], marks: Sequence[float] = ()) -> float:
    """What a scale from 0 must reach to show the values, and the marks with some room above."""
    known = values[np.isfinite(values) & (values > 0)]
    top = 0.0
    if len(known):
        usual = float(np.quantile(known, NEARLY_ALL))
        top = float(known.max())
        if top > OUTLIER * usual:
            top = ROOM_ABOVE * usual
    top = max([top, *(mark * 1.1 for mark in marks if math.isfinite(mark))])
    return top if top > LEAST else 1.0


def round_ticks(top: float, rows: int) -> list[float]:
    """Ticks from 0 to at least `top`: two to five of them, as many as so many rows bear."""
    intervals = min(max(rows // ROWS_PER_TICK, 1), MAX_INTERVALS)
    apart = _round_up(top / intervals)
    return [place * apart for place in range(math.ceil(top / apart - 1e-9) + 1)]


def round_steps(per_column: int) -> int:
    """How many steps apart the labels under a chart stand."""
    # Even ones: 1.5 or 2.5 steps there are not.
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
    """The next number that people count in."""
    power = 10.0 ** math.floor(math.log10(value))
    return next((part * power for part in _ROUND if part * power >= value * (1 - 1e-9)), 10 * power)
