"""Whether the steps of a run are of two kinds, short ones and long ones, so that no single figure is usual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

LEAST_STEPS: Final = 60
LEAST_SHARE: Final = 0.08
"""Of the rarer kind; fewer are hiccups."""
LEAST_RATIO: Final = 1.1
"""The longer kind is so many times as long."""
APART: Final = 0.85
"""Part of the variance that is explained by there being two kinds. A bell has 0.7, steps that become longer all along
0.75."""
HICCUPS: Final = 0.05
"""So many of the longest and of the shortest steps are not looked at."""


@dataclass(frozen=True)
class Kinds:
    """The two kinds of a run."""

    short_ns: float
    long_ns: float
    long_share: float
    """Part of the steps that are long."""


def kinds_of(step_ns: FloatArray) -> Kinds | None:
    """The two kinds of these steps; None = they are of one."""
    everything = np.sort(step_ns[step_ns > 0])
    out = int(len(everything) * HICCUPS)
    ascending = everything[out : len(everything) - out]
    count = len(ascending)
    if count < LEAST_STEPS:
        return None
    # By their logarithm: twice as long is as far as half as long.
    values = np.log(ascending)
    values -= values.mean()
    total = float((values**2).sum())
    if total <= 0.0:
        return None
    below = np.arange(1, count)
    reached = values.cumsum()[:-1]
    between = reached**2 * (1.0 / below + 1.0 / (count - below))
    cut = int(between.argmax()) + 1
    long_share = float((everything > ascending[cut - 1]).mean())
    kinds = Kinds(float(np.median(ascending[:cut])), float(np.median(ascending[cut:])), long_share)
    rare = min(kinds.long_share, 1.0 - kinds.long_share)
    apart = between[cut - 1] >= APART * total
    return kinds if apart and rare >= LEAST_SHARE and kinds.long_ns >= LEAST_RATIO * kinds.short_ns else None
