"""A recorded attempt from its first step to its last, in windows of aligned steps: what reports, exports and
comparisons are made from.

Goes through the frames once and keeps no more than the state does, however long the run was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.digest import Digest
from ddpwatch.core.rank import Place
from ddpwatch.core.recalled import read_alerts, read_event
from ddpwatch.core.ring import CAPACITY_STEPS, CROWDED_STEPS
from ddpwatch.core.state import RunState
from ddpwatch.core.tables import take_table
from ddpwatch.core.window import believed, held_by_all, side_by_side, together
from ddpwatch.recording import ALERTS, LATEST_NS, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddpwatch.core.alerts import Alert, AlertEvent
    from ddpwatch.core.window import Window
    from ddpwatch.sources.recorded import Attempt, Checkpoint, Recorded

CHUNK_STEPS: Final = CROWDED_STEPS // 2
"""Steps in a window: so few that all ranks still have them, however many ranks there are."""
BETWEEN_LOOKS: Final = 256
"""Frames between two looks at how far the ranks are, …"""
LOOKS: Final = 512
LEAST_BETWEEN: Final = 8
"""… or fewer of a short recording, so that it is looked at so many times."""
LAST_POSITION: Final = LATEST_NS - 1
PATIENCE_FRAMES: Final = 16
"""So many frames of each rank are read before steps go out without the histories that have not come: they come one
after the other, after the first live steps, and that of a rank which starts late comes later."""


class Readout:
    """One pass over an attempt."""

    def __init__(
        self,
        recorded: Recorded,
        attempt: Attempt,
        progress: Callable[[int], None] | None = None,
        hear: Callable[[bytes], None] | None = None,
    ) -> None:
        """Nothing is read yet. `progress` is told, now and then, how many more frames are done; `hear` is given each of
        them, before it is taken in.
        """
        self.attempt = attempt
        self.frames = recorded.frames(attempt)
        run = attempt.run
        places = [Place(endpoint.rank, endpoint.host, endpoint.pid) for endpoint in run.endpoints]
        self.state = RunState(run.id, run.name, run.world_size, places)
        """How far it has been read; at the end, how the run ended."""
        self.skipped = 0
        """Steps that not all ranks had, or that unusual things happened in and were not asked for."""
        self._recorded = recorded
        self._progress, self._hear = progress, hear
        self._next = self._position = -1

    def windows(self, *, unusual: bool = False) -> Iterator[Window]:
        """All aligned steps in order; with a pause, an evaluation or a skipped update in them only if asked for."""
        return (window for window in self.portions(unusual=unusual) if window is not None)

    def portions(self, *, unusual: bool = False) -> Iterator[Window | None]:
        """The same for whoever has something else to do between: None = some more was read, and no steps are ready."""
        done = number = 0
        between = min(max(self.frames // LOOKS, LEAST_BETWEEN), BETWEEN_LOOKS)
        # Of a large run they are sooner taken in together.
        come: list[tuple[bytes | memoryview, int]] = []
        for number, entry in enumerate(self._recorded.entries(self.attempt), 1):
            if entry.position != self._position + 1:
                self._take(come)
                yield from self._bridged(entry.position, unusual=unusual)
            self._position = entry.position
            if self._hear is not None:
                self._hear(entry.payload)
            come.append((entry.payload, entry.at_ns))
            if number % between == 0:
                self._take(come)
                if self._progress is not None:
                    self._progress(number - done)
                    done = number
                if self._all_heard or number > PATIENCE_FRAMES * self.state.world_size:
                    yield from self._ready(CHUNK_STEPS, unusual=unusual)
                yield None
        self._take(come)
        yield from self._bridged(LAST_POSITION, unusual=unusual)
        if not number and self._position < 0 and self._recorded.damaged:
            raise Unreadable(f"{self._recorded.path} is damaged, and nothing of that attempt can be read")
        self.state.tick(self.attempt.last_ns)
        yield from self._ready(1, unusual=unusual)
        if self._next >= 0:
            # Of a rank that was killed, or whose data has ended, the others have some more.
            furthest = max((rank.steps.newest for rank in self.state.ranks.values()), default=-1)
            self.skipped += max(furthest - self._next + 1, 0)

    def _take(self, come: list[tuple[bytes | memoryview, int]]) -> None:
        self.state.take_all(come)
        come.clear()

    def _bridged(self, before: int, *, unusual: bool) -> Iterator[Window]:
        """Where frames are missing, because they were let go, could not be written or cannot be read: what the
        checkpoints between tell of them.
        """
        for checkpoint in self._recorded.checkpoints(self.attempt, self._position, before):
            take_checkpoint(self.state, checkpoint)
            self._position = checkpoint.position
            yield from self._ready(CHUNK_STEPS, unusual=unusual)

    @property
    def _all_heard(self) -> bool:
        ranks = self.state.ranks.values()
        return len(ranks) >= self.state.world_size and all(rank.snapped for rank in ranks)

    def _ready(self, least: int, *, unusual: bool) -> Iterator[Window]:
        ranks = together(self.state)
        front = min((rank.steps.newest for rank in ranks), default=-1)
        if self._next < 0 and front >= 0:
            self._next = max(int(rank.steps.indices()[0]) for rank in ranks)
        if front - self._next > CAPACITY_STEPS:
            # After a gap, or what claims to be one: steps that nobody has are not gone through one by one.
            begun = max(int(rank.steps.indices()[0]) for rank in ranks)
            self.skipped += max(begun - self._next, 0)
            self._next = max(begun, self._next)
        while self._next >= 0 and front - self._next + 1 >= least:
            last = min(front, self._next + CHUNK_STEPS - 1)
            indices = np.arange(self._next, last + 1, dtype=np.int64)
            held, usual = held_by_all(ranks, indices)
            chosen = indices[held if unusual else usual]
            self.skipped += len(indices) - len(chosen)
            self._next = last + 1
            if len(chosen):
                yield side_by_side(self.state, ranks, chosen)


def take_checkpoint(state: RunState, checkpoint: Checkpoint) -> None:
    """Bring the state to a checkpoint, unless it is further already."""
    for table in checkpoint.tables:
        take_table(state, table)
    for payload, at_ns in zip(checkpoint.payloads, checkpoint.times_ns, strict=True):
        state.take(payload, at_ns)


def told(recorded: Recorded, attempt: Attempt) -> list[tuple[int, AlertEvent]]:
    """The changes of alerts while this attempt was recorded, each with its time, in order."""
    events = ((row.at_ns, read_event(row.event)) for row in recorded.alerts() if row.attempt == attempt.id)
    return [(at_ns, event) for at_ns, event in events if event is not None]


def last_words(recorded: Recorded, attempt: Attempt) -> list[Alert]:
    """Each trouble as it was at its end, or at the end of the recording, in the order in which they opened."""
    last: dict[tuple[tuple[str, str], int], Alert] = {}
    for _, event in told(recorded, attempt):
        last[event.alert.key, event.alert.since.now_ns] = event.alert
    # All that is open is kept after each checkpoint, and then what has changed.
    checkpoint = recorded.checkpoint(attempt, attempt.last_ns)
    from_ns = None if checkpoint is None else checkpoint.at_ns - 1
    for entry in recorded.entries(attempt, from_ns=from_ns, shard=ALERTS):
        for alert in read_alerts(entry.payload):
            identity = alert.key, alert.since.now_ns
            if identity in last and last[identity].closed is None:
                last[identity] = alert
    return list(last.values())


def digest_of(windows: Iterable[Window], ranks: tuple[int, ...]) -> tuple[Digest, tuple[int, ...]]:
    """The windows in numbers, and who was not believed. Without step 0, which holds warming up."""
    digest = Digest(ranks)
    disbelieved: set[int] = set()
    for window in windows:
        plain = believed(window.last(len(window) - 1) if len(window) > 1 and not window.indices[0] else window)
        disbelieved.update(plain.disbelieved)
        if plain.indices[0]:
            digest.take(plain)
    return digest, tuple(sorted(disbelieved))
