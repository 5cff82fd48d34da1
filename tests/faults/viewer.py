"""A viewer as the wire format describes it: follow the live topics, ask for the history, join the two by `seq`."""

from __future__ import annotations

import secrets
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from ddpwatch import encryption, rundir, wire
from tests.builders.fake_rank import steps_of
from tests.builders.training import wait_for


class Viewer:
    """Subscribes to one rank. Use it in a `with` block."""

    def __init__(self, address: str, *, topics=wire.LIVE_TOPICS, history: bool = True) -> None:
        self.snap: wire.Snap | None = None
        self.live: list[wire.Message] = []
        """Everything after the snapshot, or all there was."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
        self._socket.connect(address)
        for topic in topics:
            self._socket.subscribe(topic)
        if history:
            self._socket.subscribe(wire.SNAP_PREFIX + secrets.token_hex(8).encode())

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._context.destroy(linger=0)

    def read(self, until, timeout_s: float = 30.0):
        """Take messages until `until(self)` is true, and return what it said."""
        deadline_s = time.monotonic() + timeout_s
        while not (value := until(self)):
            assert time.monotonic() < deadline_s, f"not seen in {[type(each).__name__ for each in self.live[-9:]]}"
            if self._socket.poll(100):
                message = wire.decode(self._socket.recv_multipart()[1])
                if isinstance(message, wire.Snap):
                    self.snap = message
                    self.live = [each for each in self.live if each.seq > message.seq]
                else:
                    self.live.append(message)
        return value

    def refused(self, times: int) -> None:
        """Wait until the socket has failed to connect this number of times."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
        for _ in range(times):
            assert self._monitor.poll(30_000), "no attempt to connect was seen"
            recv_monitor_message(self._monitor)

    def has(self, kind: type, count: int = 1):
        """A condition for `read`: the snapshot and this number of live messages of a kind have arrived."""
        return lambda viewer: viewer.snap is not None and len(viewer.of(kind)) >= count

    def of(self, kind: type) -> list:
        return [message for message in self.live if isinstance(message, kind)]

    def notes(self) -> list[wire.Note]:
        """Those of the history, and those since."""
        return [*(self.snap.notes if self.snap is not None else []), *self.of(wire.Note)]

    def steps(self) -> list[int]:
        """The indices of all steps, history first."""
        history = self.snap.steps if self.snap is not None else []
        live = [
            step for message in self.live if isinstance(message, wire.Beat | wire.Steps) for step in steps_of(message)
        ]
        return [step.index for step in (*history, *live)]

    def trained(self, messages: int = 1):
        """A condition for `read`: this number of messages with steps has arrived."""
        return lambda viewer: (
            viewer.snap is not None
            and sum(bool(steps_of(message)) for message in viewer.live if isinstance(message, wire.Beat | wire.Steps))
            >= messages
        )


def contiguous(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def find_run(base, world_size: int = 1, **fields) -> rundir.RunFile:
    """The only run there is, once all its ranks are known and it has the given fields."""

    def look():
        runs, _ = rundir.scan(base)
        whole = len(runs) == 1 and len(runs[0].endpoints) == world_size == runs[0].world_size
        return runs[0] if whole and all(getattr(runs[0], name) == value for name, value in fields.items()) else None

    return wait_for(look)


def hasty(context, run: rundir.RunFile, address: str) -> zmq.Socket:
    """A viewer with the key of the run's first rank, at this address, which sends a heartbeat every millisecond."""
    socket = context.socket(zmq.XSUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 60_000)
    socket.setsockopt(zmq.CURVE_SERVERKEY, run.endpoints[0].server_key.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, run.viewer_secret_key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, encryption.public_of(run.viewer_secret_key).encode())
    socket.connect(address)
    return socket
