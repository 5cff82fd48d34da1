"""Where the dashboard's data comes from: finds a run, follows it, and finds the next one when the job restarts."""

from __future__ import annotations

import re
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.metrics.window import ENOUGH_STEPS
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.units import plural
from ddpwatch.errors import DdpwatchError
from ddpwatch.session.follow import RunFollower
from ddpwatch.sources.runs import live_runs
from ddpwatch.view.run_view import refreshed_view, run_view

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.limits import Limits
    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.recording.writer import Recorder
    from ddpwatch.rundir import RunFile
    from ddpwatch.view.run_view import RunView

LOOK_S: Final = 1.0
"""How often it is looked for a run while none is followed."""
DRAIN_S: Final = 0.004
"""Longest time that is spent on frames before it is seen to something else."""
HISTORY_S: Final = 0.5
"""The same, as long as there is nothing to look at yet."""
LOOK_SHARE: Final = 0.05
"""Part of the time that may go into walking all ranks for a picture: with thousands of them it is done less often …"""
MAX_LOOK_S: Final = 2.0
"""… but never longer apart than this."""
REFRESH_S: Final = 0.23
"""Between two walks the picture is refreshed so often …"""
MIN_LOOK_S: Final = 0.15
"""… and no two pictures are closer than anybody could see."""
RESTART_SLACK_S: Final = 30.0
"""A job may be started again so long before it is seen that it has ended."""
_NUMBERS: Final = re.compile(r"[\W_]*\d[\W\d_]*")
SILENCE_S: Final = 1.0
"""So often there is a picture even if nothing comes."""


class Feed:
    """One run at a time. Used by one thread at a time."""

    replayed = False
    """Whether what is shown was recorded."""

    def __init__(
        self,
        limits: Limits,
        *,
        run: RunFile | None = None,
        follows: RunFollower | None = None,
        find: Callable[[], list[RunFile]] | None = live_runs,
        simulated: bool = False,
        logs: Sequence[str] = (),
        recorder: Recorder | None = None,
        baseline: Profile | None = None,
    ) -> None:
        """Follow `follows`, or `run`, or the only run there is; where there are several, offer `choices`. No other run
        is ever meant where `find` is None.

        What comes is kept by `recorder`, which the caller closes afterwards.
        """
        self.limits = limits
        self.run = run
        self.simulated = simulated
        self.baseline = baseline
        """What scaling is told against."""
        self.logs = tuple(logs)
        """Patterns of the log files that are watched beside the run."""
        self.recorder = recorder
        self.choices: list[RunFile] = []
        """Runs to choose from; empty = none is live, or one is followed and no other is asked for."""
        self.choosing = False
        """Whether another run is asked for. The one that is followed is until then, so that there is a way back."""
        self.trouble = ""
        """Why runs cannot be looked for, in words."""
        self.follows = follows
        self.timeline = Timeline()
        self.ended = False
        self.more = False
        """Whether `advance` left something that could be taken in at once."""
        self.restarts = 0
        self.newer: tuple[RunFile, ...] = ()
        """After the end: runs that have started since, and may be what is wanted."""
        self._find = find
        self._ended_unix_s = 0.0
        self._look_due_s = 0.0
        self._run_view_due_s = self._walk_due_s = 0.0
        self._run_views: deque[RunView] = deque(maxlen=2)
        self._looked_s = 0.0
        self._unseen = False
        self._between: Callable[[], None] = _nothing
        if run is not None:
            self.attach(run)

    @property
    def ready(self) -> bool:
        """Whether there is something to draw."""
        return self.follows is not None and self.follows.answered and not self.choosing

    @property
    def name(self) -> str:
        """Of the run that is followed; empty = none is."""
        return self.follows.monitor.state.name or self.follows.monitor.state.run_id if self.follows is not None else ""

    @property
    def evaluated(self) -> bool:
        """Whether all that has come so far was judged."""
        return self.follows is not None and self.follows.monitor.caught_up and not self.follows.monitor.behind

    @property
    def opening(self) -> str:
        """What is said until there is something to draw; empty = no run is followed."""
        return f"Attaching to {sanitize(self.name, NAME_CHARS)} …" if self.name and not self.choosing else ""

    @property
    def not_recorded(self) -> str:
        """Why something is missing in the recording that is made, in words; empty = nothing is, or none is made."""
        recorder = self.recorder
        if recorder is None:
            return ""
        if recorder.trouble:
            return f"not recorded: {recorder.trouble}"
        return f"not recorded: {plural(recorder.dropped_frames, 'frame')}" if recorder.dropped_frames else ""

    @property
    def choosable(self) -> bool:
        """Whether another run can be chosen. What is recorded stays one job."""
        return self._find is not None and not (self.simulated or self.replayed or self.recorder is not None)

    def choose(self) -> bool:
        """Offer the runs there are, or go to the only one that is left; whether there is another one."""
        try:
            runs = self._find() if self._find is not None and self.choosable else []
        except DdpwatchError:
            runs = []
        if self.run is None or all(run.id == self.run.id for run in runs):
            return False
        if len(runs) > 1:
            self.choosing, self.choices = True, runs
        else:
            self.close()
            self.run, self.ended, self.newer, self._look_due_s = None, False, (), 0.0
        return True

    def stay(self) -> None:
        """Go back to the run that is followed."""
        self.choosing, self.choices, self._unseen = False, [], True

    def pick(self, run: RunFile) -> None:
        """Follow one of those that are offered; the one that is followed goes on."""
        if self.choosing and not self.ended and self.run is not None and run.id == self.run.id:
            self.stay()
        else:
            self.attach(run)

    def attach(self, run: RunFile) -> None:
        """Follow this run from now on."""
        self.close()
        self.choosing = False
        self.run, self.choices, self.ended, self.newer = run, [], False, ()
        self.timeline = Timeline()
        self.follows = RunFollower(run, self.limits, logs=self.logs, recorder=self.recorder)
        self._run_view_due_s = self._walk_due_s = 0.0

    def between_rules(self, between: Callable[[], None]) -> None:
        """Call this now and then while a large run is judged, or a picture of it is worked out for nobody who waits."""
        self._between = between
        if self.follows is not None:
            self.follows.monitor.between_rules(between)

    def advance(self) -> bool:
        """Take in what has come; whether anything may look different now."""
        if self.follows is None or self.ended:
            return self._look_for_runs()
        came = self._drain(self.follows)
        return (self.choosing and self._look_for_runs()) or came

    def run_view(self, *, at: int | None, paused: bool, anyway: bool = False) -> RunView | None:
        """The run as it is to be drawn; None = the last picture still does."""
        now_s = time.monotonic()
        # Silence is news, too: without a word from anybody the ranks become silent, one after another.
        due = (self._unseen and now_s >= self._run_view_due_s) or (
            not self.ended and now_s >= self._looked_s + SILENCE_S
        )
        if self.follows is None or not (anyway or due):
            return None
        self._looked_s = now_s
        # On average as far apart as that: it is looked only now and then whether it is time.
        self._run_view_due_s = max(self._run_view_due_s + REFRESH_S, now_s + MIN_LOOK_S)
        if at is None and not anyway and now_s < self._walk_due_s and (fresh := self._refreshed(self.follows)):
            self._unseen = False
            return fresh
        if self.ended or self.replayed:
            self.follows.monitor.evaluate_now()
            self._tell_recorder(self.follows)
        state = self.follows.monitor.state
        if self.timeline.ranks != tuple(state.ranks):
            # The last picture may be drawn from the old one yet.
            self.timeline = Timeline()
        self.timeline.follow(state)
        # Our own time and not the clock's: on a busy machine pictures would become rare for nothing.
        began_s = time.thread_time()
        if at is not None:
            # The step that is looked at may have left the history meanwhile.
            at = max(at, self.oldest)
        worked_out = run_view(
            self.follows.monitor,
            self.timeline,
            at=at,
            paused=paused,
            simulated=self.simulated,
            replayed=self.replayed,
            baseline=self.baseline,
            between=_nothing if anyway else self._between,
        )
        # The one before is still drawn. Who lets go of it last takes it apart, which takes a while with thousands of
        # ranks: that shall not be who draws.
        self._run_views.append(worked_out)
        self._unseen = False
        took_s = time.thread_time() - began_s
        self._walk_due_s = time.monotonic() + min(max(took_s / LOOK_SHARE, MIN_LOOK_S), MAX_LOOK_S)
        if self.replayed or self._walk_due_s < self._run_view_due_s:
            self._run_view_due_s = self._walk_due_s
        return worked_out

    def _refreshed(self, follows: RunFollower) -> RunView | None:
        """The last picture as it is now; None = there is none of this run, or all ranks have to be walked anyway."""
        before = self._run_views[-1] if self._run_views else None
        if before is None or before.at is not None or self.ended or self.replayed:
            return None
        return (
            refreshed_view(before) if before.monitor is follows.monitor and before.timeline is self.timeline else None
        )

    @property
    def oldest(self) -> int:
        """How far back one can look: to the first step before which there are enough for figures."""
        kept = 0
        if self.follows is not None:
            state = self.follows.monitor.state
            # Who is ahead of the others has let go of what they still have.
            kept = max((rank.steps.newest for rank in state.ranks.values()), default=-1) + 1 - state.kept_steps
        return min(max(self.timeline.oldest, kept) + ENOUGH_STEPS, self.timeline.newest)

    def want_buckets(self, wanted: bool) -> None:
        """Ask the ranks for the timing of their gradient buckets, or no longer."""
        if self.follows is not None:
            self.follows.want_buckets(wanted)

    def request_stacks(self, ranks: frozenset[int]) -> None:
        """Ask these ranks what their threads are doing."""
        if self.follows is not None:
            self.follows.request_stacks(ranks)

    def close(self) -> None:
        """Let go of the run."""
        if self.follows is not None:
            self._tell_recorder(self.follows)
            self.follows.close()
            self.follows = None

    def _drain(self, follows: RunFollower) -> bool:
        came = self.take_in(follows)
        if follows.answered and not self.more and follows.ended:
            self.ended = self._unseen = came = True
            self._ended_unix_s = time.time()
            follows.read_last_logs()
        self._tell_recorder(follows)
        return came

    def _tell_recorder(self, follows: RunFollower) -> None:
        """Alerts are kept with the frames."""
        if self.recorder is not None:
            follows.drain()

    def take_in(self, follows: RunFollower) -> bool:
        """What is there, for a while; whether anything was."""
        waiting = not follows.answered
        until_s = time.monotonic() + (HISTORY_S if waiting else DRAIN_S)
        came, self.more = False, True
        while time.monotonic() < until_s:
            follows.advance(0)
            if follows.idle and not follows.monitor.behind:
                self.more = False
                break
            came = True
            if waiting and follows.answered:
                # The first look comes before judging what has been.
                break
        self._unseen |= came
        return came

    def _look_for_runs(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._look_due_s or self.simulated or self._find is None:
            return False
        self._look_due_s = now_s + LOOK_S
        before, trouble = self.choices, self.trouble
        try:
            runs, self.trouble = self._find(), ""
        except DdpwatchError as error:
            runs, self.trouble = [], str(error)
        if self.choosing and all(self.run is not None and run.id == self.run.id for run in runs):
            self.stay()  # the others have gone meanwhile
            return True
        if self.ended and not self.choosing:
            return self._follow_restart(runs)
        if len(runs) == 1 and not self.choosing:
            self.attach(runs[0])
            return True
        self.choices = runs
        return [run.id for run in before] != [run.id for run in runs] or trouble != self.trouble

    def _follow_restart(self, runs: list[RunFile]) -> bool:
        """After the end: the same job again is the one that is meant."""
        ended = self.run
        others = [run for run in runs if ended is not None and run.id != ended.id]
        since = [run for run in others if run.started_unix_s >= self._ended_unix_s - RESTART_SLACK_S]
        again = [run for run in others if ended is not None and run.name == ended.name]
        again = again or [run for run in since if ended is not None and _alike(run.name, ended.name)]
        if not again:
            before, self.newer = self.newer, tuple(since)
            return before != self.newer
        self.attach(max(again, key=lambda run: run.started_unix_s))
        self.restarts += 1
        return True


def _nothing() -> None:
    """Nobody is in a hurry."""


def _alike(name: str, other: str) -> bool:
    """Whether two names differ in their numbers only, as where the date or the seed is in them. Names are all there is
    to go by: a launcher may give the same number to jobs that have nothing to do with each other.
    """
    stem = _NUMBERS.sub("#", name).strip("#")
    return bool(stem) and stem == _NUMBERS.sub("#", other).strip("#")
