"""Summaries of any number of values in constant memory: log-scale histograms for quantiles, and series over steps or
time that halve their resolution when they are full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.core.state.step_store import IntArray

    FloatArray = NDArray[np.float64]

MEDIAN: Final = 0.5
FINE: Final = 1.01
"""Ratio of the bounds of a bin: quantiles of curves are off by at most half a percent."""
BINS: Final = 3840
"""Bins up to the longest valid step, in nanoseconds."""
FINER: Final = 10
"""Bins of `Spread` for each bin of a curve."""


def bins(values: FloatArray) -> NDArray[np.int64]:
    """Bin of each value."""
    found: NDArray[np.int64] = np.rint(np.log(np.maximum(values, 1.0)) / np.log(FINE)).astype(np.int64)
    return np.minimum(found, BINS - 1)


def quantile(counts: NDArray[np.int32] | NDArray[np.int64], fraction: float) -> FloatArray:
    """Quantile of each row of bin counts; NaN for an empty row."""
    cumulative = counts.cumsum(axis=1, dtype=np.int64)
    total = cumulative[:, -1]
    place = (cumulative >= np.maximum(np.ceil(fraction * total), 1)[:, None]).argmax(axis=1)
    values: FloatArray = np.where(total > 0, FINE**place, np.nan)
    return values


class Spread:
    """Histogram for quantiles shown with three digits: off by at most 0.1 %."""

    def __init__(self) -> None:
        self._counts = np.zeros(BINS * FINER, dtype=np.int64)
        self._sums = np.zeros(BINS * FINER)

    def take(self, values: FloatArray) -> None:
        """Count these values."""
        places = np.log(np.maximum(values, 1.0)) * (FINER / np.log(FINE))
        places = np.minimum(places.astype(np.int64), len(self._counts) - 1)
        np.add.at(self._counts, places, 1)
        np.add.at(self._sums, places, values)

    def quantile(self, fraction: float) -> float | None:
        """Quantile with linear interpolation between neighbors; None without values."""
        cumulative = self._counts.cumsum()
        if not cumulative[-1]:
            return None
        place = fraction * float(cumulative[-1] - 1)
        # Each neighbor is taken as the mean of its bin.
        bins = np.searchsorted(cumulative, [np.floor(place), np.ceil(place)], side="right")
        low, high = (self._sums[bins] / self._counts[bins]).tolist()
        return float(low + (high - low) * (place % 1.0))


How: TypeAlias = Literal["sum", "least", "most"]
"""How two values that come to share a column are combined."""
_REDUCERS: Final[dict[How, tuple[np.ufunc, float]]] = {
    "sum": (np.add, 0.0),
    "least": (np.minimum, np.inf),
    "most": (np.maximum, -np.inf),
}


class Folded:
    """Named arrays over steps or time in a fixed number of columns: when these are full, pairs are merged."""

    def __init__(self, most: int, width: int = 1) -> None:
        """Use at most `most` columns, an even number, which start with this width in steps or nanoseconds."""
        assert most % 2 == 0, "two columns become one"
        self.width = width
        self.origin: int | None = None
        """Where the first column begins; None = empty."""
        self.used = 0
        """Number of columns in use."""
        self._most = most
        self._kept: dict[str, tuple[NDArray[Any], How]] = {}

    def keep(self, name: str, how: How = "sum", shape: tuple[int, ...] = (), dtype: type = np.float64) -> None:
        """Add an array whose columns hold values of this shape."""
        self._kept[name] = np.full((self._most, *shape), _REDUCERS[how][1], dtype=dtype), how

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The columns in use of an array."""
        return self._kept[name][0][: self.used]

    @property
    def begins(self) -> IntArray:
        """Where each column in use begins."""
        begins: IntArray = (self.origin or 0) + self.width * np.arange(self.used, dtype=np.int64)
        return begins

    def places(self, where: IntArray) -> IntArray:
        """Columns of these steps or times, after merging columns until they fit. Positions before the first column
        count as the first.
        """
        if self.origin is None:
            self.origin = int(where[0])
        while (int(where.max()) - self.origin) // self.width >= self._most:
            self._halve()
        places: IntArray = np.maximum((where - self.origin) // self.width, 0)
        self.used = max(self.used, int(places.max()) + 1)
        return places

    def add(self, name: str, places: IntArray, values: NDArray[Any]) -> None:
        """Add values to an array, a row for each of the ascending columns."""
        array, how = self._kept[name]
        ufunc = _REDUCERS[how][0]
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        array[places[starts]] = ufunc(array[places[starts]], ufunc.reduceat(values, starts, axis=0))

    def _halve(self) -> None:
        half = self._most // 2
        for array, how in self._kept.values():
            ufunc, empty = _REDUCERS[how]
            array[:half] = ufunc(array[0::2], array[1::2])
            array[half:] = empty
        self.width *= 2
        self.used = -(-self.used // 2)
