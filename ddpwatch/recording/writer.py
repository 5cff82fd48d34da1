"""Recorder: writes the frames of a run, checkpoints and alerts into a recording.

A thread of its own compresses and writes portions, so that a slow disk does not delay the viewer. While the disk is
full, portions wait in a bounded queue in memory, and writing is retried.
"""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from dataclasses import dataclass, field, replace
from threading import Condition, Thread
from typing import TYPE_CHECKING, Final

import msgspec

from ddpwatch.core.alerts.recorded import write_alerts
from ddpwatch.core.limits import DEFAULTS, changed
from ddpwatch.core.state.state_checkpoint import checkpoint_messages
from ddpwatch.recording.schema import ALERTS_TOPIC, NO_RANK, SHARD_RANKS, Columns, RecordedBy
from ddpwatch.recording.sqlite_store import RecordingFile
from ddpwatch.rundir import Endpoint
from ddpwatch.version import VERSION
from ddpwatch.wire import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from ddpwatch.core.alerts.model import Alert, AlertEvent, Finding
    from ddpwatch.core.limits import Limits
    from ddpwatch.core.state.run import RunState
    from ddpwatch.rundir import RunFile
    from ddpwatch.sources.frames import Frame

PORTION_NS: Final = 500_000_000
"""Nanoseconds of frames in a portion. One may be twice as long, so that a killed recorder loses at most a second."""
PORTION_FRAMES: Final = 16_384
"""Frames after which a portion is written early."""
PORTION_BYTES: Final = 8 << 20
"""Bytes of payloads after which a portion is written early."""
SILENCE_NS: Final = 5_000_000_000
"""Nanoseconds without frames after which the time is recorded nevertheless."""
CHECKPOINT_FRAMES: Final = 2048
"""Min frames between two checkpoints."""
CHECKPOINT_FRAMES_PER_RANK: Final = 16
"""Min frames per rank between two checkpoints: a checkpoint of many ranks is large."""
CHECKPOINT_NS: Final = 60_000_000_000
"""Nanoseconds after which a checkpoint is due anyway."""
MAX_TEXTS: Final = 64
"""Max open alerts whose changed text is written in a portion; those written longest ago come first."""
MAX_OPEN: Final = 1024
"""Max open alerts that are written after a checkpoint."""
TEXTS_AT_ONCE: Final = 32
"""Alerts in one frame, whose size is limited."""
BACKLOG_BYTES: Final = 64 << 20
"""Max bytes that wait in memory to be written; beyond, the oldest portions are dropped and counted."""
RETRY_S: Final = 1.0
"""Seconds until a failed write is tried again."""


@dataclass
class Portion:
    """What is written in one transaction."""

    run: RunFile
    began_ns: int
    number: int
    recorded_by: RecordedBy = field(default_factory=RecordedBy)
    shards: dict[int, Columns] = field(default_factory=dict)
    alerts: list[tuple[int, AlertEvent]] = field(default_factory=list)
    texts: Columns = field(default_factory=Columns)
    checkpoint: tuple[int, int, list[tuple[int, bytes]]] | None = None
    until_ns: int = 0
    """Time up to which the run was followed."""
    missed: int = 0
    """Number of frames dropped before this portion."""
    frames: int = 0
    bytes: int = 0


class Recorder:
    """Writer of one recording, which may hold several attempts of a job. Used by the thread that follows the run."""

    def __init__(
        self,
        path: Path,
        *,
        keep_s: float | None = None,
        max_bytes: int | None = None,
        say: Callable[[str], object] = lambda _line: None,
    ) -> None:
        """Open or create the file; raises if another process writes it, or it is not a recording.

        Content older than `keep_s` is removed, and the oldest beyond `max_bytes`. When writing fails, and when it works
        again, the writer's thread calls `say` with a line about it.
        """
        self.path = path
        self.write_error = ""
        """Why writing fails at the moment; empty = it works."""
        self.dropped_frames = 0
        """Number of frames dropped because they could not be written."""
        self.reason = ""
        """The last error of SQLite or the system; empty = none."""
        self.written = 0
        self._say = say
        self._file = RecordingFile(path, keep_s=keep_s, max_bytes=max_bytes)
        # Not before existing content, even if the clock was set back meanwhile.
        self._unix_ns = max(time.time_ns(), self._file.last_ns + 1) - time.monotonic_ns()
        self.goes_on = self._file.next_position > 0
        self._portion: Portion | None = None
        self._position = self._file.next_position
        self._number = self._file.next_portion
        self._recorded_by = RecordedBy(VERSION)
        self._world = 0
        self._placed: set[int] = set()
        self._due_ns = 0
        self._since_checkpoint = 0
        self._checkpoint_due_ns = 0
        self._texts: dict[tuple[str, str], tuple[Finding, bool | None]] = {}
        """Last written text by alert, the most recent last."""
        self._backlog: deque[Portion] = deque()
        self._wake = Condition()
        self._closing = False
        self._thread = Thread(target=self._write_all, name="ddpwatch-recorder", daemon=True)
        self._thread.start()

    @property
    def incomplete(self) -> bool:
        """Whether frames, or the end of the run, are missing in the file."""
        return bool(self.dropped_frames or self.write_error)

    def begin(self, run: RunFile, limits: Limits = DEFAULTS) -> None:
        """Start or continue the attempt of a run, with the thresholds of its rules."""
        now_ns = time.monotonic_ns()
        self._enqueue(now_ns)
        self._recorded_by = RecordedBy(VERSION, changed(limits))
        self._portion = self._next(run, self._unix_ns + now_ns)
        self._world = run.world_size
        self._placed = {endpoint.rank for endpoint in run.endpoints}
        self._due_ns = now_ns + PORTION_NS
        self.checkpoint_soon()

    def add(self, frames: Sequence[Frame], ranks: Iterable[int | None]) -> None:
        """Record frames, each with the rank that it claims to be from."""
        assert self._portion is not None, "begin() comes first"
        if frames and frames[0].received_ns >= self._due_ns + PORTION_NS:
            # `rest` was not called for long: a portion that spans all of it could not be found by time.
            self._enqueue(self._due_ns)
            self._due_ns = frames[0].received_ns + PORTION_NS
        portion, unix_ns, world, size = self._portion, self._unix_ns, self._world, 0
        shards = portion.shards
        for position, ((topic, payload, received_ns), rank) in enumerate(
            zip(frames, ranks, strict=True), self._position
        ):
            shard = rank // SHARD_RANKS if rank is not None and 0 <= rank < world and topic != b"log" else NO_RANK
            kept = shards.get(shard)
            if kept is None:
                kept = shards[shard] = Columns()
            kept.positions.append(position)
            kept.times_ns.append(unix_ns + received_ns)
            kept.topics.append(topic)
            kept.payloads.append(payload)
            size += len(payload)
        self._position += len(frames)
        portion.frames += len(frames)
        portion.bytes += size

    def add_events(self, events: Sequence[AlertEvent], now_ns: int) -> None:
        """Record changes of alerts."""
        if not events or self._portion is None:
            return
        for event in events:
            in_file = replace(event, alert=self._in_file_time(event.alert))
            self._portion.alerts.append((self._unix_ns + now_ns, in_file))
            self._texts.pop(event.alert.key, None)
            if event.kind != "closed":
                self._texts[event.alert.key] = _text(event.alert)

    def checkpoint_soon(self) -> None:
        """Make a checkpoint at the next opportunity."""
        self._checkpoint_due_ns = 0

    def flush(self, state: RunState, now_ns: int, alerts: Iterable[Alert] = ()) -> None:
        """Queue the portion if it is due. To be called after frames were ingested, with the state and the open alerts.

        Texts of alerts are recorded once per portion if they changed: figures in them change between two events.
        """
        portion = self._portion
        if portion is None:
            return
        full = portion.frames >= PORTION_FRAMES or portion.bytes >= PORTION_BYTES
        if not full and now_ns < self._due_ns:
            return
        if portion.frames or portion.alerts or portion.texts.positions or now_ns >= self._due_ns + SILENCE_NS:
            self._since_checkpoint += portion.frames
            self._complete(portion, state, now_ns, alerts)
            self._due_ns = now_ns + PORTION_NS

    def finish(self, state: RunState, now_ns: int, alerts: Iterable[Alert] = ()) -> None:
        """End the attempt: write the last portion with a final checkpoint."""
        if self._portion is not None:
            self._due_ns = 0
            self.checkpoint_soon()
            self._complete(self._portion, state, now_ns, alerts)
            self._enqueue(now_ns)
            self._portion = None
            self._texts.clear()

    def close(self) -> None:
        """Write what is left and close the file. Waits for the disk, unless it is full."""
        self._enqueue(0)
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._file.close()

    def _complete(self, portion: Portion, state: RunState, now_ns: int, alerts: Iterable[Alert]) -> None:
        enough = max(CHECKPOINT_FRAMES, CHECKPOINT_FRAMES_PER_RANK * len(state.ranks))
        if self._since_checkpoint >= enough or now_ns >= self._checkpoint_due_ns:
            messages = [(self._unix_ns + at_ns, payload) for at_ns, payload in checkpoint_messages(state)]
            if messages:
                self._since_checkpoint, self._checkpoint_due_ns = 0, now_ns + CHECKPOINT_NS
                portion.checkpoint = self._unix_ns + now_ns, self._position - 1, messages
                portion.bytes += sum(len(payload) for _, payload in messages)
                self._add_late_ranks(portion, state)
        if portion.checkpoint is None:
            order = {key: place for place, key in enumerate(self._texts)}
            changed = [alert for alert in alerts if self._texts.get(alert.key) != _text(alert)]
            changed.sort(key=lambda alert: order.get(alert.key, -1))
            self._keep_texts(portion, changed[:MAX_TEXTS], now_ns)
        self._enqueue(now_ns, anyway=True)
        if portion.checkpoint is not None and self._portion is not None:
            # In the portion after it: readers that start at the checkpoint continue there.
            self._keep_texts(self._portion, list(alerts)[:MAX_OPEN], now_ns)

    def _keep_texts(self, portion: Portion, alerts: Sequence[Alert], now_ns: int) -> None:
        for first in range(0, len(alerts), TEXTS_AT_ONCE):
            together = alerts[first : first + TEXTS_AT_ONCE]
            payload = write_alerts([self._in_file_time(alert) for alert in together])
            if len(payload) > MAX_FRAME_BYTES:
                continue
            portion.texts.positions.append(max(self._position - 1, 0))
            portion.texts.times_ns.append(self._unix_ns + now_ns)
            portion.texts.topics.append(ALERTS_TOPIC)
            portion.texts.payloads.append(payload)
            portion.bytes += len(payload)
            for alert in together:
                self._texts.pop(alert.key, None)
                self._texts[alert.key] = _text(alert)

    def _add_late_ranks(self, portion: Portion, state: RunState) -> None:
        """Add ranks to the description that registered after the run file was read, by their `Hello`."""
        late = [rank for rank in state.ranks.values() if rank.hello is not None and rank.rank not in self._placed]
        if late:
            self._placed.update(rank.rank for rank in late)
            endpoints = [Endpoint(rank.rank, rank.host, "", rank.pid, 0.0, "") for rank in late]
            together = sorted([*portion.run.endpoints, *endpoints], key=lambda endpoint: endpoint.rank)
            portion.run = msgspec.structs.replace(portion.run, endpoints=together)

    def _in_file_time(self, alert: Alert) -> Alert:
        """Convert the alert's times from the monotonic clock to the recording's."""
        since, last, closed = (
            None if moment is None else replace(moment, now_ns=self._unix_ns + moment.now_ns)
            for moment in (alert.since, alert.last, alert.closed)
        )
        assert since is not None
        assert last is not None
        return replace(alert, since=since, last=last, closed=closed)

    def _next(self, run: RunFile, began_ns: int) -> Portion:
        portion = Portion(run, began_ns, self._number, self._recorded_by)
        self._number += 1
        return portion

    def _enqueue(self, now_ns: int, *, anyway: bool = False) -> None:
        portion = self._portion
        if portion is None or not (anyway or portion.frames or portion.alerts or portion.texts.positions):
            return
        portion.until_ns = self._unix_ns + now_ns if now_ns else 0
        self._portion = self._next(portion.run, portion.began_ns)
        with self._wake:
            self._backlog.append(portion)
            # Neither the first portion, which may be being written, nor the last.
            while len(self._backlog) > 2 and sum(waiting.bytes for waiting in self._backlog) > BACKLOG_BYTES:
                dropped, heir = self._backlog[1], self._backlog[2]
                del self._backlog[1]
                self.dropped_frames += dropped.frames
                heir.missed += dropped.frames + dropped.missed
                heir.alerts[:0] = dropped.alerts
            self._wake.notify()

    # --- writer's thread ---

    def _write_all(self) -> None:
        while True:
            with self._wake:
                while not self._backlog and not self._closing:
                    self._wake.wait()
                if not self._backlog:
                    return
                portion = self._backlog[0]
            if self._write(portion):
                with self._wake:
                    self._backlog.popleft()
                continue
            with self._wake:
                if self._closing:
                    self.dropped_frames += sum(waiting.frames for waiting in self._backlog)
                    return
                self._wake.wait_for(lambda: self._closing, RETRY_S)

    def _write(self, portion: Portion) -> bool:
        """Write a portion; returns whether it is done with."""
        try:
            self._file.put(portion)
        except (sqlite3.Error, OSError) as error:
            self.reason = getattr(error, "strerror", None) or str(error)
            self._report_error(f"cannot write {self.path}: {self.reason}; retrying, and watching continues")
            return False
        except Exception as error:  # noqa: BLE001 - a thread that dies silently would lose all that follows
            self.dropped_frames += portion.frames
            self.reason = f"{type(error).__name__}: {error}"
            self._report_error(f"cannot write a part of {self.path}: {self.reason}")
            return True
        self.written += portion.frames
        if portion.missed:
            # Readers can restart after the gap from a checkpoint.
            self.checkpoint_soon()
        if self.write_error:
            lost = f"; {self.dropped_frames} frames were lost" if self.dropped_frames else "; nothing was lost"
            self.write_error = ""
            self._say(f"writing {self.path} works again{lost}")
        return True

    def _report_error(self, text: str) -> None:
        if not self.write_error:
            self._say(text)
        self.write_error = text


def _text(alert: Alert) -> tuple[Finding, bool | None]:
    """The part of an alert that is recorded again when it changes."""
    return alert.finding, alert.stale
