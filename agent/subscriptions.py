"""What viewers ask for, counted: how many messages, how many topics, and who waits for a history.

libzmq sets no bound to either. It remembers every topic for as long as the viewer stays, with some fifty bytes for each
letter, and reads on for as long as more comes. And what has come must not wait unread: when a viewer goes while its
messages wait for room, libzmq may abort the process (door.py says how, and what is done about it).
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ddpwatch.wire import LIVE_TOPICS

MAX_BYTES: Final = 1 << 17
"""Letters of all topics together. A viewer needs a few dozen; a thousand of them stay far below."""
READ_AHEAD: Final = 16
"""Messages of a viewer that libzmq takes in before it waits for us. More than a viewer sends, so that none of them ever
waits for room; few, so that a flood is left with the kernel, and the beat goes on.
"""
CHECK_INTERVAL_S: Final = 0.02
"""Viewers are heard so often: each time takes Python's lock from the training for a moment."""
MESSAGE_BURST: Final = 12_288
"""So many messages are heard as they come, with all who listen staying: some milliseconds of Python's lock in all. A
viewer that comes sends less than ten, and as many when it goes ..."""
MESSAGES_PER_FLUSH: Final = 32
"""... and then so many; what else comes is heard with the next flush, as a debt ..."""
MAX_DEBT: Final = 512
"""... up to here: beyond it is no viewer's work."""
ANSWER_BURST: Final = 128
"""A history is sent to each who asks. So many are, as they are asked for ..."""
ANSWERS_PER_FLUSH: Final = 2
"""... and then so many; others wait."""
ANSWERS_PER_ROUND: Final = 64
"""They share what is told: to gather it takes some milliseconds of Python's lock."""
ROUND_BURST: Final = 8
"""So many rounds of answers follow on each other ..."""
ROUNDS_PER_FLUSH: Final = 1
"""... and then so many between two flushes, so that no crowd of viewers slows the training."""
REST_S: Final = 1.0
"""Between the end of all connections and a new beginning, the first time ..."""
MAX_REST_S: Final = 64.0
"""... and when it has happened again and again. Each time costs the training about as much."""
CALM_S: Final = 60.0
"""Who listens for so long without a flood begins anew."""

FLOODED: Final = (
    "A viewer has subscribed to more topics, or faster, than viewers do. All connections to this rank were ended; "
    "viewers come back by themselves."
)


class Subscriptions:
    """Of all viewers of a rank."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque(maxlen=MESSAGE_BURST + MAX_DEBT)
        """Topics that an answer is due to."""
        self._topics: set[bytes] = set()
        self._bytes = 0
        self._message_tokens = MESSAGE_BURST
        """Below zero it is a debt."""
        self._to_answer = ANSWER_BURST
        self._rounds = ROUND_BURST

    @property
    def too_many(self) -> bool:
        """Whether somebody asks for more than viewers need. What libzmq holds of it goes with the socket only."""
        return self._bytes > MAX_BYTES or self._message_tokens < -MAX_DEBT

    @property
    def patient(self) -> bool:
        """Whether more is heard before the next flush."""
        return self._message_tokens > 0

    def reset(self) -> None:
        """All viewers are gone, and what they asked for with them; what was heard too much is not forgotten."""
        self.waiting.clear()
        self._topics.clear()
        self._bytes = 0

    def flushed(self) -> None:
        """So much more is heard and answered."""
        self._message_tokens = min(self._message_tokens + MESSAGES_PER_FLUSH, MESSAGE_BURST)
        self._to_answer = min(self._to_answer + ANSWERS_PER_FLUSH, ANSWER_BURST)
        self._rounds = min(self._rounds + ROUNDS_PER_FLUSH, ROUND_BURST)

    def note(self, asked: bytes) -> None:
        """Count a message. If it is about a topic, somebody wants it, or nobody any more."""
        self._message_tokens -= 1
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
        while self.waiting and self._rounds and self._to_answer and len(due) < ANSWERS_PER_ROUND:
            topic = self.waiting.popleft()
            if topic in self._topics:
                due.append(topic)
                self._to_answer -= 1
        self._rounds -= bool(due)
        return due


class FloodBackoff:
    """How long nobody is let in after a flood: longer each time, until there was calm."""

    def __init__(self) -> None:
        self._rest_s = REST_S
        self._until_s = 0.0

    def open(self, now_s: float) -> bool:
        """Whether viewers may come."""
        return now_s >= self._until_s

    def begin(self, now_s: float) -> None:
        """There was a flood."""
        if now_s - self._until_s >= CALM_S:
            self._rest_s = REST_S
        self._until_s = now_s + self._rest_s
        self._rest_s = min(4 * self._rest_s, MAX_REST_S)
