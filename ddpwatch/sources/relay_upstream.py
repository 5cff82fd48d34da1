"""The ranks of a run as a relay hears them: all that they publish, and on demand what a viewer wishes of some."""

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
"""Of blocks, for all viewers together: sixteen viewers of 16 384 ranks."""
MAX_SEPARATE: Final = 320
"""Ranks that may be asked alone at a time. Each takes a socket of its own."""


class Upstream:
    """One SUB socket on each block of ranks, and one on each rank that is asked alone. Belongs to one thread.

    What is published is always listened to: whether the run is over must be known without a viewer, too.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run: RunFile, poller: zmq.Poller) -> None:
        """Sockets are registered with the poller as they come and go."""
        self._connections = Connections(context, run)
        self._poller = poller
        self._blocks: dict[int, zmq.Socket[bytes]] = {}
        self._alone: dict[int, tuple[zmq.Socket[bytes], set[bytes]]] = {}
        """By rank, with the topics that it is asked for."""
        self._endpoints: dict[int, Endpoint] = {}
        """By rank, those that are listened to."""
        self.refused: dict[int, str] = {}
        """Ranks that have no address that can be used from here, and why."""
        self._asked: dict[bytes, int] = {}
        """Histories that are subscribed to, with the block."""
        self._to_ask: deque[tuple[bytes, int]] = deque()
        self._unanswered = 0
        self._ask_ns = 0

    def listen_to(self, endpoints: Iterable[Endpoint]) -> None:
        """Connect to these, too."""
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
        """Ask those who are meant. A history that is wished again is fetched again: somebody has come back."""
        if subscription.kind == "snap" and len(self._to_ask) + len(self._asked) < MAX_HISTORIES:
            self._to_ask.append((topic, subscription.place))
        for rank in self._asked_alone(subscription):
            self._ask_alone(rank, topic)

    def unsubscribe(self, topic: bytes, subscription: Subscription) -> None:
        """Ask no more: nobody is left who wants it."""
        if subscription.kind == "snap":
            self._to_ask = deque(each for each in self._to_ask if each[0] != topic)
            number = self._asked.pop(topic, None)
            if number is not None:
                self._blocks[number].setsockopt(zmq.UNSUBSCRIBE, topic)
        for rank in self._asked_alone(subscription):
            self._leave_alone(rank, topic)

    def ask_next(self, now_ns: int) -> None:
        """Ask the next block for its histories, when the one before has answered or had its time.

        Those of all ranks at once, for each of several viewers, would fill the memory.
        """
        while self._to_ask and (self._unanswered <= BLOCK_RANKS // 2 or now_ns >= self._ask_ns):
            topic, number = self._to_ask.popleft()
            socket = self._blocks.get(number)
            if socket is None:
                continue
            if topic in self._asked:
                socket.setsockopt(zmq.UNSUBSCRIBE, topic)
            self._asked[topic] = number
            socket.setsockopt(zmq.SUBSCRIBE, topic)
            self._ask_ns, self._unanswered = now_ns + ANSWER_NS, BLOCK_RANKS

    def count_answer(self) -> None:
        """A history has come."""
        self._unanswered = max(0, self._unanswered - 1)

    def _asked_alone(self, subscription: Subscription) -> list[int]:
        if subscription.kind == "bucket":
            return sorted(self._endpoints)[:RANKS_ASKED]
        return [subscription.place] if subscription.kind == "stack" and subscription.place in self._endpoints else []

    def _ask_alone(self, rank: int, topic: bytes) -> None:
        if rank not in self._alone:
            if len(self._alone) >= MAX_SEPARATE:
                return
            try:
                socket = self._new_socket()
            except zmq.ZMQError:  # no descriptor is left for it: whoever wishes it goes without
                return
            self._connections.connect(socket, self._endpoints[rank])
            self._alone[rank] = socket, set()
        socket, topics = self._alone[rank]
        if topic not in topics:
            topics.add(topic)
            socket.setsockopt(zmq.SUBSCRIBE, topic)

    def _leave_alone(self, rank: int, topic: bytes) -> None:
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
