"""Ranks that timed out in a collective, and the ranks that they had waited for.

A rank that times out has left its operation. Its progress is known from its last heartbeat and from its goodbye, which
a viewer that attaches later can still read, so that both come to the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from ddpwatch.core.diagnosis.arrivals import GroupMember, SyncPoint, minority_of, roots
from ddpwatch.core.diagnosis.exits import is_complaint, is_timeout
from ddpwatch.core.units import ranks_text
from ddpwatch.wire import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.wire import Collective

_Progress: TypeAlias = "dict[str, list[tuple[RankState, Group]]]"
"""By name of a process group, each of its ranks with its last progress."""


@dataclass(frozen=True)
class TimedOut:
    """Ranks that timed out, and the process groups that are the root cause."""

    ranks: tuple[RankState, ...]
    began: tuple[SyncPoint, ...]
    split: SyncPoint | None = None
    """The group whose ranks were in different operations under one sequence number; None = none is known."""
    unreported: int = 0
    """Ranks of that group whose operation is not known."""

    @property
    def crossed(self) -> bool:
        """Whether the ranks had waited for each other in different groups."""
        return any(sync_point.crossed for sync_point in self.began)

    @cached_property
    def culprits(self) -> Sequence[GroupMember]:
        """Ranks that had joined the fewest operations; empty = not known."""
        if self.split is not None:
            most, second, *_ = self.split.op_groups
            return self.split.minority if len(most) > len(second) + self.unreported else []
        if self.crossed:
            return minority_of(self.began)
        found: dict[int, GroupMember] = {}
        for each in (member for root in self.began for member in root.missing):
            found.setdefault(each.rank.rank, each)  # it may be missing in more than one group
        return list(found.values())

    @property
    def rests_on(self) -> str:
        """In words, the sources of what is known about the progress of the ranks."""
        sync_points = self.began if self.split is None else (self.split,)
        known = {each.rank.rank: each.rank for sync_point in sync_points for each in sync_point.members}
        words = [rank for rank, state in known.items() if state.bye is not None and state.bye.collectives]
        signs = [rank for rank in known if rank not in words]
        reported = [f"last messages of {ranks_text(words)}"] if words else []
        return "; ".join([*reported, *([f"heartbeats of {ranks_text(signs)}"] if signs else [])])


def timed_out(state: RunState) -> TimedOut | None:
    """Ranks that timed out, and the ranks that they had waited for; None = none did."""
    ranks = tuple(rank for rank in state.ranks.values() if _complains(rank))
    if not ranks:
        return None
    progress: _Progress = {}
    for rank in state.ranks.values():
        for group in _last_groups(rank):
            progress.setdefault(group.name, []).append((rank, group))
    split = _split(progress)
    if split is None:
        return TimedOut(ranks, tuple(_began(progress)))
    size = split.members[0].group.size or len(state.ranks)
    return TimedOut(ranks, (), split, max(0, size - sum(map(len, split.op_groups))))


def _complains(rank: RankState) -> bool:
    if rank.beat is not None and any(group.error == "TIMEOUT" for group in rank.beat.groups):
        return True
    return rank.bye is not None and rank.bye.reason == "failed" and is_timeout(rank.bye.text)


def _began(progress: _Progress) -> list[SyncPoint]:
    """Root causes by last progress. A rank that was ahead of another must have waited for it."""
    held = []
    for name, known in progress.items():
        front = max(group.enqueued for _, group in known)
        members = tuple(GroupMember(rank, group, age_ns=int(group.enqueued == front)) for rank, group in known)
        sync_point = SyncPoint(name, members)
        if sync_point.missing:
            held.append(sync_point)
    return roots(held, held, lambda member: member.age_ns > 0) if held else []


def _split(progress: _Progress) -> SyncPoint | None:
    """The group whose ranks had all joined an operation, but not the same one; None = there is none."""
    for name, known in progress.items():
        waited = [(rank, _waited_in(rank, group)) for rank, group in known]
        seq = min((min(ops) for _, ops in waited if ops), default=None)
        if seq is None or any(group.enqueued < seq for _, group in known):
            continue  # a rank had not joined
        sync_point = SyncPoint(name, tuple(GroupMember(rank, ops[seq], 1) for rank, ops in waited if seq in ops))
        if len(sync_point.op_groups) > 1:
            return sync_point
    return None


def _waited_in(rank: RankState, group: Group) -> dict[int, Group]:
    """By sequence number, the operations of a group that a rank may have waited for; empty = it did not wait in it.

    A heartbeat has the one it was in. A goodbye has all that it had joined, of which the last counts: gloo marks failed
    operations as completed.
    """
    words = rank.bye.collectives if rank.bye is not None and is_complaint(rank.bye.text) else []
    reported = {each.seq: _as_group(group, each) for each in words if each.group == group.name}
    beat = next((each for each in rank.beat.groups if each.name == group.name), None) if rank.beat is not None else None
    if beat is not None and beat.completed is not None and beat.completed < beat.enqueued:
        seq = beat.completed + 1
        return {seq: beat if beat.op else reported.get(seq, beat)}
    return {words[-1].seq: reported[words[-1].seq]} if words and words[-1].group == group.name else {}


def _as_group(group: Group, reported: Collective) -> Group:
    return Group(
        name=group.name, size=group.size, enqueued=reported.seq, completed=reported.seq - 1, op=reported.op,
        bytes=reported.bytes, shape=reported.shape,
    )  # fmt: skip


def _last_groups(rank: RankState) -> list[Group]:
    """Its progress in each group, from its heartbeat or goodbye, whichever is further."""
    groups = {group.name: group for group in rank.beat.groups} if rank.beat is not None else {}
    for reported in rank.bye.collectives if rank.bye is not None else ():
        known = groups.get(reported.group)
        if known is None or known.enqueued < reported.seq:
            size = known.size if known is not None else 0
            groups[reported.group] = Group(name=reported.group, size=size, enqueued=reported.seq, completed=None)
    return list(groups.values())
