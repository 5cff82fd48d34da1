"""Attach to a run and feed its frames to a `Monitor` until the run has ended.

Prints nothing and starts nothing: the dashboard, `status` and the headless loop call `advance` and show the result.
"""

from __future__ import annotations

from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING, Final, Protocol

from ddpwatch.core.alerts.model import KEPT_EVENTS
from ddpwatch.core.diagnosis.early_exit import root_cause_pending
from ddpwatch.core.limits import DEFAULTS, Limits
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.recording.schema import ALERTS_TOPIC
from ddpwatch.sources.connections import NO_ANSWER
from ddpwatch.sources.frames import Frame
from ddpwatch.sources.live import TICK_MS, Live

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpwatch.core.alerts.model import AlertEvent
    from ddpwatch.core.alerts.recorded import RecordedAlerts
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.recording.writer import Recorder
    from ddpwatch.rundir import RunFile
    from ddpwatch.session.logs import LogFrames
    from ddpwatch.sources.frames import Tick

HISTORY_S: Final = 3.0
"""Longest wait for the ranks' histories before what has come is judged without the others."""
READING: Final = 5
"""So many times as long is waited while frames are still to be read: thousands of histories take their time."""
SUSPECT_NS: Final = 200_000_000
"""It is looked so often who should be asked for its stack."""
ASK_NS: Final = 20_000_000
"""While histories are awaited, it is looked so often whether all have come."""
NO_MESSAGE_NS: Final = 30_000_000_000
"""Where no process can be seen, and somebody has left, the others are gone, too, if nobody says a word for so long."""
AT_ONCE: Final = 256
"""Frames that are taken in together, if they are there: of thousands of ranks there is always one more."""


class Source(Protocol):
    """Where frames come from: the ranks themselves, or something that sounds like them."""

    known: set[int]
    here: set[int]
    refused: dict[int, str]

    def poll(self, timeout_ms: int) -> Frame | Tick:
        """The next frame, or a tick if none comes in time."""

    def poll_ready(self, most: int) -> list[Frame]:
        """Frames that follow it at once, at most so many."""

    def want_buckets(self, wanted: bool) -> None:
        """Ask for the timing of gradient buckets, or no longer."""

    def want_stacks(self, ranks: frozenset[int]) -> None:
        """Ask these ranks, and no others, what their threads are doing."""

    def close(self) -> None:
        """Let go."""


def _follow_logs(logs: Sequence[str], since_unix_s: float) -> LogFrames:
    from ddpwatch.session.logs import LogFrames

    return LogFrames(logs, since_unix_s)


class RunFollower:
    """A run that is followed: its frames, and the watch that they feed. To be closed by the thread that made it."""

    def __init__(
        self,
        run: RunFile,
        limits: Limits = DEFAULTS,
        *,
        history_s: float = HISTORY_S,
        source: Source | None = None,
        logs: Sequence[str] = (),
        recorder: Recorder | None = None,
        engine: RecordedAlerts | None = None,
    ) -> None:
        """Attach. Nothing is judged before all ranks that can have sent their history, or `history_s` have passed.

        Frames come from the run itself, or from `source`, which is closed with this; and from log files that match
        `logs`. What comes is kept by `recorder`, which the caller closes. With `engine`, alerts are its own.
        """
        places = [Place(endpoint.rank, endpoint.host, endpoint.pid) for endpoint in run.endpoints]
        self.monitor = Monitor(RunState(run.id, run.name, run.world_size, places), limits, engine)
        self._recalled = engine
        self._recorder = recorder
        self._reported: deque[AlertEvent] = deque(maxlen=KEPT_EVENTS)
        if recorder is not None:
            recorder.begin(run, limits)
        self.answered = False
        """Whether judging has begun."""
        self.idle = False
        """Whether nothing came the last time."""
        self._source: Source = Live(run) if source is None else source
        self._history_s = history_s
        self._began_ns: int | None = None
        self._ask_due_ns = 0
        self._suspect_due_ns = 0
        self._stack_ranks: frozenset[int] = frozenset()
        self._refused: dict[int, str] = {}
        self.logs = _follow_logs(logs, run.started_unix_s) if logs else None

    def advance(self, timeout_ms: int = TICK_MS) -> int:
        """Take the next frames or tick in; returns the time of the last on the viewer's monotonic clock."""
        item = self._source.poll(0 if self.monitor.behind else timeout_ms)
        self.idle = not isinstance(item, Frame)
        if isinstance(item, Frame):
            frames = [item, *self._source.poll_ready(AT_ONCE)]
            now_ns = frames[-1].received_ns
            self._take(frames)
        else:
            now_ns = item.now_ns
            (self.monitor if self.answered else self.monitor.state).tick(now_ns, item.viewer_stall_ns)
            if self._began_ns is not None:
                self._began_ns += item.viewer_stall_ns
        if self.logs is not None:
            self._take(list(self.logs.poll(now_ns)))
        if self._recorder is not None:
            self._record_events()
            self._recorder.rest(self.monitor.state, now_ns, self.monitor.book.open.values())
        if self.answered and now_ns >= self._suspect_due_ns:
            self._suspect_due_ns = now_ns + SUSPECT_NS
            self._source.want_stacks(self.monitor.suspects | self._stack_ranks)
            self._update_unreachable()
        if not self.answered and now_ns >= self._ask_due_ns:
            # Not with every frame: with thousands of ranks asking takes longer than reading.
            self._ask_due_ns = now_ns + ASK_NS
            self._update_unreachable()
            self.answered = self._time_is_up(now_ns) or not any(map(self._awaited, self._ranks))
            if self.answered and self._recorder is not None:
                self._recorder.checkpoint_soon()
        return now_ns

    def drain(self) -> list[AlertEvent]:
        """What has happened to the alerts since the last time, in order."""
        if self._recorder is None:
            return self.monitor.book.drain()
        self._record_events()
        events = list(self._reported)
        self._reported.clear()
        return events

    def _record_events(self) -> None:
        """What has happened is recorded when it does, whether or not somebody asks for it."""
        if self._recorder is not None and self.monitor.book.news:
            events = self.monitor.book.drain()
            self._reported.extend(events)
            self._recorder.tell(events, self.monitor.state.now_ns)

    def _take(self, frames: Sequence[Frame]) -> None:
        if self._recalled is None:
            self._take_in(frames)
            return
        for of_alerts, together in groupby(frames, key=_tells_alerts):
            if of_alerts:
                for frame in together:
                    self._recalled.refresh(frame.payload, frame.received_ns)
            else:
                self._take_in(list(together))

    def _take_in(self, frames: Sequence[Frame]) -> None:
        ranks = self._taker.ingest_all([(payload, received_ns) for _, payload, received_ns in frames])
        if self._recorder is not None:
            self._recorder.add(frames, ranks)

    @property
    def _taker(self) -> Monitor | RunState:
        """Histories come one by one. A rule that saw the first alone would have judged those steps without the
        others.
        """
        return self.monitor if self.answered else self.monitor.state

    def _update_unreachable(self) -> None:
        if self._refused != self._source.refused:
            self._refused = dict(self._source.refused)
            self.monitor.state.set_unreachable(self._refused)

    def want_buckets(self, wanted: bool) -> None:
        """Ask the ranks for the timing of their gradient buckets, which they send only on demand."""
        self._source.want_buckets(wanted)

    def read_last_logs(self) -> None:
        """Take in what the log files have got since; a run that ends writes most of what matters in its last moment."""
        if self.logs is not None:
            self._take(list(self.logs.last(self.monitor.state.now_ns)))

    def request_stacks(self, ranks: frozenset[int]) -> None:
        """Ask these ranks, too, what their threads are doing: somebody wants to see it."""
        self._stack_ranks = ranks

    @property
    def said_goodbye(self) -> bool:
        """Whether every rank has."""
        return all(rank.bye is not None for rank in self._ranks)

    @property
    def ended(self) -> bool:
        """Whether nothing more can come: all ranks said goodbye, or no process that can be seen is left, or their relay
        says so.

        Ranks of other nodes cannot be seen. They hold the end back only as long as they are heard, and had their time.
        How one has ended that others complain of is waited for.
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
        return all(over) and (self._had_their_time if here else self._left_alone) and not root_cause_pending(state)

    @property
    def _had_their_time(self) -> bool:
        """Whether those that are no longer heard have been silent for so long that `rank-lost` names them: they may be
        why the others have ended. One that was never heard has as much time after the last word of anybody.
        """
        silent = [rank for rank in self._ranks if not _has_left(rank) and rank.rank not in self._source.refused]
        if not silent:
            return True
        last_ns = max(map(_last_word_ns, self._ranks))
        received_ns = max(last_ns if rank.last_received_ns is None else rank.last_received_ns for rank in silent)
        return self.monitor.state.no_heartbeat_ns(received_ns) > min(
            self.monitor.limits.rank_lost.silent_s * 1e9, NO_MESSAGE_NS
        )

    @property
    def _left_alone(self) -> bool:
        """Whether nobody has said a word for long, and some have left. Where none has, the viewer may be cut off."""
        state = self.monitor.state
        if state.relay_lost or not any(map(_has_left, self._ranks)):
            return False
        return state.no_heartbeat_ns(max(map(_last_word_ns, self._ranks))) > NO_MESSAGE_NS

    def close(self) -> None:
        """Let go of the run; what was not recorded yet is now."""
        if self._recorder is not None:
            self._record_events()
            self._recorder.finish(self.monitor.state, self.monitor.state.now_ns, self.monitor.book.open.values())
            self._recorder = None
        self._source.close()
        if self.logs is not None:
            self.logs.close()

    @property
    def _ranks(self) -> Iterator[RankState]:
        """Those that can be heard; a rank that does not call `install` never will be. One by one: the first of
        thousands answers most questions, and they are asked with every frame.
        """
        known = self._source.known
        return (rank for rank in self.monitor.state.ranks.values() if rank.rank in known)

    def _time_is_up(self, now_ns: int) -> bool:
        """As long as there is something to read, the wait is ours and not the ranks'; but not for ever."""
        if self._began_ns is None:
            self._began_ns = now_ns
        waited_s = (now_ns - self._began_ns) / 1e9
        return waited_s >= self._history_s and (self.idle or waited_s >= READING * self._history_s)

    def _awaited(self, rank: RankState) -> bool:
        why = self._source.refused.get(rank.rank, "")
        # Where nothing answers yet, somebody still may.
        return not (rank.snapped or _has_left(rank)) and (not why or why.startswith(NO_ANSWER))


def _tells_alerts(frame: Frame) -> bool:
    return frame.topic == ALERTS_TOPIC


def _has_left(rank: RankState) -> bool:
    return rank.bye is not None or rank.gone_ns is not None


def _last_word_ns(rank: RankState) -> int:
    """Viewer's clock when something was last heard of a rank, or of its end."""
    return max(rank.last_received_ns or 0, rank.bye_ns or 0, rank.gone_ns or 0)
