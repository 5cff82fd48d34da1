"""Statistical test for stragglers: ranks whose own work exceeds that of the others, and the steps in which it does.

`self` of each rank is compared with the median of the other ranks at the same step. The noise is a MAD of differences
between neighboring ranks, or the shortest half of the differences between two ranks. An excess counts above a
threshold, and is proven when its median is enough standard errors above zero, corrected for the number of ranks. Three
kinds are tested: the latest steps, every k-th step (folding by period), and sporadic outliers (Poisson).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.diagnosis.slow_episode import episode_of
from ddpwatch.core.limits import StragglerLimits
from ddpwatch.core.metrics.window import medians, medians_across, sampled_ranks
from ddpwatch.core.units import ordinal, percent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.step_store import IntArray

    FloatArray = NDArray[np.float64]
    BoolArray = NDArray[np.bool_]

EVERY_STEP: Final = 1
PERIODS: Final = (EVERY_STEP, 2, 3, 4, 5, 6, 7, 8)
"""Periods in steps by which the window is folded."""


@lru_cache(maxsize=64)
def _step_sets(count: int, recent_steps: int) -> tuple[list[slice], BoolArray, FloatArray]:
    """Sets of steps in which a rank may be slow, as slices, masks and sizes, in the order in which they are tested.

    For a window of `count` steps. Every k-th step is a slice with step k. Cached, so the masks are read-only.
    """
    slices = [where for period in PERIODS for where in _sets_of_period(count, period, recent_steps)]
    masks = np.zeros((len(slices), count), dtype=np.bool_)
    for mask, where in zip(masks, slices, strict=True):
        mask[where] = True
    masks.flags.writeable = False
    return slices, masks, masks.sum(axis=1).astype(np.float64)


def _sets_of_period(count: int, period: int, recent_steps: int) -> Iterator[slice]:
    """Shorter spans detect sooner, longer ones more surely."""
    if period == EVERY_STEP:
        for span in (recent_steps, recent_steps // 2):
            yield slice(max(0, count - span), count, EVERY_STEP)
        return
    for span in (count // 2, count):
        if span >= StragglerLimits.MIN_PERIODIC_STEPS * period and span >= 2 * recent_steps:
            first = count - span
            for start in range(period):
                yield slice(first + (start - first) % period, count, period)


MAD_TO_SIGMA: Final = 1.4826
"""Standard deviation of a normal distribution divided by its MAD."""
MEDIAN_ERROR: Final = 1.2533
"""Standard error of a median against that of a mean."""
SIGMA_ERROR: Final = 1.3
"""A sigma estimated from n numbers is raised by this fraction over sqrt(n), as it may be too small."""
LATEST_SETS: Final = 2
"""Sets of the latest steps that are tested for one rank."""
PERIODIC_SETS: Final = 70
"""Sets of every k-th step that are tested for one rank."""
VERY_MANY: Final = 32
"""Suspected ranks from which on a sort for counting pays off."""


@dataclass(frozen=True)
class Suspect:
    """A rank and the steps of the window in which it is slow."""

    row: int
    excess_ns: float
    """Median of its own work beyond that of the others, over those steps."""
    hit: BoolArray
    pattern: str
    """When it is slow, in words; empty = always."""
    noise_ns: float
    """What the excess must exceed to be proven."""
    regular: bool = True
    """Whether it is continuous or has a period."""
    first: int = 0
    last: int = -1
    """First and last step of the slow episode."""
    steps: int = 0
    slow_steps: int = 0
    """Steps up to the last slow one that the pattern describes, and the slow ones among them."""
    ended: bool = False
    """Whether the episode has ended, by the steps since."""
    lately: int = 0
    """The steps from this one on alone hold more slow ones than a hiccup."""

    @property
    def proven(self) -> bool:
        """Whether it is beyond the noise."""
        return self.excess_ns > self.noise_ns

    @property
    def continues(self) -> bool:
        """Whether it is proven and has not ended."""
        return self.proven and not self.ended


def suspects(window: Window, limits: StragglerLimits) -> list[Suspect]:
    """Slow ranks, tested twice: against the median of all ranks, then against that of the ranks not found slow."""
    self_ns = window.self_ns.astype(np.float64)
    limit_ns = limits.share * window.median_step_ns
    sigma_ns = _sigma(sampled_ranks(self_ns))
    if _majority_is_slow(self_ns, sigma_ns, limit_ns, limits):
        return []
    everybody = np.ones(len(window.ranks), dtype=np.bool_)
    # With half of the ranks slow the median lies halfway between, hence half the thresholds in the first test.
    first = _slow_ranks(self_ns, everybody, sigma_ns / 2, limit_ns / 2, limits)
    slow = [suspect.row for suspect in first if suspect.proven]
    others = everybody.copy()
    if len(slow) * 2 <= len(everybody):
        others[slow] = False
    found = _slow_ranks(self_ns, others, sigma_ns, limit_ns, limits)
    return [
        suspect
        for suspect in found
        if (not others[suspect.row] or not suspect.proven) and (suspect.proven or not suspect.ended)
    ]


def _majority_is_slow(self_ns: FloatArray, sigma_ns: float, limit_ns: float, limits: StragglerLimits) -> bool:
    """Whether more than half exceed the fastest quarter: then the fast ones are the outliers, and no rank is slow."""
    ranks = len(self_ns)
    if ranks < 3:
        return False
    sampled = sampled_ranks(self_ns)
    fast_ns = np.partition(sampled, len(sampled) // 4, axis=0)[len(sampled) // 4]
    excess_ns = _lower_median((self_ns - fast_ns)[:, -limits.recent_steps :])
    return bool((excess_ns > limit_ns + sigma_ns).sum() * 2 > ranks)


def _sigma(self_ns: FloatArray) -> float:
    """Noise of a rank's own work from step to step, as a sigma by MAD.

    From differences of neighboring ranks, which cancels what all ranks share, around the median of each pair, so that a
    constant difference is not noise. The only pair of two ranks has no others to rely on: a rank that is slow by
    another amount in most steps would hide in the noise of its own making, hence the shortest half there.
    """
    pairs_ns = self_ns[1:] - self_ns[:-1]
    if len(pairs_ns) == 1:
        mad_ns = _shortest_half(pairs_ns[0]) / 2.0
    else:
        mad_ns = float(np.median(np.abs(pairs_ns - medians(pairs_ns)[:, None])))
    sigma_ns = MAD_TO_SIGMA * mad_ns / np.sqrt(2.0)
    return float(sigma_ns * (1.0 + SIGMA_ERROR / np.sqrt(pairs_ns.size)))


def _shortest_half(values: FloatArray) -> float:
    """Length of the shortest interval that holds half of the values (shorth), which is twice the MAD of a normal
    distribution, with the correction for small samples of Rousseeuw and Leroy (1987).
    """
    ordered = np.sort(values)
    half = len(ordered) // 2 + 1
    shortest = float((ordered[half - 1 :] - ordered[: len(ordered) - half + 1]).min())
    return shortest * (1.0 + 5.0 / max(1, len(ordered) - 1))


def _slow_ranks(
    self_ns: FloatArray, others: BoolArray, sigma_ns: float, limit_ns: float, limits: StragglerLimits
) -> list[Suspect]:
    """Every rank that exceeds the threshold, each with its clearest pattern."""
    excess_ns, sigma_ns = _excess(self_ns, others, sigma_ns)
    found: dict[int, list[Suspect]] = {}
    for suspect in _periodic(excess_ns, sigma_ns, limit_ns, limits):
        found.setdefault(suspect.row, []).append(suspect)
    # Sporadic outliers count only where no pattern that continues explains them.
    explained = {row for row, known in found.items() if any(suspect.continues for suspect in known)}
    for suspect in _sporadic(excess_ns, others, sigma_ns, limit_ns, limits, explained):
        found.setdefault(suspect.row, []).append(suspect)
        if suspect.continues:
            explained.add(suspect.row)
    return [_clearest(found[row]) for row in sorted(found)]


def _clearest(found: list[Suspect]) -> Suspect:
    """The simplest pattern that explains the excess, or, if that one has ended, one that continues after it."""
    proven = [suspect for suspect in found if suspect.proven] or found
    most_ns = max(suspect.excess_ns for suspect in proven)
    clearest = next(suspect for suspect in proven if suspect.excess_ns >= StragglerLimits.EXPLAINED_SHARE * most_ns)
    later = (suspect for suspect in proven if not suspect.ended and suspect.last > clearest.last)
    return next(later, clearest) if clearest.ended else clearest


def _excess(self_ns: FloatArray, others: BoolArray, sigma_ns: float) -> tuple[FloatArray, float]:
    """Own work beyond the median of the others, and its sigma."""
    if len(self_ns) == 2:
        # Two ranks have no majority: each is compared with the other.
        return self_ns - self_ns[::-1], sigma_ns * excess_error(1)
    sampled = sampled_ranks(self_ns[others])
    return self_ns - medians_across(sampled), sigma_ns * excess_error(len(sampled))


def excess_error(others: int) -> float:
    """Sigma of a rank's excess over the median of this many other ranks, as a multiple of the sigma of one rank."""
    return math.sqrt(1.0 + (1.0 / others if others <= 2 else MEDIAN_ERROR**2 / others))


def _sigma_threshold(sigmas: float, ranks: int) -> float:
    """Threshold in sigmas for the maximum over this many ranks."""
    return math.sqrt(sigmas**2 + 2.0 * math.log(max(1.0, ranks / 2)))


def _periodic(excess_ns: FloatArray, sigma_ns: float, limit_ns: float, limits: StragglerLimits) -> Iterator[Suspect]:
    """Ranks that are slow in the latest steps, or in every k-th of the window, the simplest pattern first.

    Without patterns whose excess is no larger than that of a simpler proven one: they are never the clearest.
    """
    shown_ns: dict[int, float] = {}
    hiccup = max(1, limits.recent_steps // StragglerLimits.HICCUP_DIVISOR)
    slices, masks, sizes = _step_sets(excess_ns.shape[1], limits.recent_steps)
    over = excess_ns > limit_ns
    # Nearly all of thousands of ranks have too few slow steps for any set.
    few = np.flatnonzero(np.count_nonzero(over, axis=1) > StragglerLimits.MIN_SLOW_SHARE * float(sizes.min()))
    # Counted for all of these at once, step by step in memory: most sets catch no rank.
    by_step = np.ascontiguousarray(over[few].T).view(np.uint8)
    counts = np.stack([by_step[where].sum(axis=0, dtype=np.int32) for where in slices], axis=1)
    caught = counts > StragglerLimits.MIN_SLOW_SHARE * sizes
    for number in np.flatnonzero(caught.any(axis=0)):
        where, hit = slices[number], masks[number]
        period = where.step
        sigmas = _sigma_threshold(
            limits.sigmas + (StragglerLimits.PERIODIC_EXTRA_SIGMAS if period > EVERY_STEP else 0.0), len(excess_ns)
        )
        noise_ns = sigmas * MEDIAN_ERROR * sigma_ns / math.sqrt(sizes[number])
        rows = few[caught[:, number]]
        inside_ns = excess_ns[rows, where]
        if period == EVERY_STEP:
            # Slowness that comes and goes is not continuous, however often it comes.
            steady = (inside_ns > limit_ns / 2).mean(axis=1) >= StragglerLimits.STEADY_SHARE
            rows, inside_ns = rows[steady], inside_ns[steady]
        others = _Others(excess_ns, rows)
        for row, median_ns in zip(rows.tolist(), _lower_median(inside_ns).tolist(), strict=True):
            if median_ns <= shown_ns.get(row, 0.0):
                continue
            slow_ns = max(limit_ns, median_ns / 2)
            slow, slow_others = excess_ns[row] > slow_ns, others.above(slow_ns)
            if _may_be_chance(slow, others, slow_others, where, period):
                continue
            regular = period == EVERY_STEP or _stands_out(slow[where.start :], period)
            base_rate = max(slow_others / max(others.steps, 1), StragglerLimits.MIN_BASE_RATE)
            episode = episode_of(slow, base_rate, hiccup, period if regular else EVERY_STEP, where.start)
            first, ended = episode.first, episode.ended
            if period == EVERY_STEP:
                # Most of the latest steps are slow, so it has not ended.
                first, ended = _onset(slow, where.start), False
            lately = int(np.flatnonzero(slow)[-hiccup:][0])
            # A continuous episode is described from its onset, which may be long before the set.
            start = first if period == EVERY_STEP else where.start
            upto = max(episode.last, start) + 1
            slow_steps = int(np.count_nonzero((hit if regular and period > EVERY_STEP else slow)[start:upto]))
            steps = upto - start
            pattern = _every(period) if regular else _part(slow_steps / steps)
            suspect = Suspect(
                row, median_ns, hit, pattern, noise_ns, regular, first, episode.last, steps, slow_steps, ended, lately
            )  # fmt: skip
            if suspect.proven:
                shown_ns[row] = median_ns
            yield suspect


def _onset(slow: BoolArray, first: int) -> int:
    """The step since which a rank has been slow that is slow in most steps from `first` on."""
    block = StragglerLimits.ONSET_STEPS
    while first >= block and np.count_nonzero(slow[first - block : first]) * 2 > block:
        first -= block
    # The first block may begin with steps from before the onset.
    first += int(np.argmax(slow[first:]))
    return first if first >= block else 0


def _share(slow: BoolArray) -> float:
    """Fraction of slow steps; for small arrays `mean` takes ten times as long as a count."""
    return np.count_nonzero(slow) / slow.size


def _stands_out(slow: BoolArray, period: int) -> bool:
    """Whether every k-th step is slow and those between are not, from the first one on: in a burst all are."""
    inside = slow[::period]
    between = slow.size - inside.size
    slow_between = np.count_nonzero(slow) - np.count_nonzero(inside)
    return slow_between / between < StragglerLimits.MIN_SLOW_SHARE * _share(inside) if between else True


class _Others:
    """Steps of the ranks that are not caught in a pattern, to count slow ones by any threshold."""

    def __init__(self, excess_ns: FloatArray, caught: IntArray) -> None:
        self.ranks = len(excess_ns)
        self.steps = (self.ranks - len(caught)) * excess_ns.shape[1]
        self._excess_ns, self._caught = excess_ns, caught
        very_many = len(caught) > VERY_MANY
        self._ordered = np.sort(np.delete(excess_ns, caught, axis=0), axis=None) if very_many else None

    def above(self, limit_ns: float) -> int:
        """Number of steps beyond the threshold."""
        if self._ordered is not None:
            return int(self.steps - np.searchsorted(self._ordered, limit_ns, side="right"))
        # Counting avoids a copy of the rows of thousands of ranks.
        slow = self._excess_ns > limit_ns
        return int(np.count_nonzero(slow)) - int(np.count_nonzero(slow[self._caught]))


def _may_be_chance(slow: BoolArray, others: _Others, slow_others: int, where: slice, period: int) -> bool:
    """Binomial test: whether a pattern may collect its slow steps by chance, given the rate of slow steps outside of
    it, on the ranks that are not caught in it and on the rank itself.

    Assumes no distribution of the noise: on a busy host it comes in bursts, and medians of few steps jump.
    """
    inside = slow[where]
    apart = slow.size - inside.size if period > EVERY_STEP else 0
    elsewhere = others.steps + apart
    if not elsewhere or (others.ranks == 2 and period == EVERY_STEP):
        # Two ranks are compared with each other: when one is slow, the other is fast.
        return False
    slow_inside = int(np.count_nonzero(inside))
    slow_elsewhere = slow_others + (int(np.count_nonzero(slow)) - slow_inside if apart else 0)
    base_rate = max(slow_elsewhere / elsewhere, StragglerLimits.MIN_BASE_RATE)
    tests = others.ranks * (LATEST_SETS if period == EVERY_STEP else PERIODIC_SETS)
    return bool(_binomial_tail(slow_inside, inside.size, base_rate) * tests > StragglerLimits.MAX_PATTERN_CHANCE)


def _binomial_tail(least: int, count: int, rate: float) -> float:
    """Probability of at least `least` hits in `count` trials."""
    rate = min(rate, 1.0 - 1e-12)
    return sum(math.comb(count, hits) * rate**hits * (1.0 - rate) ** (count - hits) for hits in range(least, count + 1))


def _lower_median(values: FloatArray) -> FloatArray:
    """Row medians; of an even number the smaller of the two in the middle, which at least half exceed."""
    middle = (values.shape[1] - 1) // 2
    lower: FloatArray = np.partition(values, middle, axis=1)[:, middle]
    return lower


def _sporadic(
    excess_ns: FloatArray,
    others: BoolArray,
    sigma_ns: float,
    limit_ns: float,
    limits: StragglerLimits,
    explained: Collection[int],
) -> Iterator[Suspect]:
    """Ranks with more outliers than others by a Poisson test, without those that a pattern has `explained`."""
    steps = excess_ns.shape[1]
    threshold_ns = max(limit_ns, limits.OUTLIER_SIGMAS * sigma_ns)
    hiccup = max(1, limits.recent_steps // limits.HICCUP_DIVISOR)
    outlying = excess_ns > threshold_ns
    for span in (limits.recent_steps, 2 * limits.recent_steps, steps):
        before = max(0, steps - span)
        counts = np.count_nonzero(outlying[:, before:], axis=1)
        for row in np.flatnonzero(counts >= limits.outliers).tolist():
            if row in explained:
                continue
            rest = others.copy()
            rest[row] = False
            expected = max(float(counts[rest].mean()) if rest.any() else 0.0, limits.MIN_BASE_RATE * min(span, steps))
            if counts[row] < _poisson_threshold(expected, len(counts)):
                continue
            hit = outlying[row].copy()
            hit[:before] = False
            slow = np.flatnonzero(hit)
            period = _period(slow)
            tested = min(span, steps)
            episode = episode_of(hit, expected / tested, hiccup, period or EVERY_STEP, int(slow[0]))
            of_steps = tested - (steps - 1 - episode.last)
            slow_steps = int(np.count_nonzero(hit[: episode.last + 1]))
            yield Suspect(
                row=row,
                excess_ns=float(np.median(excess_ns[row, hit])),
                hit=hit,
                pattern=_every(period) if period else _part(slow_steps / of_steps),
                noise_ns=threshold_ns,
                regular=bool(period),
                first=episode.first,
                last=episode.last,
                steps=of_steps,
                slow_steps=slow_steps,
                ended=episode.ended,
                lately=int(slow[-hiccup:][0]),
            )


def _period(steps: IntArray) -> int | None:
    """The gap between nearly all of these steps; None = they have no period. Needs fewer of them than folding."""
    gaps = np.diff(steps)
    period = int(np.gcd.reduce(gaps))
    return period if period in PERIODS[1:] and float((gaps == period).mean()) >= StragglerLimits.STEADY_SHARE else None


def _poisson_threshold(expected: float, ranks: int) -> int:
    """Outliers of a rank that exclude chance: Poisson test with mean `expected`, corrected for `ranks` tests."""
    term, below, count = math.exp(-expected), 0.0, 0
    while (1.0 - below) * ranks > StragglerLimits.MAX_SPORADIC_CHANCE:
        below += term
        count += 1
        term *= expected / count
    return count


def _every(period: int) -> str:
    return "" if period == EVERY_STEP else f"every {ordinal(period)} step"


def _part(share: float) -> str:
    return f"in {percent(share)} of the steps"
