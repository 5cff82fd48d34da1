"""How many of something were how large, in bins of one per cent: quantiles of any number of values in a fixed size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

FINE: Final = 1.01
BINS: Final = 3840
"""Up to the longest step that is believed, in nanoseconds."""


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
