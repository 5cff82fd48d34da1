"""From which step to which a rank was slow, and whether that is over: odd steps of before and after do not count.

Each slow step speaks for a spell and each other one against it, by how likely the one and the other are inside of a
spell and outside. A spell reaches to where most speaks for it, and is over when `LLR_THRESHOLD` speaks against it
since. So one that is slow in all steps is over after a few others, and one that is slow now and then only after gaps
that are far longer than its own.
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
"""How often it is slow inside of a spell is known when the spell is, and the other way round: it settles soon."""


@dataclass(frozen=True)
class Episode:
    """Places in the steps that were looked at."""

    first: int
    last: int
    """Its last slow step; as long as it is not over, that is the latest of all."""
    ended: bool
    """Whether the steps after it are such as they are outside of it."""


class _Segment(NamedTuple):
    """Where slow steps are close to each other."""

    first: int
    last: int
    slow: int
    """How many steps of it are."""
    weight: float
    """How much speaks for it."""


def episode_of(slow: BoolArray, base_rate: float, hiccup: int, period: int = 1, start: int = 0) -> Episode:
    """Of a rank that is slow in at least one of the steps; `base_rate` = the part of them that is so anywhere. Fewer
    slow ones together than `hiccup` are no spell beside a longer one. With a period only one step of each period is
    looked at, from `start` on and before.
    """
    start %= period
    looked_at = slow[start::period]
    # The first and the step after the last of each run of slow ones. Thousands are asked for, and `np.diff` is slow.
    framed = np.zeros(len(looked_at) + 2, np.bool_)
    framed[1:-1] = looked_at
    edges = np.flatnonzero(framed[1:] != framed[:-1]).tolist()
    begins, ends = edges[::2], edges[1::2]
    base_rate = min(base_rate, StragglerLimits.MAX_BASE_RATE)
    reported = [_Segment(begins[0], ends[-1] - 1, int(np.count_nonzero(looked_at)), 0.0)]
    for _ in range(ROUNDS):
        share = sum(stretch.slow for stretch in reported) / sum(
            stretch.last - stretch.first + 1 for stretch in reported
        )
        for_it, against = _weights(share, base_rate)
        before, reported = reported, _significant(_segments(begins, ends, for_it, against), hiccup // period)
        if reported == before:
            break
    # At any time since: an odd step does not call it back, more of them are a spell of their own.
    since = np.cumsum(np.where(looked_at[reported[-1].last + 1 :], -for_it, against))
    ended = bool(np.any(since >= StragglerLimits.LLR_THRESHOLD))
    last = reported[-1].last if ended else ends[-1] - 1
    return Episode(start + reported[0].first * period, start + last * period, ended)


def _weights(share: float, base_rate: float) -> tuple[float, float]:
    """How much a slow step speaks for a spell, and any other against it."""
    share = min(max(share, StragglerLimits.MIN_RATE_FACTOR * base_rate), StragglerLimits.MAX_SLOW_RATE)
    return math.log(share / base_rate), math.log((1.0 - base_rate) / (1.0 - share))


def _segments(begins: list[int], ends: list[int], for_it: float, against: float) -> list[_Segment]:
    """Runs of slow steps, taken together across gaps that do not speak against it too much."""
    found = []
    first = end = begins[0]
    last, slow, slow_upto_last, weight, most = end, 0, 0, 0.0, 0.0
    for begin, upto in zip(begins, ends, strict=True):
        weight -= (begin - end) * against
        if slow and (weight <= 0.0 or most - weight >= StragglerLimits.LLR_THRESHOLD):
            found.append(_Segment(first, last, slow_upto_last, most))
            first, slow, weight, most = begin, 0, 0.0, 0.0
        slow += upto - begin
        weight += (upto - begin) * for_it
        if weight > most:
            last, slow_upto_last, most = upto - 1, slow, weight
        end = upto
    return [*found, _Segment(first, last, slow_upto_last, most)]


def _significant(found: list[_Segment], hiccup: int) -> list[_Segment]:
    """Those that are neither a hiccup nor a chance; where there are none, the longest, and the clearest."""
    least_slow = min(hiccup, max(stretch.slow for stretch in found))
    found = [stretch for stretch in found if stretch.slow >= least_slow]
    least = min(StragglerLimits.LLR_THRESHOLD, max(stretch.weight for stretch in found))
    return [stretch for stretch in found if stretch.weight >= least]
