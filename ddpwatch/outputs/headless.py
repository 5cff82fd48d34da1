"""Follow a run to its end without a screen: alert changes out, and how the run ended.

Prints nothing; the caller decides what to do with each change.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.sources.frames import TICK_MS
from ddpwatch.sources.live import GATHERED_RANKS, UNHURRIED_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.alerts.model import AlertEvent, Severity
    from ddpwatch.core.diagnosis.outcome import Outcome
    from ddpwatch.core.limits import Limits
    from ddpwatch.outputs.prometheus.exporter import Exporter
    from ddpwatch.recording.writer import Recorder
    from ddpwatch.rundir import RunFile

DRAIN_INTERVAL_NS: Final = 10_000_000
"""Interval, in nanoseconds, of draining alert changes and checking for the end while frames arrive without a break."""
BUCKETS_EVERY_NS: Final = 60_000_000_000
"""Interval, in nanoseconds, at which a recording subscribes to gradient buckets."""
BUCKETS_FOR_NS: Final = 2_000_000_000
"""Duration, in nanoseconds, of each such subscription: a permanent one would be most of the recording."""


@dataclass(frozen=True)
class Ending:
    """How following a run came out."""

    outcome: Outcome
    said_goodbye: bool
    """Whether every reachable rank sent a goodbye; else their processes are gone."""
    time_is_up: bool = False
    """Whether the run goes on and only the time for watching is over."""

    @property
    def bad(self) -> bool:
        """Whether the run ended badly."""
        return not self.time_is_up and self.outcome.ending == "badly"


@dataclass
class AlertCounts:
    """Number of alerts, each counted at the worst severity it reached."""

    _open: dict[tuple[str, str], Severity] = field(default_factory=dict)
    _closed: Counter[Severity] = field(default_factory=Counter)

    def count(self, event: AlertEvent) -> None:
        """Count one alert change."""
        key, severity = event.alert.key, event.alert.finding.severity
        self._open[key] = max(severity, self._open.get(key, severity))
        if event.kind == "closed":
            self._closed[self._open.pop(key)] += 1

    def by_severity(self) -> Counter[Severity]:
        """Alerts, open and closed."""
        return self._closed + Counter(self._open.values())

    @property
    def worst(self) -> Severity | None:
        """The worst severity so far; None = no alert was opened."""
        return max(self.by_severity(), default=None)


def watch_until_end(
    run: RunFile,
    limits: Limits,
    report: Callable[[AlertEvent], None],
    *,
    until_ns: int | None = None,
    logs: Sequence[str] = (),
    recorder: Recorder | None = None,
    exporter: Exporter | None = None,
) -> Ending:
    """Follow the run, and log files that match `logs`, and pass every alert change to `report`, in order.

    Returns when the run ends, or at `until_ns`. Closes neither `recorder` nor `exporter`. A recording subscribes to
    gradient buckets now and then, because ranks send them only on demand.
    """
    drain_ns = 0
    answered_ns: int | None = None
    timeout_ms = TICK_MS if run.world_size <= GATHERED_RANKS else UNHURRIED_MS
    with closing(RunFollower(run, limits, logs=logs, recorder=recorder)) as follower:
        while True:
            now_ns = follower.advance(timeout_ms)
            if not follower.idle and now_ns < drain_ns:
                continue
            drain_ns = now_ns + DRAIN_INTERVAL_NS
            if recorder is not None and follower.answered:
                answered_ns = now_ns if answered_ns is None else answered_ns
                follower.want_buckets((now_ns - answered_ns) % BUCKETS_EVERY_NS < BUCKETS_FOR_NS)
            ended = follower.ended
            time_is_up = until_ns is not None and now_ns >= until_ns
            if ended:
                follower.read_last_logs()
            if ended or (time_is_up and follower.answered):
                follower.monitor.evaluate_now()
            events = follower.drain()
            for event in events:
                report(event)
            if exporter is not None and follower.answered:
                exporter.update(follower.monitor, events, now_ns)
            if ended or time_is_up:
                book = follower.monitor.book
                outcome = outcome_of(follower.monitor.state, (*book.open.values(), *book.closed), limits)
                return Ending(outcome, follower.said_goodbye, time_is_up=not ended)
