"""Who has arrived at a collective and who has not, group by group.

Ranks count the operations of a group alike, so whoever has joined fewer than the others is the one they wait for.
Sequence numbers are compared within a group and never between groups, and clocks of hosts not at all: how long a rank
waits it tells itself, and what passes after its beat is the viewer's own time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.diagnosis.exits import what_holds
from ddpwatch.core.limits import StallLimits
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.limits import Limits
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.wire import Beat, Group

SYNC: Final = PHASES.index("sync")
HERE: Final = frozenset({"ok", "paused", "silent"})
"""Ranks that may yet arrive. Those that have ended or failed are told of by other rules."""


@dataclass(frozen=True)
class GroupMember:
    """How far one rank got in one group."""

    rank: RankState
    group: Group
    age_ns: int
    """How long it has waited by now for the oldest operation; 0 = it does not wait."""
    reported_ns: int = 0
    """The part of it that the rank itself has told. The rest is the viewer's guess: the wait may be over."""
    fresh: bool = True
    """Whether it was heard just now; else it may have left the operation that it said it waits for."""
    since_ns: int = 0
    """How long ago it was heard."""
    late: bool = False
    """Whether its next word should have come, and may yet: it is not called silent, nor is its process held."""

    @property
    def paused(self) -> bool:
        """Whether it has said that it is about to do something slow."""
        return self.rank.beat is not None and bool(self.rank.beat.pause)

    @property
    def waits_at(self) -> int | None:
        """The number of the operation that it waits for; None = not recorded."""
        return None if self.group.completed is None else self.group.completed + 1

    @property
    def signature(self) -> tuple[str, str] | None:
        """What it thinks the operation is; None = not told yet."""
        return (self.group.op, self.group.shape) if self.group.op else None


@dataclass(frozen=True)
class SyncPoint:
    """One group in which somebody waits."""

    name: str
    members: tuple[GroupMember, ...]
    """Of all ranks of the group that were heard and are still there."""
    default: bool = True
    """Whether it is the job's own group, which all ranks are in."""
    excused: frozenset[int] = frozenset()
    """Ranks that are not missing here: they wait in another group."""
    crossed: bool = False
    """Whether its ranks and those of another group wait for each other."""

    @cached_property
    def front(self) -> int:
        """The last operation that anybody has joined."""
        return max(member.group.enqueued for member in self.members)

    @cached_property
    def last_common(self) -> int:
        """The last operation that everybody has joined."""
        return min(member.group.enqueued for member in self.members)

    @cached_property
    def missing(self) -> tuple[GroupMember, ...]:
        """Those that have joined fewer operations than others, and do not wait themselves for an earlier one."""
        return tuple(
            member
            for member in self.members
            if member.group.enqueued < self.front
            and member.rank.rank not in self.excused
            and not self._waits_earlier(member)
        )

    def _waits_earlier(self, member: GroupMember) -> bool:
        if not member.age_ns or member.group.enqueued > self.last_common:
            return bool(member.age_ns)
        # Who has joined the fewest and says that it waits is stuck there, if that can be believed.
        return member.fresh and member.waits_at is not None

    @cached_property
    def arrived(self) -> tuple[GroupMember, ...]:
        """Those that have joined the last operation."""
        return tuple(member for member in self.members if member.group.enqueued == self.front)

    @cached_property
    def waiting(self) -> tuple[GroupMember, ...]:
        """Those that have joined and wait, who has waited longest first.

        Operations can be joined ahead, some ranks further than others: all of them wait for who has joined the fewest.
        Where nobody is missing, it is the earliest operation that everything else waits for.
        """
        if self.missing:
            joined = [each for each in self.members if each.group.enqueued > self.last_common]
        else:
            earliest = min((each.waits_at for each in self.members if each.age_ns and each.waits_at), default=None)
            joined = [each for each in self.members if each.waits_at in (None, earliest)]
        found = [member for member in joined if member.age_ns]
        return tuple(sorted(found, key=lambda member: -member.age_ns))

    @property
    def all_present(self) -> bool:
        """Whether every rank of the group is among them."""
        return len(self.members) == self.members[0].group.size

    @cached_property
    def op_groups(self) -> list[list[GroupMember]]:
        """Ranks that wait, by what they think the operation is; the largest camp first. One camp: they agree."""
        counts = Counter(member.signature for member in self.waiting if member.signature)
        return [
            [member for member in self.waiting if member.signature == signature]
            for signature, _ in counts.most_common()
        ]

    @property
    def minority(self) -> list[GroupMember]:
        """Of ranks that do not agree, the few; empty = there are as many of one mind as of another."""
        if len(self.op_groups) < 2 or len(self.op_groups[0]) <= len(self.op_groups[1]):
            return []
        return [member for op_group in self.op_groups[1:] for member in op_group]

    @property
    def timeout_in_ns(self) -> int | None:
        """Until the first of the waiting ranks gives up and ends the job; None = not known. May be negative."""
        left = [member.group.timeout_ns - member.age_ns for member in self.waiting if member.group.timeout_ns]
        return min(left, default=None)


def sync_points(state: RunState, min_ns: float = 0) -> list[SyncPoint]:
    """All groups in which a rank waits, the job's own first; none if nobody has waited for as long as `min_ns`, as in
    every step.
    """
    if min_ns and not any(_has_waited(state, rank, min_ns) for rank in state.ranks.values()):
        return []
    by_name: dict[str, list[GroupMember]] = {}
    for rank in state.ranks.values():
        if rank.beat is None or not rank.beat.groups or (condition := state.condition(rank)) not in HERE:
            continue
        since_ns = max(0, state.now_ns - (rank.last_received_ns or 0))
        fresh = since_ns <= StallLimits.FRESH_BEATS * state.beat_ns
        late = since_ns > StallLimits.LATE_BEATS * state.beat_ns and condition != "silent" and not what_holds(rank)
        for place, group in enumerate(rank.beat.groups):
            reported_ns = _reported_at_ns(rank.beat, group, place)
            age_ns = reported_ns + since_ns if reported_ns else 0
            by_name.setdefault(group.name, []).append(
                GroupMember(rank, group, age_ns, reported_ns, fresh, since_ns, late)
            )
    return [
        SyncPoint(name, tuple(members), default=place == 0)
        for place, (name, members) in enumerate(by_name.items())
        if any(member.age_ns for member in members)
    ]


def _has_waited(state: RunState, rank: RankState, min_ns: float) -> bool:
    """By its own word, or because it waited when it was last heard, and has missed some beats since."""
    if rank.beat is None:
        return False
    never_received = state.now_ns - (rank.last_received_ns or 0) > StallLimits.FRESH_BEATS * state.beat_ns
    for place, group in enumerate(rank.beat.groups):
        reported_ns = _reported_at_ns(rank.beat, group, place)
        if reported_ns >= min_ns or (reported_ns and never_received):
            return True
    return False


def stuck(held: Sequence[SyncPoint], limits: Limits) -> list[SyncPoint]:
    """The groups in which a wait is abnormal, without those that only wait for another one of them.

    A rank that is missing in one group because it waits in another is not where it began. Where groups wait for each
    other in a circle, all groups of the circle are told, as crossed; first the one that the fewest have not joined.
    Nothing is told for a moment of a group whose missing ranks may wait as well, and have not told so yet.
    """
    abnormal = [sync_point for sync_point in held if is_abnormal(sync_point, limits.stall, limits.judge.warmup_steps)]
    if not abnormal:
        return []
    # Waits of a circle begin within moments of each other: one of them becomes abnormal first, and says nothing yet.
    near = [sync_point for sync_point in held if any(_is_long(member, limits) for member in sync_point.waiting)]
    found = roots(abnormal, near, lambda member: _is_long(member, limits))
    return [
        sync_point
        for sync_point in found
        if sync_point.crossed
        or not any(_may_wait(each, sync_point, limits.stall.least_s * 1e9) for each in sync_point.missing)
    ]


def roots(
    held: Sequence[SyncPoint], near: Sequence[SyncPoint], waits: Callable[[GroupMember], bool]
) -> list[SyncPoint]:
    """Of the groups that are held up those where it began, given all that may hold them and what counts as waiting."""
    excused = [replace(sync_point, excused=_waiting_elsewhere(sync_point, near, waits)) for sync_point in held]
    found = [left for left, sync_point in zip(excused, held, strict=True) if left.missing or not sync_point.missing]
    if found:
        return found
    cycle = sorted(_cycles([each for each in near if each.missing]), key=lambda sync_point: len(sync_point.missing))
    if len({tuple(member.rank.rank for member in sync_point.missing) for sync_point in cycle}) > 1:
        return [replace(sync_point, crossed=True) for sync_point in cycle]
    return list(held)


def _cycles(held: list[SyncPoint]) -> list[SyncPoint]:
    """Without the groups that only wait for others: nobody who is missing elsewhere waits in them."""
    waited_for = {sync_point.name: {each.rank.rank for each in sync_point.missing} for sync_point in held}
    left = [
        sync_point
        for sync_point in held
        if any(
            each.rank.rank in missing
            for name, missing in waited_for.items()
            if name != sync_point.name
            for each in sync_point.waiting
        )
    ]
    return left if len(left) == len(held) else _cycles(left)


def minority_of(cycle: Sequence[SyncPoint]) -> tuple[GroupMember, ...]:
    """Of groups that wait for each other, the ranks that have left the many; empty = none are the fewer."""
    last_common = min((len(sync_point.missing) for sync_point in cycle), default=0)
    left = {tuple(each.rank.rank for each in sync_point.missing): sync_point.missing for sync_point in cycle}
    few = [missing for missing in left.values() if len(missing) == last_common]
    return few[0] if len(few) == 1 and len(left) > 1 else ()


def _waiting_elsewhere(
    sync_point: SyncPoint, near: Sequence[SyncPoint], waits: Callable[[GroupMember], bool]
) -> frozenset[int]:
    others = [other for other in near if other.name != sync_point.name]
    return frozenset(member.rank.rank for other in others for member in other.waiting if waits(member))


def _is_long(member: GroupMember, limits: Limits) -> bool:
    return member.age_ns > StallLimits.NEARLY_SHARE * limits.stall.least_s * 1e9


def _may_wait(missing: GroupMember, sync_point: SyncPoint, min_ns: float) -> bool:
    """Whether a missing rank may have gone to another operation before this wait was a long one.

    It has just come to another group, or its next word is late, and it is one of several that are missing or has other
    groups where it may be. This lasts until it tells that it waits there, is heard to wait nowhere, or falls silent.
    """
    others = [each for each in missing.rank.beat.groups if each.name != sync_point.name] if missing.rank.beat else []
    there_ns = [each.age_ns for each in others if each.completed is not None and each.completed < each.enqueued]
    at_most_ns = max(there_ns, default=0) + missing.since_ns
    came = bool(there_ns) and at_most_ns <= StallLimits.NEARLY_SHARE * min_ns
    never_received = missing.late and (bool(others) or len(sync_point.missing) > 1)
    # Before an operation is looked up, its age is told as less than it is.
    longest_ns = (1 + StallLimits.NEARLY_SHARE) * min_ns
    return (came or never_received) and sync_point.waiting[0].age_ns - at_most_ns <= longest_ns


def _reported_at_ns(beat: Beat, group: Group, place: int) -> int:
    if group.completed is None and place == 0 and beat.phase == SYNC:
        # Nothing is recorded: then the phase tells, for the group that gradients go through.
        return beat.phase_ns
    return group.age_ns


def p99_wait_ns(waiting: Sequence[GroupMember], warmup_steps: int) -> float | None:
    """How long these ranks have waited at the most, all but one time in a hundred; None = they have not trained yet."""
    waits = []
    for member in waiting:
        indices = member.rank.steps.indices()
        indices = indices[indices >= warmup_steps]
        if len(indices):
            waits_ns = member.rank.steps.column("sync_ns", indices)
            waits.append(float(np.percentile(waits_ns, StallLimits.WAIT_PERCENTILE)))
    return max(waits, default=None)


def is_abnormal(sync_point: SyncPoint, limits: StallLimits, warmup_steps: int) -> bool:
    """Whether somebody waits in it for longer than waits have taken so far, and nobody has announced it.

    Goes by what the ranks tell themselves: a viewer that was stopped, or hears nothing, would see all of them wait.
    """
    waiting = sorted((each for each in sync_point.waiting if not each.paused), key=lambda each: -each.reported_ns)
    if not waiting or waiting[0].reported_ns <= limits.least_s * 1e9:
        return False
    if sync_point.missing and all(member.paused for member in sync_point.missing):
        return False
    baseline_ns = p99_wait_ns(waiting[:1], warmup_steps)
    if baseline_ns is None:
        # First steps: compiling, and ranks that start late.
        timeout_ns = waiting[0].group.timeout_ns
        patience_ns = min(limits.first_s * 1e9, timeout_ns / 2 if timeout_ns else float("inf"))
        return waiting[0].reported_ns > patience_ns
    return waiting[0].reported_ns > limits.factor * baseline_ns
