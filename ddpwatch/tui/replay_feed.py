"""A recording as the data of the dashboard: played, shown at any moment, and followed while it is being written."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddpwatch.core.metrics.scaling import scaling_of
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.recording.damage_report import damage_of
from ddpwatch.tui.feed import Feed
from ddpwatch.view.replay_bar import Mark, Position

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.recording.damage_report import Damage
    from ddpwatch.session.playback import Playback
    from ddpwatch.view.run_view import RunView

PORTION_S: Final = 0.02
"""Longest time in seconds spent on a seek before it is checked whether it is still wanted."""
FILL_S: Final = 0.01
"""Longest time in seconds spent on older steps in one `advance`: nobody waits for them."""
DRAW_S: Final = 0.15
"""Seconds after a seek in which no older steps are read, so that the moment is drawn first."""
REFRESH_S: Final = 1.0
"""Seconds between two checks whether the recording has grown, or lost its oldest part."""
REST_S: Final = 2.0
"""Seconds that the end of an attempt is shown before the next one begins."""
LONG_FILL_S: Final = 0.5
"""Reading older steps is announced if it takes longer than this, in seconds."""
SHOWN_PARTS: Final = 20
"""How often the progress is shown while all steps of a run are read."""
STEP_NS: Final = 60_000_000_000
"""Longest part of the recording that is played to find the next step, in ns."""


class ReplayFeed(Feed):
    """A feed with the interface of a live one. No rule runs: alerts are shown as they were recorded."""

    replayed = True

    def __init__(self, playback: Playback, start_ns: int, baseline: Profile | None = None, notice: str = "") -> None:
        """Begin at a moment. `close` also closes the playback; the dashboard shows the `notice` when it starts."""
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
        """Text to show until there is something to draw."""
        return f"Reading {sanitize(self.playback.recorded.path.name, NAME_CHARS)} …"

    def advance(self) -> bool:
        """Play what is due, continue a seek, or read older steps."""
        more = not self.playback.seeking and self._check_growth()
        if self.playback.seeking:
            return not self.continue_seek()
        if self.follows is None:
            return False
        came = self.take_in(self.follows) or more
        self._check_damage()
        if time.monotonic() < self._fill_due_s:
            return self._check_end() or came
        if found := self.playback.fill(FILL_S):
            if found == "steps":
                # A new timeline, because the last run view may still be drawn from the old one. It is complete before
                # another thread asks it for the newest step.
                timeline = Timeline()
                timeline.follow(self.follows.monitor.state)
                self.timeline = timeline
            came = self._changed = True
        self.more |= self.playback.filling
        ended = self._check_end()
        return self._aggregate() or ended or came

    def run_view(self, *, at: int | None, paused: bool, force: bool = False) -> RunView | None:
        """The run at that moment; at its end, with the totals of all steps."""
        drawn = super().run_view(at=at, paused=paused, force=force)
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
        """Begin a seek, which `continue_seek` continues."""
        self.playback.seek(at_ns)
        self._over = False

    def seek_view(self, at_ns: int | None, wanted: Callable[[], bool], step: int | None = None) -> RunView | None:
        """Seek to a moment and compute the run view in one call, because each switch between threads adds to the wait.
        None = the first moment with something to show. With a step, play on until all ranks have finished it. Returns
        None if the seek is not `wanted` any more.
        """
        self.seek(self.playback.first_sight_ns if at_ns is None else at_ns)
        while self.continue_seek():
            if not wanted():
                return None
        if step is not None:
            self.play_to_step(step)
        at = step if step is not None and self.has_later_steps(step) else None
        return self.run_view(at=at, paused=at is not None, force=True)

    def continue_seek(self, budget_s: float = PORTION_S) -> bool:
        """Continue a seek for at most that time; whether it is still under way."""
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
        self._changed, self._run_view_due_s, self._ended_s = True, 0.0, 0.0
        self._fill_due_s = time.monotonic() + DRAW_S
        self._check_end()
        self._check_damage()
        return False

    def play_to_step(self, step: int) -> bool:
        """Play until all ranks have finished a step; whether they did within `STEP_NS`."""
        if self.follows is None:
            return False
        state = self.follows.monitor.state

        def is_finished() -> bool:
            self.timeline.follow(state)
            return self.timeline.newest >= step

        found = is_finished() or self.playback.step_on(is_finished, STEP_NS)
        self._check_end()
        return found

    def has_later_steps(self, step: int) -> bool:
        """Whether later steps are known, so that this one has to be looked back at."""
        newest = self.timeline.newest
        return step < newest or (self._over and step == newest)

    def time_of(self, step: int) -> int | None:
        """When a step ended; None = not known."""
        ranks = self.follows.monitor.state.ranks.values() if self.follows is not None else ()
        return next((at_ns for rank in ranks if (at_ns := rank.finished_ns(step)) is not None), None)

    @property
    def oldest(self) -> int:
        """The oldest step that can be shown: also the first of the run, any known one while older steps are read."""
        first = self.timeline.oldest
        return first if first <= 1 or self.playback.filling else super().oldest

    @property
    def position(self) -> Position:
        """The position for the replay line. Safe to read from any thread."""
        playback = self.playback
        pace, reel = playback.pace, playback.reel
        # Before the beginning only if that part was dropped meanwhile: what is shown is from then.
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
        """Close the recording."""
        self.follows = None
        self.playback.close()

    def _aggregate(self) -> bool:
        """At the end of the run, once older steps are read: aggregate the whole run. Whether that changes the view."""
        if not self.ended or self.playback.filling or (whole := self.playback.whole).done:
            return False
        before = int(whole.part * SHOWN_PARTS)
        whole.go_on(FILL_S)
        self.more = self.more or not whole.done
        shows = whole.done or int(whole.part * SHOWN_PARTS) > before
        self._changed |= shows
        return shows

    def _check_damage(self) -> None:
        """Update the damage, in the thread that reads; drawing uses the result."""
        recorded, place, partly = self.playback.recorded, self.playback.place, not self.playback.whole.done
        if self._damage_of != (recorded.damaged, place, partly):
            self._damage_of = recorded.damaged, place, partly
            before, self._damage = self._damage, damage_of(recorded, recorded.attempts[place], partly=partly)
            self._changed |= self._damage != before

    def _check_growth(self) -> bool:
        """Whether the recording has another beginning, end or alert."""
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

    def _check_end(self) -> bool:
        """At the end: check whether the recording grows, or begin the next attempt. Whether that changes the view."""
        playback, now_s = self.playback, time.monotonic()
        over, self._over = self._over, playback.at_end
        if not self._over or self.follows is None:
            self.ended = False
            return over
        self._ended_s = self._ended_s or now_s
        ended, self.ended = self.ended, self.follows.monitor.state.run_condition() == "ended"
        self._check_growth()
        spans = playback.reel.spans
        if playback.pace.playing and playback.place + 1 < len(spans) and now_s >= self._ended_s + REST_S:
            self.seek(spans[playback.place + 1].first_ns)
        return self._over != over or self.ended != ended
