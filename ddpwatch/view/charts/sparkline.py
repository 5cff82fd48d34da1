"""Sparklines: a series of numbers as block characters in one or more rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from ddpwatch.view.cells import Cell, Level
from ddpwatch.view.charts.axis import MOST, scale_top

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.view.cells import Line

    Values: TypeAlias = Sequence[float] | NDArray[np.floating[Any]]

EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
"""Blocks by the eighths of a row that they fill."""
ROOM_ABOVE_MEDIAN: Final = 2.0
"""The scale ends at this many times the median or higher, so that small variations do not fill the height."""


def spark(values: Values, columns: int, *, level: Level = Level.PLAIN, top: float | None = None) -> Line:
    """A sparkline of exactly `columns`, from old to new. A column with several values shows the largest.

    The scale goes from 0 to the largest value, or to twice the median if that is more: a series that hardly changes is
    a flat line at half height, and its noise is not magnified. A few values far above all others do not flatten the
    rest. With `top` the scale ends there. Values that are not finite are blank, negative ones 0.
    """
    return sparks(values, columns, 1, level=level, top=top)[0]


def sparks(
    values: Values, columns: int, rows: int, *, level: Level = Level.PLAIN, top: float | None = None
) -> list[Line]:
    """The same curve over several rows."""
    if columns < 1:
        return [[] for _ in range(rows)]
    heights = _eighths(_largest(np.asarray(values, dtype=np.float64), columns), top, rows)
    texts = (
        "".join(EIGHTHS[min(max(height - 8 * below, 0), 8)] for height in heights) for below in reversed(range(rows))
    )
    return [[Cell(text.ljust(columns), level)] for text in texts]


def _largest(values: NDArray[np.float64], columns: int) -> NDArray[np.float64]:
    """Fold into at most `columns` values by maximum; nan where none is finite."""
    if not len(values):
        return values
    values = np.where(np.isfinite(values), np.maximum(values, 0.0), -1.0)
    together = -(-len(values) // columns)
    # Columns are counted from the new end, so that the newest value is in a full one.
    short = -len(values) % together
    filled = np.concatenate([np.full(short, -1.0), values])
    largest: NDArray[np.float64] = filled.reshape(-1, together).max(axis=1)
    return np.where(largest < 0, np.nan, largest)


def _eighths(values: NDArray[np.float64], top: float | None, rows: int) -> list[int]:
    known = np.isfinite(values)
    if not known.any():
        return [0] * len(values)
    values = np.minimum(values, MOST)
    if top is None:
        top = max(scale_top(values), ROOM_ABOVE_MEDIAN * float(np.median(values[known])))
    heights = np.where(known, np.clip(np.rint(values / top * 8 * rows), 1, 8 * rows), 0)
    eighths: list[int] = heights.astype(np.int64).tolist()
    return eighths
