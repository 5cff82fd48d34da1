"""Schedule of faults in the demo: healthy segments and segments with one slow rank, repeated forever.

Imports no torch and reads no clock. Rank 0 asks a `Director` every few steps and broadcasts the answer, so that all
ranks are in the same segment in the same step, whatever their clocks say.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final, NamedTuple

from ddpwatch.simulator.scenario import Fault, Segment, segment_at

DIRECTIVE_STEPS: Final = 12
"""Steps between two broadcasts: few beside the segments, and enough that the broadcasts cost nothing."""
LAG: Final = 0.6
"""Time added to the slow rank, as a fraction of a healthy step: visible on any machine, and not a hang."""
WORK_S: Final = 0.033
"""Shortest work of a rank in a step, in seconds."""
MAX_WORK_S: Final = 0.3
"""Longest work of a rank in a step, in seconds: the rules need a number of steps in each segment."""
WORK_PER_REDUCE: Final = 50.0
"""Work as a multiple of an all-reduce, which takes twice as long beside computation: about 4 % of the step."""
MIN_LAG_S: Final = 0.01
"""Shortest lag in seconds: a shorter one would be hidden by the scheduler of a fast machine."""
MAX_PACE: Final = 4.0
"""Faster than this, a segment would end before a rule is certain."""
_DIRECTIVES_KEPT: Final = 9
"""Healthy directives whose step durations give the median."""


def make_schedule(lag: float = LAG) -> tuple[Segment, ...]:
    """The segments in order, with lengths in seconds; the slow rank lags by `lag` healthy steps."""
    return (
        # Long enough to be evaluated before anything happens.
        Segment(14.0),
        Segment(24.0, (Fault((1,), "data", lag, onset=0),)),
        Segment(26.0),
        Segment(24.0, (Fault((2,), "backward", lag, onset=0),)),
        # Short, because the healthy beginning follows.
        Segment(12.0),
    )


SCHEDULE: Final = make_schedule()


class Directive(NamedTuple):
    """What all ranks do in the next steps. Numbers only, so that it fits into a tensor."""

    over: float
    """Not 0 = the demo ends before these steps."""
    segment: float
    """Position of the segment in the schedule."""
    step_s: float
    """Duration of a healthy step; 0 = none was measured yet."""

    def lag_in(self, phase: str, rank: int, ranks: int, schedule: tuple[Segment, ...] = SCHEDULE) -> float:
        """Seconds that this rank lags in this phase. With fewer ranks than in the schedule, its ranks wrap around."""
        for fault in schedule[int(self.segment)].faults:
            if fault.phase == phase and rank in {each % ranks for each in fault.ranks}:
                return max(MIN_LAG_S, fault.size * self.step_s)
        return 0.0


class Director:
    """Plays the schedule on rank 0, and measures the healthy steps by which faults are sized."""

    def __init__(self, began_s: float, seconds: float, pace: float, schedule: tuple[Segment, ...] = SCHEDULE) -> None:
        """Start at `began_s` and end after `seconds`; a `pace` of 2 plays twice as fast."""
        self._began_s, self._seconds, self._pace, self._schedule = began_s, seconds, pace, schedule
        self._step_s: deque[float] = deque(maxlen=_DIRECTIVES_KEPT)
        """Step durations of the last healthy directives."""
        self._last_s: float | None = None
        self._segment = 0

    def next_directive(self, now_s: float) -> Directive:
        """The next directive. To be called before the first step and every `DIRECTIVE_STEPS` steps."""
        if self._last_s is not None and not self._schedule[self._segment].faults:
            self._step_s.append((now_s - self._last_s) / DIRECTIVE_STEPS)
        self._last_s = now_s
        elapsed_s = now_s - self._began_s
        self._segment, _ = segment_at(self._schedule, elapsed_s * self._pace)
        step_s = median(self._step_s) if self._step_s else 0.0
        return Directive(float(elapsed_s >= self._seconds), float(self._segment), step_s)


def work_for(reduce_s: float, pace: float = 1.0) -> float:
    """Seconds of work per step for a healthy communication share, given the duration of an all-reduce.

    On a small or busy machine ranks wake each other late, which alone would raise an alert beside short steps. A faster
    pace has shorter steps, so that a segment has as many of them.
    """
    return min(max(WORK_PER_REDUCE * reduce_s, WORK_S), MAX_WORK_S) / max(pace, 1.0)


def pace_for(seconds: float) -> float:
    """The pace at which the schedule ends within this time, between 1 and `MAX_PACE`."""
    return min(MAX_PACE, max(1.0, sum(segment.length for segment in SCHEDULE) / seconds))
