"""A recording as a source of frames: as they came then, with the times of then, at a pace that the viewer chooses.

Silence, ages and countdowns are those of the recording, however fast it is played.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpwatch.sources.frames import Frame, Tick

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from ddpwatch.recording.reader import Attempt, Recorded
    from ddpwatch.recording.schema import Entry

TICK_MS: Final = 100
"""A tick comes after this much silence."""
WINDOW_NS: Final = 10_000_000_000
"""So much of a recording is asked for at a time."""
SLACK_NS: Final = 1_000_000_000
"""Frames after a checkpoint are looked for from so long before it: the number tells, and not the time."""
MAX_BEHIND_S: Final = 1.0
"""Frames that are overdue by more than this cannot be played so fast, or nobody has asked: time waits for them."""
MIN_S: Final = 1e-5
"""No clock is so fine that it would be worth to sleep for less."""
_CHECKPOINT: Final = b"checkpoint"
"""In place of the topic of what brings the state to a checkpoint."""


class Span(NamedTuple):
    """From when to when an attempt was recorded."""

    first_ns: int
    last_ns: int


class Reel:
    """All attempts of a recording one after another, without the time between them."""

    def __init__(self, spans: Sequence[Span]) -> None:
        """In the order of the attempts; at least one."""
        self.spans = [Span(first_ns, max(first_ns, last_ns)) for first_ns, last_ns in spans]
        self._starts_ns = [0]
        for span in self.spans:
            self._starts_ns.append(self._starts_ns[-1] + span.last_ns - span.first_ns)

    @property
    def total_ns(self) -> int:
        """How long they are together."""
        return self._starts_ns[-1]

    def place(self, at_ns: int) -> int:
        """Which attempt was under way then, or the last before; the first, if there is none."""
        begun = [place for place, span in enumerate(self.spans) if span.first_ns <= at_ns]
        return begun[-1] if begun else 0

    def clamp(self, at_ns: int) -> int:
        """The same moment, or the nearest one of that attempt."""
        span = self.spans[self.place(at_ns)]
        return min(max(at_ns, span.first_ns), span.last_ns)

    def passed_ns(self, at_ns: int) -> int:
        """How much comes before a moment."""
        place = self.place(at_ns)
        return self._starts_ns[place] + self.clamp(at_ns) - self.spans[place].first_ns

    def at(self, passed_ns: int) -> int:
        """The moment before which there is so much."""
        passed_ns = min(max(passed_ns, 0), self.total_ns)
        place = max(place for place in range(len(self.spans)) if self._starts_ns[place] <= passed_ns)
        return self.spans[place].first_ns + passed_ns - self._starts_ns[place]


class Pace:
    """What time it is in the recording. Goes on by a clock of ours while it plays."""

    def __init__(
        self, at_ns: int, speed: float = 1.0, *, playing: bool = True, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Begin at a moment; a `speed` of 2 plays two seconds in one."""
        self._clock = clock
        self._at_ns, self._since_ns = at_ns, clock()
        self._speed = speed
        self._playing = playing
        self._held = False

    @property
    def now_ns(self) -> int:
        """The moment that has come."""
        if not self.running:
            return self._at_ns
        return self._at_ns + int((self._clock() - self._since_ns) * self._speed)

    @property
    def running(self) -> bool:
        """Whether time passes."""
        return self._playing and not self._held

    @property
    def playing(self) -> bool:
        """Whether it is meant to: it may be held up."""
        return self._playing

    @playing.setter
    def playing(self, playing: bool) -> None:
        self.move(self.now_ns)
        self._playing = playing

    @property
    def speed(self) -> float:
        """How many seconds pass in one of ours."""
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        self.move(self.now_ns)
        self._speed = speed

    def move(self, at_ns: int) -> None:
        """It is this moment now."""
        self._at_ns, self._since_ns = at_ns, self._clock()

    def hold(self, held: bool) -> None:
        """Stand at this moment whatever is meant, or no longer."""
        self.move(self.now_ns)
        self._held = held


class Replay:
    """Plays one attempt. What is due by the pace comes at once: set to a moment, it brings the state there."""

    def __init__(
        self,
        recorded: Recorded,
        attempt: Attempt,
        pace: Pace,
        *,
        end_ns: int,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Begin at the last checkpoint before the moment that it is by `pace`. After `end_ns` nothing is known."""
        self.known: set[int] = {endpoint.rank for endpoint in attempt.run.endpoints}
        """Ranks that had told where they listen."""
        self.here: set[int] = set()
        """None: that a process has ended stands in the recording."""
        self.refused: dict[int, str] = {}
        """None of them, ever."""
        self.attempt = attempt
        self.pace = pace
        self.end_ns = end_ns
        self._recorded, self._sleep = recorded, sleep
        checkpoint = recorded.checkpoint(attempt, pace.now_ns)
        self.began_ns = attempt.first_ns if checkpoint is None else checkpoint.at_ns
        """What is played begins here."""
        self.tables: list[bytes] = [] if checkpoint is None else checkpoint.tables
        """Steps from before that moment, which the state must have before it is given frames."""
        self._first: deque[tuple[int, bytes]] = deque()
        if checkpoint is not None:
            # Each at its own time: what a rank has said last is as old as it was.
            self._first.extend(zip(checkpoint.times_ns, checkpoint.payloads, strict=True))
        self._after = -1 if checkpoint is None else checkpoint.position
        self._read_ns = self.began_ns - SLACK_NS
        """Up to here it has been read."""
        self.played_ns = self.began_ns
        """Up to here frames have been handed out."""
        self._next: Entry | None = None
        self._exhausted = False
        self._entries = self._read()

    @property
    def at_end(self) -> bool:
        """Whether nothing is left of it, and its time is up."""
        return not self._first and self._ahead() is None and self.pace.now_ns >= self.end_ns

    @property
    def next_ns(self) -> int:
        """When the next frame came; at the end, the end."""
        entry = self._ahead()
        return self.end_ns if entry is None else entry.at_ns

    def poll(self, timeout_ms: int = TICK_MS) -> Frame | Tick:
        """The next frame that is due, or a tick if none is in time."""
        if self._first:
            at_ns, payload = self._first.popleft()
            return Frame(_CHECKPOINT, payload, at_ns)
        entry = self._ahead()
        if timeout_ms > 0 and self.next_ns > self.pace.now_ns:
            ahead_s = (self.next_ns - self.pace.now_ns) / 1e9 / self.pace.speed
            self._sleep(min(timeout_ms / 1e3, max(ahead_s, MIN_S) if self.pace.running else timeout_ms / 1e3))
        now_ns = self.pace.now_ns
        if entry is None or entry.at_ns > now_ns:
            if now_ns > self.end_ns:
                self.pace.move(self.end_ns)
            return Tick(min(now_ns, self.end_ns))
        if self.pace.running and now_ns - entry.at_ns > MAX_BEHIND_S * 1e9 * self.pace.speed:
            self.pace.move(entry.at_ns)
        self._next, self.played_ns = None, entry.at_ns
        return Frame(entry.topic, entry.payload, entry.at_ns)

    def poll_ready(self, most: int) -> list[Frame]:
        """More of what is due, at most so many: on the way to another moment that is all there was."""
        frames: list[Frame] = []
        while self._first and len(frames) < most:
            at_ns, payload = self._first.popleft()
            frames.append(Frame(_CHECKPOINT, payload, at_ns))
        now_ns = self.pace.now_ns
        while len(frames) < most and (entry := self._ahead()) is not None and entry.at_ns <= now_ns:
            self._next, self.played_ns = None, entry.at_ns
            frames.append(Frame(entry.topic, entry.payload, entry.at_ns))
        return frames

    def extend(self, attempt: Attempt, end_ns: int) -> None:
        """More of it was recorded meanwhile."""
        self.attempt, self.end_ns = attempt, max(end_ns, self.end_ns)
        if self._exhausted:
            self._exhausted, self._entries = False, self._read()

    def want_stacks(self, ranks: frozenset[int]) -> None:
        """Nobody is there who could answer; what was answered then comes by itself."""

    def want_buckets(self, wanted: bool) -> None:
        """As above."""

    def close(self) -> None:
        """The recording belongs to whoever opened it."""
        self._first.clear()
        self._entries.close()

    def _ahead(self) -> Entry | None:
        """The next frame; None = there is none, or none yet."""
        if self._next is None and not self._exhausted:
            self._next = next(self._entries, None)
            self._exhausted = self._next is None
        return self._next

    def _read(self) -> Generator[Entry, None, None]:
        """What was recorded, by windows: of a long recording no more is looked at than is played."""
        window_ns = WINDOW_NS
        while self._read_ns < self.attempt.last_ns:
            upto_ns = min(self._read_ns + window_ns, self.attempt.last_ns)
            found = False
            for entry in self._recorded.entries(
                self.attempt, from_ns=self._read_ns, upto_ns=upto_ns, after=self._after, alerts=True
            ):
                found = True
                yield entry
            self._read_ns = upto_ns
            # Where nothing was recorded for long, larger and larger parts of it are passed over.
            window_ns = WINDOW_NS if found else 2 * window_ns
