"""Whose own work takes longer than that of the others, in which steps, and whether that is beyond the noise.

Compared is `self`, by medians, against the median of the other ranks at the same step. The noise is what a rank's own
work varies by from step to step; an excess counts when it is larger than a limit, and is proven when it is so many
standard errors away from nothing that chance is out of the question, for as many ranks as there are.

The sets of steps of a window in which a rank may be slow: all of the latest, or every k-th.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.diagnosis.episode import episode_of
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
"""A rank that is slow in every k-th step is looked for by folding the window."""


@dataclass(frozen=True)
class StepSets:
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
def step_sets(count: int, recent_steps: int) -> StepSets:
    """For a window of so many steps. Shared between calls: nobody may change them."""
    periods, slices, masks = [], [], []
    for period in PERIODS:
        for where in _sets_of_period(count, period, recent_steps):
            mask = np.zeros(count, dtype=np.bool_)
            mask[where] = True
            mask.flags.writeable = False
            periods.append(period)
            slices.append(where)
            masks.append(mask)
    return StepSets(periods, slices, masks, np.array([mask.sum() for mask in masks], dtype=np.float64))


def _sets_of_period(count: int, period: int, recent_steps: int) -> Iterator[slice]:
    """Steps in which a rank may be slow with a period; a shorter span is sooner, a longer one surer."""
    if period == EVERY_STEP:
        for span in (recent_steps, recent_steps // 2):
            yield slice(max(0, count - span), count)
        return
    for span in (count // 2, count):
        if span >= StragglerLimits.MIN_PERIODIC_STEPS * period and span >= 2 * recent_steps:
            first = count - span
            for start in range(period):
                yield slice(first + (start - first) % period, count, period)


MAD_TO_SIGMA: Final = 1.4826
MEDIAN_ERROR: Final = 1.2533
"""Standard error of a median against that of a mean."""
SIGMA_ERROR: Final = 1.3
"""A spread estimated from few numbers may be too small: this over the root of their count is added to it."""
LATEST_SETS: Final = 2
PERIODIC_SETS: Final = 70
"""How many sets of steps are looked at for one rank."""
VERY_MANY: Final = 32


@dataclass(frozen=True)
class Suspect:
    """A rank and the steps in which it is slow."""

    row: int
    excess_ns: float
    """Own work beyond that of the others: the median over those steps."""
    hit: BoolArray
    pattern: str
    """When it is slow, in words; empty = always."""
    noise_ns: float
    """What the excess must exceed to be beyond doubt."""
    regular: bool = True
    """Whether the pattern has an order."""
    first: int = 0
    last: int = -1
    """In which steps of the window it is slow at all: from the first to the last of them."""
    steps: int = 0
    slow_steps: int = 0
    """Of how many steps, up to the last slow one, the pattern is told, and in how many of these it is slow."""
    ended: bool = False
    """Whether it was slow in these steps and is so no longer, by all that came since."""
    lately: int = 0
    """From this step on alone it is slow in more than a hiccup."""

    @property
    def proven(self) -> bool:
        """Whether it is beyond the noise."""
        return self.excess_ns > self.noise_ns


def suspects(window: Window, limits: StragglerLimits) -> list[Suspect]:
    """Ranks that stand out against the median, judged once more against the others without them."""
    self_ns = window.self_ns.astype(np.float64)
    limit_ns = limits.share * window.median_step_ns
    sigma_ns = _sigma(sampled_ranks(self_ns))
    if _majority_is_slow(self_ns, sigma_ns, limit_ns, limits):
        return []
    everybody = np.ones(len(window.ranks), dtype=np.bool_)
    # With half of the ranks slow the median lies half-way between: so the first look has half the limits.
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
    """Whether more than half exceed the fastest quarter: then the fast ones are the odd ones, and nobody is slow."""
    ranks = len(self_ns)
    if ranks < 3:
        return False
    asked = sampled_ranks(self_ns)
    fast_ns = np.partition(asked, len(asked) // 4, axis=0)[len(asked) // 4]
    excess_ns = _lower_median((self_ns - fast_ns)[:, -limits.recent_steps :])
    return bool((excess_ns > limit_ns + sigma_ns).sum() * 2 > ranks)


def _sigma(self_ns: FloatArray) -> float:
    """How much a rank's own work varies from step to step, by itself.

    From differences between neighbours, so that what all ranks share goes out, and around their medians, so that a
    lasting difference is no noise.
    """
    pairs_ns = self_ns[1:] - self_ns[:-1]
    around_ns = pairs_ns - medians(pairs_ns)[:, None]
    sigma_ns = MAD_TO_SIGMA * float(np.median(np.abs(around_ns))) / np.sqrt(2.0)
    return float(sigma_ns * (1.0 + SIGMA_ERROR / np.sqrt(around_ns.size)))


def _slow_ranks(
    self_ns: FloatArray, others: BoolArray, sigma_ns: float, limit_ns: float, limits: StragglerLimits
) -> list[Suspect]:
    """Every rank that exceeds the limit, in the clearest of the ways in which it does."""
    excess_ns, sigma_ns = _excess(self_ns, others, sigma_ns)
    found: dict[int, list[Suspect]] = {}
    for suspect in _periodic(excess_ns, sigma_ns, limit_ns, limits):
        found.setdefault(suspect.row, []).append(suspect)
    # In no order: only where no pattern explains it, that is to say one that goes on.
    explained = {row for row, known in found.items() if any(map(_goes_on, known))}
    for suspect in _sporadic(excess_ns, others, sigma_ns, limit_ns, limits, explained):
        found.setdefault(suspect.row, []).append(suspect)
        if _goes_on(suspect):
            explained.add(suspect.row)
    return [_clearest(found[row]) for row in sorted(found)]


def _goes_on(suspect: Suspect) -> bool:
    return suspect.proven and not suspect.ended


def _clearest(found: list[Suspect]) -> Suspect:
    """The simplest pattern that explains the excess: one of twice the frequency catches half of it. Where that one has
    ended, rather one that goes on after it.
    """
    proven = [suspect for suspect in found if suspect.proven] or found
    most_ns = max(suspect.excess_ns for suspect in proven)
    clearest = next(suspect for suspect in proven if suspect.excess_ns >= StragglerLimits.EXPLAINED_SHARE * most_ns)
    goes_on = (suspect for suspect in proven if not suspect.ended and suspect.last > clearest.last)
    return next(goes_on, clearest) if clearest.ended else clearest


def _excess(self_ns: FloatArray, others: BoolArray, sigma_ns: float) -> tuple[FloatArray, float]:
    """Own work beyond the median of the others, and how much it varies."""
    if len(self_ns) == 2:
        # Of two there is no majority: each is measured by the other.
        return self_ns - self_ns[::-1], sigma_ns * float(np.sqrt(2.0))
    asked = sampled_ranks(self_ns[others])
    count = len(asked)
    error = 1.0 / count if count <= 2 else MEDIAN_ERROR**2 / count
    return self_ns - medians_across(asked), sigma_ns * float(np.sqrt(1.0 + error))


def _sigma_threshold(sigmas: float, ranks: int) -> float:
    """The more ranks there are, the further one of them strays by chance."""
    return math.sqrt(sigmas**2 + 2.0 * math.log(max(1.0, ranks / 2)))


def _periodic(excess_ns: FloatArray, sigma_ns: float, limit_ns: float, limits: StragglerLimits) -> Iterator[Suspect]:
    """Ranks that are slow in all of the latest steps, or in every k-th of the window, the simplest pattern first.

    Without those that a simpler one, which is proven, shows as much of: they are never the clearest.
    """
    shown_ns: dict[int, float] = {}
    hiccup = max(1, limits.recent_steps // limits.HICCUP_DIVISOR)
    sets = step_sets(excess_ns.shape[1], limits.recent_steps)
    over = excess_ns > limit_ns
    # Nearly all of thousands of ranks have too few slow steps for any way, and are not looked at further.
    few = np.flatnonzero(np.count_nonzero(over, axis=1) > limits.MIN_SLOW_SHARE * sets.least)
    # Counted for all of these at once, step by step in memory: most ways catch nobody.
    by_step = np.ascontiguousarray(over[few].T).view(np.uint8)
    counts = np.stack([by_step[where].sum(axis=0, dtype=np.int32) for where in sets.slices], axis=1)
    caught = counts > limits.MIN_SLOW_SHARE * sets.sizes
    for way in np.flatnonzero(caught.any(axis=0)):
        period, where, hit = sets.periods[way], sets.slices[way], sets.masks[way]
        sigmas = _sigma_threshold(
            limits.sigmas + (limits.PERIODIC_EXTRA_SIGMAS if period > EVERY_STEP else 0.0), len(excess_ns)
        )
        noise_ns = sigmas * MEDIAN_ERROR * sigma_ns / math.sqrt(sets.sizes[way])
        rows = few[caught[:, way]]
        looked_at_ns = excess_ns[rows, where]
        if period == EVERY_STEP:
            # What comes and goes does not last, however often it comes.
            steady = (looked_at_ns > limit_ns / 2).mean(axis=1) >= limits.STEADY_SHARE
            rows, looked_at_ns = rows[steady], looked_at_ns[steady]
        others = _Others(excess_ns, rows)
        for row, median_ns in zip(rows.tolist(), _lower_median(looked_at_ns).tolist(), strict=True):
            if median_ns <= shown_ns.get(row, 0.0):
                continue
            slow_ns = max(limit_ns, median_ns / 2)
            slow, slow_others = excess_ns[row] > slow_ns, others.above(slow_ns)
            if _may_be_chance(slow, others, slow_others, where, period):
                continue
            regular = period == EVERY_STEP or _stands_out(slow[where.start :], period)
            usual = max(slow_others / max(others.steps, 1), limits.MIN_BASE_RATE)
            episode = episode_of(slow, usual, hiccup, period if regular else EVERY_STEP, where.start)
            first, ended = episode.first, episode.ended
            if period == EVERY_STEP:
                # Most of the latest steps are slow: that it is over is told when they are not.
                first, ended = _onset(slow, where.start), False
            lately = int(np.flatnonzero(slow)[-hiccup:][0])
            # One that lasts is told from its beginning on, which may be long before.
            start = first if period == EVERY_STEP else where.start
            upto = max(episode.last, start) + 1
            reported = int(np.count_nonzero((hit if regular and period > EVERY_STEP else slow)[start:upto]))
            steps = upto - start
            pattern = _every(period) if regular else _part(reported / steps)
            suspect = Suspect(
                row, median_ns, hit, pattern, noise_ns, regular, first, episode.last, steps, reported, ended, lately
            )  # fmt: skip
            if suspect.proven:
                shown_ns[row] = median_ns
            yield suspect


def _onset(slow: BoolArray, first: int) -> int:
    """Since when it has been slow, where it is in most of the steps from `first` on."""
    block = StragglerLimits.ONSET_STEPS
    while first >= block and np.count_nonzero(slow[first - block : first]) * 2 > block:
        first -= block
    # Some of those at the beginning may be of before.
    first += int(np.argmax(slow[first:]))
    return first if first >= block else 0


def _share(slow: BoolArray) -> float:
    """How many of these are slow. Counted: of so few steps a `mean` takes ten times as long."""
    return np.count_nonzero(slow) / slow.size


def _stands_out(slow: BoolArray, period: int) -> bool:
    """Whether the steps of a pattern, from its first one on, are slow and those between are not: in a burst all are."""
    inside = slow[::period]
    between = slow.size - inside.size
    slow_between = np.count_nonzero(slow) - np.count_nonzero(inside)
    return slow_between / between < StragglerLimits.MIN_SLOW_SHARE * _share(inside) if between else True


class _Others:
    """All steps of the ranks that are not caught in a pattern: how many of them are slow, by whatever limit."""

    def __init__(self, excess_ns: FloatArray, caught: IntArray) -> None:
        self.ranks = len(excess_ns)
        self.steps = (self.ranks - len(caught)) * excess_ns.shape[1]
        self._excess_ns, self._caught = excess_ns, caught
        # Where very many are caught, each asks: then it is worth the while to put them in order.
        very_many = len(caught) > VERY_MANY
        self._ordered = np.sort(np.delete(excess_ns, caught, axis=0), axis=None) if very_many else None

    def above(self, limit_ns: float) -> int:
        """How many exceed it."""
        if self._ordered is not None:
            return int(self.steps - np.searchsorted(self._ordered, limit_ns, side="right"))
        # Counted, and not picked out: there may be thousands of ranks.
        slow = self._excess_ns > limit_ns
        return int(np.count_nonzero(slow)) - int(np.count_nonzero(slow[self._caught]))


def _may_be_chance(slow: BoolArray, others: _Others, slow_others: int, where: slice, period: int) -> bool:
    """Whether as many slow steps may come together by chance, where so many there are outside the pattern: those of the
    ranks that are not caught in it, and the rank's own between.

    Asks nothing of the noise's shape: on a busy host it comes in spells, and medians of few steps jump.
    """
    inside = slow[where]
    apart = slow.size - inside.size if period > EVERY_STEP else 0
    elsewhere = others.steps + apart
    if not elsewhere or (others.ranks == 2 and period == EVERY_STEP):
        # Of two ranks, each is measured by the other: when one is slow, the other is fast.
        return False
    slow_inside = int(np.count_nonzero(inside))
    slow_elsewhere = slow_others + (int(np.count_nonzero(slow)) - slow_inside if apart else 0)
    usual = max(slow_elsewhere / elsewhere, StragglerLimits.MIN_BASE_RATE)
    questions = others.ranks * (LATEST_SETS if period == EVERY_STEP else PERIODIC_SETS)
    return bool(_binomial_tail(slow_inside, inside.size, usual) * questions > StragglerLimits.MAX_PATTERN_CHANCE)


def _binomial_tail(least: int, count: int, share: float) -> float:
    """Chance of at least so many hits among a count, where each is one with that probability."""
    share = min(share, 1.0 - 1e-12)
    return sum(
        math.comb(count, hits) * share**hits * (1.0 - share) ** (count - hits) for hits in range(least, count + 1)
    )


def _lower_median(values: FloatArray) -> FloatArray:
    """Exceeded by more than half of them: of an even number the smaller of the two in the middle."""
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
    """Ranks with several slow steps in no order, each of them beyond the noise by itself, and more than others have.
    Without those that are `explained`.
    """
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
            usual = max(float(counts[rest].mean()) if rest.any() else 0.0, limits.MIN_BASE_RATE * min(span, steps))
            if counts[row] < _poisson_threshold(usual, len(counts)):
                continue
            hit = outlying[row].copy()
            hit[:before] = False
            slow = np.flatnonzero(hit)
            period = _period(slow)
            looked_at = min(span, steps)
            episode = episode_of(hit, usual / looked_at, hiccup, period or EVERY_STEP, int(slow[0]))
            of_steps = looked_at - (steps - 1 - episode.last)
            reported = int(np.count_nonzero(hit[: episode.last + 1]))
            yield Suspect(
                row=row,
                excess_ns=float(np.median(excess_ns[row, hit])),
                hit=hit,
                pattern=_every(period) if period else _part(reported / of_steps),
                noise_ns=threshold_ns,
                regular=bool(period),
                first=episode.first,
                last=episode.last,
                steps=of_steps,
                slow_steps=reported,
                ended=episode.ended,
                lately=int(slow[-hiccup:][0]),
            )


def _period(steps: IntArray) -> int | None:
    """How far these steps are from each other, if that is the same for nearly all; None = they come in no order.

    So it is told as soon as there are enough of them, which is before folding is sure.
    """
    gaps = np.diff(steps)
    period = int(np.gcd.reduce(gaps))
    return period if period in PERIODS[1:] and float((gaps == period).mean()) >= StragglerLimits.STEADY_SHARE else None


def _poisson_threshold(usual: float, ranks: int) -> int:
    """How many odd steps of a rank are no chance, where so many are usual: Poisson, for that many ranks at once."""
    term, below, count = math.exp(-usual), 0.0, 0
    while (1.0 - below) * ranks > StragglerLimits.MAX_SPORADIC_CHANCE:
        below += term
        count += 1
        term *= usual / count
    return count


def _every(period: int) -> str:
    return "" if period == EVERY_STEP else f"every {ordinal(period)} step"


def _part(share: float) -> str:
    return f"in {percent(share)} of the steps"
