"""Ranks that have given up waiting, and whom they had waited for.

A rank that gives up has left its operation by then. How far each one had got is told by its last sign of life, and by
its last words, which a viewer that comes later can still read: so both come to the same answer. So it is with ranks
that had met under the same number, each in another operation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ddpwatch.core.diagnosis.arrivals import GroupMember, SyncPoint, minority_of, roots
from ddpwatch.core.diagnosis.exits import is_complaint, is_timeout
from ddpwatch.core.units import ranks_text
from ddpwatch.wire import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.wire import Collective


@dataclass(frozen=True)
class GivingUp:
    """Who has given up, and the groups where it began."""

    ranks: tuple[RankState, ...]
    began: tuple[SyncPoint, ...]
    split: SyncPoint | None = None
    """The group in which they had met, and did not mean the same; None = none is known."""
    unreported: int = 0
    """Ranks of that group of which it is not known what they meant."""

    @property
    def crossed(self) -> bool:
        """Whether the ranks had waited for each other in different groups."""
        return any(sync_point.crossed for sync_point in self.began)

    @cached_property
    def culprits(self) -> Sequence[GroupMember]:
        """Those that had joined the fewest operations; empty = it cannot be told."""
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
        """What is known of how far the ranks had got, and from where."""
        sync_points = self.began if self.split is None else (self.split,)
        known = {each.rank.rank: each.rank for sync_point in sync_points for each in sync_point.members}
        words = [rank for rank, state in known.items() if state.bye is not None and state.bye.collectives]
        signs = [rank for rank in known if rank not in words]
        reported = [f"last words of {ranks_text(words)}"] if words else []
        return "; ".join([*reported, *([f"signs of life of {ranks_text(signs)}"] if signs else [])])


def giving_up(state: RunState) -> GivingUp | None:
    """Who has given up, and for whom they had waited; None = nobody has."""
    ranks = tuple(rank for rank in state.ranks.values() if _complains(rank))
    if not ranks:
        return None
    split = _split(state)
    if split is None:
        return GivingUp(ranks, tuple(_began(state)))
    size = split.members[0].group.size or len(state.ranks)
    return GivingUp(ranks, (), split, max(0, size - sum(map(len, split.op_groups))))


def _complains(rank: RankState) -> bool:
    if rank.beat is not None and any(group.error == "TIMEOUT" for group in rank.beat.groups):
        return True
    return rank.bye is not None and rank.bye.reason == "failed" and is_timeout(rank.bye.text)


def _began(state: RunState) -> list[SyncPoint]:
    """The groups where it began. Every rank is taken to have waited wherever it was ahead of another: that operation
    cannot have completed.
    """
    by_name: dict[str, list[GroupMember]] = {}
    for rank in state.ranks.values():
        for group in _last_groups(rank):
            by_name.setdefault(group.name, []).append(GroupMember(rank, group, 0))
    held = []
    for name, members in by_name.items():
        front = max(member.group.enqueued for member in members)
        ahead = (replace(each, age_ns=int(each.group.enqueued == front)) for each in members)
        sync_point = SyncPoint(name, tuple(ahead))
        if sync_point.missing:
            held.append(sync_point)
    return roots(held, held, lambda member: member.age_ns > 0) if held else []


def _split(state: RunState) -> SyncPoint | None:
    """The group whose ranks had all come to an operation, and not to the same; None = there is none."""
    by_name: dict[str, list[tuple[RankState, Group, dict[int, Group]]]] = {}
    for rank in state.ranks.values():
        for group in _last_groups(rank):
            by_name.setdefault(group.name, []).append((rank, group, _waited_in(rank, group)))
    for name, known in by_name.items():
        seq = min((min(ops) for _, _, ops in known if ops), default=None)
        if seq is None or any(group.enqueued < seq for _, group, _ in known):
            continue  # somebody had not come
        met = tuple(GroupMember(rank, ops[seq], 1) for rank, _, ops in known if seq in ops)
        sync_point = SyncPoint(name, met)
        if len(sync_point.op_groups) > 1:
            return sync_point
    return None


def _waited_in(rank: RankState, group: Group) -> dict[int, Group]:
    """By number, the operations of a group that a rank may have waited for; empty = it did not wait in this one.

    Its beat tells the one, as long as it was in it. Last words tell all that it had joined, of which the last counts:
    gloo calls an operation done that has failed.
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
    """How far it had got in each group, by whatever it said last."""
    groups = {group.name: group for group in rank.beat.groups} if rank.beat is not None else {}
    for reported in rank.bye.collectives if rank.bye is not None else ():
        known = groups.get(reported.group)
        if known is None or known.enqueued < reported.seq:
            size = known.size if known is not None else 0
            groups[reported.group] = Group(name=reported.group, size=size, enqueued=reported.seq, completed=None)
    return list(groups.values())
