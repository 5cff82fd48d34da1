"""Ranks whose data has ended while the others go on training, and wait for them in vain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.arrivals import SYNC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.arrivals import Meeting
    from ddpwatch.core.rank import RankState

BARRIER: Final = "barrier"


def ran_out(meeting: Meeting) -> list[RankState]:
    """The ranks that are missing because their data has ended, in a pass in which others go on training."""
    missing = [each.rank for each in meeting.missing]
    if not missing or not all(rank.at_end_of_data for rank in missing):
        return []
    return missing if any(_goes_on(each.rank, missing) for each in meeting.waiting) else []


def left_the_loop(meeting: Meeting) -> list[RankState]:
    """The ranks of a group that wait in a barrier at the end of their data, while the others train.

    A barrier in the middle of the data is another matter: `desync`. So is one that most wait in, because then one of
    them has left it out; of as many, what is left of the others' data tells.
    """
    left = [each.rank for each in meeting.waiting if each.group.op == BARRIER and not in_sync(each.rank)]
    training = [each.rank for each in meeting.waiting if in_sync(each.rank)]
    if not left or len(left) + len(training) < len(meeting.waiting) or not all(rank.at_end_of_data for rank in left):
        return []
    even = len(left) == len(training) and all(_goes_on(rank, left) for rank in training)
    return left if even or len(left) < len(training) else []


def in_sync(rank: RankState) -> bool:
    """Whether it is in the communication of a step."""
    return rank.beat is not None and rank.beat.phase == SYNC


def _goes_on(rank: RankState, left: Sequence[RankState]) -> bool:
    """Whether it trains, and has data left of the pass that these have ended."""
    passes = {loader.epoch for each in left if (loader := each.loader) is not None}
    return in_sync(rank) and not rank.at_end_of_data and rank.loader is not None and rank.loader.epoch in passes
