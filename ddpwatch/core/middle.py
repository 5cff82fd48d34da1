"""The middle of many values. Rows of some dozens, thousands of them: sorted whole they are done sooner than picked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def medians(values: NDArray[Any]) -> NDArray[np.float64]:
    """The median of each row: what `np.median(values, axis=-1)` gives. No row may be empty."""
    ordered = np.sort(values, axis=-1)
    count = ordered.shape[-1]
    middle: NDArray[np.float64] = (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2.0
    return middle


def medians_across(values: NDArray[Any]) -> NDArray[np.float64]:
    """The median of each column of a table."""
    return medians(np.ascontiguousarray(values.T))
