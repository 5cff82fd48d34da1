"""Frames of a run that is under way, straight from its ranks over ZeroMQ. Can subscribe, and do nothing else."""

from __future__ import annotations

import resource
import secrets
import time
from typing import TYPE_CHECKING, Final

import zmq

from ddpwatch.sources.frames import Frame, Tick
from ddpwatch.wire import LIVE_TOPICS, MAX_FRAME_BYTES, MAX_TOPIC_BYTES, SNAP_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.rundir import Endpoint, RunFile

TICK_MS: Final = 100
"""A tick comes after this much silence."""
RECEIVE_QUEUE_FRAMES: Final = 4096
"""Per rank. At some ten frames a second it bridges minutes in which the viewer is stopped."""
RECONNECT_MS: Final = 100
RECONNECT_MAX_MS: Final = 2000
_SPARE_FILES: Final = 64


class Live:
    """One SUB socket on all ranks of a run. Belongs to the thread that made it, which also closes it.

    Ranks that cannot be reached are no error here: they stay unheard, and the state calls them missing.
    """

    def __init__(self, run: RunFile) -> None:
        """Connect and ask every rank for its history. Returns at once; answers come as frames."""
        self.refused: dict[int, str] = {}
        """Ranks whose address cannot be used, and why."""
        _allow_open_files(len(run.endpoints) + _SPARE_FILES)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_FRAMES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        # Live topics first: what is sent while a snapshot is made must arrive, the snapshot's number sorts it out.
        for topic in (*LIVE_TOPICS, SNAP_PREFIX + secrets.token_hex(8).encode()):
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        for endpoint in run.endpoints:
            self._connect(endpoint)

    def poll(self, timeout_ms: int = TICK_MS) -> Frame | Tick:
        """The next frame, or a tick if none comes in time."""
        try:
            return _frame(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            if self._socket.poll(timeout_ms):
                return _frame(self._socket.recv_multipart())
            return Tick(time.monotonic_ns())

    def __iter__(self) -> Iterator[Frame | Tick]:
        """Frames and ticks, for ever."""
        while True:
            yield self.poll()

    def close(self) -> None:
        """Let go of all ranks. Waits for nothing."""
        self._socket.close()
        self._context.term()

    def _connect(self, endpoint: Endpoint) -> None:
        scheme = endpoint.address.partition("://")[0]
        if scheme != "ipc":
            # Plain TCP does not exist in ddpwatch. TCP with CURVE needs the run's keys, set on the socket before this.
            self.refused[endpoint.rank] = f"listens on {scheme or 'nothing'}, which this version cannot reach"
            return
        try:
            self._socket.connect(endpoint.address)
        except zmq.ZMQError as error:
            self.refused[endpoint.rank] = f"has an address that cannot be used: {error.strerror}"


def _frame(parts: list[bytes]) -> Frame:
    """The parts as a frame. Anything but two parts becomes an empty payload, which counts as unreadable."""
    if len(parts) != 2 or len(parts[0]) > MAX_TOPIC_BYTES:
        return Frame(b"", b"", time.monotonic_ns())
    return Frame(parts[0], parts[1], time.monotonic_ns())


def _allow_open_files(count: int) -> None:
    """Make room for one file descriptor per rank, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
