"""Early exits: ranks whose data ended while the others go on training and wait for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpwatch.core.diagnosis.arrivals import SYNC
from ddpwatch.core.diagnosis.exits import is_complaint, is_timeout
from ddpwatch.core.limits import RankLostLimits, UnevenBatchLimits
from ddpwatch.core.model_kinds import OWN_SAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.core.diagnosis.arrivals import SyncPoint
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState

BARRIER: Final = "barrier"
EXIT: Final = "exit"
ENDED: Final = frozenset({EXIT, "closed"})
END_OF_DATA: Final = "end of data"
"""Subject of all findings about them."""


@dataclass(frozen=True)
class LeftBehind:
    """Ranks that ended in order at the end of their data, and those that failed without them."""

    left: tuple[RankState, ...] = ()
    failed: tuple[RankState, ...] = ()
    """Ranks that lost their connections, with data left in the same epoch."""
    at_end: bool = True
    """Whether the end of their data is known; else it is inferred, as the length of their data was not reported."""


def left_behind(state: RunState) -> LeftBehind:
    """Ranks that failed after others had left at the end of their data.

    If the length of the data is not reported, a rank that had waited for one that was gone: while it waited, that was
    found as end of data, and it stays the same episode when connections break. A rank with exit code 0 has come to the
    end of its script, whether others had waited or not.
    """
    ended = [rank for rank in state.ranks.values() if ended_in_order(rank)]
    left = tuple(rank for rank in ended if rank.at_end_of_data)
    failed = tuple(rank for rank in _complaining_since(state, left) if _has_data_left(rank, left))
    if failed:
        return LeftBehind(left, failed)
    left = tuple(rank for rank in ended if not reports_data_length(rank))
    failed = tuple(_complaining_since(state, left))
    if not failed:
        return LeftBehind()
    # One that had waited, or still does, is enough: the last heartbeats of the others may be from before.
    living = [rank for rank in state.ranks.values() if state.condition(rank) == "ok"]
    waited = any(
        # Those that left long enough before a rank failed to be the ones that it waited for.
        is_stuck(rank, [each for each in left if (rank.bye_ns or 0) - (each.bye_ns or 0) > UnevenBatchLimits.STUCK_NS])
        for rank in failed
    )
    waits = any(is_stuck(rank, left) for rank in living)
    in_order = all(rank.exit_code == 0 for rank in left)
    return LeftBehind(left, failed, at_end=False) if waited or waits or in_order else LeftBehind()


def left_before(state: RunState, failed_ns: int) -> list[RankState]:
    """Ranks that had said goodbye in order when another lost its connection, which may have been to them."""
    return [
        rank
        for rank in state.ranks.values()
        if state.condition(rank) == "ended"
        and rank.bye is not None
        and rank.bye.reason in ENDED
        and (rank.bye_ns or 0) <= failed_ns + RankLostLimits.PROOF_NS
    ]


def exit_code_pending(state: RunState, left: Iterable[RankState]) -> bool:
    """Whether the exit code of a rank that left may still come: its process is on this host and has not ended."""
    return any(
        rank.bye is not None
        and rank.bye.reason == EXIT
        and rank.gone_ns is None
        and rank.held_ns is not None
        and state.now_ns - (rank.bye_ns or 0) < UnevenBatchLimits.EXIT_CODE_NS
        for rank in left
    )


def root_cause_pending(state: RunState) -> bool:
    """Whether a rank has lost its connection to one that left, whose exit code may still come."""
    lost_ns = [rank.bye_ns or 0 for rank, _ in _complaining(state)]
    return bool(lost_ns) and exit_code_pending(state, left_before(state, max(lost_ns)))


def _complaining(state: RunState) -> list[tuple[RankState, str]]:
    """Ranks that failed with an exception about another rank, and its text."""
    failed = [rank for rank in state.ranks.values() if state.condition(rank) == "failed"]
    return [(rank, rank.bye.text) for rank in failed if rank.bye is not None and is_complaint(rank.bye.text)]


def _complaining_since(state: RunState, left: Sequence[RankState]) -> list[RankState]:
    """Ranks that lost a connection, other than by a timeout, since the first of these left."""
    if not left:
        return []
    since_ns = min(rank.bye_ns or 0 for rank in left)
    return [rank for rank, text in _complaining(state) if (rank.bye_ns or 0) >= since_ns and not is_timeout(text)]


def is_stuck(rank: RankState, left: Sequence[RankState]) -> bool:
    """Whether it has been waiting in the all-reduce of a step that the ranks which left never began."""
    beat = rank.beat
    if not left or beat is None or not in_sync(rank):
        return False
    return beat.phase_ns > UnevenBatchLimits.STUCK_NS and (rank.step or 0) >= min(each.step or 0 for each in left)


def ended_in_order(rank: RankState) -> bool:
    """Whether a rank that trains with others has said goodbye in order; other ends are up to `rank-failed`."""
    if rank.bye is None or rank.hello is None:
        return False
    return rank.bye.reason in ENDED and rank.hello.kind in OWN_SAMPLES and (rank.exit_code or 0) <= 0


def reports_data_length(rank: RankState) -> bool:
    """Whether the length of its data in the latest epoch is known."""
    return rank.loader is not None and bool(rank.loader.length)


def ran_out(sync_point: SyncPoint) -> list[RankState]:
    """Ranks that are missing because their data has ended, in an epoch in which others go on training."""
    missing = [each.rank for each in sync_point.missing]
    if not missing or not all(rank.at_end_of_data for rank in missing):
        return []
    return missing if any(_goes_on(each.rank, missing) for each in sync_point.waiting) else []


def left_the_loop(sync_point: SyncPoint) -> list[RankState]:
    """Ranks of a group that wait in a barrier at the end of their data, while the others train.

    A barrier in the middle of the data is up to `desync`, and so is one in which the majority waits, as then the others
    have left it out. Of equal numbers, the data left to the others decides.
    """
    left = [each.rank for each in sync_point.waiting if each.group.op == BARRIER]
    training = [each.rank for each in sync_point.waiting if each.group.op != BARRIER and in_sync(each.rank)]
    if not left or len(left) + len(training) < len(sync_point.waiting) or not all(rank.at_end_of_data for rank in left):
        return []
    even = len(left) == len(training) and all(_goes_on(rank, left) for rank in training)
    return left if even or len(left) < len(training) else []


def in_sync(rank: RankState) -> bool:
    """Whether it waits in a collective."""
    return rank.beat is not None and rank.beat.phase == SYNC


def _goes_on(rank: RankState, left: Sequence[RankState]) -> bool:
    """Whether it trains, and has data left in the epoch that these have ended."""
    return in_sync(rank) and _has_data_left(rank, left)


def _has_data_left(rank: RankState, left: Sequence[RankState]) -> bool:
    epochs = {loader.epoch for each in left if (loader := each.loader) is not None}
    return not rank.at_end_of_data and rank.loader is not None and rank.loader.epoch in epochs
