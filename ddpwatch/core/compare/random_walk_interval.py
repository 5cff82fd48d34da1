"""Random-walk variance of a run's speed, and the test for two modes of step times; both refine `bootstrap`.

A block bootstrap covers noise, whose effect on a run's median falls with the length of the run. It misses a speed that
drifts without returning, whose effect grows. The low-frequency cosine coefficients of a run's parts separate the two:
noise makes them equal on average, a random walk makes them fall with the square of the frequency.

Eight coefficients cannot decide between the two. So the ratio of walk to noise has a posterior over a grid, and each
bootstrap resample draws its ratio from it. Without this, of simulated pairs of equal runs whose speed walks by 0.1 % a
step, `compare` calls 45 to 62 % different instead of 17 %; of equal runs on shared machines, 9 to 56 % instead of 2 to
11 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.diagnosis.straggler_stats import MAD_TO_SIGMA
from ddpwatch.core.limits import CompareLimits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

MAX_PARTS: Final = 16
"""Parts that a run is divided into, at most; their medians are the input of the cosine transform."""
MIN_PART_STEPS: Final = 4
"""Steps in each part, at least; shorter runs are divided into fewer parts."""
COSINES: Final = 8
"""Number of cosine coefficients; higher frequencies reflect single parts."""
FAR_PARTS: Final = 2.5
"""Parts are clipped at this multiple of their scaled MAD: a run with an unusual beginning is not an uncertain one."""
STEADY: Final = 0.7
"""Prior probability that a run does not walk. A higher one finds smaller differences and takes more walks for them;
`benchmarks/comparison.py` measures both."""
WALKS: Final = np.geomspace(1.0, 1e4, 40)
"""Grid of the walk's variance over a run, as a multiple of the noise variance of its median; log-uniform prior."""
BLOCKS_FREEDOM: Final = 16
"""Degrees of freedom that the bootstrap variance adds to those of the coefficients."""
LONG_BLOCKS: Final = 8
"""Number of the longest bootstrap blocks. A walk of variance v spreads a run's steps by v/6, and the mean of this
number of blocks by that over `LONG_BLOCKS`."""


class RandomWalk:
    """Random draws of one run, shared by all of its figures, which drift together."""

    def __init__(self, steps: int, resamples: int, rng: np.random.Generator) -> None:
        self.parts = min(MAX_PARTS, steps // MIN_PART_STEPS)
        """Number of parts to divide the run into; with fewer than two, nothing is added."""
        self._cosines = np.arange(1, min(COSINES, self.parts - 1) + 1)
        # Stratified draws: the interval depends on the rare large ones.
        self._uniform = rng.permutation((np.arange(resamples) + 0.5) / resamples)
        self._freedom = len(self._cosines) + BLOCKS_FREEDOM
        self._chi_square = rng.chisquare(self._freedom, resamples)
        self._normal = rng.standard_normal(resamples)

    def of(self, parts: FloatArray, variance: float) -> FloatArray:
        """Random-walk term to add to each resample of a figure, from its values by part and the bootstrap variance."""
        known = np.isfinite(parts)
        if not len(self._cosines) or not known.any():
            return np.zeros_like(self._normal)
        squares = self._squares(np.where(known, parts, np.median(parts[known])))
        walks = np.concatenate([[0.0], WALKS])
        # Expected squares and bootstrap variance under each walk, as multiples of those under noise alone.
        larger = 1.0 + walks[:, None] / (np.pi * self._cosines) ** 2
        wider = 1.0 + walks / (6.0 * LONG_BLOCKS)
        noise_squares = (squares / larger).sum(axis=1) + BLOCKS_FREEDOM * variance / wider
        if noise_squares.min() <= 0.0:
            return np.zeros_like(self._normal)
        prior = np.concatenate([[STEADY], np.full(len(WALKS), (1.0 - STEADY) / len(WALKS))])
        log_scales = np.log(larger).sum(axis=1) + BLOCKS_FREEDOM * np.log(wider)
        log_posterior = np.log(prior) - (log_scales + self._freedom * np.log(noise_squares)) / 2.0
        posterior = np.exp(log_posterior - log_posterior.max())
        drawn = np.searchsorted(np.cumsum(posterior[:-1] / posterior.sum()), self._uniform)
        # The mean of a walk over its run has a third of the variance of its end.
        total = noise_squares[drawn] / self._chi_square * (1.0 + walks[drawn] / 3.0)
        added: FloatArray = self._normal * np.sqrt(np.maximum(total - variance, 0.0))
        return added

    def _squares(self, parts: FloatArray) -> FloatArray:
        """Squared cosine coefficients, scaled to the variance of a mean over all parts."""
        deviations = parts - np.median(parts)
        limit = FAR_PARTS * MAD_TO_SIGMA * np.median(np.abs(deviations))
        angles = np.pi * self._cosines[:, None] * (np.arange(len(parts)) + 0.5) / len(parts)
        coefficients = np.sqrt(2.0) * np.cos(angles) @ deviations.clip(-limit, limit) / len(parts)
        squares: FloatArray = coefficients**2
        return squares


@dataclass(frozen=True)
class StepModes:
    """The two modes of a run's step times."""

    short_ns: float
    long_ns: float
    long_share: float
    """Fraction of the steps in the longer mode."""


def step_modes(step_ns: FloatArray) -> StepModes | None:
    """Split step times into two modes by Otsu's method on their logarithms; None = there is only one mode."""
    everything = np.sort(step_ns[step_ns > 0])
    trimmed = int(len(everything) * CompareLimits.MODES_TRIM)
    ascending = everything[trimmed : len(everything) - trimmed]
    count = len(ascending)
    if count < CompareLimits.MODES_MIN_STEPS:
        return None
    values = np.log(ascending)
    values -= values.mean()
    total = float((values**2).sum())
    if total <= 0.0:
        return None
    below = np.arange(1, count)
    between = values.cumsum()[:-1] ** 2 * (1.0 / below + 1.0 / (count - below))
    cut = int(between.argmax()) + 1
    long_share = float((everything > ascending[cut - 1]).mean())
    modes = StepModes(float(np.median(ascending[:cut])), float(np.median(ascending[cut:])), long_share)
    rarer = min(long_share, 1.0 - long_share)
    distinct = (
        between[cut - 1] >= CompareLimits.MODES_MIN_SEPARATION * total
        and rarer >= CompareLimits.MODES_MIN_FRACTION
        and modes.long_ns >= CompareLimits.MODES_MIN_RATIO * modes.short_ns
    )
    return modes if distinct else None
