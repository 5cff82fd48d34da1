"""How many of something were how large, in bins: quantiles of any number of values in a fixed size.

In bins of one per cent, for a curve that has many of them; and in finer ones, for a figure that is told in digits.

Figures over steps or time in a fixed number of columns: when they are full, two become one. However long a run was,
what is kept of it has the same size.
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
BINS: Final = 3840
"""Up to the longest step that is believed, in nanoseconds."""
FINER: Final = 10
"""Bins of a figure for each of a curve."""


def bins(values: FloatArray) -> NDArray[np.int64]:
    """The bin of each value."""
    found: NDArray[np.int64] = np.rint(np.log(np.maximum(values, 1.0)) / np.log(FINE)).astype(np.int64)
    return np.minimum(found, BINS - 1)


def quantile(spread: NDArray[np.int32] | NDArray[np.int64], part: float) -> FloatArray:
    """By rows: the value that so many lie below, or at; nan for a row without any."""
    reached = spread.cumsum(axis=1, dtype=np.int64)
    total = reached[:, -1]
    place = (reached >= np.maximum(np.ceil(part * total), 1)[:, None]).argmax(axis=1)
    values: FloatArray = np.where(total > 0, FINE**place, np.nan)
    return values


class Spread:
    """Values of which quantiles are told in three digits: they are a tenth of a per cent off at the worst."""

    def __init__(self) -> None:
        self._counts = np.zeros(BINS * FINER, dtype=np.int64)
        self._sums = np.zeros(BINS * FINER)

    def take(self, values: FloatArray) -> None:
        """Count these, too."""
        places = np.log(np.maximum(values, 1.0)) * (FINER / np.log(FINE))
        places = np.minimum(places.astype(np.int64), len(self._counts) - 1)
        np.add.at(self._counts, places, 1)
        np.add.at(self._sums, places, values)

    def quantile(self, part: float) -> float | None:
        """The value that so many lie below; between two of them, as far between as it is. None = there is none."""
        reached = self._counts.cumsum()
        if not reached[-1]:
            return None
        place = part * float(reached[-1] - 1)
        # Each of the two counts as the mean of those that are in one bin with it.
        bins = np.searchsorted(reached, [np.floor(place), np.ceil(place)], side="right")
        low, high = (self._sums[bins] / self._counts[bins]).tolist()
        return float(low + (high - low) * (place % 1.0))


How: TypeAlias = Literal["sum", "least", "most"]
"""What becomes of two values that come to share a column."""
_WAYS: Final[dict[How, tuple[np.ufunc, float]]] = {
    "sum": (np.add, 0.0),
    "least": (np.minimum, np.inf),
    "most": (np.maximum, -np.inf),
}


class Folded:
    """Named arrays with one row a column. A column is `width` steps, or nanoseconds; places only ever ascend."""

    def __init__(self, most: int, width: int = 1) -> None:
        """At most so many columns, an even number; each of them begins with this width."""
        assert most % 2 == 0, "two columns become one"
        self.width = width
        self.origin: int | None = None
        """Where the first column begins; None = nothing has come."""
        self.used = 0
        """Columns that something has come up to."""
        self._most = most
        self._kept: dict[str, tuple[NDArray[Any], How]] = {}

    def keep(self, name: str, how: How = "sum", shape: tuple[int, ...] = (), dtype: type = np.float64) -> None:
        """Have an array of this name, of which each column holds values of this shape."""
        self._kept[name] = np.full((self._most, *shape), _WAYS[how][1], dtype=dtype), how

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The columns in use."""
        return self._kept[name][0][: self.used]

    @property
    def begins(self) -> IntArray:
        """Where each column in use begins."""
        begins: IntArray = (self.origin or 0) + self.width * np.arange(self.used, dtype=np.int64)
        return begins

    def places(self, where: IntArray) -> IntArray:
        """The columns of these steps or times; makes room for them. What is before the first counts as the first."""
        if self.origin is None:
            self.origin = int(where[0])
        while (int(where.max()) - self.origin) // self.width >= self._most:
            self._halve()
        places: IntArray = np.maximum((where - self.origin) // self.width, 0)
        self.used = max(self.used, int(places.max()) + 1)
        return places

    def add(self, name: str, places: IntArray, values: NDArray[Any]) -> None:
        """Take values in, a row for each of the ascending places."""
        array, how = self._kept[name]
        ufunc = _WAYS[how][0]
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        array[places[starts]] = ufunc(array[places[starts]], ufunc.reduceat(values, starts, axis=0))

    def _halve(self) -> None:
        half = self._most // 2
        for array, how in self._kept.values():
            ufunc, empty = _WAYS[how]
            array[:half] = ufunc(array[0::2], array[1::2])
            array[half:] = empty
        self.width *= 2
        self.used = -(-self.used // 2)
