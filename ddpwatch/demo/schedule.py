"""What happens in the demo, and when: chapters of health and of one slow rank, told again and again.

Knows no torch and reads no clock. Rank 0 asks it at every page, a few steps long, and tells the others; so all ranks
are in the same chapter in the same step, whatever their own clocks say.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final, NamedTuple

from ddpwatch.simulator.scenario import Chapter, Fault, chapter_at

PAGE_STEPS: Final = 12
"""Rank 0 speaks to the others each time so many steps are done: often enough for chapters, too seldom to be a load."""
LAG: Final = 0.6
"""What a slow rank takes longer, as a part of a healthy step: clear on any machine, and no standstill."""
WORK_S: Final = 0.033
"""What a rank works in a step, at the least …"""
MAX_WORK_S: Final = 0.3
"""… and at the most: a chapter needs steps to be judged by."""
WORK_PER_REDUCE: Final = 50.0
"""Between these so many times an all-reduce, which takes twice as long where ranks compute: about 4 % of the step."""
MIN_LAG_S: Final = 0.01
"""On a fast machine a part of the step would drown in what the scheduler does."""
MAX_PACE: Final = 4.0
"""Told faster than this, a chapter would be over before a rule can be sure."""
_PAGES_KEPT: Final = 9


def story(lag: float = LAG) -> tuple[Chapter, ...]:
    """The chapters in order, with their lengths in seconds. A slow rank takes longer by `lag` healthy steps."""
    return (
        # Long enough to be judged before anything happens.
        Chapter(14.0),
        Chapter(24.0, (Fault((1,), "data", lag, onset=0),)),
        Chapter(26.0),
        Chapter(24.0, (Fault((2,), "backward", lag, onset=0),)),
        # Short, because the healthy beginning follows.
        Chapter(12.0),
    )


STORY: Final = story()


class Page(NamedTuple):
    """What holds on all ranks for the next steps. Numbers only, so that it fits into a tensor."""

    over: float
    """Not 0 = these steps are not done any more."""
    chapter: float
    """Number of the chapter in the story."""
    step_s: float
    """Length of a healthy step; 0 = none was measured yet."""

    def lag_in(self, phase: str, rank: int, ranks: int, story: tuple[Chapter, ...] = STORY) -> float:
        """What this rank takes longer in this phase, in seconds. Ranks of faults wrap around where there are fewer."""
        for fault in story[int(self.chapter)].faults:
            if fault.phase == phase and rank in {each % ranks for each in fault.ranks}:
                return max(MIN_LAG_S, fault.size * self.step_s)
        return 0.0


class Teller:
    """Rank 0's part: turns the pages, and measures the healthy steps by which faults are sized."""

    def __init__(
        self, began_s: float, seconds: float, *, pace: float | None = None, story: tuple[Chapter, ...] = STORY
    ) -> None:
        """The story begins now and ends after `seconds`; a `pace` of 2 = twice as fast, None = as `pace_for` has it."""
        self._began_s, self._seconds, self._story = began_s, seconds, story
        self._pace = pace_for(seconds, story) if pace is None else pace
        self._step_s: deque[float] = deque(maxlen=_PAGES_KEPT)
        """Length of a step, from each of the last healthy pages."""
        self._turned_s: float | None = None
        self._chapter = 0

    def turn(self, now_s: float) -> Page:
        """The next page. To be asked for every `PAGE_STEPS` steps, before the first one, too."""
        if self._turned_s is not None and not self._story[self._chapter].faults:
            self._step_s.append((now_s - self._turned_s) / PAGE_STEPS)
        self._turned_s = now_s
        elapsed_s = now_s - self._began_s
        self._chapter, _ = chapter_at(self._story, elapsed_s * self._pace)
        step_s = median(self._step_s) if self._step_s else 0.0
        return Page(float(elapsed_s >= self._seconds), float(self._chapter), step_s)


def work_for(reduce_s: float, pace: float = 1.0) -> float:
    """How long a rank should work in a step, where an all-reduce takes so long: a healthy job communicates little.

    On a small or busy machine the ranks wake each other late, and beside short steps that alone would be an alert. A
    story that is told faster has shorter steps, so that as many of them are in a chapter.
    """
    return min(max(WORK_PER_REDUCE * reduce_s, WORK_S), MAX_WORK_S) / max(pace, 1.0)


def pace_for(seconds: float, story: tuple[Chapter, ...] = STORY) -> float:
    """How fast it must be told to come to its end in this time: never slower than written, nor too fast to follow."""
    return min(MAX_PACE, max(1.0, sum(chapter.length for chapter in story) / seconds))
