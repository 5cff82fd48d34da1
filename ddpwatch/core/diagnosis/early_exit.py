"""Ranks whose data has ended while the others go on training, and wait for them in vain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpwatch.core.diagnosis.arrivals import SYNC
from ddpwatch.core.diagnosis.exits import is_complaint, is_timeout
from ddpwatch.core.limits import RankLostLimits, UnevenBatchLimits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.core.diagnosis.arrivals import SyncPoint
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState

BARRIER: Final = "barrier"
EXIT: Final = "exit"
ENDED: Final = frozenset({EXIT, "closed"})
KINDS: Final = frozenset({"ddp", "contains-ddp"})
END_OF_DATA: Final = "end of data"
"""The subject of what is told of them, whoever tells it."""


@dataclass(frozen=True)
class LeftBehind:
    """Ranks that have ended in order at the end of their data, and those that failed without them."""

    left: tuple[RankState, ...] = ()
    failed: tuple[RankState, ...] = ()
    """They lost their connections, with data left of the same pass; empty = nobody did."""
    at_end: bool = True
    """Whether the end of their data is known; else it is not told how much they had, and the others had waited."""


def left_behind(state: RunState) -> LeftBehind:
    """Who was left by ranks whose data had ended, and has failed since.

    Of ranks that do not tell how much data they have, it is who had waited for one that was gone: that was told as the
    end of its data while they waited, and stays one trouble when they lose their connections. One whose exit code is
    known to be 0 has come to the end of its script, whether they had waited or not.
    """
    ended = [rank for rank in state.ranks.values() if ended_in_order(rank)]
    left = tuple(rank for rank in ended if rank.at_end_of_data)
    failed = tuple(rank for rank in _complaining_since(state, left) if _has_data_left(rank, left))
    if failed:
        return LeftBehind(left, failed)
    left = tuple(rank for rank in ended if not tells_its_data(rank))
    failed = tuple(_complaining_since(state, left))
    if not failed:
        return LeftBehind()
    # Enough if one had waited, or still does: the last beats of the others may be from before.
    living = [rank for rank in state.ranks.values() if state.condition(rank) == "ok"]
    waited = any(is_stuck(rank, _outlived(rank, left)) for rank in failed)
    waits = any(is_stuck(rank, left) for rank in living)
    in_order = all(rank.exit_code == 0 for rank in left)
    return LeftBehind(left, failed, at_end=False) if waited or waits or in_order else LeftBehind()


def left_before(state: RunState, failed_ns: int) -> list[RankState]:
    """Ranks that had said goodbye, and not badly, when another lost its connection: it may have been to them."""
    return [
        rank
        for rank in state.ranks.values()
        if state.condition(rank) == "ended"
        and rank.bye is not None
        and rank.bye.reason in ENDED
        and (rank.bye_ns or 0) <= failed_ns + RankLostLimits.PROOF_NS
    ]


def word_to_come(state: RunState, left: Iterable[RankState]) -> bool:
    """Whether the exit code of one that has left may still be told: its process can be seen, and has not ended yet."""
    return any(
        rank.bye is not None
        and rank.bye.reason == EXIT
        and rank.gone_ns is None
        and rank.held_ns is not None
        and state.now_ns - (rank.bye_ns or 0) < UnevenBatchLimits.EXIT_CODE_NS
        for rank in left
    )


def blame_to_come(state: RunState) -> bool:
    """Whether a rank has lost its connection to one that has left, and it is not told yet how that one ended."""
    lost_ns = [
        rank.bye_ns or 0
        for rank in state.ranks.values()
        if rank.bye is not None and state.condition(rank) == "failed" and is_complaint(rank.bye.text)
    ]
    return bool(lost_ns) and word_to_come(state, left_before(state, max(lost_ns)))


def _complaining_since(state: RunState, left: Sequence[RankState]) -> list[RankState]:
    """Those that have lost a connection, and not waited for a timeout, since these have left."""
    since_ns = min((rank.bye_ns or 0 for rank in left), default=None)
    if since_ns is None:
        return []
    return [
        rank
        for rank in state.ranks.values()
        if state.condition(rank) == "failed"
        and rank.bye is not None
        and (rank.bye_ns or 0) >= since_ns
        and is_complaint(rank.bye.text)
        and not is_timeout(rank.bye.text)
    ]


def is_stuck(rank: RankState, left: Sequence[RankState]) -> bool:
    """Whether it has been waiting in an all-reduce of a step that ranks which have ended never began."""
    beat = rank.beat
    if not left or beat is None or not in_sync(rank):
        return False
    return beat.phase_ns > UnevenBatchLimits.STUCK_NS and (rank.step or 0) >= min(each.step or 0 for each in left)


def _outlived(rank: RankState, left: Sequence[RankState]) -> list[RankState]:
    """Those that had left long enough before a rank failed to be told of as the ones that it waits for."""
    return [each for each in left if (rank.bye_ns or 0) - (each.bye_ns or 0) > UnevenBatchLimits.STUCK_NS]


def ended_in_order(rank: RankState) -> bool:
    """Whether a rank that trains with others has said goodbye, and not badly: that is a matter of `rank-failed`."""
    if rank.bye is None or rank.hello is None:
        return False
    return rank.bye.reason in ENDED and rank.hello.kind in KINDS and (rank.exit_code or 0) <= 0


def tells_its_data(rank: RankState) -> bool:
    """Whether it is known how much data its latest pass has."""
    return rank.loader is not None and bool(rank.loader.length)


def ran_out(sync_point: SyncPoint) -> list[RankState]:
    """The ranks that are missing because their data has ended, in a pass in which others go on training."""
    missing = [each.rank for each in sync_point.missing]
    if not missing or not all(rank.at_end_of_data for rank in missing):
        return []
    return missing if any(_goes_on(each.rank, missing) for each in sync_point.waiting) else []


def left_the_loop(sync_point: SyncPoint) -> list[RankState]:
    """The ranks of a group that wait in a barrier at the end of their data, while the others train.

    A barrier in the middle of the data is another matter: `desync`. So is one that most wait in, because then one of
    them has left it out; of as many, what is left of the others' data tells.
    """
    left = [each.rank for each in sync_point.waiting if each.group.op == BARRIER and not in_sync(each.rank)]
    training = [each.rank for each in sync_point.waiting if in_sync(each.rank)]
    if not left or len(left) + len(training) < len(sync_point.waiting) or not all(rank.at_end_of_data for rank in left):
        return []
    even = len(left) == len(training) and all(_goes_on(rank, left) for rank in training)
    return left if even or len(left) < len(training) else []


def in_sync(rank: RankState) -> bool:
    """Whether it is in the communication of a step."""
    return rank.beat is not None and rank.beat.phase == SYNC


def _goes_on(rank: RankState, left: Sequence[RankState]) -> bool:
    """Whether it trains, and has data left of the pass that these have ended."""
    return in_sync(rank) and _has_data_left(rank, left)


def _has_data_left(rank: RankState, left: Sequence[RankState]) -> bool:
    passes = {loader.epoch for each in left if (loader := each.loader) is not None}
    return not rank.at_end_of_data and rank.loader is not None and rank.loader.epoch in passes
