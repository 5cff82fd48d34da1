"""Frames of a run that is under way, straight from its ranks over ZeroMQ. Can subscribe, and do nothing else.

The end of a process is not on the wire. Where it can be seen, on this node, it becomes a frame of our own making, so
that whoever records frames records that, too.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import zmq

from ddpwatch import rundir
from ddpwatch.sources.connections import NO_ANSWER, Connections, Handshakes, UnreachableError
from ddpwatch.sources.frames import Frame, Tick
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
    from collections.abc import Iterator, Sequence

    from ddpwatch.rundir import Endpoint, RunFile

TICK_MS: Final = 100
"""A tick comes after this much silence."""
UNHURRIED_MS: Final = 400
"""… or after this much, where there are many ranks and nobody looks at a screen."""
RANKS_ASKED: Final = 16
"""So many ranks are asked for their buckets."""
VIEWER_STALL_NS: Final = 1_000_000_000
"""Who has not looked for so long was held up, and knows nothing of that time."""
CHECK_NS: Final = 1_000_000_000
"""How often it is looked who has come and who has gone."""
ASKED_AT_ONCE: Final = 64
"""So many histories may be on their way at a time: those of thousands of ranks would fill the memory."""
ANSWER_NS: Final = 100_000_000
"""A rank that does not answer holds the next ones back no longer than this."""
GATHERED_RANKS: Final = 256
GATHERED_PART: Final = 0.6
"""Of more ranks than that there is always one that speaks: so much of the time that a reader has is waited first, and
read together what came, instead of being woken by each. What is read together has about the same time, no coarser than
the signs of life of one rank."""
NO_ANSWER_NS: Final = 2_000_000_000
"""Where nothing has answered for so long, the address is wrong, or its host cannot be reached."""
GRACE_NS: Final = 500_000_000
"""Between the end of a process and our word on it: its goodbye may still be on the way, and must come first."""
NOTICE_NS: Final = 5_000_000
"""So often it is looked, while frames come without a break, whether a process has ended: the order of ends counts."""
MAX_ASKED_RANKS: Final = 256
"""Of more ranks nobody is asked when one is aborted: all would answer at once."""
_SPARE_FILES: Final = 64
ZERO_COPY_RECV: Final = 10
"""A setting of ZeroMQ's that pyzmq has no name for, and older libraries do not know."""
NOBLOCK: Final = int(zmq.NOBLOCK)
"""As a plain number, which pyzmq takes sooner than its own."""


class Live:
    """One SUB socket on all ranks of a run. Belongs to the thread that made it, which also closes it.

    Ranks that cannot be reached are no error here: they stay unheard, and the state calls them missing.
    """

    def __init__(self, run: RunFile) -> None:
        """Connect and ask every rank for its history. Returns at once; answers come as frames."""
        self.refused: dict[int, str] = {}
        """Ranks that cannot be listened to, and why: they have no address for us, nothing answers there, or they do not
        let us in."""
        allow_open_files(len(run.endpoints) + _SPARE_FILES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Else each connection has a buffer twice as large, which stays as long as one message in it is unread.
        with contextlib.suppress(zmq.ZMQError):
            self._context.set(ZERO_COPY_RECV, 0)
        self._connections = Connections(self._context, run)
        self._socket = self._connections.new_socket()
        self._next_part = self._socket.recv
        self._handshakes = Handshakes(self._context, self._socket)
        self._relayed = run.relay is not None
        self._snap = SNAP_PREFIX + secrets.token_hex(8).encode()
        self._topics: dict[bytes, bytes] = {}
        """Under which something may come, each by itself."""
        # Live topics first: what is sent while a snapshot is made must arrive, the snapshot's number sorts it out.
        for topic in (*LIVE_TOPICS, *(RELAY_TOPICS if self._relayed else (self._snap,))):
            self._subscribe(topic)
        self._question = b""
        """What all ranks are asked, while they are."""
        self._question_ns = 0
        self._left_over = b""
        self._buckets: zmq.Socket[bytes] | None = None
        self._stacks: zmq.Socket[bytes] | None = None
        self._suspects: frozenset[int] = frozenset()
        self._connected: dict[int, Endpoint] = {}
        """By rank, those that are listened to, in the order in which they came."""
        self._ranks_at: dict[str, list[int]] = {}
        self._unanswered_since: dict[str, int] = {}
        """Addresses on TCP at which nothing has answered yet, and since when."""
        self._unreachable: dict[int, Endpoint] = {}
        """Those that have no address that we could use."""
        self._to_ask: deque[Endpoint] = deque()
        """Ranks that are not listened to yet."""
        self._unanswered = 0
        self._ask_ns = 0
        self._run = run
        self.known: set[int] = set()
        """Ranks that have told where they listen."""
        self.here: set[int] = set()
        """Those of them that run on this node, where the end of their process can be seen."""
        self._process_exits = ProcessExits()
        self._notice_ns = 0
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._ends = zmq.Poller()
        """Of processes alone: who waits for frames to gather does not miss one."""
        if (ends := self._process_exits.ends.fileno()) is not None:
            for poller in (self._poller, self._ends):
                poller.register(ends, zmq.POLLIN)
        self._check_ns = time.monotonic_ns() + CHECK_NS
        self._connect_all(run.endpoints)
        self._kept_back: list[Frame] = []
        """Frames that have been read, and are passed on after a tick."""
        self._looked_ns = time.monotonic_ns()

    def poll(self, timeout_ms: int = TICK_MS) -> Frame | Tick:
        """The next frame, or a tick if none comes in time. If this process was held up, a tick that says so goes before
        what has come meanwhile.
        """
        item = self._kept_back.pop(0) if self._kept_back else self._next(timeout_ms)
        now_ns = item.received_ns if isinstance(item, Frame) else item.now_ns
        viewer_stall_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
        if viewer_stall_ns <= VIEWER_STALL_NS + timeout_ms * 1_000_000:
            return item
        if isinstance(item, Frame):
            self._kept_back.insert(0, item)
        return Tick(now_ns, viewer_stall_ns)

    def _next(self, timeout_ms: int) -> Frame | Tick:
        frame = self._receive()
        now_ns = time.monotonic_ns() if frame is None else frame.received_ns
        if frame is None or now_ns >= self._notice_ns:
            self._notice(now_ns)
        if self._to_ask:
            # Also while there is always something to read: the first ranks, or a relay, would keep the others waiting.
            self._ask_next(now_ns)
        if frame is not None:
            return frame
        if now_ns >= self._check_ns or self._process_exits.check_due:
            self._check_ns = now_ns + CHECK_NS
            self._process_exits.check(now_ns, grace_ns=GRACE_NS)
            self._read_handshakes(now_ns)
            self._connect_new_ranks()
            self._ask_no_more(now_ns)
        if self._to_ask:
            timeout_ms = min(timeout_ms, ANSWER_NS // 1_000_000)
        for asked in (self._buckets, self._stacks):
            if asked is not None and asked.poll(0):
                parts = asked.recv_multipart()
                return Frame(parts[0], parts[1] if len(parts) == 2 else b"", now_ns)
        # Only when all that came has been read: a goodbye among it goes before.
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
        # Before whoever asked goes to work on what has come: of an abort every moment counts.
        self._notice(time.monotonic_ns())
        return self._receive()

    def poll_ready(self, most: int) -> list[Frame]:
        """More frames that have come already, without a look at anything else."""
        frames, self._kept_back = self._kept_back or self._read(most), []
        if not frames:
            return []
        if frames[-1].received_ns - self._looked_ns > VIEWER_STALL_NS:
            self._kept_back = frames
            return []
        self._looked_ns = frames[-1].received_ns
        return frames

    def _notice(self, now_ns: int) -> None:
        self._notice_ns = now_ns + NOTICE_NS
        if self._process_exits.notice(now_ns):
            self._ask_all(now_ns)

    def _receive(self) -> Frame | None:
        """The next frame, if one is there."""
        frames = self._read(1)
        return frames[0] if frames else None

    def _read(self, most: int) -> list[Frame]:
        """Frames that are there, all with the time of now. With thousands of ranks most of the time goes by here, so it
        is one loop.

        Parts are told apart by what is in them: to ask ZeroMQ whether another one follows costs more than to read it.
        """
        frames: list[Frame] = []
        topics, next_part, new, now_ns = self._topics, self._next_part, tuple.__new__, time.monotonic_ns()
        while len(frames) < most:
            said, payload = self._left_over, b""
            try:
                if said:
                    self._left_over = b""
                else:
                    said = next_part(NOBLOCK)
                if said in topics:
                    payload = next_part(NOBLOCK)
            except zmq.Again:
                if not said:
                    break
            if len(payload) > MAX_TOPIC_BYTES:
                # One for all that came under it: each of its own would be kept as long as its frame.
                topic = topics[said]
            else:
                topic, payload = self._malformed(said, payload)
            if self._unanswered and topic.startswith(self._snap):
                self._unanswered -= 1
            frames.append(new(Frame, (topic, payload, now_ns)))
        return frames

    def _malformed(self, topic: bytes, payload: bytes) -> tuple[bytes, bytes]:
        """What is no topic followed by something else becomes an empty payload, which counts as unreadable; so does
        what follows a payload.
        """
        if topic not in self._topics:
            while self._socket.getsockopt(zmq.RCVMORE):
                self._next_part(NOBLOCK)
            return b"", b""
        if payload in self._topics:
            # There was one part only, and this is the next message.
            self._left_over, payload = payload, b""
        return topic, payload

    def _ask_all(self, now_ns: int) -> None:
        """Ask what everybody is in, over the lines that are there: when a process was aborted its launcher ends the
        others in a moment, before they have come to their last words.
        """
        if self._question or len(self._connected) > MAX_ASKED_RANKS:
            return
        self._question, self._question_ns = STACK_PREFIX + secrets.token_hex(8).encode(), now_ns
        self._topics[self._question] = self._question
        self._socket.setsockopt(zmq.SUBSCRIBE, self._question)

    def _ask_no_more(self, now_ns: int) -> None:
        if self._question and now_ns >= self._question_ns + CHECK_NS:
            self._socket.setsockopt(zmq.UNSUBSCRIBE, self._question)
            self._question = b""

    def want_buckets(self, wanted: bool) -> None:
        """Ask the first ranks for the gradient buckets of every step, or no more. They send them only while asked.

        Not all of a thousand ranks: each of them sends every step.
        """
        if not wanted and self._buckets is not None:
            self._buckets.close()
            self._buckets = None
        elif wanted and self._buckets is None:
            self._buckets = self._connections.new_socket()
            self._buckets.setsockopt(zmq.SUBSCRIBE, TOPICS[Buckets])
            for endpoint in list(self._connected.values())[: 1 if self._relayed else RANKS_ASKED]:
                self._connections.connect(self._buckets, endpoint)

    def want_stacks(self, ranks: frozenset[int], *, everything: bool = False) -> None:
        """Ask these ranks, and no others, what the thread that trains is doing, or `everything` that is one. They tell
        it about once a second.
        """
        if ranks == self._suspects:
            return
        self._suspects = ranks
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None
        if ranks:
            self._stacks = self._connections.new_socket()
            topic = (STACKS_PREFIX if everything else STACK_PREFIX) + secrets.token_hex(8).encode()
            asked = [self._connected[rank] for rank in sorted(ranks & self._connected.keys())]
            for subscription in [of_rank(topic, endpoint.rank) for endpoint in asked] if self._relayed else [topic]:
                self._stacks.setsockopt(zmq.SUBSCRIBE, subscription)
            for endpoint in asked[:1] if self._relayed else asked:
                self._connections.connect(self._stacks, endpoint)

    def __iter__(self) -> Iterator[Frame | Tick]:
        """Frames and ticks, for ever."""
        while True:
            yield self.poll()

    def close(self) -> None:
        """Let go of all ranks. Waits for nothing."""
        self.want_buckets(False)
        self.want_stacks(frozenset())
        self._handshakes.close()
        self._socket.close()
        self._process_exits.ends.close()
        self._context.term()

    def _connect_new_ranks(self) -> None:
        """Connect to ranks that have come since, or have got an address for us: `run.json` is there before that."""
        if len(self.known) >= self._run.world_size and not self._unreachable:
            return
        with contextlib.suppress(OSError, ValueError):
            run = rundir.read(rundir.base_path() / self._run.id / rundir.RUN_FILE)
            if run.id == self._run.id:
                known = {rank: self._unreachable.get(rank) for rank in self.known}
                new = [each for each in run.endpoints if known.get(each.rank, each) not in (None, each)]
                self._connect_all([*new, *(each for each in run.endpoints if each.rank not in known)])

    def _connect_all(self, endpoints: Sequence[Endpoint]) -> None:
        self.known.update(endpoint.rank for endpoint in endpoints)
        self._to_ask.extend(endpoints)
        self._ask_next(time.monotonic_ns())
        self.here |= self._process_exits.follow(endpoints)

    def _ask_next(self, now_ns: int) -> None:
        """Listen to some more ranks, when those before them have answered or had their time."""
        if self._unanswered > ASKED_AT_ONCE // 2 and now_ns < self._ask_ns:
            return
        self._ask_ns, self._unanswered = now_ns + ANSWER_NS, 0
        while self._to_ask and self._unanswered < ASKED_AT_ONCE:
            self._unanswered += 1
            self._connect(self._to_ask.popleft())

    def _subscribe(self, topic: bytes) -> None:
        if topic not in self._topics:
            self._topics[topic] = topic
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)

    def _connect(self, endpoint: Endpoint) -> None:
        try:
            if self._relayed and self._ranks_at:
                (address,) = self._ranks_at  # the one connection serves all
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
            answered = self._handshakes.has_answered(address)
            if answered or now_ns - since_ns >= NO_ANSWER_NS:
                del self._unanswered_since[address]
            if not answered and now_ns - since_ns >= NO_ANSWER_NS:
                self.refused.update((rank, f"{NO_ANSWER} {address}") for rank in self._ranks_at[address])


def allow_open_files(count: int) -> None:
    """Make room for one file descriptor per rank, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
