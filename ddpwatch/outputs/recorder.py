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

from ddpwatch.core.snapshot import snapshot
from ddpwatch.outputs.shelf import Shelf
from ddpwatch.recording import NO_RANK, SHARD_RANKS, Entry
from ddpwatch.wire import encode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddpwatch.core.alerts import AlertEvent
    from ddpwatch.core.state import RunState
    from ddpwatch.rundir import RunFile
    from ddpwatch.sources.frames import Frame

PORTION_NS: Final = 900_000_000
"""What has come is written so often: a recorder that is killed has lost less than a second."""
PORTION_FRAMES: Final = 16_384
PORTION_BYTES: Final = 8 << 20
"""… or as soon as so much has come."""
CHECKPOINT_FRAMES: Final = 4096
CHECKPOINT_NS: Final = 60_000_000_000
"""One can begin to read after so many frames or so much time, whichever is sooner."""
BACKLOG_BYTES: Final = 64 << 20
"""What cannot be written waits in memory, but not more than this; then the oldest is given up, and counted."""
RETRY_S: Final = 1.0


class _Claim(msgspec.Struct):
    rank: int


_claim: Final = msgspec.msgpack.Decoder(_Claim)


@dataclass
class Portion:
    """What is written together, or not at all."""

    run: RunFile
    began_ns: int
    number: int
    shards: dict[int, list[Entry]] = field(default_factory=dict)
    alerts: list[tuple[int, AlertEvent]] = field(default_factory=list)
    checkpoint: tuple[int, int, list[bytes]] | None = None
    """Time, position and messages."""
    frames: int = 0
    bytes: int = 0


class Recorder:
    """One recording, which may hold several attempts of a job. Used by the thread that follows the run."""

    def __init__(self, path: Path, *, keep_s: float | None = None, max_bytes: int | None = None) -> None:
        """Open the file, or make it; raises if somebody else is writing it, or it is no recording.

        What is older than `keep_s` is let go, and the oldest when it has more than `max_bytes`.
        """
        self.path = path
        self.trouble = ""
        """Why nothing is written at the moment, in words; empty = it is."""
        self.given_up = 0
        """Frames that were given up because they could not be written."""
        self.written = 0
        """Frames on disk."""
        self._shelf = Shelf(path, keep_s=keep_s, max_bytes=max_bytes)
        self._unix_ns = time.time_ns() - time.monotonic_ns()
        self._portion: Portion | None = None
        self._position = self._shelf.next_position
        self._number = self._shelf.next_portion
        self._due_ns = 0
        self._since_checkpoint = CHECKPOINT_FRAMES
        self._checkpoint_due_ns = 0
        self._backlog: deque[Portion] = deque()
        self._wake = Condition()
        self._closing = False
        self._thread = Thread(target=self._write_all, name="ddpwatch-recorder", daemon=True)
        self._thread.start()

    def begin(self, run: RunFile) -> None:
        """What comes from now on is of this run. One that is in the recording already is gone on with."""
        self._hand_on()
        began_ns = self._unix_ns + time.monotonic_ns()
        # Addresses and keys are nobody's business who is given the file.
        endpoints = [msgspec.structs.replace(endpoint, address="") for endpoint in run.endpoints]
        self._portion = self._next(msgspec.structs.replace(run, endpoints=endpoints), began_ns)
        self._since_checkpoint = CHECKPOINT_FRAMES

    def add(self, frame: Frame) -> None:
        """Keep a frame."""
        portion = self._portion
        assert portion is not None, "begin() comes first"
        try:
            shard = _claim.decode(frame.payload).rank // SHARD_RANKS if frame.topic != b"log" else NO_RANK
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            shard = NO_RANK
        entry = Entry(self._position, self._unix_ns + frame.received_ns, frame.topic, frame.payload)
        self._position += 1
        entries = portion.shards.get(shard)
        if entries is None:
            portion.shards[shard] = [entry]
        else:
            entries.append(entry)
        portion.frames += 1
        portion.bytes += len(frame.payload)

    def tell(self, events: Sequence[AlertEvent], now_ns: int) -> None:
        """Keep changes of alerts."""
        if events and self._portion is not None:
            self._portion.alerts.extend((self._unix_ns + now_ns, self._in_file_time(event)) for event in events)

    def rest(self, state: RunState, now_ns: int) -> None:
        """Hand on what is due. To be called when something was taken in, with the state after it."""
        portion = self._portion
        if portion is None:
            return
        full = portion.frames >= PORTION_FRAMES or portion.bytes >= PORTION_BYTES
        if not full and now_ns < self._due_ns:
            return
        self._due_ns = now_ns + PORTION_NS
        self._since_checkpoint += portion.frames
        if self._since_checkpoint >= CHECKPOINT_FRAMES or now_ns >= self._checkpoint_due_ns:
            self._since_checkpoint, self._checkpoint_due_ns = 0, now_ns + CHECKPOINT_NS
            messages = [encode(message) for message in snapshot(state)]
            portion.checkpoint = self._unix_ns + now_ns, self._position - 1, messages
            portion.bytes += sum(map(len, messages))
        self._hand_on()

    def close(self) -> None:
        """Write what is left, and leave one file. Waits for the disk, but not for a full one."""
        self._hand_on()
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._shelf.close()

    def _in_file_time(self, event: AlertEvent) -> AlertEvent:
        """Times of our own clock mean nothing to who reads it later."""
        alert = event.alert
        since, last, closed = (
            None if moment is None else replace(moment, now_ns=self._unix_ns + moment.now_ns)
            for moment in (alert.since, alert.last, alert.closed)
        )
        assert since is not None
        assert last is not None
        return replace(event, alert=replace(alert, since=since, last=last, closed=closed))

    def _next(self, run: RunFile, began_ns: int) -> Portion:
        portion = Portion(run, began_ns, self._number)
        self._number += 1
        return portion

    def _hand_on(self) -> None:
        portion = self._portion
        if portion is None or not (portion.frames or portion.alerts):
            return
        self._portion = self._next(portion.run, portion.began_ns)
        with self._wake:
            self._backlog.append(portion)
            while sum(waiting.bytes for waiting in self._backlog) > BACKLOG_BYTES and len(self._backlog) > 1:
                # Not the first one: it may be under way.
                dropped = self._backlog[1]
                del self._backlog[1]
                self.given_up += dropped.frames
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
                self.written += portion.frames
            elif self._closing:
                self.given_up += sum(waiting.frames for waiting in self._backlog)
                return
            else:
                time.sleep(RETRY_S)

    def _write(self, portion: Portion) -> bool:
        try:
            self._shelf.put(portion)
        except (sqlite3.Error, OSError) as error:
            self.trouble = f"cannot write {self.path}: {error}"
            return False
        self.trouble = ""
        return True
