"""Bounds of a slow episode by a log-likelihood ratio test (CUSUM).

Each slow step adds the log-likelihood ratio of the episode's rate against the base rate, each other step subtracts. An
episode reaches to the maximum of the sum, and has ended once the sum has fallen by `LLR_THRESHOLD` since. So a rank
that was slow in all steps has ended after a few others, and one that is slow now and then only after gaps far longer
than its own. Odd steps before and after do not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ddpwatch.core.limits import StragglerLimits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    BoolArray = NDArray[np.bool_]

ROUNDS: Final = 4
"""Rounds in which bounds and rate of the episode are estimated from each other; they converge sooner as a rule."""


@dataclass(frozen=True)
class Episode:
    """A slow episode, by positions in the tested steps."""

    first: int
    last: int
    """Its last slow step; the latest of all as long as it has not ended."""
    ended: bool
    """Whether the steps since are at the base rate."""


class _Segment(NamedTuple):
    """Slow steps that are close to each other."""

    first: int
    last: int
    slow: int
    """Number of slow steps."""
    weight: float
    """Log-likelihood ratio of the segment."""


def episode_of(slow: BoolArray, base_rate: float, hiccup: int, period: int = 1, start: int = 0) -> Episode:
    """The episode of a rank with at least one slow step; `base_rate` is the fraction of slow steps outside of it.

    Segments with fewer slow steps than `hiccup` do not count beside a longer one. With a period only every k-th step is
    tested, in phase with `start`.
    """
    start %= period
    tested = slow[start::period]
    # First and end of each run of slow steps. `np.diff` would be slow for thousands of calls.
    framed = np.zeros(len(tested) + 2, np.bool_)
    framed[1:-1] = tested
    edges = np.flatnonzero(framed[1:] != framed[:-1]).tolist()
    begins, ends = edges[::2], edges[1::2]
    base_rate = min(base_rate, StragglerLimits.MAX_BASE_RATE)
    segments = [_Segment(begins[0], ends[-1] - 1, int(np.count_nonzero(tested)), 0.0)]
    for _ in range(ROUNDS):
        rate = sum(each.slow for each in segments) / sum(each.last - each.first + 1 for each in segments)
        gain, loss = _weights(rate, base_rate)
        before, segments = segments, _significant(_segments(begins, ends, gain, loss), hiccup // period)
        if segments == before:
            break
    # At any time since: an odd step does not revoke the end, more of them are an episode of their own.
    since = np.cumsum(np.where(tested[segments[-1].last + 1 :], -gain, loss))
    ended = bool(np.any(since >= StragglerLimits.LLR_THRESHOLD))
    last = segments[-1].last if ended else ends[-1] - 1
    return Episode(start + segments[0].first * period, start + last * period, ended)


def _weights(rate: float, base_rate: float) -> tuple[float, float]:
    """Log-likelihood ratios that a slow step adds and any other subtracts."""
    rate = min(max(rate, StragglerLimits.MIN_RATE_FACTOR * base_rate), StragglerLimits.MAX_SLOW_RATE)
    return math.log(rate / base_rate), math.log((1.0 - base_rate) / (1.0 - rate))


def _segments(begins: list[int], ends: list[int], gain: float, loss: float) -> list[_Segment]:
    """Runs of slow steps, joined across gaps that do not outweigh them."""
    found = []
    first = end = begins[0]
    last, slow, slow_upto_last, weight, most = end, 0, 0, 0.0, 0.0
    for begin, upto in zip(begins, ends, strict=True):
        weight -= (begin - end) * loss
        if slow and (weight <= 0.0 or most - weight >= StragglerLimits.LLR_THRESHOLD):
            found.append(_Segment(first, last, slow_upto_last, most))
            first, slow, weight, most = begin, 0, 0.0, 0.0
        slow += upto - begin
        weight += (upto - begin) * gain
        if weight > most:
            last, slow_upto_last, most = upto - 1, slow, weight
        end = upto
    return [*found, _Segment(first, last, slow_upto_last, most)]


def _significant(found: list[_Segment], hiccup: int) -> list[_Segment]:
    """Segments that are neither a hiccup nor chance; if there are none, the longest, and the most likely."""
    least_slow = min(hiccup, max(segment.slow for segment in found))
    found = [segment for segment in found if segment.slow >= least_slow]
    least = min(StragglerLimits.LLR_THRESHOLD, max(segment.weight for segment in found))
    return [segment for segment in found if segment.weight >= least]
