"""Replay: a recording as a source that yields frames with their recorded times, at a pace that the viewer sets.

Silence, ages and countdowns are those of the recording, however fast it is played.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpwatch.recording.schema import ALERTS_TOPIC
from ddpwatch.sources.frames import TICK_MS, Frame, Tick

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from ddpwatch.recording.reader import Attempt, Recorded
    from ddpwatch.recording.schema import Entry

SLACK_NS: Final = 1_000_000_000
"""Nanoseconds before a checkpoint from which on frames are read: their position decides, and not their time."""
MAX_BEHIND_S: Final = 1.0
"""Max seconds, at the viewer's pace, by which a frame may be overdue before time waits for it: frames cannot be played
that fast, or the viewer did not poll."""
MIN_S: Final = 1e-5
"""Shortest sleep in seconds; no clock is finer."""


class Span(NamedTuple):
    """First and last time of an attempt."""

    first_ns: int
    last_ns: int


class Reel:
    """Timeline of all attempts of a recording, without the time between them."""

    def __init__(self, spans: Sequence[Span]) -> None:
        """In the order of the attempts; at least one."""
        self.spans = [Span(first_ns, max(first_ns, last_ns)) for first_ns, last_ns in spans]
        self._starts_ns = [0]
        for span in self.spans:
            self._starts_ns.append(self._starts_ns[-1] + span.last_ns - span.first_ns)

    @property
    def total_ns(self) -> int:
        """Duration of all attempts together."""
        return self._starts_ns[-1]

    def place(self, at_ns: int) -> int:
        """Index of the attempt at that time, or else of the last one before it, or else 0."""
        begun = [place for place, span in enumerate(self.spans) if span.first_ns <= at_ns]
        return begun[-1] if begun else 0

    def clamp(self, at_ns: int) -> int:
        """The same moment, or the nearest one of that attempt."""
        span = self.spans[self.place(at_ns)]
        return min(max(at_ns, span.first_ns), span.last_ns)

    def passed_ns(self, at_ns: int) -> int:
        """Duration of the recording before a moment."""
        place = self.place(at_ns)
        return self._starts_ns[place] + self.clamp(at_ns) - self.spans[place].first_ns

    def at(self, passed_ns: int) -> int:
        """The moment after that much of the recording; inverse of `passed_ns`."""
        passed_ns = min(max(passed_ns, 0), self.total_ns)
        place = max(place for place in range(len(self.spans)) if self._starts_ns[place] <= passed_ns)
        return self.spans[place].first_ns + passed_ns - self._starts_ns[place]


class Pace:
    """Clock of the recording: runs at a multiple of the monotonic clock, and can be paused and set."""

    def __init__(
        self, at_ns: int, speed: float = 1.0, *, playing: bool = True, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Start at a moment; a `speed` of 2 plays two seconds in one."""
        self._clock = clock
        self._at_ns, self._since_ns = at_ns, clock()
        self._speed = speed
        self._playing = playing
        self._held = False

    @property
    def now_ns(self) -> int:
        """Current time in the recording."""
        if not self.running:
            return self._at_ns
        return self._at_ns + int((self._clock() - self._since_ns) * self._speed)

    @property
    def running(self) -> bool:
        """Whether time passes."""
        return self._playing and not self._held

    @property
    def playing(self) -> bool:
        """Whether the viewer wants time to pass; `hold` may prevent it."""
        return self._playing

    @playing.setter
    def playing(self, playing: bool) -> None:
        self.move(self.now_ns)
        self._playing = playing

    @property
    def speed(self) -> float:
        """Seconds of the recording per second."""
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        self.move(self.now_ns)
        self._speed = speed

    def move(self, at_ns: int) -> None:
        """Set the current time."""
        self._at_ns, self._since_ns = at_ns, self._clock()

    def hold(self, held: bool) -> None:
        """Stop the clock during a seek, or release it."""
        self.move(self.now_ns)
        self._held = held


class Replay:
    """Source of one attempt's frames. Everything that is due comes at once, so that a moved pace means a seek."""

    def __init__(
        self,
        recorded: Recorded,
        attempt: Attempt,
        pace: Pace,
        *,
        start: tuple[int, int],
        end_ns: int,
        on_alerts: Callable[[bytes, int], None] | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Begin at a `start` from `Recorded.restore`. After `end_ns` nothing is known. Recorded texts of open alerts,
        with their times, go to `on_alerts` between the frames.
        """
        self.known: set[int] = {endpoint.rank for endpoint in attempt.run.endpoints}
        self.here: set[int] = set()
        """Always empty: exits of processes are in the recording."""
        self.refused: dict[int, str] = {}
        """Always empty."""
        self.attempt = attempt
        self.pace = pace
        self.end_ns = end_ns
        self._recorded, self._on_alerts, self._sleep = recorded, on_alerts, sleep
        self.began_ns, self._after = start
        self._read_ns = self.began_ns - SLACK_NS
        self.played_ns = self.began_ns
        """Time of the last frame that was yielded."""
        self._next: Entry | None = None
        self._exhausted = False
        self._entries = self._read()

    @property
    def at_end(self) -> bool:
        """Whether all frames were yielded and the end is reached."""
        return self._ahead() is None and self.pace.now_ns >= self.end_ns

    @property
    def next_ns(self) -> int:
        """Time of the next frame; at the end, the end."""
        entry = self._ahead()
        return self.end_ns if entry is None else entry.at_ns

    def poll(self, timeout_ms: int = TICK_MS) -> Frame | Tick:
        """The next frame that is due, or a tick after the timeout."""
        if timeout_ms > 0 and self.next_ns > self.pace.now_ns:
            ahead_s = (self.next_ns - self.pace.now_ns) / 1e9 / self.pace.speed
            self._sleep(min(timeout_ms / 1e3, max(ahead_s, MIN_S) if self.pace.running else timeout_ms / 1e3))
        now_ns = self.pace.now_ns
        while (entry := self._ahead()) is not None and entry.at_ns <= now_ns:
            self._next, self.played_ns = None, entry.at_ns
            if self._on_alerts is not None and entry.topic == ALERTS_TOPIC:
                self._on_alerts(entry.payload, entry.at_ns)
                continue
            if self.pace.running and now_ns - entry.at_ns > MAX_BEHIND_S * 1e9 * self.pace.speed:
                self.pace.move(entry.at_ns)
            return Frame(entry.topic, entry.payload, entry.at_ns)
        if now_ns > self.end_ns:
            self.pace.move(self.end_ns)
        return Tick(min(now_ns, self.end_ns))

    def poll_ready(self, most: int) -> list[Frame]:
        """Further frames that are due, up to the next text of alerts: it applies to the state after these."""
        frames: list[Frame] = []
        now_ns = self.pace.now_ns
        while len(frames) < most and (entry := self._ahead()) is not None and entry.at_ns <= now_ns:
            if entry.topic == ALERTS_TOPIC:
                break
            self._next, self.played_ns = None, entry.at_ns
            frames.append(Frame(entry.topic, entry.payload, entry.at_ns))
        return frames

    def extend(self, attempt: Attempt, end_ns: int) -> None:
        """Continue with what was recorded meanwhile."""
        self.attempt, self.end_ns = attempt, max(end_ns, self.end_ns)
        if self._exhausted:
            self._exhausted, self._entries = False, self._read()

    def want_stacks(self, ranks: frozenset[int]) -> None:
        """Does nothing: recorded stacks are among the frames."""

    def want_buckets(self, wanted: bool) -> None:
        """Does nothing: recorded buckets are among the frames."""

    def close(self) -> None:
        """Stop reading. The recording is closed by its owner."""
        self._entries.close()

    def _ahead(self) -> Entry | None:
        """Peek at the next frame; None = there is none so far."""
        if self._next is None and not self._exhausted:
            self._next = next(self._entries, None)
            self._exhausted = self._next is None
        return self._next

    def _read(self) -> Generator[Entry, None, None]:
        while self._read_ns < (upto_ns := self.attempt.last_ns):
            yield from self._recorded.entries(
                self.attempt,
                from_ns=self._read_ns,
                upto_ns=upto_ns,
                after=self._after,
                alerts=self._on_alerts is not None,
            )
            self._read_ns = upto_ns
