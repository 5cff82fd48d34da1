"""Attach to a run and feed its frames to a `Monitor` until the run has ended.

Prints nothing and starts nothing: the dashboard, `status` and the headless loop call `advance` and show the result.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from ddpwatch.core.alerts.model import KEPT_EVENTS
from ddpwatch.core.diagnosis.early_exit import root_cause_pending
from ddpwatch.core.limits import DEFAULTS, Limits
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.sources.connections import NO_ANSWER
from ddpwatch.sources.frames import TICK_MS, Frame
from ddpwatch.sources.live import Live

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpwatch.core.alerts.model import AlertEvent
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.recording.writer import Recorder
    from ddpwatch.rundir import RunFile
    from ddpwatch.sources.frames import Tick

HISTORY_S: Final = 3.0
"""Max seconds to wait for the ranks' histories before rules are evaluated without the missing ones."""
READING: Final = 5
"""Factor on `HISTORY_S` while frames are still unread: thousands of histories take longer."""
SUSPECT_NS: Final = 200_000_000
"""Nanoseconds between updates of the ranks whose stacks are requested."""
ASK_NS: Final = 20_000_000
"""Nanoseconds between checks whether all histories have arrived."""
NO_MESSAGE_NS: Final = 30_000_000_000
"""Nanoseconds without any message after which remote ranks count as gone, if another rank has left."""
AT_ONCE: Final = 256
"""Max frames that are ingested together: with thousands of ranks there is always one more."""


class Source(Protocol):
    """Source of frames: the ranks, a recording or a simulator."""

    known: set[int]
    here: set[int]
    refused: dict[int, str]

    def poll(self, timeout_ms: int) -> Frame | Tick:
        """The next frame, or a tick after the timeout."""

    def poll_ready(self, most: int) -> list[Frame]:
        """Further frames that are available at once, up to a maximum."""

    def want_buckets(self, wanted: bool) -> None:
        """Subscribe to the timing of gradient buckets, or unsubscribe."""

    def want_stacks(self, ranks: frozenset[int]) -> None:
        """Request the stacks of these ranks only."""

    def close(self) -> None:
        """Close all connections."""


class RunFollower:
    """Feeds the frames of a run to its `Monitor`. To be closed by the thread that created it."""

    def __init__(
        self,
        run: RunFile,
        limits: Limits = DEFAULTS,
        *,
        history_s: float = HISTORY_S,
        source: Source | None = None,
        logs: Sequence[str] = (),
        recorder: Recorder | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        """Attach. Rules are not evaluated before all reachable ranks have sent their history, or `history_s` have
        passed; a `monitor` that is passed in has its history already.

        Frames come from the run itself, or from `source`, which is closed with this; and from log files that match
        `logs`. They go to `recorder`, which the caller closes.
        """
        if monitor is None:
            places = [Place(endpoint.rank, endpoint.host, endpoint.pid) for endpoint in run.endpoints]
            self.monitor = Monitor(RunState(run.id, run.name, run.world_size, places), limits)
        else:
            self.monitor = monitor
        self._recorder = recorder
        self._reported: deque[AlertEvent] = deque(maxlen=KEPT_EVENTS)
        if recorder is not None:
            recorder.begin(run, limits)
        self.answered = monitor is not None
        """Whether rules are being evaluated."""
        self.idle = False
        """Whether the last poll brought no frame."""
        self._source: Source = Live(run) if source is None else source
        self._history_s = history_s
        self._began_ns: int | None = None
        self._ask_due_ns = 0
        self._suspect_due_ns = 0
        self._stack_ranks: frozenset[int] = frozenset()
        self._refused: dict[int, str] = {}
        self.logs = None
        if logs:
            # Compiling the log patterns takes 12 ms.
            from ddpwatch.session.log_source import LogFrames

            self.logs = LogFrames(logs, run.started_unix_s)

    def advance(self, timeout_ms: int = TICK_MS) -> int:
        """Process the next frames or tick; returns the time of the last, on the viewer's monotonic clock."""
        item = self._source.poll(0 if self.monitor.behind else timeout_ms)
        self.idle = not isinstance(item, Frame)
        if isinstance(item, Frame):
            frames = [item, *self._source.poll_ready(AT_ONCE)]
            now_ns = frames[-1].received_ns
            self._ingest(frames)
        else:
            now_ns = item.now_ns
            (self.monitor if self.answered else self.monitor.state).tick(now_ns, item.viewer_stall_ns)
            if self._began_ns is not None:
                self._began_ns += item.viewer_stall_ns
        if self.logs is not None:
            self._ingest(list(self.logs.poll(now_ns)))
        if self._recorder is not None:
            self._record_events()
            self._recorder.flush(self.monitor.state, now_ns, self.monitor.book.open.values())
        if self.answered and now_ns >= self._suspect_due_ns:
            self._suspect_due_ns = now_ns + SUSPECT_NS
            self._source.want_stacks(self.monitor.suspects | self._stack_ranks)
            self._update_unreachable()
        if not self.answered and now_ns >= self._ask_due_ns:
            # Not with every frame: with thousands of ranks the check takes longer than reading.
            self._ask_due_ns = now_ns + ASK_NS
            self._update_unreachable()
            self.answered = self._time_is_up(now_ns) or not any(map(self._awaited, self._ranks))
            if self.answered and self._recorder is not None:
                self._recorder.checkpoint_soon()
        return now_ns

    def drain(self) -> list[AlertEvent]:
        """Changes of alerts since the last call, in order."""
        if self._recorder is None:
            return self.monitor.book.drain()
        self._record_events()
        events = list(self._reported)
        self._reported.clear()
        return events

    def _record_events(self) -> None:
        """Record changes of alerts when they happen, even if `drain` is never called."""
        if self._recorder is not None and self.monitor.book.news:
            events = self.monitor.book.drain()
            self._reported.extend(events)
            self._recorder.add_events(events, self.monitor.state.now_ns)

    def _ingest(self, frames: Sequence[Frame]) -> None:
        # Histories arrive one by one: a rule that saw only the first would evaluate those steps without the others.
        target = self.monitor if self.answered else self.monitor.state
        ranks = target.ingest_all([(payload, received_ns) for _, payload, received_ns in frames])
        if self._recorder is not None:
            self._recorder.add(frames, ranks)

    def _update_unreachable(self) -> None:
        if self._refused != self._source.refused:
            self._refused = dict(self._source.refused)
            self.monitor.state.set_unreachable(self._refused)

    def want_buckets(self, wanted: bool) -> None:
        """Subscribe to the timing of gradient buckets, which ranks send only on demand."""
        self._source.want_buckets(wanted)

    def read_last_logs(self) -> None:
        """Read the log files to their end; a run writes most of what matters in its last moment."""
        if self.logs is not None:
            self._ingest(list(self.logs.last(self.monitor.state.now_ns)))

    def request_stacks(self, ranks: frozenset[int]) -> None:
        """Request the stacks of these ranks too, for display."""
        self._stack_ranks = ranks

    @property
    def said_goodbye(self) -> bool:
        """Whether every rank has sent its goodbye."""
        return all(rank.bye is not None for rank in self._ranks)

    @property
    def ended(self) -> bool:
        """Whether the run has ended: all ranks sent a goodbye, no observable process is left, or the relay reports it.

        Processes on other nodes are not observable: they delay the end only while they send, and until `rank-lost`
        names them. The exit of a rank that others blame is waited for.
        """
        state, here = self.monitor.state, self._source.here
        if state.relay is not None and state.relay.ended:
            return True
        if self.said_goodbye:
            return not root_cause_pending(state)
        over = (
            _has_left(rank) or (rank.rank not in here and state.condition(rank) in {"missing", "silent"})
            for rank in self._ranks
        )
        return all(over) and (self._silent_long_enough if here else self._left_alone) and not root_cause_pending(state)

    @property
    def _silent_long_enough(self) -> bool:
        """Whether ranks without a heartbeat have been silent long enough for `rank-lost` to name them: they may be why
        the others ended. A rank that never sent anything gets the same time after the last message of any rank.
        """
        silent = [rank for rank in self._ranks if not _has_left(rank) and rank.rank not in self._source.refused]
        if not silent:
            return True
        last_ns = max(map(_last_message_ns, self._ranks))
        received_ns = max(last_ns if rank.last_received_ns is None else rank.last_received_ns for rank in silent)
        return self.monitor.state.no_heartbeat_ns(received_ns) > min(
            self.monitor.limits.rank_lost.silent_s * 1e9, NO_MESSAGE_NS
        )

    @property
    def _left_alone(self) -> bool:
        """Whether some ranks left and none sent anything for long. If none left, the viewer may be disconnected."""
        state = self.monitor.state
        if state.relay_lost or not any(map(_has_left, self._ranks)):
            return False
        return state.no_heartbeat_ns(max(map(_last_message_ns, self._ranks))) > NO_MESSAGE_NS

    def close(self) -> None:
        """Finish the recording and close the source."""
        if self._recorder is not None:
            self._record_events()
            self._recorder.finish(self.monitor.state, self.monitor.state.now_ns, self.monitor.book.open.values())
            self._recorder = None
        self._source.close()
        if self.logs is not None:
            self.logs.close()

    @property
    def _ranks(self) -> Iterator[RankState]:
        """Ranks that have registered, lazily: the first of thousands often decides, and this runs with every frame."""
        known = self._source.known
        return (rank for rank in self.monitor.state.ranks.values() if rank.rank in known)

    def _time_is_up(self, now_ns: int) -> bool:
        """Whether the wait for histories is over. With frames unread the viewer is the slow one, and waits longer."""
        if self._began_ns is None:
            self._began_ns = now_ns
        waited_s = (now_ns - self._began_ns) / 1e9
        return waited_s >= self._history_s and (self.idle or waited_s >= READING * self._history_s)

    def _awaited(self, rank: RankState) -> bool:
        why = self._source.refused.get(rank.rank, "")
        # An address that does not answer yet may still do so.
        return not (rank.snapped or _has_left(rank)) and (not why or why.startswith(NO_ANSWER))


def _has_left(rank: RankState) -> bool:
    return rank.bye is not None or rank.gone_ns is not None


def _last_message_ns(rank: RankState) -> int:
    """Viewer's monotonic nanoseconds of the last message of a rank, or about its exit."""
    return max(rank.last_received_ns or 0, rank.bye_ns or 0, rank.gone_ns or 0)
