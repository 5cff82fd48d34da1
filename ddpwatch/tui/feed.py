"""The data of the dashboard: finds a run, follows it, and finds the next one when the job restarts."""

from __future__ import annotations

import re
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from ddpwatch.core.limits import WindowLimits
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.units import plural
from ddpwatch.errors import DdpwatchError
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.sources.find_run import live_runs
from ddpwatch.view.run_view import refreshed_view, run_view

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.limits import Limits
    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.recording.writer import Recorder
    from ddpwatch.rundir import RunFile
    from ddpwatch.view.run_view import RunView

SEARCH_S: Final = 1.0
"""Seconds between two searches for a run while none is followed."""
DRAIN_S: Final = 0.004
"""Longest time in seconds spent on frames in one `advance`."""
HISTORY_S: Final = 0.5
"""The same until there is something to show."""
WALK_SHARE: Final = 0.05
"""Largest fraction of the time spent on run views that walk all ranks: with thousands of ranks they are rarer."""
MAX_WALK_S: Final = 2.0
"""Longest time in seconds between two such run views."""
REFRESH_S: Final = 0.23
"""Seconds between run views that keep the rows of the one before."""
MIN_VIEW_S: Final = 0.15
"""Shortest time in seconds between two run views: nobody could see more of them."""
RESTART_SLACK_S: Final = 30.0
"""A restarted job may begin this many seconds before the end of the old run is noticed."""
_NUMBERS: Final = re.compile(r"[\W_]*\d[\W\d_]*")
SILENCE_S: Final = 1.0
"""Seconds between run views while nothing is received."""


class Feed:
    """Follows one run at a time. Used by one thread at a time."""

    replayed = False
    """Whether the run comes from a recording."""

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
        """Follow `follows`, or `run`, or the only run that `find` returns; if it returns several, offer `choices`.
        Without `find` there is never another run. The caller closes the `recorder`.
        """
        self.limits = limits
        self.run = run
        self.simulated = simulated
        self.baseline = baseline
        """The run of one process that scaling is compared with."""
        self.logs = tuple(logs)
        """Glob patterns of watched log files."""
        self.recorder = recorder
        self.choices: list[RunFile] = []
        """Runs to choose from; empty = none is live, or one is followed and the user wants no other."""
        self.choosing = False
        """Whether the user wants another run. Until one is chosen, the current run is still followed."""
        self.search_error = ""
        """Why the search for runs failed."""
        self.follows = follows
        self.timeline = Timeline()
        self.ended = False
        self.more = False
        """Whether `advance` ran out of time with frames left."""
        self.restarts = 0
        self.newer: tuple[RunFile, ...] = ()
        """After the end: runs that have started since."""
        self._find = find
        self._ended_unix_s = 0.0
        self._search_due_s = 0.0
        self._run_view_due_s = self._walk_due_s = 0.0
        self._run_views: deque[RunView] = deque(maxlen=2)
        self._viewed_s = 0.0
        self._changed = False
        """Whether something was received since the last run view."""
        self._between: Callable[[], None] = _nothing
        if run is not None:
            self.attach(run)

    @property
    def ready(self) -> bool:
        """Whether there is something to draw."""
        return self.follows is not None and self.follows.answered and not self.choosing

    @property
    def name(self) -> str:
        """Name of the run; empty = none is followed."""
        return self.follows.monitor.state.name or self.follows.monitor.state.run_id if self.follows is not None else ""

    @property
    def evaluated(self) -> bool:
        """Whether the rules have evaluated everything received so far."""
        return self.follows is not None and self.follows.monitor.caught_up and not self.follows.monitor.behind

    @property
    def opening(self) -> str:
        """Text to show until there is something to draw; empty = no run is followed."""
        return f"Attaching to {self.name} …" if self.name and not self.choosing else ""

    @property
    def not_recorded(self) -> str:
        """What is missing in the recording being written; empty = nothing, or none is written."""
        recorder = self.recorder
        if recorder is None:
            return ""
        if recorder.write_error:
            return f"not recorded: {recorder.write_error}"
        return f"not recorded: {plural(recorder.dropped_frames, 'frame')}" if recorder.dropped_frames else ""

    @property
    def choosable(self) -> bool:
        """Whether another run can be chosen. A recording stays with one job."""
        return self._find is not None and not (self.simulated or self.replayed or self.recorder is not None)

    def choose(self) -> bool:
        """Offer the live runs, or switch to the only other one; whether there is another one."""
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
            self.run, self.ended, self.newer, self._search_due_s = None, False, (), 0.0
        return True

    def stay(self) -> None:
        """Go back to the current run."""
        self.choosing, self.choices, self._changed = False, [], True

    def pick(self, run: RunFile) -> None:
        """Follow one of the choices; go back if it is the current run."""
        if self.choosing and not self.ended and self.run is not None and run.id == self.run.id:
            self.stay()
        else:
            self.attach(run)

    def attach(self, run: RunFile) -> None:
        """Follow a run."""
        self.close()
        self.choosing = False
        self.run, self.choices, self.ended, self.newer = run, [], False, ()
        self.timeline = Timeline()
        self.follows = RunFollower(run, self.limits, logs=self.logs, recorder=self.recorder)
        self._run_view_due_s = self._walk_due_s = 0.0

    def between_rules(self, between: Callable[[], None]) -> None:
        """Call this now and then while rules run, or while a run view is computed that no key waits for."""
        self._between = between
        if self.follows is not None:
            self.follows.monitor.between_rules(between)

    def advance(self) -> bool:
        """Process what has been received; whether anything may look different."""
        if self.follows is None or self.ended:
            return self._search()
        came = self._drain(self.follows)
        return (self.choosing and self._search()) or came

    def run_view(self, *, at: int | None, paused: bool, force: bool = False) -> RunView | None:
        """The run as it is to be drawn; None = the last run view still holds."""
        now_s = time.monotonic()
        # Also while nothing is received: ranks without a heartbeat become silent one after another.
        due = (self._changed and now_s >= self._run_view_due_s) or (
            not self.ended and now_s >= self._viewed_s + SILENCE_S
        )
        if self.follows is None or not (force or due):
            return None
        self._viewed_s = now_s
        # Counted from when the last one was due, not made: calls are rare, and would add their delay each time.
        self._run_view_due_s = max(self._run_view_due_s + REFRESH_S, now_s + MIN_VIEW_S)
        if at is None and not force and now_s < self._walk_due_s and (fresh := self._refreshed(self.follows)):
            self._changed = False
            return fresh
        if self.ended or self.replayed:
            self.follows.monitor.evaluate_now()
            self._record_alerts(self.follows)
        state = self.follows.monitor.state
        if self.timeline.ranks != tuple(state.ranks):
            # The last run view may still be drawn from the old timeline.
            self.timeline = Timeline()
        self.timeline.follow(state)
        # CPU time and not wall time: on a busy machine run views would become rare for nothing.
        began_s = time.thread_time()
        if at is not None:
            # The step may have left the history meanwhile.
            at = max(at, self.oldest)
        computed = run_view(
            self.follows.monitor,
            self.timeline,
            at=at,
            paused=paused,
            simulated=self.simulated,
            replayed=self.replayed,
            baseline=self.baseline,
            between=_nothing if force else self._between,
        )
        # Keeps the run view before this one alive. Freeing one takes a while with thousands of ranks, and must not
        # happen in the thread that draws.
        self._run_views.append(computed)
        self._changed = False
        took_s = time.thread_time() - began_s
        self._walk_due_s = time.monotonic() + min(max(took_s / WALK_SHARE, MIN_VIEW_S), MAX_WALK_S)
        if self.replayed or self._walk_due_s < self._run_view_due_s:
            self._run_view_due_s = self._walk_due_s
        return computed

    def _refreshed(self, follows: RunFollower) -> RunView | None:
        """The last run view with current totals and alerts; None = all ranks have to be walked."""
        before = self._run_views[-1] if self._run_views else None
        if before is None or before.at is not None or self.ended or self.replayed:
            return None
        same_run = before.monitor is follows.monitor and before.timeline is self.timeline
        return refreshed_view(before) if same_run else None

    @property
    def oldest(self) -> int:
        """The oldest step that can be shown: the first one with enough steps before it for figures."""
        kept = 0
        if self.follows is not None:
            state = self.follows.monitor.state
            # A rank ahead of the others has dropped steps that they still have.
            kept = max((rank.steps.newest for rank in state.ranks.values()), default=-1) + 1 - state.kept_steps
        return min(max(self.timeline.oldest, kept) + WindowLimits.MIN_STEPS, self.timeline.newest)

    def want_buckets(self, wanted: bool) -> None:
        """Subscribe to the timing of gradient buckets, or unsubscribe."""
        if self.follows is not None:
            self.follows.want_buckets(wanted)

    def request_stacks(self, ranks: frozenset[int]) -> None:
        """Ask these ranks for the stacks of their threads."""
        if self.follows is not None:
            self.follows.request_stacks(ranks)

    def close(self) -> None:
        """Stop following the run."""
        if self.follows is not None:
            self._record_alerts(self.follows)
            self.follows.close()
            self.follows = None

    def _drain(self, follows: RunFollower) -> bool:
        came = self.take_in(follows)
        if follows.answered and not self.more and follows.ended:
            self.ended = self._changed = came = True
            self._ended_unix_s = time.time()
            follows.read_last_logs()
        self._record_alerts(follows)
        return came

    def _record_alerts(self, follows: RunFollower) -> None:
        if self.recorder is not None:
            follows.drain()

    def take_in(self, follows: RunFollower) -> bool:
        """Process frames for a limited time; whether there were any."""
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
                # Show the run before the rules evaluate its history.
                break
        self._changed |= came
        return came

    def _search(self) -> bool:
        """Search for runs when it is time; whether that changes what is shown."""
        now_s = time.monotonic()
        if now_s < self._search_due_s or self.simulated or self._find is None:
            return False
        self._search_due_s = now_s + SEARCH_S
        before, error_before = self.choices, self.search_error
        try:
            runs, self.search_error = self._find(), ""
        except DdpwatchError as error:
            runs, self.search_error = [], str(error)
        if self.choosing and all(self.run is not None and run.id == self.run.id for run in runs):
            self.stay()  # the others have gone meanwhile
            return True
        if self.ended and not self.choosing:
            return self._follow_restart(runs)
        if len(runs) == 1 and not self.choosing:
            self.attach(runs[0])
            return True
        self.choices = runs
        return [run.id for run in before] != [run.id for run in runs] or error_before != self.search_error

    def _follow_restart(self, runs: list[RunFile]) -> bool:
        """After the end: follow a run of the same job; whether anything changes."""
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
    """The callback of a run view that a key waits for."""


def _alike(name: str, other: str) -> bool:
    """Whether two names differ only in numbers, such as a date or a seed. There is nothing else to go by: launchers
    give the same job number to unrelated jobs.
    """
    stem = _NUMBERS.sub("#", name).strip("#")
    return bool(stem) and stem == _NUMBERS.sub("#", other).strip("#")
