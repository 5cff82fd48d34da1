"""Keeps what is followed: frames as they came, moments to begin at, and alerts as they were told, in a recording.

Whoever follows the run only hands things over. A thread of its own compresses them and writes them once a second, so
that a slow disk delays nobody; while a disk is full it keeps what it can in memory, says so, and goes on trying.
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
from ddpwatch.core.state.checkpoint import checkpoint_messages
from ddpwatch.recording.schema import ALERTS_TOPIC, NO_RANK, SHARD_RANKS, Columns, RecordedBy
from ddpwatch.recording.storage import Shelf
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
"""What has come is written so often. A portion that was not handed on in time is at most twice as long: a recorder that
is killed has lost no more than a second, and what the disk had not taken yet."""
PORTION_FRAMES: Final = 16_384
PORTION_BYTES: Final = 8 << 20
"""… or as soon as so much has come."""
SILENCE_NS: Final = 5_000_000_000
"""So often it is written down that nothing has come."""
CHECKPOINT_FRAMES: Final = 2048
CHECKPOINT_FRAMES_PER_RANK: Final = 16
"""One can begin to read after so many frames, the larger of the two: a checkpoint of many ranks is large, too."""
CHECKPOINT_NS: Final = 60_000_000_000
"""… or after so much time."""
MAX_TEXTS: Final = 64
"""Open alerts whose new text is kept in a portion; of more than that, those that have waited longest."""
MAX_OPEN: Final = 1024
"""… and after a checkpoint, where all are kept."""
TEXTS_AT_ONCE: Final = 32
"""In one frame, which must not become too large."""
BACKLOG_BYTES: Final = 64 << 20
"""What cannot be written waits in memory, but not more than this; then the oldest is given up, and counted."""
RETRY_S: Final = 1.0


@dataclass
class Portion:
    """What is written together, or not at all."""

    run: RunFile
    began_ns: int
    number: int
    judged: RecordedBy = field(default_factory=RecordedBy)
    shards: dict[int, Columns] = field(default_factory=dict)
    alerts: list[tuple[int, AlertEvent]] = field(default_factory=list)
    texts: Columns = field(default_factory=Columns)
    """How open alerts read."""
    checkpoint: tuple[int, int, list[tuple[int, bytes]]] | None = None
    """Time, position and messages."""
    until_ns: int = 0
    """The run was followed up to here."""
    missed: int = 0
    """Frames before this that were given up."""
    frames: int = 0
    bytes: int = 0


class Recorder:
    """One recording, which may hold several attempts of a job. Used by the thread that follows the run."""

    def __init__(
        self,
        path: Path,
        *,
        keep_s: float | None = None,
        max_bytes: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Open the file, or make it; raises if somebody else is writing it, or it is no recording.

        What is older than `keep_s` is let go, and the oldest when it has more than `max_bytes`. When writing fails,
        and when it goes on, `say` is called with a line about it, by a thread of ours.
        """
        self.path = path
        self.trouble = ""
        """Why nothing is written at the moment, in words; empty = it is."""
        self.given_up = 0
        """Frames that were given up because they could not be written."""
        self.reason = ""
        """Why something could not be written the last time, in the words of who refused it; empty = all could."""
        self.written = 0
        """Frames on disk."""
        self._say = say
        self._shelf = Shelf(path, keep_s=keep_s, max_bytes=max_bytes)
        # Not before what is there already, even if the clock was set back meanwhile.
        self._unix_ns = max(time.time_ns(), self._shelf.last_ns + 1) - time.monotonic_ns()
        self.goes_on = self._shelf.next_position > 0
        """Whether frames were in it before."""
        self._portion: Portion | None = None
        self._position = self._shelf.next_position
        self._number = self._shelf.next_portion
        self._judged = RecordedBy(VERSION)
        self._world = 0
        self._placed: set[int] = set()
        self._due_ns = 0
        self._since_checkpoint = 0
        self._checkpoint_due_ns = 0
        self._texts: dict[tuple[str, str], tuple[Finding, bool | None]] = {}
        """By alert, what is kept of it; the one that was kept last is last."""
        self._backlog: deque[Portion] = deque()
        self._wake = Condition()
        self._closing = False
        self._thread = Thread(target=self._write_all, name="ddpwatch-recorder", daemon=True)
        self._thread.start()

    @property
    def incomplete(self) -> bool:
        """Whether something that came is not in the file: frames, or after the end how it ended."""
        return bool(self.given_up or self.trouble)

    def begin(self, run: RunFile, limits: Limits = DEFAULTS) -> None:
        """What comes from now on is of this run, judged by these limits. If it is in the recording already, it is gone
        on with.
        """
        now_ns = time.monotonic_ns()
        self._hand_on(now_ns)
        self._judged = RecordedBy(VERSION, changed(limits))
        self._portion = self._next(run, self._unix_ns + now_ns)
        self._world = run.world_size
        self._placed = {endpoint.rank for endpoint in run.endpoints}
        self._due_ns = now_ns + PORTION_NS
        self.checkpoint_soon()

    def add(self, frames: Iterable[Frame], ranks: Iterable[int | None]) -> None:
        """Keep frames, each with the rank that it claims to be of."""
        assert self._portion is not None, "begin() comes first"
        shards, unix_ns, world, position = self._portion.shards, self._unix_ns, self._world, self._position
        first, size = position, 0
        for (topic, payload, received_ns), rank in zip(frames, ranks, strict=True):
            if received_ns >= self._due_ns + PORTION_NS:
                # Nobody has rested for long: a portion that spans it all would be found by no time in it.
                self._count(position - first, size)
                first, size = position, 0
                self._hand_on(self._due_ns)
                self._due_ns = received_ns + PORTION_NS
                shards = self._portion.shards
            shard = rank // SHARD_RANKS if rank is not None and 0 <= rank < world and topic != b"log" else NO_RANK
            kept = shards.get(shard)
            if kept is None:
                kept = shards[shard] = Columns()
            kept.positions.append(position)
            kept.times_ns.append(unix_ns + received_ns)
            kept.topics.append(topic)
            kept.payloads.append(payload)
            position += 1
            size += len(payload)
        self._count(position - first, size)

    def _count(self, frames: int, size: int) -> None:
        """So many frames, with so many bytes, have been added to the portion."""
        assert self._portion is not None
        self._position += frames
        self._portion.frames += frames
        self._portion.bytes += size

    def tell(self, events: Sequence[AlertEvent], now_ns: int) -> None:
        """Keep changes of alerts."""
        if not events or self._portion is None:
            return
        for event in events:
            in_file = replace(event, alert=self._in_file_time(event.alert))
            self._portion.alerts.append((self._unix_ns + now_ns, in_file))
            self._texts.pop(event.alert.key, None)
            if event.kind != "closed":
                self._texts[event.alert.key] = _text(event.alert)

    def checkpoint_soon(self) -> None:
        """One should be able to begin about here."""
        self._checkpoint_due_ns = 0

    def rest(self, state: RunState, now_ns: int, alerts: Iterable[Alert] = ()) -> None:
        """Hand on what is due. To be called when something was taken in, with the state and the open alerts after it.

        What an alert reads is kept once in a portion if it has changed: between two changes that are worth telling its
        figures go on.
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
        """No more comes of this run: keep the last of it, and how it ended."""
        if self._portion is not None:
            self._due_ns = 0
            self.checkpoint_soon()
            self._complete(self._portion, state, now_ns, alerts)
            self._hand_on(now_ns)
            self._portion = None
            self._texts.clear()

    def close(self) -> None:
        """Write what is left, and leave one file. Waits for the disk, but not for a full one."""
        self._hand_on(0)
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._shelf.close()

    def _complete(self, portion: Portion, state: RunState, now_ns: int, alerts: Iterable[Alert]) -> None:
        enough = max(CHECKPOINT_FRAMES, CHECKPOINT_FRAMES_PER_RANK * len(state.ranks))
        if self._since_checkpoint >= enough or now_ns >= self._checkpoint_due_ns:
            messages = [(self._unix_ns + at_ns, payload) for at_ns, payload in checkpoint_messages(state)]
            if messages:
                self._since_checkpoint, self._checkpoint_due_ns = 0, now_ns + CHECKPOINT_NS
                portion.checkpoint = self._unix_ns + now_ns, self._position - 1, messages
                portion.bytes += sum(len(payload) for _, payload in messages)
                self._welcome(portion, state)
        if portion.checkpoint is None:
            order = {key: place for place, key in enumerate(self._texts)}
            changed = [alert for alert in alerts if self._texts.get(alert.key) != _text(alert)]
            changed.sort(key=lambda alert: order.get(alert.key, -1))
            self._keep_texts(portion, changed[:MAX_TEXTS], now_ns)
        self._hand_on(now_ns, anyway=True)
        if portion.checkpoint is not None and self._portion is not None:
            # After it, and not with it: who begins there reads on from there.
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

    def _welcome(self, portion: Portion, state: RunState) -> None:
        """Ranks that came after the run file was read have told themselves where they are."""
        late = [rank for rank in state.ranks.values() if rank.hello is not None and rank.rank not in self._placed]
        if late:
            self._placed.update(rank.rank for rank in late)
            endpoints = [Endpoint(rank.rank, rank.host, "", rank.pid, 0.0, "") for rank in late]
            together = sorted([*portion.run.endpoints, *endpoints], key=lambda endpoint: endpoint.rank)
            portion.run = msgspec.structs.replace(portion.run, endpoints=together)

    def _in_file_time(self, alert: Alert) -> Alert:
        """Times of our own clock mean nothing to who reads it later."""
        since, last, closed = (
            None if moment is None else replace(moment, now_ns=self._unix_ns + moment.now_ns)
            for moment in (alert.since, alert.last, alert.closed)
        )
        assert since is not None
        assert last is not None
        return replace(alert, since=since, last=last, closed=closed)

    def _next(self, run: RunFile, began_ns: int) -> Portion:
        portion = Portion(run, began_ns, self._number, self._judged)
        self._number += 1
        return portion

    def _hand_on(self, now_ns: int, *, anyway: bool = False) -> None:
        portion = self._portion
        if portion is None or not (anyway or portion.frames or portion.alerts or portion.texts.positions):
            return
        portion.until_ns = self._unix_ns + now_ns if now_ns else 0
        self._portion = self._next(portion.run, portion.began_ns)
        with self._wake:
            self._backlog.append(portion)
            # Neither the first one, which may be under way, nor the last.
            while len(self._backlog) > 2 and sum(waiting.bytes for waiting in self._backlog) > BACKLOG_BYTES:
                dropped, heir = self._backlog[1], self._backlog[2]
                del self._backlog[1]
                self.given_up += dropped.frames
                heir.missed += dropped.frames + dropped.missed
                heir.alerts[:0] = dropped.alerts
            self._wake.notify()

    # --- the thread that writes ---

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
                    self.given_up += sum(waiting.frames for waiting in self._backlog)
                    return
                self._wake.wait_for(lambda: self._closing, RETRY_S)

    def _write(self, portion: Portion) -> bool:
        """Whether we are done with it."""
        try:
            self._shelf.put(portion)
        except (sqlite3.Error, OSError) as error:
            self.reason = _reason(error)
            self._say_trouble(f"cannot write {self.path}: {self.reason}; watching goes on, writing is tried again")
            return False
        except Exception as error:  # noqa: BLE001 - a thread that ends unheard would lose all that follows
            self.given_up += portion.frames
            self.reason = f"{type(error).__name__}: {error}"
            self._say_trouble(f"cannot write a part of {self.path}: {self.reason}")
            return True
        self.written += portion.frames
        if portion.missed:
            # Who reads across the gap would miss what was in it; from here on nobody need.
            self.checkpoint_soon()
        if self.trouble:
            lost = f"; {self.given_up} frames could not be kept" if self.given_up else "; nothing was lost"
            self.trouble = ""
            self._print(f"{self.path} is written again{lost}")
        return True

    def _say_trouble(self, text: str) -> None:
        if not self.trouble:
            self._print(text)
        self.trouble = text

    def _print(self, text: str) -> None:
        if self._say is not None:
            self._say(text)


def _reason(error: Exception) -> str:
    """SQLite's words, or those of the system."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _text(alert: Alert) -> tuple[Finding, bool | None]:
    """What is kept anew when it changes."""
    return alert.finding, alert.stale
