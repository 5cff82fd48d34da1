"""Relay's connections to the ranks: all live topics, and on demand what viewers subscribe to."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import zmq

from ddpwatch.sources.connections import Connections, UnreachableError
from ddpwatch.sources.live import ANSWER_NS, RANKS_ASKED
from ddpwatch.sources.relay_topics import BLOCK_RANKS, block_of
from ddpwatch.wire import LIVE_TOPICS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.rundir import Endpoint, RunFile
    from ddpwatch.sources.relay_topics import Subscription

MAX_HISTORIES: Final = 4096
"""Max requested block histories of all viewers together: sixteen viewers of 16 384 ranks."""
MAX_SEPARATE: Final = 320
"""Max ranks with a subscription of their own at a time. Each needs a socket."""


class Upstream:
    """One SUB socket per block of ranks, and one per rank with a subscription of its own. Belongs to one thread.

    Live topics are received even without a viewer, because the relay must notice the end of the run.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run: RunFile, poller: zmq.Poller) -> None:
        """Sockets are registered with the poller while they are open."""
        self._connections = Connections(context, run)
        self._poller = poller
        self._blocks: dict[int, zmq.Socket[bytes]] = {}
        self._alone: dict[int, tuple[zmq.Socket[bytes], set[bytes]]] = {}
        """By rank, its own socket and the topics subscribed to."""
        self._endpoints: dict[int, Endpoint] = {}
        self.refused: dict[int, str] = {}
        """Ranks without a usable address, each with the reason."""
        self._histories: dict[bytes, int] = {}
        """Subscribed histories, with their block."""
        self._pending: deque[tuple[bytes, int]] = deque()
        self._unanswered = 0
        self._answer_due_ns = 0

    def listen_to(self, endpoints: Iterable[Endpoint]) -> None:
        """Connect to further ranks."""
        for endpoint in endpoints:
            number = block_of(endpoint.rank)
            socket = self._blocks.get(number)
            if socket is None:
                socket = self._blocks[number] = self._new_socket()
                for topic in LIVE_TOPICS:
                    socket.setsockopt(zmq.SUBSCRIBE, topic)
            try:
                self._connections.connect(socket, endpoint)
            except UnreachableError as error:
                self.refused[endpoint.rank] = str(error)
            else:
                self.refused.pop(endpoint.rank, None)
                self._endpoints[endpoint.rank] = endpoint

    def subscribe(self, topic: bytes, subscription: Subscription) -> None:
        """Subscribe at the addressed ranks. A repeated history is requested again: its viewer has reconnected."""
        if subscription.kind == "snap" and len(self._pending) + len(self._histories) < MAX_HISTORIES:
            self._pending.append((topic, subscription.place))
        for rank in self._own_sockets_for(subscription):
            self._subscribe_alone(rank, topic)

    def unsubscribe(self, topic: bytes, subscription: Subscription) -> None:
        """Unsubscribe: no viewer is left."""
        if subscription.kind == "snap":
            self._pending = deque(each for each in self._pending if each[0] != topic)
            number = self._histories.pop(topic, None)
            if number is not None:
                self._blocks[number].setsockopt(zmq.UNSUBSCRIBE, topic)
        for rank in self._own_sockets_for(subscription):
            self._unsubscribe_alone(rank, topic)

    def ask_next(self, now_ns: int) -> None:
        """Request the next block's histories once the previous block has answered or timed out.

        The histories of all ranks at once, for several viewers, would fill the memory.
        """
        while self._pending and (self._unanswered <= BLOCK_RANKS // 2 or now_ns >= self._answer_due_ns):
            topic, number = self._pending.popleft()
            socket = self._blocks.get(number)
            if socket is None:
                continue
            if topic in self._histories:
                socket.setsockopt(zmq.UNSUBSCRIBE, topic)
            self._histories[topic] = number
            socket.setsockopt(zmq.SUBSCRIBE, topic)
            self._answer_due_ns, self._unanswered = now_ns + ANSWER_NS, BLOCK_RANKS

    def count_answer(self) -> None:
        """Count a received history."""
        self._unanswered = max(0, self._unanswered - 1)

    def _own_sockets_for(self, subscription: Subscription) -> list[int]:
        if subscription.kind == "bucket":
            return sorted(self._endpoints)[:RANKS_ASKED]
        return [subscription.place] if subscription.kind == "stack" and subscription.place in self._endpoints else []

    def _subscribe_alone(self, rank: int, topic: bytes) -> None:
        if rank not in self._alone:
            if len(self._alone) >= MAX_SEPARATE:
                return
            try:
                socket = self._new_socket()
            except zmq.ZMQError:  # out of file descriptors: the viewer gets no answer
                return
            self._connections.connect(socket, self._endpoints[rank])
            self._alone[rank] = socket, set()
        socket, topics = self._alone[rank]
        if topic not in topics:
            topics.add(topic)
            socket.setsockopt(zmq.SUBSCRIBE, topic)

    def _unsubscribe_alone(self, rank: int, topic: bytes) -> None:
        socket, topics = self._alone.get(rank, (None, set()))
        if socket is None or topic not in topics:
            return
        topics.discard(topic)
        socket.setsockopt(zmq.UNSUBSCRIBE, topic)
        if not topics:
            self._poller.unregister(socket)
            socket.close()
            del self._alone[rank]

    def _new_socket(self) -> zmq.Socket[bytes]:
        socket = self._connections.new_socket()
        self._poller.register(socket, zmq.POLLIN)
        return socket
