"""How far a run may be from the next one of the same thing because its speed wanders: more than its steps alone tell.

Two things make the parts of a run differ. Chance, short or lasting for some dozens of steps: it becomes less the longer
a run is, and parts that differ this way do so up and down, as often as not. And a speed that walks away and does not
come back: it becomes more the longer a run is. How much of each there is, is told by the slow waves in the parts of a
run: in the first half a turn, a whole one, one and a half. Chance makes all of them alike; a walk makes the slowest the
largest, each falling with the square of how fast it is.

Eight waves cannot tell the two apart for sure. So all mixtures are held against them, and each has its say in as many
draws as it is likely: a run that has shown no walk is not taken for one that walks, nor for one that never would.

Whether the steps of a run are of two kinds, short ones and long ones, so that no single figure is usual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.diagnosis.straggler_stats import MAD_TO_SIGMA

if TYPE_CHECKING:
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

MAX_PARTS: Final = 16
MIN_PART_STEPS: Final = 4
COSINES: Final = 8
"""Faster ones tell of single parts."""
FAR_PARTS: Final = 2.5
"""Parts that are further off than so many spreads are taken to be as far: a run that is slow but for its beginning is
slow, and not uncertain."""
STEADY: Final = 0.7
"""How likely it is that a job does not walk, before anything was seen of it. More finds smaller differences, and takes
more walks for them; `benchmarks/comparison.py` looks at both."""
WALKS: Final = np.geomspace(1.0, 1e4, 40)
"""How far a job may walk in a run, as a multiple of what chance does to the whole run; in squares, all as likely."""
BLOCKS_FREEDOM: Final = 16
"""What chance does is known from draws of blocks as well, which count like so many waves."""
LONG_BLOCKS: Final = 8
"""Of a run that walks, long blocks differ, too: its steps do by a sixth of how far it walks, in squares, and the mean
of so many of its blocks by this part of that."""


class RandomWalk:
    """The chances of one run: the same in all of its figures, which are faster and slower together."""

    def __init__(self, steps: int, resamples: int, chance: np.random.Generator) -> None:
        self.parts = min(MAX_PARTS, steps // MIN_PART_STEPS)
        """So many parts of the run are asked for; with fewer than two nothing wanders."""
        self._cosines = np.arange(1, min(COSINES, self.parts - 1) + 1)
        # One in each of as many stretches: the interval is where the last few of them lie.
        self._which = chance.permutation((np.arange(resamples) + 0.5) / resamples)
        self._freedom = len(self._cosines) + BLOCKS_FREEDOM
        self._chi_square = chance.chisquare(self._freedom, resamples)
        self._normal = chance.standard_normal(resamples)

    def of(self, parts: FloatArray, variance: float) -> FloatArray:
        """What is to be added to each draw of a figure: by its parts in their order, and the variance of the draws."""
        reported = np.isfinite(parts)
        if not len(self._cosines) or not reported.any():
            return np.zeros_like(self._normal)
        squares = self._squares(np.where(reported, parts, np.median(parts[reported])))
        walks = np.concatenate([[0.0], WALKS])
        # A walk that is this far from where it began after the whole run makes waves that are so many times as large.
        larger = 1.0 + walks[:, None] / (np.pi * self._cosines) ** 2
        wider = 1.0 + walks / (6.0 * LONG_BLOCKS)
        chance_squares = (squares / larger).sum(axis=1) + BLOCKS_FREEDOM * variance / wider
        if chance_squares.min() <= 0.0:
            return np.zeros_like(self._normal)
        before = np.concatenate([[STEADY], np.full(len(WALKS), (1.0 - STEADY) / len(WALKS))])
        sizes = np.log(larger).sum(axis=1) + BLOCKS_FREEDOM * np.log(wider)
        likely = np.log(before) - (sizes + self._freedom * np.log(chance_squares)) / 2.0
        share = np.exp(likely - likely.max())
        place = np.searchsorted(np.cumsum(share[:-1] / share.sum()), self._which)
        # In the mean over its run a walk is a third as far off, in squares, as at the end.
        whole = chance_squares[place] / self._chi_square * (1.0 + walks[place] / 3.0)
        added: FloatArray = self._normal * np.sqrt(np.maximum(whole - variance, 0.0))
        return added

    def _squares(self, parts: FloatArray) -> FloatArray:
        """Of each wave, in the measure of the variance of a mean over all parts."""
        away = parts - np.median(parts)
        far = FAR_PARTS * MAD_TO_SIGMA * np.median(np.abs(away))
        turns = np.pi * self._cosines[:, None] * (np.arange(len(parts)) + 0.5) / len(parts)
        waves = np.sqrt(2.0) * np.cos(turns) @ away.clip(-far, far) / len(parts)
        squares: FloatArray = waves**2
        return squares


MIN_STEPS: Final = 60
MIN_SHARE: Final = 0.08
"""Of the rarer kind; fewer are hiccups."""
MIN_RATIO: Final = 1.1
"""The longer kind is so many times as long."""
APART: Final = 0.85
"""Part of the variance that is explained by there being two kinds. A bell has 0.7, steps that become longer all along
0.75."""
HICCUPS: Final = 0.05
"""So many of the longest and of the shortest steps are not looked at."""


@dataclass(frozen=True)
class StepModes:
    """The two kinds of a run."""

    short_ns: float
    long_ns: float
    long_share: float
    """Part of the steps that are long."""


def step_modes(step_ns: FloatArray) -> StepModes | None:
    """The two kinds of these steps; None = they are of one."""
    everything = np.sort(step_ns[step_ns > 0])
    out = int(len(everything) * HICCUPS)
    ascending = everything[out : len(everything) - out]
    count = len(ascending)
    if count < MIN_STEPS:
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
    kinds = StepModes(float(np.median(ascending[:cut])), float(np.median(ascending[cut:])), long_share)
    rare = min(kinds.long_share, 1.0 - kinds.long_share)
    apart = between[cut - 1] >= APART * total
    return kinds if apart and rare >= MIN_SHARE and kinds.long_ns >= MIN_RATIO * kinds.short_ns else None
