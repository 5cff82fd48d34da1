"""Ranks that have given up waiting, and whom they had waited for.

A rank that gives up has left its operation by then. How far each one had got is told by its last sign of life, and by
its last words, which a viewer that comes later can still read: so both come to the same answer. So it is with ranks
that had met under the same number, each in another operation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ddpwatch.core.diagnosis.arrivals import Meeting, Standing, roots, the_few
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
    began: tuple[Meeting, ...]
    split: Meeting | None = None
    """The group in which they had met, and did not mean the same; None = none is known."""
    untold: int = 0
    """Ranks of that group of which it is not known what they meant."""

    @property
    def crossed(self) -> bool:
        """Whether the ranks had waited for each other in different groups."""
        return any(meeting.crossed for meeting in self.began)

    @cached_property
    def culprits(self) -> Sequence[Standing]:
        """Those that had joined the fewest operations; empty = it cannot be told."""
        if self.split is not None:
            most, second, *_ = self.split.camps
            return self.split.odd if len(most) > len(second) + self.untold else []
        if self.crossed:
            return the_few(self.began)
        found: dict[int, Standing] = {}
        for each in (standing for root in self.began for standing in root.missing):
            found.setdefault(each.rank.rank, each)  # it may be missing in more than one group
        return list(found.values())

    @property
    def rests_on(self) -> str:
        """What is known of how far the ranks had got, and from where."""
        meetings = self.began if self.split is None else (self.split,)
        known = {each.rank.rank: each.rank for meeting in meetings for each in meeting.standings}
        words = [rank for rank, state in known.items() if state.bye is not None and state.bye.collectives]
        signs = [rank for rank in known if rank not in words]
        told = [f"last words of {ranks_text(words)}"] if words else []
        return "; ".join([*told, *([f"signs of life of {ranks_text(signs)}"] if signs else [])])


def giving_up(state: RunState) -> GivingUp | None:
    """Who has given up, and for whom they had waited; None = nobody has."""
    ranks = tuple(rank for rank in state.ranks.values() if _complains(rank))
    if not ranks:
        return None
    split = _split(state)
    if split is None:
        return GivingUp(ranks, tuple(_began(state)))
    size = split.standings[0].group.size or len(state.ranks)
    return GivingUp(ranks, (), split, max(0, size - sum(map(len, split.camps))))


def _complains(rank: RankState) -> bool:
    if rank.beat is not None and any(group.error == "TIMEOUT" for group in rank.beat.groups):
        return True
    return rank.bye is not None and rank.bye.reason == "failed" and is_timeout(rank.bye.text)


def _began(state: RunState) -> list[Meeting]:
    """The groups where it began. Every rank is taken to have waited wherever it was ahead of another: that operation
    cannot have completed.
    """
    by_name: dict[str, list[Standing]] = {}
    for rank in state.ranks.values():
        for group in _last_groups(rank):
            by_name.setdefault(group.name, []).append(Standing(rank, group, 0))
    held = []
    for name, standings in by_name.items():
        front = max(standing.group.enqueued for standing in standings)
        ahead = (replace(each, age_ns=int(each.group.enqueued == front)) for each in standings)
        meeting = Meeting(name, tuple(ahead))
        if meeting.missing:
            held.append(meeting)
    return roots(held, held, lambda standing: standing.age_ns > 0) if held else []


def _split(state: RunState) -> Meeting | None:
    """The group whose ranks had all come to an operation, and not to the same; None = there is none."""
    by_name: dict[str, list[tuple[RankState, Group, dict[int, Group]]]] = {}
    for rank in state.ranks.values():
        for group in _last_groups(rank):
            by_name.setdefault(group.name, []).append((rank, group, _waited_in(rank, group)))
    for name, known in by_name.items():
        seq = min((min(ops) for _, _, ops in known if ops), default=None)
        if seq is None or any(group.enqueued < seq for _, group, _ in known):
            continue  # somebody had not come
        met = tuple(Standing(rank, ops[seq], 1) for rank, _, ops in known if seq in ops)
        meeting = Meeting(name, met)
        if len(meeting.camps) > 1:
            return meeting
    return None


def _waited_in(rank: RankState, group: Group) -> dict[int, Group]:
    """By number, the operations of a group that a rank may have waited for; empty = it did not wait in this one.

    Its beat tells the one, as long as it was in it. Last words tell all that it had joined, of which the last counts:
    gloo calls an operation done that has failed.
    """
    words = rank.bye.collectives if rank.bye is not None and is_complaint(rank.bye.text) else []
    told = {each.seq: _as_group(group, each) for each in words if each.group == group.name}
    beat = next((each for each in rank.beat.groups if each.name == group.name), None) if rank.beat is not None else None
    if beat is not None and beat.completed is not None and beat.completed < beat.enqueued:
        seq = beat.completed + 1
        return {seq: beat if beat.op else told.get(seq, beat)}
    return {words[-1].seq: told[words[-1].seq]} if words and words[-1].group == group.name else {}


def _as_group(group: Group, told: Collective) -> Group:
    return Group(
        name=group.name, size=group.size, enqueued=told.seq, completed=told.seq - 1, op=told.op, bytes=told.bytes,
        shape=told.shape,
    )  # fmt: skip


def _last_groups(rank: RankState) -> list[Group]:
    """How far it had got in each group, by whatever it said last."""
    groups = {group.name: group for group in rank.beat.groups} if rank.beat is not None else {}
    for told in rank.bye.collectives if rank.bye is not None else ():
        known = groups.get(told.group)
        if known is None or known.enqueued < told.seq:
            size = known.size if known is not None else 0
            groups[told.group] = Group(name=told.group, size=size, enqueued=told.seq, completed=None)
    return list(groups.values())
