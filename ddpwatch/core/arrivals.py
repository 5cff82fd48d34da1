"""Who has arrived at a collective and who has not, group by group.

Ranks count the operations of a group alike, so whoever has joined fewer than the others is the one they wait for.
Sequence numbers are compared within a group and never between groups, and clocks of hosts not at all: how long a rank
waits it tells itself, and what passes after its beat is the viewer's own time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.limits import Limits, StallLimits
    from ddpwatch.core.rank import RankState
    from ddpwatch.core.state import RunState
    from ddpwatch.wire import Group

SYNC: Final = PHASES.index("sync")
P99: Final = 99.0
HERE: Final = frozenset({"ok", "paused", "silent"})
"""Ranks that may yet arrive. Those that have ended or failed are told of by other rules."""


@dataclass(frozen=True)
class Standing:
    """How far one rank got in one group."""

    rank: RankState
    group: Group
    age_ns: int
    """How long it has waited by now for the oldest operation; 0 = it does not wait."""

    @property
    def paused(self) -> bool:
        """Whether it has said that it is about to do something slow."""
        return self.rank.beat is not None and bool(self.rank.beat.pause)

    @property
    def signature(self) -> tuple[str, str] | None:
        """What it thinks the operation is; None = not told yet."""
        return (self.group.op, self.group.shape) if self.group.op else None


@dataclass(frozen=True)
class Meeting:
    """One group in which somebody waits."""

    name: str
    standings: tuple[Standing, ...]
    """Of all ranks of the group that were heard and are still there."""
    default: bool = True
    """Whether it is the job's own group, which all ranks are in."""

    @cached_property
    def front(self) -> int:
        """The last operation that anybody has joined."""
        return max(standing.group.enqueued for standing in self.standings)

    @cached_property
    def missing(self) -> tuple[Standing, ...]:
        """Those that have joined fewer operations than others."""
        return tuple(standing for standing in self.standings if standing.group.enqueued < self.front)

    @cached_property
    def arrived(self) -> tuple[Standing, ...]:
        """Those that have joined the last operation."""
        return tuple(standing for standing in self.standings if standing.group.enqueued == self.front)

    @cached_property
    def waiting(self) -> tuple[Standing, ...]:
        """Those that have joined and wait, who has waited longest first."""
        found = [standing for standing in self.arrived if standing.age_ns]
        return tuple(sorted(found, key=lambda standing: -standing.age_ns))

    @property
    def everybody(self) -> bool:
        """Whether every rank of the group is among them."""
        return len(self.standings) == self.standings[0].group.size

    @cached_property
    def camps(self) -> list[list[Standing]]:
        """Ranks that wait, by what they think the operation is; the largest camp first. One camp: they agree."""
        counts = Counter(standing.signature for standing in self.waiting if standing.signature)
        return [
            [standing for standing in self.waiting if standing.signature == signature]
            for signature, _ in counts.most_common()
        ]

    @property
    def left_ns(self) -> int | None:
        """Until the first of the waiting ranks gives up and ends the job; None = not known. May be negative."""
        left = [standing.group.timeout_ns - standing.age_ns for standing in self.waiting if standing.group.timeout_ns]
        return min(left, default=None)


def meetings(state: RunState) -> list[Meeting]:
    """All groups in which a rank waits, the job's own first."""
    by_name: dict[str, list[Standing]] = {}
    for rank in state.ranks.values():
        if rank.beat is None or not rank.beat.groups or state.condition(rank) not in HERE:
            continue
        for place, group in enumerate(rank.beat.groups):
            by_name.setdefault(group.name, []).append(Standing(rank, group, _age_ns(state, rank, group, place)))
    return [
        Meeting(name, tuple(standings), default=place == 0)
        for place, (name, standings) in enumerate(by_name.items())
        if any(standing.age_ns for standing in standings)
    ]


def stuck(state: RunState, limits: Limits) -> list[Meeting]:
    """The groups in which a wait is abnormal, without those that only wait for another one of them.

    A rank that is missing in one group because it waits in another is not where it began. Where groups wait for each
    other in a circle, the few have left the many: the one with the fewest missing ranks is told.
    """
    abnormal = [meeting for meeting in meetings(state) if is_abnormal(meeting, limits.stall, limits.judge.warmup_steps)]
    roots = [meeting for meeting in abnormal if not _waits_for_another(meeting, abnormal)]
    if roots or not abnormal:
        return roots
    fewest = min(len(meeting.missing) for meeting in abnormal)
    return [meeting for meeting in abnormal if len(meeting.missing) == fewest]


def _waits_for_another(meeting: Meeting, abnormal: Sequence[Meeting]) -> bool:
    elsewhere = {standing.rank.rank for other in abnormal if other.name != meeting.name for standing in other.waiting}
    return bool(meeting.missing) and all(standing.rank.rank in elsewhere for standing in meeting.missing)


def _age_ns(state: RunState, rank: RankState, group: Group, place: int) -> int:
    beat = rank.beat
    assert beat is not None
    age_ns = group.age_ns
    if group.completed is None and place == 0 and beat.phase == SYNC:
        # Nothing is recorded: then the phase tells, for the group that gradients go through.
        age_ns = beat.phase_ns
    return age_ns + max(0, state.now_ns - (rank.sign_ns or state.now_ns)) if age_ns else 0


def usual_wait_ns(waiting: Sequence[Standing], warmup_steps: int) -> float | None:
    """How long these ranks have waited at the most, all but one time in a hundred; None = they have not trained yet."""
    waits = []
    for standing in waiting:
        indices = standing.rank.steps.indices()
        indices = indices[indices >= warmup_steps]
        if len(indices):
            waits.append(float(np.percentile(standing.rank.steps.column("sync_ns", indices), P99)))
    return max(waits, default=None)


def is_abnormal(meeting: Meeting, limits: StallLimits, warmup_steps: int) -> bool:
    """Whether somebody waits in it for longer than waits have taken so far, and nobody has announced it."""
    waiting = [standing for standing in meeting.waiting if not standing.paused]
    if not waiting or waiting[0].age_ns <= limits.least_s * 1e9:
        return False
    if meeting.missing and all(standing.paused for standing in meeting.missing):
        return False
    usual_ns = usual_wait_ns(waiting[:1], warmup_steps)
    if usual_ns is None:
        # First steps: compiling, and ranks that start late.
        timeout_ns = waiting[0].group.timeout_ns
        patience_ns = min(limits.first_s * 1e9, timeout_ns / 2 if timeout_ns else float("inf"))
        return waiting[0].age_ns > patience_ns
    return waiting[0].age_ns > limits.factor * usual_ns
