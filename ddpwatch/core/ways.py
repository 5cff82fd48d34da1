"""The sets of steps of a window in which a rank may be slow: all of the latest, or every k-th."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]
    BoolArray = NDArray[np.bool_]

LASTING: Final = 1
PERIODS: Final = (LASTING, 2, 3, 4, 5, 6, 7, 8)
"""A rank that is slow in every k-th step is looked for by folding the window."""
FOLDED_STEPS: Final = 8
"""Fewer slow steps than this are no pattern: pauses of the garbage collector fall into any order."""


@dataclass(frozen=True)
class Ways:
    """Steps in which a rank may be slow, in the order in which they are looked at."""

    periods: list[int]
    slices: list[slice]
    masks: list[BoolArray]
    sizes: FloatArray

    @cached_property
    def least(self) -> float:
        """Steps of the smallest."""
        return float(self.sizes.min())


@lru_cache(maxsize=64)
def all_ways(count: int, recent_steps: int) -> Ways:
    """For a window of so many steps. Shared between calls: nobody may change them."""
    periods, slices, masks = [], [], []
    for period in PERIODS:
        for where in _ways(count, period, recent_steps):
            mask = np.zeros(count, dtype=np.bool_)
            mask[where] = True
            mask.flags.writeable = False
            periods.append(period)
            slices.append(where)
            masks.append(mask)
    return Ways(periods, slices, masks, np.array([mask.sum() for mask in masks], dtype=np.float64))


def _ways(count: int, period: int, recent_steps: int) -> Iterator[slice]:
    """Steps in which a rank may be slow with a period; a shorter span is sooner, a longer one surer."""
    if period == LASTING:
        for span in (recent_steps, recent_steps // 2):
            yield slice(max(0, count - span), count)
        return
    for span in (count // 2, count):
        if span >= FOLDED_STEPS * period and span >= 2 * recent_steps:
            first = count - span
            for start in range(period):
                yield slice(first + (start - first) % period, count, period)
