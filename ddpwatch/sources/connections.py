"""Connections to the ranks of a run: sockets, addresses, and the outcome of each CURVE handshake.

Ranks on this node are reached by their socket files, others over TCP with the run's keys, and with a relay's ticket all
of them through the relay.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq

from ddpwatch import encryption, rundir
from ddpwatch.errors import AccessRefused, NoSuchRun
from ddpwatch.wire import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.rundir import Endpoint, RunFile

RECEIVE_QUEUE_FRAMES: Final = 4096
"""Receive queue per rank, in frames. At about ten frames a second it covers minutes in which the viewer is stopped."""
RELAYED_FRAMES: Final = 64
"""Receive queue per rank through a relay, in frames; all ranks share one queue there."""
RECONNECT_MS: Final = 100
"""Milliseconds until the first attempt to reconnect."""
RECONNECT_MAX_MS: Final = 2000
"""Upper bound of that time, which doubles with each attempt (exponential backoff)."""
BROKEN_OFF: Final = 3
"""Consecutive handshakes broken off by the listener that show that it has another key."""
PROBE_S: Final = 3.0
"""Default timeout of `probe` in seconds."""
PROBES: Final = 8
"""Max ranks that `probe` tries."""
AT_ONCE_S: Final = 3.0
"""Handshakes that end within this many seconds were broken off; later ones timed out."""
_EVENTS: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MONITOR_EVENT: Final = struct.Struct("=Hi")
"""Event and value in libzmq's monitor format. pyzmq's own parser imports asyncio, a tenth of a command's start time."""

NOT_LET_IN: Final = "does not accept the key"
NO_ANSWER: Final = "does not answer at"
OTHER_KEY: Final = "has another key than this ticket, or another program listens there"


BAD_KEY: Final = "the viewer key in the ticket is not a CURVE key"


class UnreachableError(Exception):
    """A rank has no address that is usable from here. The text gives the reason."""


class Connections:
    """Factory of sockets and their connections to the ranks of one run."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run: RunFile) -> None:
        self._context = context
        self._viewer_secret_key = run.viewer_secret_key
        self._relay = run.relay
        relayed = RELAYED_FRAMES * run.world_size if run.relay is not None else 0
        self._queue_frames = max(RECEIVE_QUEUE_FRAMES, relayed)
        self._node = rundir.node_id()

    def new_socket(self) -> zmq.Socket[bytes]:
        """Create a SUB socket: it can subscribe, but not send."""
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, self._queue_frames)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        return socket

    def connect(self, socket: zmq.Socket[bytes], endpoint: Endpoint) -> str:
        """Connect the socket to a rank and return the address. Raises `UnreachableError`."""
        relay = self._relay
        try:
            if relay is not None:
                address = relay.tcp_address
                self._connect_there(socket, address, relay.server_key, endpoint.host)
            elif self.is_here(endpoint):
                address = endpoint.address
                encryption.connect_ipc(socket, address)
            else:
                address = endpoint.tcp_address
                self._connect_there(socket, address, endpoint.server_key, endpoint.host)
        except (zmq.ZMQError, ValueError) as error:
            reason = error.strerror if isinstance(error, zmq.ZMQError) else f"its key {error}"
            raise UnreachableError(f"has an unusable address: {reason}") from None
        return address

    def is_here(self, endpoint: Endpoint) -> bool:
        """Whether a rank is reached by its socket file."""
        if not endpoint.address.startswith("ipc://") or endpoint.node != self._node:
            return False
        # Another container may have the same node id and its files elsewhere.
        return not endpoint.tcp_address or Path(endpoint.address.removeprefix("ipc://")).exists()

    def _connect_there(self, socket: zmq.Socket[bytes], address: str, server_key: str, host: str) -> None:
        if not address.startswith("tcp://"):
            raise UnreachableError(f"is on host {host} and does not listen on TCP")
        if not server_key or not self._viewer_secret_key:
            raise UnreachableError("listens on TCP, but its key is not in the ticket")
        if not encryption.available():
            raise UnreachableError("listens on TCP, but this libzmq was built without CURVE encryption")
        if not encryption.is_secret_key(self._viewer_secret_key):
            raise UnreachableError(f"listens on TCP, but {BAD_KEY}")
        encryption.connect(socket, address, server_key, self._viewer_secret_key)


class Handshakes:
    """Monitor of a socket's handshakes. Belongs to the socket's thread, and is closed before the socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        place = f"inproc://handshakes/{secrets.token_hex(8)}"
        socket.monitor(place, _EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.LINGER, 0)
        # Unlimited, because libzmq's thread would block at a limit; events are few and small.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(place)
        self._began_s: dict[str, float] = {}
        """By address, monotonic time in seconds at which the current handshake began."""
        self._failed: Counter[str] = Counter()

    def has_answered(self, address: str) -> bool:
        """Whether a connection to the address was ever established, even if the handshake failed."""
        return address in self._began_s

    def news(self) -> Iterator[tuple[str, str]]:
        """New outcomes as pairs of address and reason; an empty reason means that the handshake succeeded."""
        while True:
            try:
                event_frame, endpoint = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, _ = _MONITOR_EVENT.unpack(event_frame)
            address = endpoint.decode(errors="replace")
            if event == zmq.EVENT_CONNECTED:
                self._began_s[address] = time.monotonic()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                del self._failed[address]
                yield address, ""
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                yield address, NOT_LET_IN
            elif time.monotonic() - self._began_s.get(address, 0.0) < AT_ONCE_S:
                self._failed[address] += 1
                if self._failed[address] == BROKEN_OFF:
                    yield address, OTHER_KEY

    def close(self) -> None:
        """Stop monitoring."""
        self._socket.disable_monitor()
        self._monitor.close()


def probe(run: RunFile, timeout_s: float = PROBE_S) -> None:
    """Check that a rank or the relay accepts connections; raises `AccessRefused`, or `NoSuchRun` if none answers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connections = Connections(context, run)
    socket = connections.new_socket()
    handshakes = Handshakes(context, socket)
    refused: dict[str, str] = {}
    tried: set[str] = set()
    try:
        for endpoint in run.endpoints[: PROBES if run.relay is None else 1]:
            try:
                tried.add(connections.connect(socket, endpoint))
            except UnreachableError as error:
                refused[f"rank {endpoint.rank}"] = str(error)
        deadline_s = time.monotonic() + timeout_s
        while tried and time.monotonic() < deadline_s:
            for address, reason in handshakes.news():
                if not reason:
                    return
                refused[address] = reason
                tried.discard(address)
            time.sleep(0.005)
    finally:
        handshakes.close()
        context.destroy(linger=0)
    name = f"run {run.id[:8]} ({run.name})"
    if refused:
        where, why = next(iter(refused.items()))
        problem = BAD_KEY if why.endswith(BAD_KEY) else f"{where} {why}"
        new = "with `ddpwatch ticket` on its hosts" if run.relay is None else "from the host of `ddpwatch relay`"
        raise AccessRefused(f"{name} cannot be watched: {problem}; get a new ticket {new}")
    where = ", ".join(sorted(tried)[:3]) or "any address"
    silent = f"no rank of {name} answers" if run.relay is None else f"the relay of {name} does not answer"
    raise NoSuchRun(f"{silent} at {where}: the run has ended, or this host cannot reach it")
