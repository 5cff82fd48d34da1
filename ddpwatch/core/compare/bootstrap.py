"""Compares two runs by a block bootstrap: what differs, by how much, and whether that is significant.

Consecutive steps are correlated, so blocks of steps are resampled, with the same seed for all runs: the interval of a
run does not depend on the run it is compared with. A drifting speed widens the resamples (`random_walk_interval`). A
difference is significant if its confidence interval excludes zero; one below `CompareLimits.MIN_CHANGE` is reported as
too small, because two runs of the same job may differ by as much.

Figures are medians, which outliers do not move. If step times have two modes, such as a checkpoint every third step, a
median would jump from one mode to the other: then figures of both runs are means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from ddpwatch.core.compare.random_walk_interval import LONG_BLOCKS, RandomWalk, step_modes
from ddpwatch.core.limits import CompareLimits
from ddpwatch.core.metrics.aggregate import PARTS
from ddpwatch.core.metrics.window import medians

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.core.compare.random_walk_interval import StepModes
    from ddpwatch.core.metrics.aggregate import StepSample
    from ddpwatch.core.metrics.scaling import Profile

    FloatArray = NDArray[np.float64]

Verdict: TypeAlias = Literal["slower", "faster", "higher", "lower", "too small", "inside noise", "unproven"]
Better: TypeAlias = Literal["less", "more", "neither"]
"""Whether more or less of a figure is better. Neither of a share: longer work lowers the share of everything else."""

BLOCK_RESAMPLES: Final = 1000
"""Bootstrap resamples of blocks of steps."""
RESAMPLES: Final = 8 * BLOCK_RESAMPLES
"""Each block resample is used with several random walks: these cost little, and the interval depends on the rare large
ones."""
SEED: Final = 20
"""Seed of the random numbers, the same for all runs, so that a comparison can be repeated."""
BLOCKS: Final = (20, LONG_BLOCKS)
"""Numbers of blocks in a resample: short ones, and long ones for long correlations. The wider result counts."""
MAX_ROWS: Final = 1024
"""Maximum number of steps to resample; of a longer run, stretches from all over it."""
STRETCH_STEPS: Final = 64
"""Consecutive steps in one such stretch."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """One figure of both runs."""

    name: str
    """`step`, `share`, `samples_per_s`, `samples_per_s_rank`, or a part of the step."""
    a: Estimate | None
    b: Estimate | None
    """None = not known."""
    change: Estimate | None
    """`b` against `a`: relative to `a`; for parts of the step relative to `a`'s step; for the share absolute."""
    verdict: Verdict
    """`higher` or `lower` for the share, else `slower` or `faster`. `too small` = significant, but below `smallest`."""
    smallest: float = CompareLimits.MIN_CHANGE
    """Smallest relevant change."""


@dataclass(frozen=True)
class Comparison:
    """Run `b` against run `a`."""

    a: Profile
    b: Profile
    steps: Difference
    share: Difference
    throughput: Difference
    """Of all ranks together."""
    each: Difference
    """Mean of a rank."""
    parts: tuple[Difference, ...]
    by_samples: bool
    """Whether the verdict is about samples instead of steps, because the batches differ."""
    kinds: tuple[StepModes | None, StepModes | None] = (None, None)
    """The two modes of each run's step times, if it has them; then all figures are means instead of medians."""

    @property
    def by_means(self) -> bool:
        """Whether figures are means."""
        return any(kinds is not None for kinds in self.kinds)

    @property
    def headline(self) -> Difference:
        """The deciding figure: step time, or throughput of a rank if batches or world sizes differ."""
        return self.each if self.by_samples else self.steps

    @property
    def slowdown(self) -> Estimate | None:
        """By how much `b` is slower, as a fraction of `a`'s time; negative = faster."""
        change = self.headline.change
        if change is None or not self.by_samples:
            return change
        return Estimate(*(1.0 / max(1.0 + value, 1e-9) - 1.0 for value in (change.value, change.high, change.low)))

    def fails(self, most: float) -> bool:
        """Whether `b` is significantly slower, by more than `most`. A limit below `smallest` is applied as given."""
        slowdown = self.slowdown
        return slowdown is not None and self.headline.verdict in {"slower", "too small"} and slowdown.value > most


def compare(a: StepSample, b: StepSample) -> Comparison | None:
    """Compare two runs; None = one of them has no step that all of its ranks have finished."""
    profile_a, profile_b = a.profile(), b.profile()
    if profile_a is None or profile_b is None:
        return None
    kinds = step_modes(_whole_ns(a)), step_modes(_whole_ns(b))
    by_means = any(each is not None for each in kinds)
    first, second = _Bootstrap(a, by_means=by_means), _Bootstrap(b, by_means=by_means)
    reported = profile_a.samples_per_s is not None and profile_b.samples_per_s is not None
    differ = profile_a.effective_batch != profile_b.effective_batch or profile_a.world_size != profile_b.world_size
    return Comparison(
        a=profile_a,
        b=profile_b,
        steps=_difference("step", first, second),
        share=_difference(
            "share", first, second, "neither", smallest=CompareLimits.MIN_SHARE_CHANGE, relative_to="none"
        ),
        throughput=_difference("samples_per_s", first, second, "more"),
        each=_difference("samples_per_s_rank", first, second, "more"),
        parts=tuple(_difference(name, first, second, relative_to="step") for name in PARTS),
        by_samples=reported and differ,
        kinds=kinds,
    )


def _whole_ns(sample: StepSample) -> FloatArray:
    steps = sample.steps()
    whole_ns: FloatArray = np.sum([steps[name] for name in PARTS], axis=0)
    return whole_ns


class _Bootstrap:
    """Figures of one run, each with its resamples."""

    def __init__(self, sample: StepSample, *, by_means: bool) -> None:
        steps, whole_ns = sample.steps(), _whole_ns(sample)
        rows = np.stack([whole_ns, *(steps[name] for name in PARTS), steps["samples"]])
        kept = rows[:, whole_ns > 0]
        self._world = max(sample.world_size, 1)
        self._all, self._rows = kept, _thinned(kept)
        count = self._rows.shape[1]
        self.proven = count >= CompareLimits.MIN_STEPS
        rng = np.random.default_rng(SEED)
        self._resampled = [_blocks(count, max(count // blocks, 1), rng) for blocks in BLOCKS]
        self._random_walk = RandomWalk(count if self.proven else 0, RESAMPLES, rng)
        self._by_means = by_means
        self._known: dict[str, tuple[float, FloatArray]] = {}

    def of(self, name: str) -> tuple[float, FloatArray]:
        """A figure and its resamples; NaN = not known."""
        if name not in self._known:
            all_top, all_bottom = self._fraction(name, self._all)
            top, bottom = self._fraction(name, self._rows)
            if not np.isfinite(top).any():
                return np.nan, np.full(RESAMPLES, np.nan)
            value, thinned_value = self._center(all_top, all_bottom)[0], self._center(top, bottom)[0]
            by_blocks = (self._resample(top, bottom, resampled) for resampled in self._resampled)
            resamples = max(by_blocks, key=lambda centers: float(np.std(centers)))
            variance, resamples = float(np.var(resamples)), np.tile(resamples, RESAMPLES // BLOCK_RESAMPLES)
            if not self._by_means and self._random_walk.parts:
                # Alternating between two modes is not a walk; long blocks cover it.
                split = np.array_split(np.arange(len(top)), self._random_walk.parts)
                parts = np.array([self._center(top[part], bottom[part])[0] for part in split])
                resamples = resamples + self._random_walk.of(parts, variance)
            # A run is as a whole neither faster nor slower than each of its steps.
            each = (all_top / all_bottom)[np.isfinite(all_top)]
            # The figure is of all steps; the resamples, of some of them, give its uncertainty.
            self._known[name] = float(value), np.clip(resamples + (value - thinned_value), each.min(), each.max())
        return self._known[name]

    def _resample(self, top: FloatArray, bottom: FloatArray, resampled: NDArray[np.int64]) -> FloatArray:
        """The figure of each resample."""
        if self._by_means:
            return self._center(top[resampled], bottom[resampled])
        return _resampled_medians(top / bottom, resampled)

    def _center(self, top: FloatArray, bottom: FloatArray) -> FloatArray:
        """Median or mean of each row, or of the only one, without unknown values."""
        top, bottom = np.atleast_2d(top), np.atleast_2d(bottom)
        if not self._by_means:
            return _medians(top / bottom)
        known = np.isfinite(top)
        sums, weights = np.where(known, top, 0.0).sum(axis=1), np.where(known, bottom, 0.0).sum(axis=1)
        means: FloatArray = sums / weights.clip(1e-12)
        means[~known.any(axis=1)] = np.nan
        return means

    def _fraction(self, name: str, rows: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Numerator and denominator of a figure in each of these steps; NaN = not known."""
        whole_ns, samples = rows[0], rows[-1]
        one = np.ones_like(whole_ns)
        if name == "step":
            return whole_ns, one
        if name == "share":
            return rows[1 + PARTS.index("wire")] + rows[1 + PARTS.index("wait")], whole_ns
        if name == "samples_per_s":
            return samples * 1e9, whole_ns
        if name == "samples_per_s_rank":
            return samples * 1e9 / self._world, whole_ns
        return rows[1 + PARTS.index(name)], one


def _thinned(rows: FloatArray) -> FloatArray:
    """At most `MAX_ROWS` steps, in stretches."""
    count = rows.shape[1]
    if count <= MAX_ROWS:
        return rows
    starts = np.linspace(0, count - STRETCH_STEPS, MAX_ROWS // STRETCH_STEPS).astype(np.int64)
    return rows[:, (starts[:, None] + np.arange(STRETCH_STEPS)).ravel()]


def _blocks(count: int, block: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """(resample, step): indices of circular blocks that begin anywhere."""
    starts = rng.integers(0, count, (BLOCK_RESAMPLES, -(-count // block)))
    resampled = (starts[:, :, None] + np.arange(block)).reshape(BLOCK_RESAMPLES, -1)[:, :count] % count
    return resampled.astype(np.int64)


def _medians(values: FloatArray) -> FloatArray:
    """Median of each row, without unknown values."""
    if np.isfinite(values).all():
        return medians(values)
    known = [row[np.isfinite(row)] for row in values]
    return np.array([np.median(row) if len(row) else np.nan for row in known])


def _resampled_medians(values: FloatArray, resampled: NDArray[np.int64]) -> FloatArray:
    """Median of each resample, given the indices of its values."""
    if not np.isfinite(values).all():
        return _medians(values[resampled])
    order = np.argsort(values)
    # The ranks of the values are small integers, which sort several times as fast as the values.
    ranks = np.empty(len(values), dtype=np.int16)
    ranks[order] = np.arange(len(values))
    ordered, count = np.sort(ranks[resampled], axis=1), resampled.shape[1]
    found: FloatArray = values[order[ordered[:, [(count - 1) // 2, count // 2]]]].mean(axis=1)
    return found


def _difference(
    name: str,
    a: _Bootstrap,
    b: _Bootstrap,
    better: Better = "less",
    *,
    smallest: float = CompareLimits.MIN_CHANGE,
    relative_to: Literal["itself", "step", "none"] = "itself",
) -> Difference:
    (value_a, resamples_a), (value_b, resamples_b) = a.of(name), b.of(name)
    first, second = _estimate(value_a, resamples_a), _estimate(value_b, resamples_b)
    if first is None or second is None:
        return Difference(name, first, second, None, "unproven", smallest)
    if relative_to == "itself":
        scale, scales = value_a, resamples_a
    elif relative_to == "step":
        scale, scales = a.of("step")
    else:
        scale, scales = 1.0, np.ones(RESAMPLES)
    # Both runs are resampled with the same seed. In the same order, that would hide a difference.
    apart = resamples_b[np.random.default_rng(SEED).permutation(RESAMPLES)] - resamples_a
    change = _estimate((value_b - value_a) / max(scale, 1e-12), apart / np.maximum(scales, 1e-12))
    if change is None or not (a.proven and b.proven):
        return Difference(name, first, second, change, "unproven", smallest)
    return Difference(name, first, second, change, _verdict(change, smallest, better), smallest)


def _verdict(change: Estimate, smallest: float, better: Better) -> Verdict:
    if change.low <= 0.0 <= change.high:
        return "inside noise"
    if abs(change.value) < smallest:
        return "too small"
    if better == "neither":
        return "higher" if change.value > 0 else "lower"
    return "faster" if (change.value > 0) == (better == "more") else "slower"


def _estimate(value: float, resampled: FloatArray) -> Estimate | None:
    known = resampled[np.isfinite(resampled)]
    if not np.isfinite(value) or not len(known):
        return None
    outside = (1.0 - CompareLimits.CONFIDENCE) / 2.0
    low, high = np.quantile(known, [outside, 1.0 - outside])
    return Estimate(value, min(float(low), value), max(float(high), value))
