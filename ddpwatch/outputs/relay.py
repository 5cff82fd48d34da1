"""Relay: forwards the frames of a whole run through one TCP port, with CURVE on both sides, and stores none.

To the ranks it is a viewer, which can only subscribe. To viewers it is like a rank: they can only subscribe, and only
those with the key of its ticket get a byte. It adds a heartbeat of its own, so that a lost relay is not taken for lost
ranks, and what it sees of processes on its node.
"""

from __future__ import annotations

import os
import socket as sockets
import time
from typing import TYPE_CHECKING, Final

import zmq
from msgspec import DecodeError, Struct, msgpack, structs

from ddpwatch import encryption, wire
from ddpwatch.errors import DdpwatchError, UsageError, WireError
from ddpwatch.outputs.prometheus.server import join_address, listen, read_address
from ddpwatch.rundir import RelayPoint
from ddpwatch.sources.find_run import read_again
from ddpwatch.sources.live import GRACE_NS, NOBLOCK, allow_open_files
from ddpwatch.sources.processes import ProcessExits
from ddpwatch.sources.relay_topics import read
from ddpwatch.sources.relay_upstream import MAX_SEPARATE, Upstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.rundir import Endpoint, RunFile

SEND_QUEUE: Final = 64
"""Frames queued for each viewer and rank: half a minute at 1 Hz. A stopped viewer then loses frames."""
MIN_QUEUE: Final = 16_384
"""Minimum number of frames queued for each viewer, which small runs get."""
TURN_MS: Final = 100
"""Maximum wait, in milliseconds, for a frame; then exits of processes and the time of the heartbeat are checked."""
BETWEEN_TURNS_S: Final = 0.002
"""Pause, in seconds, in which frames gather: polling all sockets for each frame costs more than forwarding it."""
AT_ONCE: Final = 256
"""Maximum number of frames, subscriptions or keys handled before the next socket."""
BEAT_NS: Final = 1_000_000_000
"""Interval, in nanoseconds, of the relay's heartbeats and of its checks for new ranks and for the end."""
REMOTE_GONE_NS: Final = 10_000_000_000
"""Ranks of other nodes are gone after this time, in ns, without a frame, once all ranks of this node are gone."""
GIVE_UP_NS: Final = 600_000_000_000
"""Time, in nanoseconds, without any frame after which a run has ended, where no process can be seen."""
GOODBYE_MS: Final = 1000
"""Time, in milliseconds, for the last frames to reach the viewers."""
BACKLOG: Final = 64
"""Connections that may wait to be accepted."""
SPARE_FILES: Final = 1024
"""File descriptors for viewers, up to three each, and for ranks with a connection of their own."""
_SUBSCRIBED: Final = frozenset(wire.TOPICS[kind] for kind in (wire.Beat, wire.Gpus, wire.Bye))
_LIVE: Final = frozenset(wire.LIVE_TOPICS)
_ON_DEMAND: Final = (wire.SNAP_PREFIX, wire.STACK_PREFIX, wire.STACKS_PREFIX, wire.TOPICS[wire.Buckets])
_WITH_MORE: Final = NOBLOCK | int(zmq.SNDMORE)
_GONE: Final = wire.TOPICS[wire.Gone]


class _Header(Struct):
    """The fields of a frame that a relay reads."""

    rank: int
    t: str = ""


_header_decoder: Final = msgpack.Decoder(_Header)


class Relay:
    """Serves one run. Belongs to the thread that made it, which calls `turn` until `ended` is set."""

    def __init__(self, run: RunFile, bind: str, advertise: str | None, roster_grew: Callable[[], None]) -> None:
        """Listen at `bind`, HOST:PORT, and connect to all ranks; `advertise` is the address for viewers, if it differs.

        `roster_grew` is called when further ranks have joined, which changes the ticket.
        """
        if run.relay is not None:
            raise UsageError(
                "this is already the ticket of a relay; start the relay on a host that can reach the ranks"
            )
        if not encryption.available():
            raise DdpwatchError(
                "libzmq was built without CURVE encryption, which a relay needs; reinstall pyzmq from a wheel"
            )
        self._run, self._roster_grew = run, roster_grew
        advertised = None if advertise is None else read_address(advertise, "--advertise")
        self._listener = listen(bind, "--bind", BACKLOG)
        host, port = self._listener.getsockname()[:2]
        self.address = join_address(*advertised) if advertised else join_address(_reachable(host), port)
        """Address for viewers."""
        allow_open_files(len(run.endpoints) + 3 * MAX_SEPARATE + SPARE_FILES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        viewer_public_key, self._viewer_secret_key = encryption.new_keys()
        self._server_key, secret_key = encryption.new_keys()
        self._keeper = encryption.ZapHandler(self._context, viewer_public_key)
        self._front = self._open_front(secret_key, max(MIN_QUEUE, SEND_QUEUE * run.world_size))
        self._poller = zmq.Poller()
        self._poller.register(self._keeper.socket, zmq.POLLIN)
        self._poller.register(self._front, zmq.POLLIN)
        self._process_exits = ProcessExits()
        if (ends := self._process_exits.ends.fileno()) is not None:
            self._poller.register(ends, zmq.POLLIN)
        self._upstream = Upstream(self._context, run, self._poller)
        self._here: set[int] = set()
        self._left: set[int] = set()
        """Ranks that have sent a goodbye."""
        self._gone: set[int] = set()
        self._reported: dict[tuple[int, str], bytes] = {}
        """The latest report of each kind about ranks that ended or were stopped, for viewers that come later."""
        self._beat_ns = 0
        self._received_ns: dict[int, int] = {}
        self._known: dict[int, Endpoint] = {}
        self.passed = 0
        """Number of forwarded frames, with or without viewers."""
        self.ended = ""
        """How the run ended, as text; empty while it runs."""
        self._connect_all(run.endpoints)

    @property
    def ticket(self) -> RunFile:
        """What a viewer needs to watch the run through this relay, without the ranks' own keys."""
        known = sorted(self._known.values(), key=lambda endpoint: endpoint.rank)
        endpoints = [structs.replace(endpoint, tcp_address="", server_key="") for endpoint in known]
        point = RelayPoint(f"tcp://{self.address}", self._server_key)
        return structs.replace(self._run, endpoints=endpoints, viewer_secret_key=self._viewer_secret_key, relay=point)

    @property
    def refused(self) -> int:
        """Number of connections refused for a wrong key."""
        return self._keeper.refused

    @property
    def unreachable(self) -> dict[int, str]:
        """Ranks that cannot be reached from here, and why."""
        return self._upstream.refused

    def turn(self) -> None:
        """Poll all sockets once and handle what has arrived."""
        ready = self._poller.poll(TURN_MS)
        now_ns = time.monotonic_ns()
        for which, _ in ready:
            if which is self._keeper.socket:
                self._keeper.answer(AT_ONCE)
            elif which is self._front:
                self._read_subscriptions()
            elif isinstance(which, zmq.Socket) and not which.closed:
                self._pass_on(which, now_ns)
        self._upstream.ask_next(now_ns)
        self._process_exits.notice(now_ns)
        if self._process_exits.check_due:
            self._process_exits.check(now_ns, grace_ns=GRACE_NS)
        while (message := self._process_exits.next(now_ns)) is not None:
            self._forward_process_event(message.payload)
        if now_ns >= self._beat_ns:
            self._check(now_ns)
        elif ready:
            time.sleep(BETWEEN_TURNS_S)

    def close(self) -> None:
        """Close all sockets; if the run has ended, after the viewers have received that."""
        self._process_exits.ends.close()
        self._context.destroy(linger=GOODBYE_MS if self.ended else 0)
        self._listener.close()

    def _open_front(self, secret_key: str, send_queue: int) -> zmq.Socket[bytes]:
        front = self._context.socket(zmq.XPUB)
        front.setsockopt(zmq.SNDHWM, send_queue)
        # A viewer whose connection broke subscribes again, perhaps before the old connection times out.
        front.setsockopt(zmq.XPUB_VERBOSE, 1)
        encryption.listen_with(front, secret_key)
        front.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))
        front.bind(f"tcp://127.0.0.1:{self._listener.getsockname()[1]}")  # the descriptor says where, not this
        return front

    def _read_subscriptions(self) -> None:
        for _ in range(AT_ONCE):
            try:
                request = self._front.recv(NOBLOCK)
            except zmq.Again:
                return
            subscribed, topic = request[:1] == b"\x01", request[1:]
            subscription = read(topic)
            if subscription is not None:
                (self._upstream.subscribe if subscribed else self._upstream.unsubscribe)(topic, subscription)
            elif subscribed and topic == _GONE:
                for payload in self._reported.values():
                    self._send(_GONE, payload)
                self._beat_ns = 0

    def _pass_on(self, socket: zmq.Socket[bytes], now_ns: int) -> None:
        """Forward what has arrived. Anything but a topic followed by a payload is dropped.

        Parts are recognized by content: asking ZeroMQ whether another part follows costs more than reading it.
        """
        receive, topic = socket.recv, b""
        for _ in range(AT_ONCE):
            try:
                topic = topic or receive(NOBLOCK)
                if not _is_topic(topic):
                    topic = b""
                    continue
                payload = receive(NOBLOCK)
            except zmq.Again:
                return
            if _is_topic(payload):
                # The previous frame had one part only.
                topic = payload
                continue
            self._send(topic, payload)
            self.passed += 1
            if topic in _SUBSCRIBED:
                self._note(payload, now_ns)
            elif topic.startswith(wire.SNAP_PREFIX):
                self._upstream.count_answer()
            topic = b""

    def _send(self, topic: bytes, payload: bytes) -> None:
        # A viewer that cannot keep up loses frames and sees that in their sequence numbers.
        self._front.send(topic, _WITH_MORE)
        self._front.send(payload, NOBLOCK)

    def _note(self, payload: bytes, now_ns: int) -> None:
        """Keep when each rank was received last, and which ranks sent a goodbye."""
        try:
            header = _header_decoder.decode(payload)
            bye = wire.decode(payload) if header.t == "bye" else None
        except (DecodeError, UnicodeDecodeError, RecursionError, WireError):
            return
        if header.rank not in self._known:
            return
        self._received_ns[header.rank] = now_ns
        if isinstance(bye, wire.Bye):
            self._left.add(bye.rank)
            # Without a sequence number, for viewers that come later.
            self._reported[bye.rank, "bye"] = wire.encode(structs.replace(bye, seq=0))

    def _forward_process_event(self, payload: bytes) -> None:
        """Forward what was seen of a process, and keep it."""
        self._send(_GONE, payload)
        message = wire.decode(payload)
        if isinstance(message, wire.Held):
            self._reported[message.rank, "held"] = payload
        elif isinstance(message, wire.Gone):
            self._gone.add(message.rank)
            # For viewers that come later.
            self._reported[message.rank, "gone"] = wire.encode(structs.replace(message, ago_ns=0))
        else:
            self._left.add(message.rank)
            self._reported.setdefault((message.rank, "bye"), payload)

    def _check(self, now_ns: int) -> None:
        """Once a second: connect new ranks, check for the end, send a heartbeat."""
        self._beat_ns = now_ns + BEAT_NS
        self._process_exits.check(now_ns, grace_ns=GRACE_NS)
        self._connect_new_ranks()
        self.ended = self._how_ended(now_ns)
        message = wire.Relay(rank=0, seq=0, host=wire.fit(sockets.gethostname()), ended=bool(self.ended))
        self._send(wire.TOPICS[wire.Relay], wire.encode(message))

    def _connect_new_ranks(self) -> None:
        if len(self._known) >= self._run.world_size and not self.unreachable:
            return
        late = [
            endpoint
            for endpoint in read_again(self._run).endpoints
            if self._known.get(endpoint.rank) != endpoint
            and (endpoint.rank not in self._known or endpoint.rank in self.unreachable)
        ]
        if late:
            self._connect_all(late)
            self._roster_grew()

    def _connect_all(self, endpoints: list[Endpoint]) -> None:
        now_ns = time.monotonic_ns()
        for endpoint in endpoints:
            self._known[endpoint.rank] = endpoint
            self._received_ns.setdefault(endpoint.rank, now_ns)
        self._upstream.listen_to(endpoints)
        self._here |= self._process_exits.follow(endpoints)

    def _how_ended(self, now_ns: int) -> str:
        waiting = self._known.keys() - self._left
        if not waiting:
            return "all ranks have exited"
        waiting -= self._gone
        no_heartbeat_since_ns = min((now_ns - self._received_ns[rank] for rank in waiting), default=GIVE_UP_NS)
        if self._here and not waiting & self._here and no_heartbeat_since_ns >= REMOTE_GONE_NS:
            return "its processes are gone"
        return "no frame for ten minutes" if not self._here and no_heartbeat_since_ns >= GIVE_UP_NS else ""


def _is_topic(part: bytes) -> bool:
    """Whether it is a subscribed topic. A payload never is: it begins with the byte of a msgpack map."""
    return len(part) <= wire.MAX_TOPIC_BYTES and (part in _LIVE or part.startswith(_ON_DEMAND))


def _reachable(host: str) -> str:
    """The host name in place of a wildcard address, which no viewer can connect to."""
    return sockets.gethostname() if host in {"0.0.0.0", "::"} else host  # noqa: S104 - the user has said so
