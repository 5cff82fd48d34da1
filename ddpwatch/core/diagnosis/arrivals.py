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
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.limits import Limits, StallLimits
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.wire import Beat, Group

SYNC: Final = PHASES.index("sync")
P99: Final = 99.0
NEARLY: Final = 0.5
"""A wait that is half as long as an abnormal one counts when it is asked why a rank is missing elsewhere."""
SHORT_S: Final = 0.1
"""For less than this ranks wait in every step, and nobody asks for whom."""
FRESH_BEATS: Final = 4
"""A rank that has missed so many beats may be elsewhere by now."""
LATE_BEATS: Final = 2
"""One that has missed so many may have come to an operation, and had no chance to tell."""
HERE: Final = frozenset({"ok", "paused", "silent"})
"""Ranks that may yet arrive. Those that have ended or failed are told of by other rules."""


@dataclass(frozen=True)
class Standing:
    """How far one rank got in one group."""

    rank: RankState
    group: Group
    age_ns: int
    """How long it has waited by now for the oldest operation; 0 = it does not wait."""
    told_ns: int = 0
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
class Meeting:
    """One group in which somebody waits."""

    name: str
    standings: tuple[Standing, ...]
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
        return max(standing.group.enqueued for standing in self.standings)

    @cached_property
    def fewest(self) -> int:
        """The last operation that everybody has joined."""
        return min(standing.group.enqueued for standing in self.standings)

    @cached_property
    def missing(self) -> tuple[Standing, ...]:
        """Those that have joined fewer operations than others, and do not wait themselves for an earlier one."""
        return tuple(
            standing
            for standing in self.standings
            if standing.group.enqueued < self.front
            and standing.rank.rank not in self.excused
            and not self._waits_earlier(standing)
        )

    def _waits_earlier(self, standing: Standing) -> bool:
        if not standing.age_ns or standing.group.enqueued > self.fewest:
            return bool(standing.age_ns)
        # Who has joined the fewest and says that it waits is stuck there, if that can be believed.
        return standing.fresh and standing.waits_at is not None

    @cached_property
    def arrived(self) -> tuple[Standing, ...]:
        """Those that have joined the last operation."""
        return tuple(standing for standing in self.standings if standing.group.enqueued == self.front)

    @cached_property
    def waiting(self) -> tuple[Standing, ...]:
        """Those that have joined and wait, who has waited longest first.

        Operations can be joined ahead, some ranks further than others: all of them wait for who has joined the fewest.
        Where nobody is missing, it is the earliest operation that everything else waits for.
        """
        if self.missing:
            joined = [each for each in self.standings if each.group.enqueued > self.fewest]
        else:
            earliest = min((each.waits_at for each in self.standings if each.age_ns and each.waits_at), default=None)
            joined = [each for each in self.standings if each.waits_at in (None, earliest)]
        found = [standing for standing in joined if standing.age_ns]
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
    def odd(self) -> list[Standing]:
        """Of ranks that do not agree, the few; empty = there are as many of one mind as of another."""
        if len(self.camps) < 2 or len(self.camps[0]) <= len(self.camps[1]):
            return []
        return [standing for camp in self.camps[1:] for standing in camp]

    @property
    def left_ns(self) -> int | None:
        """Until the first of the waiting ranks gives up and ends the job; None = not known. May be negative."""
        left = [standing.group.timeout_ns - standing.age_ns for standing in self.waiting if standing.group.timeout_ns]
        return min(left, default=None)


def meetings(state: RunState, least_ns: float = 0) -> list[Meeting]:
    """All groups in which a rank waits, the job's own first; none if nobody has waited for as long as `least_ns`, as in
    every step.
    """
    if least_ns and not any(_has_waited(state, rank, least_ns) for rank in state.ranks.values()):
        return []
    by_name: dict[str, list[Standing]] = {}
    for rank in state.ranks.values():
        if rank.beat is None or not rank.beat.groups or (condition := state.condition(rank)) not in HERE:
            continue
        since_ns = max(0, state.now_ns - (rank.sign_ns or 0))
        fresh = since_ns <= FRESH_BEATS * state.beat_ns
        late = since_ns > LATE_BEATS * state.beat_ns and condition != "silent" and not what_holds(rank)
        for place, group in enumerate(rank.beat.groups):
            told_ns = _told_ns(rank.beat, group, place)
            age_ns = told_ns + since_ns if told_ns else 0
            by_name.setdefault(group.name, []).append(Standing(rank, group, age_ns, told_ns, fresh, since_ns, late))
    return [
        Meeting(name, tuple(standings), default=place == 0)
        for place, (name, standings) in enumerate(by_name.items())
        if any(standing.age_ns for standing in standings)
    ]


def _has_waited(state: RunState, rank: RankState, least_ns: float) -> bool:
    """By its own word, or because it waited when it was last heard, and has missed some beats since."""
    if rank.beat is None:
        return False
    unheard = state.now_ns - (rank.sign_ns or 0) > FRESH_BEATS * state.beat_ns
    for place, group in enumerate(rank.beat.groups):
        told_ns = _told_ns(rank.beat, group, place)
        if told_ns >= least_ns or (told_ns and unheard):
            return True
    return False


def stuck(held: Sequence[Meeting], limits: Limits) -> list[Meeting]:
    """The groups in which a wait is abnormal, without those that only wait for another one of them.

    A rank that is missing in one group because it waits in another is not where it began. Where groups wait for each
    other in a circle, all groups of the circle are told, as crossed; first the one that the fewest have not joined.
    Nothing is told for a moment of a group whose missing ranks may wait as well, and have not told so yet.
    """
    abnormal = [meeting for meeting in held if is_abnormal(meeting, limits.stall, limits.judge.warmup_steps)]
    if not abnormal:
        return []
    # Waits of a circle begin within moments of each other: one of them becomes abnormal first, and says nothing yet.
    near = [meeting for meeting in held if any(_is_long(standing, limits) for standing in meeting.waiting)]
    found = roots(abnormal, near, lambda standing: _is_long(standing, limits))
    return [
        meeting
        for meeting in found
        if meeting.crossed or not any(_may_wait(each, meeting, limits.stall.least_s * 1e9) for each in meeting.missing)
    ]


def roots(held: Sequence[Meeting], near: Sequence[Meeting], waits: Callable[[Standing], bool]) -> list[Meeting]:
    """Of the groups that are held up those where it began, given all that may hold them and what counts as waiting."""
    excused = [replace(meeting, excused=_waiting_elsewhere(meeting, near, waits)) for meeting in held]
    found = [left for left, meeting in zip(excused, held, strict=True) if left.missing or not meeting.missing]
    if found:
        return found
    circle = sorted(_in_circles([each for each in near if each.missing]), key=lambda meeting: len(meeting.missing))
    if len({tuple(standing.rank.rank for standing in meeting.missing) for meeting in circle}) > 1:
        return [replace(meeting, crossed=True) for meeting in circle]
    return list(held)


def _in_circles(held: list[Meeting]) -> list[Meeting]:
    """Without the groups that only wait for others: nobody who is missing elsewhere waits in them."""
    waited_for = {meeting.name: {each.rank.rank for each in meeting.missing} for meeting in held}
    left = [
        meeting
        for meeting in held
        if any(
            each.rank.rank in missing
            for name, missing in waited_for.items()
            if name != meeting.name
            for each in meeting.waiting
        )
    ]
    return left if len(left) == len(held) else _in_circles(left)


def the_few(circle: Sequence[Meeting]) -> tuple[Standing, ...]:
    """Of groups that wait for each other, the ranks that have left the many; empty = none are the fewer."""
    fewest = min((len(meeting.missing) for meeting in circle), default=0)
    left = {tuple(each.rank.rank for each in meeting.missing): meeting.missing for meeting in circle}
    few = [missing for missing in left.values() if len(missing) == fewest]
    return few[0] if len(few) == 1 and len(left) > 1 else ()


def _waiting_elsewhere(meeting: Meeting, near: Sequence[Meeting], waits: Callable[[Standing], bool]) -> frozenset[int]:
    others = [other for other in near if other.name != meeting.name]
    return frozenset(standing.rank.rank for other in others for standing in other.waiting if waits(standing))


def _is_long(standing: Standing, limits: Limits) -> bool:
    return standing.age_ns > NEARLY * limits.stall.least_s * 1e9


def _may_wait(missing: Standing, meeting: Meeting, least_ns: float) -> bool:
    """Whether a missing rank may have gone to another operation before this wait was a long one.

    It has just come to another group, or its next word is late, and it is one of several that are missing or has other
    groups where it may be. This lasts until it tells that it waits there, is heard to wait nowhere, or falls silent.
    """
    others = [each for each in missing.rank.beat.groups if each.name != meeting.name] if missing.rank.beat else []
    there_ns = [each.age_ns for each in others if each.completed is not None and each.completed < each.enqueued]
    at_most_ns = max(there_ns, default=0) + missing.since_ns
    came = bool(there_ns) and at_most_ns <= NEARLY * least_ns
    unheard = missing.late and (bool(others) or len(meeting.missing) > 1)
    # Before an operation is looked up, its age is told as less than it is.
    return (came or unheard) and meeting.waiting[0].age_ns - at_most_ns <= (1 + NEARLY) * least_ns


def _told_ns(beat: Beat, group: Group, place: int) -> int:
    if group.completed is None and place == 0 and beat.phase == SYNC:
        # Nothing is recorded: then the phase tells, for the group that gradients go through.
        return beat.phase_ns
    return group.age_ns


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
    """Whether somebody waits in it for longer than waits have taken so far, and nobody has announced it.

    Goes by what the ranks tell themselves: a viewer that was stopped, or hears nothing, would see all of them wait.
    """
    waiting = sorted((each for each in meeting.waiting if not each.paused), key=lambda each: -each.told_ns)
    if not waiting or waiting[0].told_ns <= limits.least_s * 1e9:
        return False
    if meeting.missing and all(standing.paused for standing in meeting.missing):
        return False
    usual_ns = usual_wait_ns(waiting[:1], warmup_steps)
    if usual_ns is None:
        # First steps: compiling, and ranks that start late.
        timeout_ns = waiting[0].group.timeout_ns
        patience_ns = min(limits.first_s * 1e9, timeout_ns / 2 if timeout_ns else float("inf"))
        return waiting[0].told_ns > patience_ns
    return waiting[0].told_ns > limits.factor * usual_ns
