"""Fixed-size summaries of any number of values: histograms with logarithmic bins, and columns that merge in pairs.

- `bins` and `quantile`: bins of one percent, for curves that have many histograms.
- `Histogram`: bins of a tenth of a percent, for a single figure that is shown in digits.
- `MergingColumns`: figures over steps or time in a fixed number of columns. When all are in use, two become one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.core.state.step_store import IntArray

    FloatArray = NDArray[np.float64]

MEDIAN: Final = 0.5
FINE: Final = 1.01
"""Ratio of the bounds of a bin."""
BINS: Final = 3840
"""Bins up to the longest plausible step, in ns."""
FINER: Final = 10
"""Bins of a `Histogram` in one of these."""


def bins(values: FloatArray) -> NDArray[np.int64]:
    """Bin of each value."""
    found: NDArray[np.int64] = np.rint(np.log(np.maximum(values, 1.0)) / np.log(FINE)).astype(np.int64)
    return np.minimum(found, BINS - 1)


def quantile(histograms: NDArray[np.int32] | NDArray[np.int64], fraction: float) -> FloatArray:
    """This quantile of each row of counts by bin, as the center of its bin; nan for a row of zeros."""
    reached = histograms.cumsum(axis=1, dtype=np.int64)
    total = reached[:, -1]
    place = (reached >= np.maximum(np.ceil(fraction * total), 1)[:, None]).argmax(axis=1)
    values: FloatArray = np.where(total > 0, FINE**place, np.nan)
    return values


class Histogram:
    """Sparse histogram. Its quantiles are the means of bins, within a tenth of a percent."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._sums: defaultdict[int, float] = defaultdict(float)

    def add(self, values: FloatArray) -> None:
        """Count these values."""
        places = np.log(np.maximum(values, 1.0)) * (FINER / np.log(FINE))
        places = np.minimum(places.astype(np.int64), BINS * FINER - 1)
        for place, value in zip(places.tolist(), values.tolist(), strict=True):
            self._counts[place] += 1
            self._sums[place] += value

    def quantile(self, fraction: float) -> float | None:
        """This quantile, with linear interpolation between two values as in `np.quantile`. None = no values."""
        if not self._counts:
            return None
        bins = sorted(self._counts)
        reached = np.cumsum([self._counts[place] for place in bins])
        place = fraction * float(reached[-1] - 1)
        between = np.searchsorted(reached, [np.floor(place), np.ceil(place)], side="right").tolist()
        low, high = (self._sums[bins[each]] / self._counts[bins[each]] for each in between)
        return float(low + (high - low) * (place % 1.0))


How: TypeAlias = Literal["sum", "min", "max"]
"""How values that share a column are combined."""
_REDUCERS: Final[dict[How, tuple[np.ufunc, float]]] = {
    "sum": (np.add, 0.0),
    "min": (np.minimum, np.inf),
    "max": (np.maximum, -np.inf),
}


class MergingColumns:
    """Named arrays with one row a column of `width` steps, or ns; a full set merges in pairs. Places only ascend."""

    def __init__(self, max_columns: int, width: int = 1) -> None:
        """At most `max_columns`, an even number, each of this width at first."""
        assert max_columns % 2 == 0, "two columns become one"
        self.width = width
        self.origin: int | None = None
        """Where the first column begins; None = nothing was added."""
        self.used = 0
        """Columns up to the last place."""
        self._max_columns = max_columns
        self._kept: dict[str, tuple[NDArray[Any], How]] = {}

    def keep(self, name: str, how: How = "sum", shape: tuple[int, ...] = (), dtype: type = np.float64) -> None:
        """Add an array of this name, with values of this shape in each column."""
        self._kept[name] = np.full((self._max_columns, *shape), _REDUCERS[how][1], dtype=dtype), how

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The columns in use of an array."""
        return self._kept[name][0][: self.used]

    @property
    def begins(self) -> IntArray:
        """Where each column in use begins."""
        begins: IntArray = (self.origin or 0) + self.width * np.arange(self.used, dtype=np.int64)
        return begins

    def places(self, where: IntArray) -> IntArray:
        """The columns of these steps or times, merging first if need be. What is before the first goes to the first."""
        if self.origin is None:
            self.origin = int(where[0])
        while (int(where.max()) - self.origin) // self.width >= self._max_columns:
            self._halve()
        places: IntArray = np.maximum((where - self.origin) // self.width, 0)
        self.used = max(self.used, int(places.max()) + 1)
        return places

    def add(self, name: str, places: IntArray, values: NDArray[Any]) -> None:
        """Combine values with what is there, one row for each of the ascending places."""
        array, how = self._kept[name]
        ufunc = _REDUCERS[how][0]
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        array[places[starts]] = ufunc(array[places[starts]], ufunc.reduceat(values, starts, axis=0))

    def _halve(self) -> None:
        half = self._max_columns // 2
        for array, how in self._kept.values():
            ufunc, empty = _REDUCERS[how]
            array[:half] = ufunc(array[0::2], array[1::2])
            array[half:] = empty
        self.width *= 2
        self.used = -(-self.used // 2)
