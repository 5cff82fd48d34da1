"""The agent's thread: it owns every socket, and is the only one that talks to the outside."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import zmq

from ddpwatch import wire
from ddpwatch.agent.beat import Pulse
from ddpwatch.agent.home import Home
from ddpwatch.agent.recorder import to_step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpwatch.agent.recorder import Recorder

FLUSH_S: Final = 0.25
FLUSH_MANY_S: Final = 1.0
MANY_RANKS: Final = 256
HELLO_EVERY_S: Final = 5.0
SEND_QUEUE: Final = 1000
# How long the last words may take to leave when a viewer is stuck.
GOODBYE_MS: Final = 200
MAX_STEPS_PER_FLUSH: Final = 2048
MAX_SNAPS_PER_FLUSH: Final = 16
# libzmq aborts the process when it runs out of descriptors while it sets itself up.
SPARE_DESCRIPTORS: Final = 24

_MESSAGES: Final[dict[str, type[Any]]] = {
    "note": wire.Note,
    "loader": wire.Loader,
    "checksum": wire.Checksum,
    "buckets": wire.Buckets,
}


class Publisher(threading.Thread):
    """Drains the ring, beats, and answers subscriptions for snapshots. Reads nothing else from anybody.

    A viewer can only subscribe; there is no message that it could send.
    """

    def __init__(self, recorder: Recorder, describe: Callable[[], dict[str, Any]], base: Path, name: str) -> None:
        super().__init__(name="ddpwatch", daemon=True)
        self._recorder = recorder
        self._describe = describe
        self._home = Home(base, name)
        self._stop = threading.Event()
        self._farewell = ("closed", "")
        self._seq = 0
        self._steps: deque[wire.Step] = deque(maxlen=wire.MAX_SNAP_STEPS)
        self._recent: dict[str, deque[Any]] = {
            "note": deque(maxlen=64),
            "loader": deque(maxlen=16),
            "checksum": deque(maxlen=64),
        }
        self._socket: zmq.Socket[bytes] | None = None
        self._wake_read, self._wake_write = os.pipe()
        self.address = ""
        """Where viewers find this rank; empty until it listens."""

    def stop(self, reason: str, text: str = "", *, wait_s: float = 2.0) -> None:
        """Send what is left, say why, and end. Waits a moment at the most: training does not hang on a viewer."""
        self._farewell = (reason, text)
        self._stop.set()
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")
        if self.is_alive() and threading.current_thread() is not self:
            self.join(wait_s)

    def run(self) -> None:
        """Serve until stopped or switched off."""
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - the training must go on whatever happens here
            self._recorder.switch.trip("publisher", error)
        finally:
            with contextlib.suppress(Exception):
                self._home.leave()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _serve(self) -> None:
        self._pulse = Pulse(self._recorder)
        context = zmq.Context(io_threads=1)
        try:
            while not self._stop.is_set() and self._recorder.switch.on:
                if not self._home.find():
                    self._stop.wait(FLUSH_S)
                    continue
                self._publish(context)
        finally:
            context.destroy(linger=GOODBYE_MS)

    def _publish(self, context: zmq.Context[Any]) -> None:
        """Listen at the home that was found, until the end or until the ranks meet somewhere else."""
        _ensure_spare_descriptors()
        socket = context.socket(zmq.XPUB)
        try:
            socket.linger = GOODBYE_MS
            socket.sndhwm = SEND_QUEUE
            socket.maxmsgsize = wire.MAX_TOPIC_BYTES + 1
            self.address = self._home.open(socket)
            self._socket = socket
            self._loop(socket)
        finally:
            self._socket = None
            self.address = ""
            socket.close()

    def _loop(self, socket: zmq.Socket[bytes]) -> None:
        flush_s = FLUSH_MANY_S if self._home.identity.world_size > MANY_RANKS else FLUSH_S
        next_flush_s = next_hello_s = monotonic()
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while self._recorder.switch.on and not self._stop.is_set() and not self._home.outdated:
            now_s = monotonic()
            if now_s >= next_hello_s:
                self._send(self._hello(self._next_seq()))
                next_hello_s = now_s + HELLO_EVERY_S
            if now_s >= next_flush_s:
                self._flush()
                self._home.tend()
                next_flush_s = max(next_flush_s + flush_s, now_s)
            if dict(poller.poll(max(0, round((next_flush_s - monotonic()) * 1000)))).get(socket):
                self._answer(socket)
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        if self._home.outdated:
            return
        self._flush()
        switch = self._recorder.switch
        reason, text = self._farewell if switch.on else ("off", switch.reason)
        self._send(wire.Bye(rank=self._rank, seq=self._next_seq(), reason=reason, text=text, mono_ns=perf_counter_ns()))

    @property
    def _rank(self) -> int:
        return self._home.identity.rank

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _send(self, message: wire.Message, topic: bytes | None = None) -> None:
        assert self._socket is not None
        # A viewer that cannot keep up loses messages; it sees the gap in `seq`. Nothing waits for it.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(
                (topic or wire.TOPICS[type(message)], wire.encode(message)), flags=zmq.NOBLOCK, copy=True
            )

    def _hello(self, seq: int) -> wire.Hello:
        return self._home.hello(seq, self._describe())

    def _flush(self) -> None:
        """Everything that has happened since the last time, then a beat."""
        rank = self._rank
        for tag, fields in self._recorder.events.drain(MAX_STEPS_PER_FLUSH):
            kind = _MESSAGES[tag]
            kept = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
            message = kind(rank=rank, seq=self._next_seq(), **kept)
            if tag in self._recent:
                self._recent[tag].append(message)
            self._send(message)
        steps = [to_step(record) for record in self._recorder.steps.drain(MAX_STEPS_PER_FLUSH)]
        if steps:
            self._steps.extend(steps)
            self._send(wire.Steps(rank=rank, seq=self._next_seq(), steps=steps))
        self._send(self._pulse.beat(rank, self._next_seq()))

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        """Take note of subscriptions; a new `snap/<nonce>` gets the history, once."""
        for _ in range(MAX_SNAPS_PER_FLUSH):
            try:
                asked = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            subscribed, topic = asked[:1] == b"\x01", asked[1:]
            if topic == wire.TOPICS[wire.Buckets]:
                self._recorder.want_buckets = subscribed
            elif subscribed and topic.startswith(wire.SNAP_PREFIX) and len(topic) <= wire.MAX_TOPIC_BYTES:
                self._flush()
                self._send(self._snap(), topic)

    def _snap(self) -> wire.Snap:
        rank = self._rank
        return wire.Snap(
            rank=rank,
            seq=self._seq,
            hello=self._hello(self._seq),
            beat=self._pulse.beat(rank, self._seq),
            steps=list(self._steps),
            notes=list(self._recent["note"]),
            loaders=list(self._recent["loader"]),
            checksums=list(self._recent["checksum"]),
        )


def _ensure_spare_descriptors() -> None:
    """Refuse to start where libzmq could run out of descriptors, because it would take the process down."""
    spare: list[int] = []
    try:
        spare.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(SPARE_DESCRIPTORS))
    except OSError as error:
        raise RuntimeError(
            f"fewer than {SPARE_DESCRIPTORS} free file descriptors ({error.strerror}); raise `ulimit -n`"
        ) from None
    finally:
        for handle in spare:
            os.close(handle)
