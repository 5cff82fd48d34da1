"""What viewers ask for, counted: how many messages, how many topics, and who waits for a history.

libzmq sets no bound to either. It remembers every topic for as long as the viewer stays, with some fifty bytes for each
letter, and reads on for as long as more comes. And what has come must not wait unread: when a viewer goes while its
messages wait for room, libzmq may abort the process (libzmq issue 4364).
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ddpwatch.wire import LIVE_TOPICS

MOST_BYTES: Final = 1 << 17
"""Letters of all topics together. A viewer needs a few dozen; a thousand of them stay far below."""
READ_AHEAD: Final = 16
"""Messages of a viewer that libzmq takes in before it waits for us. More than a viewer sends, so that none of them ever
waits for room; few, so that a flood is left with the kernel, and the beat goes on.
"""
BETWEEN_LOOKS_S: Final = 0.02
"""Who sends without end is heard so often: each time takes Python's lock from the training for a moment."""
MOST_MESSAGES: Final = 1024
"""Between two flushes. A viewer that comes sends less than ten."""
ANSWERS_PER_ROUND: Final = 64
"""They share what is told, so that many cost little more than one."""
ROUNDS_AT_ONCE: Final = 8
"""Histories and stacks take some milliseconds of Python's lock. So many rounds of answers follow on each other ..."""
ROUNDS_PER_FLUSH: Final = 1
"""... and then so many between two flushes; others wait, so that no crowd of viewers slows the training."""

FLOODED: Final = (
    "A viewer has subscribed to more topics, or faster, than viewers do. All connections to this rank were ended; "
    "viewers come back by themselves."
)


class Wishes:
    """Of the viewers of one socket."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque(maxlen=MOST_MESSAGES)
        """Topics that an answer is due to."""
        self._topics: set[bytes] = set()
        self._bytes = 0
        self._messages = 0
        self._rounds = ROUNDS_AT_ONCE

    @property
    def too_many(self) -> bool:
        """Whether somebody asks for more than viewers need. What libzmq holds of it goes with the socket only."""
        return self._bytes > MOST_BYTES or self._messages > MOST_MESSAGES

    def flushed(self) -> None:
        """A new count begins."""
        self._messages = 0
        self._rounds = min(self._rounds + ROUNDS_PER_FLUSH, ROUNDS_AT_ONCE)

    def note(self, asked: bytes) -> None:
        """Count a message. If it is about a topic, somebody wants it, or nobody any more."""
        self._messages += 1
        kind, topic = asked[:1], asked[1:]
        if topic in LIVE_TOPICS:
            return
        if kind == b"\x01" and topic not in self._topics:
            self._topics.add(topic)
            self._bytes += len(topic)
        elif kind == b"\x00" and topic in self._topics:
            self._topics.discard(topic)
            self._bytes -= len(topic)

    def due(self) -> list[bytes]:
        """The topics that are answered now, in the order in which they were asked for; not those given back since."""
        due: list[bytes] = []
        while self.waiting and self._rounds and len(due) < ANSWERS_PER_ROUND:
            topic = self.waiting.popleft()
            if topic in self._topics:
                due.append(topic)
        self._rounds -= bool(due)
        return due
