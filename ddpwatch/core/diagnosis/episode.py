"""From which step to which a rank was slow, and whether that is over: odd steps of before and after do not count.

Each slow step speaks for a spell and each other one against it, by how likely the one and the other are inside of a
spell and outside. A spell reaches to where most speaks for it, and is over when as much as `SURE` speaks against it
since. So one that is slow in all steps is over after a few others, and one that is slow now and then only after gaps
that are far longer than its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    BoolArray = NDArray[np.bool_]

SURE: Final = 12.0
"""Logarithm of the odds from which on it is no chance: some in a million."""
MOST_SHARE: Final = 0.97
"""A rank that is slow in every step is so in no more of them: one that is not may come between."""
LEAST_FACTOR: Final = 2.0
"""In a spell steps are slow at least so many times as often as they are outside."""
MOST_USUAL: Final = 0.4
ROUNDS: Final = 4
"""How often it is slow inside of a spell is known when the spell is, and the other way round: it settles soon."""


@dataclass(frozen=True)
class Spell:
    """Places in the steps that were looked at."""

    first: int
    last: int
    """Its last slow step; as long as it is not over, that is the latest of all."""
    ended: bool
    """Whether the steps after it are such as they are outside of it."""


class _Stretch(NamedTuple):
    """Where slow steps are close to each other."""

    first: int
    last: int
    slow: int
    """How many steps of it are."""
    weight: float
    """How much speaks for it."""


def spell_of(slow: BoolArray, usual: float, hiccup: int, period: int = 1, start: int = 0) -> Spell:
    """Of a rank that is slow in at least one of the steps; `usual` = the part of them that is so anywhere. Fewer slow
    ones together than `hiccup` are no spell beside a longer one. With a period only each so-manieth step is looked at,
    from `start` on and before.
    """
    start %= period
    looked_at = slow[start::period]
    # The first and the step after the last of each run of slow ones. Thousands are asked for, and `np.diff` is slow.
    framed = np.zeros(len(looked_at) + 2, np.bool_)
    framed[1:-1] = looked_at
    edges = np.flatnonzero(framed[1:] != framed[:-1]).tolist()
    begins, ends = edges[::2], edges[1::2]
    usual = min(usual, MOST_USUAL)
    told = [_Stretch(begins[0], ends[-1] - 1, int(np.count_nonzero(looked_at)), 0.0)]
    for _ in range(ROUNDS):
        share = sum(stretch.slow for stretch in told) / sum(stretch.last - stretch.first + 1 for stretch in told)
        for_it, against = _weights(share, usual)
        before, told = told, _told(_stretches(begins, ends, for_it, against), hiccup // period)
        if told == before:
            break
    # At any time since: an odd step does not call it back, more of them are a spell of their own.
    since = np.cumsum(np.where(looked_at[told[-1].last + 1 :], -for_it, against))
    ended = bool(np.any(since >= SURE))
    last = told[-1].last if ended else ends[-1] - 1
    return Spell(start + told[0].first * period, start + last * period, ended)


def _weights(share: float, usual: float) -> tuple[float, float]:
    """How much a slow step speaks for a spell, and any other against it."""
    share = min(max(share, LEAST_FACTOR * usual), MOST_SHARE)
    return math.log(share / usual), math.log((1.0 - usual) / (1.0 - share))


def _stretches(begins: list[int], ends: list[int], for_it: float, against: float) -> list[_Stretch]:
    """Runs of slow steps, taken together across gaps that do not speak against it too much."""
    found = []
    first = end = begins[0]
    last, slow, slow_upto_last, weight, most = end, 0, 0, 0.0, 0.0
    for begin, upto in zip(begins, ends, strict=True):
        weight -= (begin - end) * against
        if slow and (weight <= 0.0 or most - weight >= SURE):
            found.append(_Stretch(first, last, slow_upto_last, most))
            first, slow, weight, most = begin, 0, 0.0, 0.0
        slow += upto - begin
        weight += (upto - begin) * for_it
        if weight > most:
            last, slow_upto_last, most = upto - 1, slow, weight
        end = upto
    return [*found, _Stretch(first, last, slow_upto_last, most)]


def _told(found: list[_Stretch], hiccup: int) -> list[_Stretch]:
    """Those that are neither a hiccup nor a chance; where there are none, the longest, and the clearest."""
    least_slow = min(hiccup, max(stretch.slow for stretch in found))
    found = [stretch for stretch in found if stretch.slow >= least_slow]
    least = min(SURE, max(stretch.weight for stretch in found))
    return [stretch for stretch in found if stretch.weight >= least]
