"""Live source: frames of a running job, received from its ranks over ZeroMQ SUB sockets.

The end of a process is not on the wire. On this node it is observed, and becomes a synthetic frame, so that recordings
contain it too.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import zmq

from ddpwatch.sources.connections import NO_ANSWER, Connections, Handshakes, UnreachableError
from ddpwatch.sources.find_run import read_again
from ddpwatch.sources.frames import TICK_MS, Frame, Tick
from ddpwatch.sources.processes import ProcessExits
from ddpwatch.sources.relay_topics import of_block, of_rank
from ddpwatch.wire import (
    LIVE_TOPICS,
    MAX_TOPIC_BYTES,
    RELAY_TOPICS,
    SNAP_PREFIX,
    STACK_PREFIX,
    STACKS_PREFIX,
    TOPICS,
    Buckets,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.rundir import Endpoint, RunFile

UNHURRIED_MS: Final = 400
"""Milliseconds without a frame before a tick, for many ranks without a screen."""
RANKS_ASKED: Final = 16
"""Max ranks that are subscribed to for their gradient buckets."""
VIEWER_STALL_NS: Final = 1_000_000_000
"""Nanoseconds between two polls from which on the viewer was held up, and does not know what happened meanwhile."""
CHECK_NS: Final = 1_000_000_000
"""Nanoseconds between checks for new ranks and ended processes."""
ASKED_AT_ONCE: Final = 64
"""Max histories in flight: those of thousands of ranks would fill the memory."""
ANSWER_NS: Final = 100_000_000
"""Max nanoseconds that a rank without an answer delays the next ones."""
GATHERED_RANKS: Final = 256
GATHERED_PART: Final = 0.6
"""Fraction of the timeout that passes before frames are read together, with more than `GATHERED_RANKS` ranks: otherwise
each frame would wake the reader. Their common timestamp is no coarser than a rank's heartbeat interval."""
NO_ANSWER_NS: Final = 2_000_000_000
"""Nanoseconds without an answer after which an address counts as wrong or unreachable."""
GRACE_NS: Final = 500_000_000
"""Nanoseconds between the end of a process and our frame about it: its goodbye may be in flight and must come first."""
NOTICE_NS: Final = 5_000_000
"""Nanoseconds between checks for ended processes while frames arrive without a break: the order of exits matters."""
MAX_ASKED_RANKS: Final = 256
"""Max ranks for requesting all stacks after an abort; more would all answer at once."""
_SPARE_FILES: Final = 64
"""File descriptors beyond one for each rank."""
ZERO_COPY_RECV: Final = 10
"""ZMQ_ZERO_COPY_RECV, which pyzmq does not name and older libraries do not support."""
NOBLOCK: Final = int(zmq.NOBLOCK)
"""Plain int, which pyzmq handles faster than its enum."""


class Live:
    """One SUB socket for all ranks of a run. Belongs to the thread that created it, which also closes it.

    Unreachable ranks are not an error: nothing is received from them, and the state shows them as missing.
    """

    def __init__(self, run: RunFile) -> None:
        """Connect and request every rank's history. Returns at once; answers arrive as frames."""
        self.refused: dict[int, str] = {}
        """Ranks that cannot be received, each with the reason: no usable address, no answer, or access denied."""
        allow_open_files(len(run.endpoints) + _SPARE_FILES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Otherwise each connection has a buffer of twice the size, which stays while one message in it is unread.
        with contextlib.suppress(zmq.ZMQError):
            self._context.set(ZERO_COPY_RECV, 0)
        self._connections = Connections(self._context, run)
        self._socket = self._connections.new_socket()
        self._next_part = self._socket.recv
        self._handshakes = Handshakes(self._context, self._socket)
        self._relayed = run.relay is not None
        self._snap = SNAP_PREFIX + secrets.token_hex(8).encode()
        self._topics: dict[bytes, bytes] = {}
        """Interned topics of the main socket."""
        # Live topics first: frames sent while a snapshot is made must arrive; its sequence number orders them.
        for topic in (*LIVE_TOPICS, *(RELAY_TOPICS if self._relayed else (self._snap,))):
            self._subscribe(topic)
        self._stack_topic = b""
        """Topic of the current stack request to all ranks; empty = none."""
        self._stack_request_ns = 0
        self._left_over = b""
        self._buckets: zmq.Socket[bytes] | None = None
        self._stacks: zmq.Socket[bytes] | None = None
        self._suspects: frozenset[int] = frozenset()
        self._connected: dict[int, Endpoint] = {}
        self._ranks_at: dict[str, list[int]] = {}
        self._unanswered_since: dict[str, int] = {}
        """By TCP address that has not answered yet, monotonic nanoseconds of the first attempt."""
        self._unreachable: dict[int, Endpoint] = {}
        self._to_connect: deque[Endpoint] = deque()
        self._unanswered = 0
        self._answer_due_ns = 0
        self._run = run
        self.known: set[int] = set()
        """Ranks that have registered an address."""
        self.here: set[int] = set()
        """Ranks on this node, where the end of their process can be observed."""
        self._process_exits = ProcessExits()
        self._notice_ns = 0
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._ends = zmq.Poller()
        """Poller of process ends alone, so that none is missed while frames are gathered."""
        if (ends := self._process_exits.ends.fileno()) is not None:
            for poller in (self._poller, self._ends):
                poller.register(ends, zmq.POLLIN)
        self._check_ns = time.monotonic_ns() + CHECK_NS
        self._add_ranks(run.endpoints)
        self._held_back: list[Frame] = []
        """Frames that were read and are returned after a tick."""
        self._looked_ns = time.monotonic_ns()

    def poll(self, timeout_ms: int = TICK_MS) -> Frame | Tick:
        """The next frame, or a tick after the timeout. A tick reports a stall of the viewer before its frames."""
        item = self._held_back.pop(0) if self._held_back else self._next(timeout_ms)
        now_ns = item.received_ns if isinstance(item, Frame) else item.now_ns
        viewer_stall_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
        if viewer_stall_ns <= VIEWER_STALL_NS + timeout_ms * 1_000_000:
            return item
        if isinstance(item, Frame):
            self._held_back.insert(0, item)
        return Tick(now_ns, viewer_stall_ns)

    def _next(self, timeout_ms: int) -> Frame | Tick:
        frame = self._receive()
        now_ns = time.monotonic_ns() if frame is None else frame.received_ns
        if frame is None or now_ns >= self._notice_ns:
            self._notice(now_ns)
        if self._to_connect:
            # Also while frames keep arriving: the first ranks, or a relay, would keep the others waiting.
            self._connect_next(now_ns)
        if frame is not None:
            return frame
        if now_ns >= self._check_ns or self._process_exits.check_due:
            self._check_ns = now_ns + CHECK_NS
            self._process_exits.check(now_ns, grace_ns=GRACE_NS)
            self._read_handshakes(now_ns)
            self._connect_late_ranks()
            self._end_stack_request(now_ns)
        if self._to_connect:
            timeout_ms = min(timeout_ms, ANSWER_NS // 1_000_000)
        for socket in (self._buckets, self._stacks):
            if socket is not None and socket.poll(0):
                parts = socket.recv_multipart()
                return Frame(parts[0], parts[1] if len(parts) == 2 else b"", now_ns)
        # Only when all frames have been read: a goodbye among them comes first.
        gone = self._process_exits.next(now_ns)
        if gone is not None:
            return gone
        return self._await(timeout_ms) or Tick(time.monotonic_ns())

    def _await(self, timeout_ms: int) -> Frame | None:
        if timeout_ms > 0 and len(self._connected) > GATHERED_RANKS and self._ends.sockets:
            gather_ms = int(timeout_ms * GATHERED_PART)
            timeout_ms -= gather_ms
            self._ends.poll(gather_ms)
        if not self._poller.poll(timeout_ms):
            return None
        # Before the caller processes frames: after an abort every millisecond counts.
        self._notice(time.monotonic_ns())
        return self._receive()

    def poll_ready(self, most: int) -> list[Frame]:
        """Further frames that have arrived already; checks nothing else."""
        frames, self._held_back = self._held_back or self._read(most), []
        if not frames:
            return []
        if frames[-1].received_ns - self._looked_ns > VIEWER_STALL_NS:
            self._held_back = frames
            return []
        self._looked_ns = frames[-1].received_ns
        return frames

    def _notice(self, now_ns: int) -> None:
        self._notice_ns = now_ns + NOTICE_NS
        if self._process_exits.notice(now_ns):
            self._request_all_stacks(now_ns)

    def _receive(self) -> Frame | None:
        frames = self._read(1)
        return frames[0] if frames else None

    def _read(self, most: int) -> list[Frame]:
        """Frames that have arrived, all with the current time. Hot path with thousands of ranks: one loop, and message
        parts are distinguished by content, because querying RCVMORE costs more than reading the part.
        """
        frames: list[Frame] = []
        topics, next_part, new, now_ns = self._topics, self._next_part, tuple.__new__, time.monotonic_ns()
        while len(frames) < most:
            first_part, payload = self._left_over, b""
            try:
                if first_part:
                    self._left_over = b""
                else:
                    first_part = next_part(NOBLOCK)
                if first_part in topics:
                    payload = next_part(NOBLOCK)
            except zmq.Again:
                if not first_part:
                    break
            if len(payload) > MAX_TOPIC_BYTES:
                # The interned topic, so that not every frame keeps its own copy.
                topic = topics[first_part]
            else:
                topic, payload = self._malformed(first_part, payload)
            if self._unanswered and topic.startswith(self._snap):
                self._unanswered -= 1
            frames.append(new(Frame, (topic, payload, now_ns)))
        return frames

    def _malformed(self, topic: bytes, payload: bytes) -> tuple[bytes, bytes]:
        """Repair a message that is not topic and payload: its payload becomes empty, which counts as unreadable."""
        if topic not in self._topics:
            while self._socket.getsockopt(zmq.RCVMORE):
                self._next_part(NOBLOCK)
            return b"", b""
        if payload in self._topics:
            # The message had one part, and this is the beginning of the next.
            self._left_over, payload = payload, b""
        return topic, payload

    def _request_all_stacks(self, now_ns: int) -> None:
        """Request all ranks' stacks over existing connections: after an abort the launcher ends the other ranks within
        moments, before they send their final messages.
        """
        if self._stack_topic or len(self._connected) > MAX_ASKED_RANKS:
            return
        self._stack_topic, self._stack_request_ns = STACK_PREFIX + secrets.token_hex(8).encode(), now_ns
        self._topics[self._stack_topic] = self._stack_topic
        self._socket.setsockopt(zmq.SUBSCRIBE, self._stack_topic)

    def _end_stack_request(self, now_ns: int) -> None:
        if self._stack_topic and now_ns >= self._stack_request_ns + CHECK_NS:
            self._socket.setsockopt(zmq.UNSUBSCRIBE, self._stack_topic)
            self._stack_topic = b""

    def want_buckets(self, wanted: bool) -> None:
        """Subscribe to gradient buckets of the first `RANKS_ASKED` ranks, or unsubscribe: they send every step."""
        if not wanted and self._buckets is not None:
            self._buckets.close()
            self._buckets = None
        elif wanted and self._buckets is None:
            self._buckets = self._connections.new_socket()
            self._buckets.setsockopt(zmq.SUBSCRIBE, TOPICS[Buckets])
            for endpoint in list(self._connected.values())[: 1 if self._relayed else RANKS_ASKED]:
                self._connections.connect(self._buckets, endpoint)

    def want_stacks(self, ranks: frozenset[int], *, everything: bool = False) -> None:
        """Subscribe to these ranks' stacks, about one a second: of the training thread, or `everything`."""
        if ranks == self._suspects:
            return
        self._suspects = ranks
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None
        if ranks:
            self._stacks = self._connections.new_socket()
            topic = (STACKS_PREFIX if everything else STACK_PREFIX) + secrets.token_hex(8).encode()
            targets = [self._connected[rank] for rank in sorted(ranks & self._connected.keys())]
            for subscription in [of_rank(topic, endpoint.rank) for endpoint in targets] if self._relayed else [topic]:
                self._stacks.setsockopt(zmq.SUBSCRIBE, subscription)
            for endpoint in targets[:1] if self._relayed else targets:
                self._connections.connect(self._stacks, endpoint)

    def close(self) -> None:
        """Close all connections without waiting."""
        self.want_buckets(False)
        self.want_stacks(frozenset())
        self._handshakes.close()
        self._socket.close()
        self._process_exits.ends.close()
        self._context.term()

    def _connect_late_ranks(self) -> None:
        """Connect to ranks that registered, or got a usable address, after `run.json` was first read."""
        if len(self.known) >= self._run.world_size and not self._unreachable:
            return
        endpoints, unreachable = read_again(self._run).endpoints, self._unreachable
        self._add_ranks([e for e in endpoints if e.rank not in self.known or unreachable.get(e.rank, e) != e])

    def _add_ranks(self, endpoints: Sequence[Endpoint]) -> None:
        self.known.update(endpoint.rank for endpoint in endpoints)
        self._to_connect.extend(endpoints)
        self._connect_next(time.monotonic_ns())
        self.here |= self._process_exits.follow(endpoints)

    def _connect_next(self, now_ns: int) -> None:
        """Connect to the next ranks once the previous ones have answered or timed out."""
        if self._unanswered > ASKED_AT_ONCE // 2 and now_ns < self._answer_due_ns:
            return
        self._answer_due_ns, self._unanswered = now_ns + ANSWER_NS, 0
        while self._to_connect and self._unanswered < ASKED_AT_ONCE:
            self._unanswered += 1
            self._connect(self._to_connect.popleft())

    def _subscribe(self, topic: bytes) -> None:
        if topic not in self._topics:
            self._topics[topic] = topic
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)

    def _connect(self, endpoint: Endpoint) -> None:
        try:
            if self._relayed and self._ranks_at:
                (address,) = self._ranks_at  # one connection serves all ranks
            else:
                address = self._connections.connect(self._socket, endpoint)
        except UnreachableError as error:
            self.refused[endpoint.rank] = str(error)
            self._unreachable[endpoint.rank] = endpoint
            return
        self.refused.pop(endpoint.rank, None)
        self._unreachable.pop(endpoint.rank, None)
        self._connected[endpoint.rank] = endpoint
        self._ranks_at.setdefault(address, []).append(endpoint.rank)
        if address.startswith("tcp://"):
            self._unanswered_since.setdefault(address, time.monotonic_ns())
        if self._relayed:
            self._subscribe(of_block(self._snap, endpoint.rank))
            return
        if self._buckets is not None and len(self._connected) <= RANKS_ASKED:
            self._connections.connect(self._buckets, endpoint)
        if self._stacks is not None and endpoint.rank in self._suspects:
            self._connections.connect(self._stacks, endpoint)

    def _read_handshakes(self, now_ns: int) -> None:
        for address, reason in self._handshakes.news():
            for rank in self._ranks_at.get(address, ()):
                if reason:
                    self.refused[rank] = reason
                else:
                    self.refused.pop(rank, None)
        for address, since_ns in list(self._unanswered_since.items()):
            if self._handshakes.has_answered(address):
                del self._unanswered_since[address]
            elif now_ns - since_ns >= NO_ANSWER_NS:
                del self._unanswered_since[address]
                self.refused.update((rank, f"{NO_ANSWER} {address}") for rank in self._ranks_at[address])


def allow_open_files(count: int) -> None:
    """Raise the limit on open files to one per rank, as far as the hard limit permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
