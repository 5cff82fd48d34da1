"""A recording as the data of the dashboard: played, or looked at at any moment, and followed while it is written."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddpwatch.core.metrics.scaling import scaling_of
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.recording.health import damage_of
from ddpwatch.tui.feed import Feed
from ddpwatch.view.replay_bar import Mark, Position

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.recording.health import Damage
    from ddpwatch.session.playback import Playback
    from ddpwatch.view.run_view import RunView

PORTION_S: Final = 0.02
"""Longest time on the way to another moment before it is looked whether it is still wanted."""
FILL_S: Final = 0.01
"""The same for older steps: nobody waits for them."""
DRAW_S: Final = 0.15
"""So long after one has come to a moment older steps are left alone: it is to be drawn first."""
REFRESH_S: Final = 1.0
"""It is looked so often whether more was recorded, or the oldest was let go."""
REST_S: Final = 2.0
"""So long one sees how an attempt ended before the next one begins."""
LONG_FILL_S: Final = 0.5
"""That older steps are looked for is told when it takes longer than this: of most recordings it does not."""
SHOWN_PARTS: Final = 20
"""While all steps of a run are read, it is told so many times how much of it is done."""
STEP_NS: Final = 60_000_000_000
"""For the next step no more of the recording is played than this."""


class ReplayFeed(Feed):
    """Has the surface of a feed of a live run. Nothing in it is judged: alerts are told as they were."""

    replayed = True

    def __init__(self, playback: Playback, start_ns: int, baseline: Profile | None = None, notice: str = "") -> None:
        """Begin at a moment; the playback is closed with this. The `notice` is said when it is opened."""
        super().__init__(playback.limits, find=list, baseline=baseline)
        self.playback, self.notice = playback, notice
        self._refresh_due_s = 0.0
        self._ended_s = 0.0
        self._marked: tuple[object, tuple[Mark, ...]] | None = None
        self._over = False
        self._fill_due_s = 0.0
        self._damage: Damage | None = None
        self._damage_of: tuple[object, ...] = ()
        playback.seek(start_ns)

    @property
    def opening(self) -> str:
        """What is said until there is something to draw."""
        return f"Reading {sanitize(self.playback.recorded.path.name, NAME_CHARS)} …"

    def advance(self) -> bool:
        """Play what is due, go on to where one shall be, or look for older steps."""
        more = not self.playback.seeking and self._look_for_more()
        if self.playback.seeking:
            return not self.travel()
        if self.follows is None:
            return False
        came = self.take_in(self.follows) or more
        self._look_for_damage()
        if time.monotonic() < self._fill_due_s:
            return self._see_to_the_end() or came
        if found := self.playback.fill(FILL_S):
            if found == "steps":
                # Another one, in which the older steps are: the last picture may be drawn from this one yet. It is
                # whole before somebody asks it for the newest step.
                timeline = Timeline()
                timeline.follow(self.follows.monitor.state)
                self.timeline = timeline
            came = self._unseen = True
        self.more |= self.playback.filling
        ended = self._see_to_the_end()
        return self._add_up() or ended or came

    def run_view(self, *, at: int | None, paused: bool, anyway: bool = False) -> RunView | None:
        """The run at that moment; at its end, with all of its steps added up."""
        drawn = super().run_view(at=at, paused=paused, anyway=anyway)
        if drawn is None:
            return None
        drawn = replace(drawn, by_steps=not (self.playback.pace.playing or self._over), damage=self._damage)
        if not self.ended:
            return drawn
        whole = self.playback.whole
        if not whole.done or whole.aggregate.steps < drawn.aggregate.steps:
            return replace(drawn, read=whole.part)
        scaling = scaling_of(self.baseline, whole.aggregate)
        return replace(drawn, aggregate=whole.aggregate, whole_scaling=scaling)

    def seek(self, at_ns: int) -> None:
        """Go to a moment; `travel` does it."""
        self.playback.seek(at_ns)
        self._over = False

    def go(self, at_ns: int | None, wanted: Callable[[], bool], step: int | None = None) -> RunView | None:
        """Go to a moment and work its picture out, all at once: somebody waits for it, and each time that threads wait
        for each other adds to that. No moment = the first with something to see, which only who reads can look for.
        With a step, go on from there until all ranks have told it, and look at that one. None = it is not `wanted` any
        more, and one is on the way.
        """
        self.seek(self.playback.first_sight_ns if at_ns is None else at_ns)
        while self.travel():
            if not wanted():
                return None
        if step is not None:
            self.step_on(step)
        at = step if step is not None and self.is_before_newest(step) else None
        return self.run_view(at=at, paused=at is not None, anyway=True)

    def travel(self, budget_s: float = PORTION_S) -> bool:
        """Go on to where one shall be, for so long at most; whether there is still some way to go."""
        self.more = self.playback.catch_up(budget_s)
        if self.more:
            return True
        before, self.follows = self.follows, self.playback.follows
        if self.follows is not before:
            self.timeline = Timeline()
            attempt = self.playback.recorded.attempts[self.playback.place]
            if self.run is not None and self.run.id != attempt.run.id:
                self.restarts += 1
            self.run = attempt.run
        self._unseen, self._run_view_due_s, self._ended_s = True, 0.0, 0.0
        self._fill_due_s = time.monotonic() + DRAW_S
        self._see_to_the_end()
        self._look_for_damage()
        return False

    def step_on(self, step: int) -> bool:
        """Play until all ranks have finished a step; whether they had within a while."""
        if self.follows is None:
            return False
        state = self.follows.monitor.state

        def has_come() -> bool:
            self.timeline.follow(state)
            return self.timeline.newest >= step

        found = has_come() or self.playback.step_on(has_come, STEP_NS)
        self._see_to_the_end()
        return found

    def is_before_newest(self, step: int) -> bool:
        """Whether more is known by now than how it was at that step."""
        newest = self.timeline.newest
        return step < newest or (self._over and step == newest)

    def time_of(self, step: int) -> int | None:
        """When a step ended; None = cannot be told."""
        ranks = self.follows.monitor.state.ranks.values() if self.follows is not None else ()
        return next((at_ns for rank in ranks if (at_ns := rank.finished_ns(step)) is not None), None)

    @property
    def oldest(self) -> int:
        """How far back one can look: also to where the run begins, and to what is known until older steps are found."""
        first = self.timeline.oldest
        return first if first <= 1 or self.playback.filling else super().oldest

    @property
    def position(self) -> Position:
        """Where it is, for the line that says so. May be asked by any thread."""
        playback = self.playback
        pace, reel = playback.pace, playback.reel
        # Before the beginning one is only where that was let go meanwhile: what is looked at is from then.
        at_ns = min(reel.clamp(now_ns := pace.now_ns), now_ns)
        total_ns = max(reel.total_ns, 1)
        starts_ns = [reel.passed_ns(span.first_ns) for span in reel.spans[1:]]
        return Position(
            at_ns=at_ns,
            passed_s=reel.passed_ns(at_ns) / 1e9,
            total_s=reel.total_ns / 1e9,
            playing=pace.playing,
            at_end=self._over,
            speed=pace.speed,
            attempt=reel.place(at_ns) + 1,
            attempts=len(reel.spans),
            progress=playback.progress,
            marks=self._marks(),
            seams=tuple(start_ns / total_ns for start_ns in starts_ns),
            damage=self._damage,
            older=playback.filling and time.monotonic() >= self._fill_due_s + LONG_FILL_S,
        )

    def close(self) -> None:
        """Let go of the recording."""
        self.follows = None
        self.playback.close()

    def _add_up(self) -> bool:
        """After the end of the run, and when older steps are there: read the whole of it. Whether that shows."""
        if not self.ended or self.playback.filling or (whole := self.playback.whole).done:
            return False
        before = int(whole.part * SHOWN_PARTS)
        whole.go_on(FILL_S)
        self.more = self.more or not whole.done
        shows = whole.done or int(whole.part * SHOWN_PARTS) > before
        self._unseen |= shows
        return shows

    def _look_for_damage(self) -> None:
        """In the thread that reads; who draws only looks at what was found."""
        recorded, place, partly = self.playback.recorded, self.playback.place, not self.playback.whole.done
        if self._damage_of != (recorded.damaged, place, partly):
            self._damage_of = recorded.damaged, place, partly
            before, self._damage = self._damage, damage_of(recorded, recorded.attempts[place], partly=partly)
            self._unseen |= self._damage != before

    def _look_for_more(self) -> bool:
        """Whether there is another beginning or end by now, or another alert on the line."""
        now_s = time.monotonic()
        if now_s < self._refresh_due_s:
            return False
        self._refresh_due_s = now_s + REFRESH_S
        return self.playback.refresh()

    def _marks(self) -> tuple[Mark, ...]:
        playback = self.playback
        reel, opened = playback.reel, playback.opened
        if self._marked is None or self._marked[0] is not reel:
            total_ns = max(reel.total_ns, 1)
            marks = tuple(Mark(reel.passed_ns(alert.at_ns) / total_ns, alert.severity) for alert in opened)
            self._marked = reel, marks
        return self._marked[1]

    def _see_to_the_end(self) -> bool:
        """At the end: look whether it goes on, or go on with the next attempt. Whether something looks different."""
        playback, now_s = self.playback, time.monotonic()
        over, self._over = self._over, playback.at_end
        if not self._over or self.follows is None:
            self.ended = False
            return over
        self._ended_s = self._ended_s or now_s
        ended, self.ended = self.ended, self.follows.monitor.state.run_condition() == "ended"
        self._look_for_more()
        spans = playback.reel.spans
        if playback.pace.playing and playback.place + 1 < len(spans) and now_s >= self._ended_s + REST_S:
            self.seek(spans[playback.place + 1].first_ns)
        return self._over != over or self.ended != ended
