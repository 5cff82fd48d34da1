"""Playback of a recording with seeks: the run and its alerts as they were at any moment.

Draws nothing and has no thread. Long seeks and the search for older steps run within time budgets, so that the caller
can do something else in between.
"""

from __future__ import annotations

import time
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ddpwatch.core.alerts.recorded import RecordedAlerts
from ddpwatch.core.limits import DEFAULTS, Limits
from ddpwatch.core.metrics.window import older_may_count
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.units import plural
from ddpwatch.recording.alerts import Opened, opened_alerts
from ddpwatch.recording.replay import Pace, Reel, Replay, Span
from ddpwatch.recording.steps import WholeRun
from ddpwatch.recording.time_parser import NoMoment, parse_clock, parse_offset, span_text
from ddpwatch.session.replay_backfill import backfill_gpus, backfill_steps
from ddpwatch.session.run_follower import RunFollower

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import tzinfo

    from ddpwatch.core.state.run import RunState
    from ddpwatch.recording.reader import Attempt, Recording

SPEEDS: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""Speeds to choose from, as multiples of real time."""
COMING_NS: Final = 1_000_000_000
"""Nanoseconds after the start of the moment shown first if no step comes for long: ranks usually connect by then."""
LONG_NS: Final = 10_000_000_000
"""Max nanoseconds after the start in which the first common step is searched: a longer wait is worth seeing."""
MAX_FRAMES: Final = 20_000
"""Max frames in which the first common step is searched, because the viewer waits for it."""
GO_ON_NS: Final = 15_000_000_000
"""Max nanoseconds of a forward seek that plays the frames between; a longer one restores a checkpoint."""
JUST_S: Final = 3.0
"""Seconds for which a viewer that went to an alert, and plays on, still counts as being at it."""
MAX_GAP_NS: Final = 3_600_000_000_000
"""Max nanoseconds after the last frame in which an alert belongs to the recording: it may be about the silence."""

Filled: TypeAlias = Literal["", "steps", "gpus"]
"""What was found of the time before a moment; empty = nothing yet."""


def first_sight(recorded: Recording, attempt: Attempt) -> int:
    """Time of the first step that all ranks have; `COMING_NS` after the start, if that took longer than `LONG_NS`."""
    first_ns = attempt.first_ns
    upto_ns = min(first_ns + LONG_NS, attempt.last_ns)
    state = attempt.new_state()
    _, after = recorded.restore(attempt, first_ns, state)
    if _in_common(state):
        return first_ns
    # Each rank is checked until it has a step: checking all with every frame is too slow for thousands.
    waiting = list(state.ranks.values())
    for entry in islice(recorded.entries(attempt, upto_ns=upto_ns, after=after), MAX_FRAMES):
        state.ingest(entry.payload, entry.at_ns)
        while waiting and waiting[-1].steps.newest >= 1:
            waiting.pop()
        if not waiting and _in_common(state):
            return max(entry.at_ns, first_ns)
    return min(first_ns + COMING_NS, attempt.last_ns)


def _in_common(state: RunState) -> bool:
    ranks = state.ranks.values()
    step = min((rank.steps.newest for rank in ranks), default=-1)
    return step >= 1 and all(rank.steps.has(step) for rank in ranks)


class Playback:
    """Position in a recording, and the run at that moment. Used by one thread at a time, except for the pace."""

    def __init__(
        self,
        recorded: Recording,
        *,
        speed: float = 1.0,
        playing: bool = True,
        limits: Limits = DEFAULTS,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Read the alerts, and no frames yet. The recording is closed with this."""
        self.recorded = recorded
        self.limits = limits
        self.follows: RunFollower | None = None
        """The run at the moment that was reached last; None = none was yet."""
        self.place = 0
        """Index of its attempt."""
        self._sights: dict[int, tuple[Attempt, int]] = {}
        self.opened: tuple[Opened, ...] = ()
        self.reel = self._scan()
        self.pace = Pace(self.reel.spans[0].first_ns, speed, playing=playing, clock=clock)
        self._source: Replay | None = None
        self._engine: RecordedAlerts | None = None
        self._coming: tuple[RunFollower, Replay, RecordedAlerts, int] | None = None
        """What replaces `follows`, its source, alerts and `place` when the seek arrives."""
        self._filling: Iterator[Filled] | None = None
        self._older_steps: Iterator[Filled] = iter(())
        self._whole: WholeRun | None = None
        self._from_ns = self._wanted_ns = 0
        self.seeking = False
        """Whether the requested moment is not reached yet."""

    # --- position ---

    @property
    def at_end(self) -> bool:
        """Whether the end of this attempt is reached."""
        return not self.seeking and self._source is not None and self._source.at_end

    @property
    def progress(self) -> float | None:
        """Fraction of the seek that is done, from 0 to 1; None = no seek."""
        source = self._source if self._coming is None else self._coming[1]
        if not self.seeking or source is None:
            return None
        return min(max((source.played_ns - self._from_ns) / max(self._wanted_ns - self._from_ns, 1), 0.0), 1.0)

    @property
    def filling(self) -> bool:
        """Whether older steps and GPU readings are still being read."""
        return self._filling is not None

    @property
    def first_sight_ns(self) -> int:
        """The first moment at which there is something to see: a step of all ranks, or an alert."""
        return self._sight_ns(0)

    def change_speed(self, way: int) -> None:
        """Play at the next higher speed, or with -1 at the next lower one."""
        speeds = SPEEDS if way > 0 else reversed(SPEEDS)
        self.pace.speed = next((speed for speed in speeds if (speed - self.pace.speed) * way > 0), self.pace.speed)

    def next_alert(self, way: int) -> int | None:
        """Time of the next opening of an alert, or with -1 of the previous one; None = there is none."""
        now_ns = self.pace.now_ns
        times_ns = sorted(self.reel.clamp(opened.at_ns) for opened in self.opened)
        if way > 0:
            return next((at_ns for at_ns in times_ns if at_ns > now_ns), None)
        # A viewer that just went to an alert and plays on has passed it, maybe the next too, and means the one before.
        just_ns = int(JUST_S * 1e9 * self.pace.speed) if self.pace.playing else 0
        if self._wanted_ns in times_ns and now_ns - self._wanted_ns <= just_ns:
            now_ns = self._wanted_ns
        return next((at_ns for at_ns in reversed(times_ns) if at_ns < now_ns), None)

    def moment(self, text: str, zone: tzinfo, near_ns: int | None = None) -> int:
        """Parse a moment; raises `NoMoment` with the time that the recording covers."""
        reel = self.reel
        try:
            passed_ns = parse_offset(text, reel.total_ns)
            if passed_ns is not None:
                return reel.at(passed_ns)
            return reel.clamp(parse_clock(text, reel.spans[0].first_ns, reel.spans[-1].last_ns, zone, near_ns))
        except NoMoment as error:
            raise NoMoment(f"{error}; the recording is {self._covered(zone)}") from None

    def before_alert(self, number: int, before_ns: int, zone: tzinfo) -> int:
        """The moment `before_ns` before alert `number` opened, but not before the first sight; raises `NoMoment`."""
        if not 1 <= number <= len(self.opened):
            there = f"only {plural(len(self.opened), 'alert')}" if self.opened else "no alert"
            raise NoMoment(f"{there} in the recording, {self._covered(zone)}")
        at_ns = self.opened[number - 1].at_ns
        return self.reel.clamp(max(at_ns - before_ns, self._sight_ns(self.reel.place(at_ns))))

    def is_kept(self, number: int) -> bool:
        """Whether the moment of an alert is recorded: retention removes frames before alerts."""
        at_ns = self.opened[number - 1].at_ns
        return at_ns >= self.reel.spans[self.reel.place(at_ns)].first_ns

    def _covered(self, zone: tzinfo) -> str:
        return span_text(self.reel.spans[0].first_ns, self.reel.spans[-1].last_ns, zone)

    # --- seeking ---

    def seek(self, at_ns: int) -> None:
        """Request a moment, or the nearest one; `catch_up` goes there. A further request replaces this one."""
        at_ns = self.reel.clamp(at_ns)
        place = self.reel.place(at_ns)
        self.pace.hold(True)
        self.pace.move(at_ns)
        self._cancel_coming()
        self._wanted_ns, self.seeking = at_ns, True
        if self.follows is not None and self._source is not None and place == self.place:
            self._from_ns = self.follows.monitor.state.now_ns
            if self._from_ns <= at_ns <= self._from_ns + GO_ON_NS:
                return
        attempt = self.recorded.attempts[place]
        state = attempt.new_state()
        start = self.recorded.restore(attempt, at_ns, state)
        engine = RecordedAlerts(self.recorded.events(attempt), self.limits)
        end_ns = self.reel.spans[place].last_ns
        source = Replay(self.recorded, attempt, self.pace, start=start, end_ns=end_ns, on_alerts=engine.refresh)
        follower = RunFollower(attempt.run, source=source, monitor=Monitor(state, self.limits, engine))
        self._coming, self._from_ns = (follower, source, engine, place), source.began_ns

    def catch_up(self, budget_s: float = 3600.0) -> bool:
        """Continue a seek for at most that many seconds; returns whether it is still under way."""
        if not self.seeking:
            return False
        follower = self.follows if self._coming is None else self._coming[0]
        assert follower is not None
        until_s = time.monotonic() + budget_s
        follower.advance(0)
        while not follower.idle:
            if time.monotonic() >= until_s:
                return True
            follower.advance(0)
        self._arrive(follower)
        return False

    def step_on(self, has_come: Callable[[], bool], most_ns: int) -> bool:
        """Play frame by frame until `has_come`, for at most that many nanoseconds of the recording."""
        if self.follows is None or self._source is None or self.seeking:
            return False
        until_ns = self.pace.now_ns + most_ns
        while self._source.next_ns <= until_ns and not self._source.at_end:
            self.pace.move(self._source.next_ns)
            self.follows.advance(0)
            while not self.follows.idle:
                self.follows.advance(0)
            if has_come():
                return True
        return False

    def fill(self, budget_s: float) -> Filled:
        """Read older steps and GPU readings for at most that many seconds; returns what is complete enough to draw."""
        until_s = time.monotonic() + budget_s
        while self._filling is not None and time.monotonic() < until_s:
            found = next(self._filling, None)
            if found is None:
                self._filling = None
            elif found:
                return found
        return ""

    def fill_figures(self) -> None:
        """Read older steps until the latest figures do not depend on more of them, for output without charts."""
        assert self.follows is not None
        state = self.follows.monitor.state
        # Checked only between portions: within one, steps are missing that will come.
        while older_may_count(state) and "steps" in self._older_steps:
            pass

    @property
    def whole(self) -> WholeRun:
        """Aggregate of all recorded steps of this attempt, as far as it was read."""
        attempt = self.recorded.attempts[self.place]
        known = self._whole
        if known is None or (known.attempt.id, known.attempt.last_ns) != (attempt.id, attempt.last_ns):
            known = self._whole = WholeRun(self.recorded, attempt)
        return known

    def refresh(self) -> bool:
        """Take over what was recorded meanwhile; returns whether anything was."""
        if not self.recorded.refresh():
            return False
        self.reel = self._scan()
        if self._source is not None and self._engine is not None:
            ids = [attempt.id for attempt in self.recorded.attempts]
            if self._source.attempt.id not in ids:
                # Retention has removed the attempt that is shown.
                self._source = None
                self.seek(self.reel.spans[0].first_ns)
                return True
            self.place = ids.index(self._source.attempt.id)
            attempt, span = self.recorded.attempts[self.place], self.reel.spans[self.place]
            self._engine.add(self.recorded.events(attempt)[self._engine.count :])
            self._source.extend(attempt, span.last_ns)
            if self.pace.playing and self.pace.now_ns < span.first_ns:
                self.seek(span.first_ns)
        return True

    def close(self) -> None:
        """Close the recording."""
        self._cancel_coming()
        self._filling = None
        if self.follows is not None:
            self.follows.close()
        self.recorded.close()

    def _scan(self) -> Reel:
        self.opened = opened_alerts(self.recorded)
        return Reel([self._span(attempt) for attempt in self.recorded.attempts])

    def _sight_ns(self, place: int) -> int:
        """First sight of an attempt. Not after one of its alerts, which "next alert" would skip from there."""
        attempt, span = self.recorded.attempts[place], self.reel.spans[place]
        if self._sights.get(place, (None, 0))[0] != attempt:
            self._sights[place] = attempt, first_sight(self.recorded, attempt)
        reported_ns = [at_ns for alert in self.opened if span.first_ns <= (at_ns := alert.at_ns) <= span.last_ns]
        return self.reel.clamp(min([self._sights[place][1], *reported_ns]))

    def _span(self, attempt: Attempt) -> Span:
        latest_ns = attempt.last_ns + MAX_GAP_NS
        within_ns = [at_ns for at_ns, _ in self.recorded.events(attempt) if at_ns <= latest_ns]
        return Span(attempt.first_ns, max([attempt.last_ns, *within_ns]))

    def _arrive(self, follower: RunFollower) -> None:
        follower.monitor.evaluate_now()
        if self._coming is not None:
            if self.follows is not None:
                self.follows.close()
            self.follows, self._source, self._engine, self.place = self._coming
            self._coming = None
            where = self.recorded, self._source.attempt, follower.monitor.state, self._source.began_ns
            self._older_steps = ("steps" if whole else "" for whole in backfill_steps(*where))
            self._filling = chain(self._older_steps, ("gpus" if longer else "" for longer in backfill_gpus(*where)))
        self.seeking = False
        self.pace.hold(False)

    def _cancel_coming(self) -> None:
        if self._coming is not None:
            self._coming[0].close()
            self._coming = None
