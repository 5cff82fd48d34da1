"""Limits on what viewers may ask of a rank: topic bytes, messages per minute and answers per flush.

libzmq has no such limits. It remembers every topic while the viewer stays connected, at about fifty bytes per
character, and reads for as long as data arrives. Messages must not stay unread either: when a viewer disconnects while
its messages wait for room, libzmq may abort the process (see `tcp_listener`).
"""

from __future__ import annotations

from itertools import islice
from time import monotonic
from typing import Final

from ddpwatch.wire import LIVE_TOPICS, SNAP_PREFIX, STACK_PREFIX, STACKS_PREFIX

SUBSCRIBE: Final = b"\x01"
UNSUBSCRIBE: Final = b"\x00"
MAX_HELD_BYTES: Final = 1 << 17
"""Bytes of all topics together. A viewer needs a few dozen, so a thousand viewers stay far below."""
READ_AHEAD: Final = 16
"""Messages per viewer that libzmq buffers. More than a viewer sends at once, so none waits for room; few enough that a
flood stays in the kernel's buffers."""
CHECK_INTERVAL_S: Final = 0.02
"""Seconds between reads of subscriptions; each read takes the GIL from the training."""
MAX_MESSAGES: Final = 12_288
"""Messages in `WINDOW_S` beyond which it is a flood. A viewer sends fewer than ten when it connects, and again when it
leaves."""
WINDOW_S: Final = 60.0
"""Length in seconds of the window in which messages are counted."""
MAX_ANSWERS: Final = 32
"""Topics answered between two flushes. They share one snapshot, which takes milliseconds of the GIL to collect."""
BACKOFF_S: Final = 1.0
"""Seconds without any connection after the first flood."""
MAX_BACKOFF_S: Final = 64.0
"""Seconds without any connection after repeated floods. Reopening costs the training about as much each time."""
CALM_S: Final = 60.0
"""Seconds without a flood after which the backoff starts over."""
FLOODED: Final = (
    "A client subscribed to more topics, or faster, than a viewer does. All connections to this rank were closed; "
    "viewers reconnect by themselves."
)
_ANSWERED: Final = (SNAP_PREFIX, STACK_PREFIX, STACKS_PREFIX)


class Subscriptions:
    """Topics that the viewers of a rank hold, and those still to be answered."""

    def __init__(self) -> None:
        self.reset()
        self._may_answer = True

    def reset(self) -> None:
        """Start over after all viewers were disconnected."""
        self._topics: set[bytes] = set()
        self._bytes = 0
        self._unanswered: dict[bytes, None] = {}
        self._messages = 0
        self._window_end_s = 0.0

    @property
    def flooded(self) -> bool:
        """Whether viewers exceed a limit. libzmq frees their topics only with the socket."""
        return self._bytes > MAX_HELD_BYTES or self._messages > MAX_MESSAGES

    def note(self, message: bytes) -> None:
        """Count one message; if it is a subscription or its end, add or remove the topic."""
        now_s = monotonic()
        if now_s >= self._window_end_s:
            self._window_end_s = now_s + WINDOW_S
            self._messages = 0
        self._messages += 1
        kind, topic = message[:1], message[1:]
        if topic in LIVE_TOPICS:
            return
        if kind == SUBSCRIBE:
            if topic not in self._topics:
                self._topics.add(topic)
                self._bytes += len(topic)
            if topic.startswith(_ANSWERED):
                self._unanswered[topic] = None
        elif kind == UNSUBSCRIBE and topic in self._topics:
            self._topics.remove(topic)
            self._bytes -= len(topic)
            self._unanswered.pop(topic, None)

    def flushed(self) -> None:
        """Allow one more round of answers."""
        self._may_answer = True

    def due(self) -> list[bytes]:
        """Topics to answer in this round, oldest first; empty if there was a round since the last flush."""
        due = list(islice(self._unanswered, MAX_ANSWERS)) if self._may_answer else []
        for topic in due:
            del self._unanswered[topic]
        self._may_answer &= not due
        return due


class FloodBackoff:
    """Exponential backoff after floods, during which no viewer can connect."""

    def __init__(self) -> None:
        self._pause_s = BACKOFF_S
        self._until_s = 0.0

    def is_over(self, now_s: float) -> bool:
        """Whether viewers may connect."""
        return now_s >= self._until_s

    def begin(self, now_s: float) -> None:
        """Begin a pause after a flood."""
        if now_s - self._until_s >= CALM_S:
            self._pause_s = BACKOFF_S
        self._until_s = now_s + self._pause_s
        self._pause_s = min(4 * self._pause_s, MAX_BACKOFF_S)
