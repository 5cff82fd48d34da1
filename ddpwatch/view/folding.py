"""Steps onto the columns of a chart: what every drawing over time shares, so that they stand in line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.core.ring import IntArray


@dataclass(frozen=True)
class Folding:
    """Which steps share a column. A column that no step falls into stays empty: a gap is shown, not closed."""

    first: int
    """The first step of the first column."""
    per_column: int
    """Steps to a column."""
    columns: int
    """Columns in use; the newest step is in the last one."""
    kept: slice
    """Those of the given steps that are shown."""
    starts: IntArray
    """Where the steps of each column that has any begin, among those kept."""
    places: IntArray
    """The columns that these are."""

    def column_of(self, step: int) -> int | None:
        """The column of a step; None = it is not shown."""
        column = (step - self.first) // self.per_column
        return column if 0 <= column < self.columns else None

    def spread(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values of the columns that have steps, as values of all columns; nan in the others."""
        spread = np.full(self.columns, np.nan)
        spread[self.places] = values
        return spread


def fold(steps: IntArray, columns: int) -> Folding | None:
    """Ascending steps on at most so many columns; None where there is nothing to show.

    Columns begin at multiples of their number of steps: a new step changes the last column only, and a chart that
    moves does not flicker. What does not fill a column at the old end is left out.
    """
    if not len(steps) or columns < 1:
        return None
    oldest, newest = int(steps[0]), int(steps[-1])
    per_column = -(-(newest - oldest + 1) // columns)
    last = newest // per_column
    first = min(-(-oldest // per_column), last)
    begin = int(np.searchsorted(steps, first * per_column))
    column = steps[begin:] // per_column - first
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    return Folding(first * per_column, per_column, last - first + 1, slice(begin, len(steps)), starts, column[starts])
