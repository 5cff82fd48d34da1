"""Missing and waiting ranks of a collective, by the sequence numbers of each process group.

All ranks of a group count its operations alike, so the others wait for a rank that has joined fewer. Sequence numbers
are compared within a group only, and clocks of hosts not at all: a wait is what the rank reported plus the viewer's
time since its heartbeat.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.diagnosis.exits import what_holds
from ddpwatch.core.limits import StallLimits
from ddpwatch.core.state.run import ALIVE
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.limits import Limits
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.wire import Beat, Group

SYNC: Final = PHASES.index("sync")
HERE: Final = ALIVE | {"silent"}
"""Conditions of ranks that may yet arrive. Other rules report those that ended or failed."""


@dataclass(frozen=True)
class GroupMember:
    """Progress of one rank in one process group."""

    rank: RankState
    group: Group
    age_ns: int
    """Its wait for the oldest operation; 0 = it does not wait."""
    reported_ns: int = 0
    """The part of the wait that the rank reported. The rest is assumed: the wait may be over."""
    fresh: bool = True
    """Whether its last heartbeat is recent; else it may have left the operation."""
    since_ns: int = 0
    """Time since its last heartbeat."""
    late: bool = False
    """Whether a heartbeat is overdue, though the rank is not silent yet and nothing holds its process."""

    @property
    def paused(self) -> bool:
        """Whether it has announced something slow."""
        return self.rank.beat is not None and bool(self.rank.beat.pause)

    @property
    def activity(self) -> str:
        """What keeps it in `other`: an evaluation or the function of a checkpoint save; empty = not known."""
        return self.rank.beat.activity if self.rank.beat is not None else ""

    @property
    def waits_at(self) -> int | None:
        """Sequence number of the operation that it waits for; None = not recorded."""
        return None if self.group.completed is None else self.group.completed + 1

    @property
    def signature(self) -> tuple[str, str] | None:
        """Name and shape of the operation that it is in; None = not reported yet."""
        return (self.group.op, self.group.shape) if self.group.op else None


@dataclass(frozen=True)
class SyncPoint:
    """One process group in which a rank waits."""

    name: str
    members: tuple[GroupMember, ...]
    """Its ranks that have sent a heartbeat and may yet arrive."""
    default: bool = True
    """Whether it is the default group, with all ranks of the job."""
    excused: frozenset[int] = frozenset()
    """Ranks that do not count as missing: they wait in another group."""
    crossed: bool = False
    """Whether its ranks and those of another group wait for each other."""

    @cached_property
    def front(self) -> int:
        """The last operation that any rank has joined."""
        return max(member.group.enqueued for member in self.members)

    @cached_property
    def last_common(self) -> int:
        """The last operation that all ranks have joined."""
        return min(member.group.enqueued for member in self.members)

    @cached_property
    def missing(self) -> tuple[GroupMember, ...]:
        """Ranks that have joined fewer operations than others, and do not wait for an earlier one themselves."""
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
        # A rank that has joined the fewest and waits is stuck there, if its report is recent.
        return member.fresh and member.waits_at is not None

    @cached_property
    def waiting(self) -> tuple[GroupMember, ...]:
        """Ranks that have joined and wait, the longest wait first.

        Ranks may be several operations ahead: all of them wait for the one that has joined the fewest. If none is
        missing, everything waits for the earliest operation.
        """
        if self.missing:
            joined = [each for each in self.members if each.group.enqueued > self.last_common]
        else:
            earliest = min((each.waits_at for each in self.members if each.age_ns and each.waits_at), default=None)
            joined = [each for each in self.members if each.waits_at in (None, earliest)]
        return tuple(sorted((each for each in joined if each.age_ns), key=lambda each: -each.age_ns))

    @cached_property
    def awaits_activity(self) -> bool:
        """Whether all missing ranks save a checkpoint or evaluate."""
        return bool(self.missing) and all(member.activity for member in self.missing)

    @property
    def all_present(self) -> bool:
        """Whether every rank of the group is among the members."""
        return len(self.members) == self.members[0].group.size

    @cached_property
    def op_groups(self) -> list[list[GroupMember]]:
        """Waiting ranks by the operation that they are in, the largest group first; one group = they agree."""
        counts = Counter(member.signature for member in self.waiting if member.signature)
        return [
            [member for member in self.waiting if member.signature == signature]
            for signature, _ in counts.most_common()
        ]

    @property
    def minority(self) -> list[GroupMember]:
        """Ranks in another operation than the majority; empty = they agree, or there is no majority."""
        if len(self.op_groups) < 2 or len(self.op_groups[0]) <= len(self.op_groups[1]):
            return []
        return [member for op_group in self.op_groups[1:] for member in op_group]

    @property
    def timeout_in_ns(self) -> int | None:
        """Time until the first waiting rank times out and ends the job; None = not known. May be negative."""
        left = [member.group.timeout_ns - member.age_ns for member in self.waiting if member.group.timeout_ns]
        return min(left, default=None)


def sync_points(state: RunState, min_ns: float = 0) -> list[SyncPoint]:
    """All process groups in which a rank waits, the default group first; empty if no rank has waited for `min_ns`."""
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
    """By its own report, or because it waited at its last heartbeat and several have been missed since."""
    if rank.beat is None:
        return False
    overdue = state.now_ns - (rank.last_received_ns or 0) > StallLimits.FRESH_BEATS * state.beat_ns
    reported_ns = [_reported_at_ns(rank.beat, group, place) for place, group in enumerate(rank.beat.groups)]
    return any(wait_ns >= min_ns or (wait_ns and overdue) for wait_ns in reported_ns)


def stuck(held: Sequence[SyncPoint], limits: Limits) -> list[SyncPoint]:
    """Sync points with an abnormal wait, reduced to root causes: without those that only wait for another one.

    Groups that wait for each other in a cycle are all returned, as crossed, the one with the fewest missing ranks
    first. A group whose missing ranks may be waiting elsewhere without having reported it is withheld for a moment.
    """
    abnormal = [sync_point for sync_point in held if is_abnormal(sync_point, limits.stall, limits.judge.warmup_steps)]
    if not abnormal:
        return []
    min_ns = limits.stall.least_s * 1e9

    def is_long(member: GroupMember) -> bool:
        return member.age_ns > StallLimits.NEARLY_SHARE * min_ns

    # Waits of a cycle begin within moments of each other: the first that becomes abnormal proves nothing yet.
    near = [sync_point for sync_point in held if any(map(is_long, sync_point.waiting))]
    return [
        sync_point
        for sync_point in roots(abnormal, near, is_long)
        if sync_point.crossed or not any(_may_wait(each, sync_point, min_ns) for each in sync_point.missing)
    ]


def roots(
    held: Sequence[SyncPoint], near: Sequence[SyncPoint], waits: Callable[[GroupMember], bool]
) -> list[SyncPoint]:
    """Root causes of the `held` sync points: a rank that is missing because it waits in a `near` one is not a cause."""
    waiting = {other.name: {each.rank.rank for each in other.waiting if waits(each)} for other in near}
    excused = [
        replace(each, excused=frozenset(rank for name in waiting.keys() - {each.name} for rank in waiting[name]))
        for each in held
    ]
    found = [left for left, sync_point in zip(excused, held, strict=True) if left.missing or not sync_point.missing]
    if found:
        return found
    cycle = sorted(_cycles([each for each in near if each.missing]), key=lambda sync_point: len(sync_point.missing))
    if len({tuple(member.rank.rank for member in sync_point.missing) for sync_point in cycle}) > 1:
        return [replace(sync_point, crossed=True) for sync_point in cycle]
    return list(held)


def _cycles(held: list[SyncPoint]) -> list[SyncPoint]:
    """Sync points in a cycle of waits: those in which a rank waits that is missing in another of them."""
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
    """The smallest set of missing ranks in a cycle of waits; empty = there is no single smallest one."""
    missing = {tuple(each.rank.rank for each in sync_point.missing): sync_point.missing for sync_point in cycle}
    smallest = min(map(len, missing), default=0)
    found = [members for members in missing.values() if len(members) == smallest]
    return found[0] if len(found) == 1 and len(missing) > 1 else ()


def _may_wait(missing: GroupMember, sync_point: SyncPoint, min_ns: float) -> bool:
    """Whether a missing rank may have gone to another operation before this wait was a long one.

    It has just joined one in another group, or its heartbeat is late, and it is one of several missing ranks or has
    other groups. This lasts until it reports its wait there, reports none, or falls silent.
    """
    others = [each for each in missing.rank.beat.groups if each.name != sync_point.name] if missing.rank.beat else []
    there_ns = [each.age_ns for each in others if each.completed is not None and each.completed < each.enqueued]
    at_most_ns = max(there_ns, default=0) + missing.since_ns
    came = bool(there_ns) and at_most_ns <= StallLimits.NEARLY_SHARE * min_ns
    unreported = missing.late and (bool(others) or len(sync_point.missing) > 1)
    # The first reports of an operation have less than its age.
    return (came or unreported) and sync_point.waiting[0].age_ns - at_most_ns <= (1 + StallLimits.NEARLY_SHARE) * min_ns


def _reported_at_ns(beat: Beat, group: Group, place: int) -> int:
    if group.completed is None and place == 0 and beat.phase == SYNC:
        # Nothing is recorded: the phase stands in, for the group of the gradients.
        return beat.phase_ns
    return group.age_ns


def p99_wait_ns(rank: RankState, warmup_steps: int) -> float | None:
    """99th percentile of the waits of a rank so far; None = it has not trained yet."""
    indices = rank.steps.indices()
    indices = indices[indices >= warmup_steps]
    waits_ns = rank.steps.column("sync_ns", indices)
    return float(np.percentile(waits_ns, StallLimits.WAIT_PERCENTILE)) if len(indices) else None


def is_abnormal(sync_point: SyncPoint, limits: StallLimits, warmup_steps: int) -> bool:
    """Whether a wait exceeds the baseline of earlier waits, and no rank has announced it.

    By reported times only: to a viewer that was stopped or disconnected all ranks would seem to wait.
    """
    waiting = (each for each in sync_point.waiting if not each.paused)
    longest = max(waiting, key=lambda each: each.reported_ns, default=None)
    if longest is None or longest.reported_ns <= limits.least_s * 1e9:
        return False
    if sync_point.missing and all(member.paused for member in sync_point.missing):
        return False
    baseline_ns = p99_wait_ns(longest.rank, warmup_steps)
    if baseline_ns is None:
        # First steps: compiling, and ranks that start late.
        timeout_ns = longest.group.timeout_ns
        patience_ns = min(limits.first_s * 1e9, timeout_ns / 2 if timeout_ns else float("inf"))
        return longest.reported_ns > patience_ns
    return longest.reported_ns > limits.factor * baseline_ns
