"""How many of something were how large, in bins: quantiles of any number of values in a fixed size.

In bins of one per cent, for a curve that has many of them; and in finer ones, for a figure that is told in digits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
