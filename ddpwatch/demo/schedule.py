"""What happens in the demo, and when: chapters of health and of one slow rank, told again and again.

Knows no torch and reads no clock. Rank 0 asks it at every page, a few steps long, and tells the others; so all ranks
are in the same chapter in the same step, whatever their own clocks say.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

PAGE_STEPS: Final = 12
"""Rank 0 speaks to the others each time so many steps are done: often enough for chapters, too seldom to be a load."""
LAG: Final = 0.6
"""What a slow rank takes longer, as a part of a healthy step: clear on any machine, and no standstill."""
WORK_S: Final = 0.033
"""What a rank works in a step, at the least …"""
MOST_WORK_S: Final = 0.3
"""… and at the most: a chapter needs steps to be judged by."""
WORK_PER_REDUCE: Final = 50.0
"""Between these so many times an all-reduce, which takes twice as long where ranks compute: about 4 % of the step."""
LEAST_LAG_S: Final = 0.01
"""On a fast machine a part of the step would drown in what the scheduler does."""
MOST_PACE: Final = 4.0
"""Told faster than this, a chapter would be over before a rule can be sure."""
_PAGES_KEPT: Final = 9


@dataclass(frozen=True)
class Chapter:
    """Some seconds in which one rank is slow in one phase, or none is."""

    seconds: float
    rank: int | None = None
    """Counted around where there are fewer ranks; None = all are healthy."""
    phase: str = ""


STORY: Final = (
    # Long enough to be judged before anything happens.
    Chapter(14.0),
    Chapter(24.0, 1, "data"),
    Chapter(26.0),
    Chapter(24.0, 2, "backward"),
    # Short, because the healthy beginning follows.
    Chapter(12.0),
)


class Page(NamedTuple):
    """What holds on all ranks for the next steps. Numbers only, so that it fits into a tensor."""

    over: float
    """Not 0 = these steps are not done any more."""
    chapter: float
    """Number of the chapter in the story."""
    lag_s: float
    """What its slow rank takes longer."""

    def lag_in(self, phase: str, rank: int, ranks: int, story: tuple[Chapter, ...] = STORY) -> float:
        """What this rank takes longer in this phase, in seconds."""
        chapter = story[int(self.chapter)]
        slow = chapter.rank is not None and chapter.rank % ranks == rank and chapter.phase == phase
        return self.lag_s if slow else 0.0


class Teller:
    """Rank 0's part: turns the pages. Sizes the lag by the healthy steps that it has seen so far."""

    def __init__(
        self,
        began_s: float,
        seconds: float,
        *,
        pace: float | None = None,
        lag: float = LAG,
        story: tuple[Chapter, ...] = STORY,
    ) -> None:
        """The story begins now and ends after `seconds`; a `pace` of 2 = twice as fast, None = as `pace_for` has it."""
        self._began_s, self._seconds, self._lag, self._story = began_s, seconds, lag, story
        self._pace = pace_for(seconds, story) if pace is None else pace
        self._step_s: deque[float] = deque(maxlen=_PAGES_KEPT)
        """Length of a step, from each of the last healthy pages."""
        self._turned_s: float | None = None
        self._chapter = 0

    def turn(self, now_s: float) -> Page:
        """The next page. To be asked for every `PAGE_STEPS` steps, before the first one, too."""
        if self._turned_s is not None and self._story[self._chapter].rank is None:
            self._step_s.append((now_s - self._turned_s) / PAGE_STEPS)
        self._turned_s = now_s
        elapsed_s = now_s - self._began_s
        self._chapter = number_at(elapsed_s * self._pace, self._story)
        lag_s = max(LEAST_LAG_S, self._lag * median(self._step_s)) if self._step_s else LEAST_LAG_S
        return Page(float(elapsed_s >= self._seconds), float(self._chapter), lag_s)


def number_at(elapsed_s: float, story: tuple[Chapter, ...] = STORY) -> int:
    """Number of the chapter that is told after so many seconds, told over and over."""
    into_s = elapsed_s % sum(chapter.seconds for chapter in story)
    for number, chapter in enumerate(story):
        into_s -= chapter.seconds
        if into_s < 0:
            return number
    return len(story) - 1


def work_for(reduce_s: float, pace: float = 1.0) -> float:
    """How long a rank should work in a step, where an all-reduce takes so long: a healthy job communicates little.

    On a small or busy machine the ranks wake each other late, and beside short steps that alone would be an alert. A
    story that is told faster has shorter steps, so that as many of them are in a chapter.
    """
    return min(max(WORK_PER_REDUCE * reduce_s, WORK_S), MOST_WORK_S) / max(pace, 1.0)


def pace_for(seconds: float, story: tuple[Chapter, ...] = STORY) -> float:
    """How fast it must be told to come to its end in this time: never slower than written, nor too fast to follow."""
    return min(MOST_PACE, max(1.0, sum(chapter.seconds for chapter in story) / seconds))
