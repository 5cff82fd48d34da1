"""Figures over steps or time in a fixed number of columns: when they are full, two become one. However long a run was,
what is kept of it has the same size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.core.ring import IntArray

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
