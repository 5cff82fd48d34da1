"""A recorded attempt from its first step to its last, in windows of aligned steps: what reports, exports and
comparisons are made from.

Goes through the frames once and keeps no more than the state does, however long the run was.

All recorded steps of a run added up, as a dashboard has them that has looked on from its beginning to its end.

Who goes to the end of a recording has the last steps only. The others are read from the beginning, in portions, so that
whoever waits for something else does not wait for this.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.metrics.aggregate import Aggregate
from ddpwatch.core.metrics.window import aligned_window, held_by_all, together
from ddpwatch.core.state.step_store import CROWDED_STEPS
from ddpwatch.recording.schema import LATEST_NS, Unreadable
from ddpwatch.wire import STEP_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.recording.reader import Attempt, Recorded

CHUNK_STEPS: Final = CROWDED_STEPS // 2
"""Steps in a window: so few that all ranks still have them, however many ranks there are."""
BETWEEN_LOOKS: Final = 256
"""Frames between two looks at how far the ranks are, …"""
LOOKS: Final = 512
MIN_BETWEEN: Final = 8
"""… or fewer of a short recording, so that it is looked at so many times."""
LAST_POSITION: Final = LATEST_NS - 1
LOOK_BYTES: Final = 64 * STEP_BYTES
"""It is also looked after so much of each rank has come: of a run with many steps a second, before they are let go."""
RESERVE: Final = 0.25
"""Of the steps that are kept of a rank, so much is left free for those that come until the next look."""
SILENCE_NS: Final = 1_500_000_000
"""After so long without any frame the ranks may be so far on that what is there has to make room."""
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
        self.state = attempt.new_state()
        """How far it has been read; at the end, how the run ended."""
        self.skipped = 0
        """Steps that not all ranks had, or that unusual things happened in and were not asked for."""
        self._recorded = recorded
        self._progress, self._hear = progress, hear
        self._next = self._position = -1
        self._compared: Sequence[RankState] = ()
        """Ranks that were compared at the last look."""

    def windows(self, *, unusual: bool = False) -> Iterator[Window]:
        """All aligned steps in order; with a pause, an evaluation or a skipped update in them only if asked for."""
        return (window for window in self.portions(unusual=unusual) if window is not None)

    def portions(self, *, unusual: bool = False) -> Iterator[Window | None]:
        """The same for whoever has something else to do between: None = some more was read, and no steps are ready."""
        done = number = come_bytes = came_ns = 0
        between = min(max(self.frames // LOOKS, MIN_BETWEEN), BETWEEN_LOOKS)
        # Of a large run they are sooner taken in together.
        come: list[tuple[bytes | memoryview, int]] = []
        for number, entry in enumerate(self._recorded.entries(self.attempt), 1):
            if entry.position != self._position + 1:
                self._take(come)
                yield from self._bridged(entry.position, unusual=unusual)
            elif entry.at_ns - came_ns >= SILENCE_NS and self._next >= 0:
                self._take(come)
                yield from self._ready(1, unusual=unusual, last=True)
            self._position, came_ns = entry.position, entry.at_ns
            if self._hear is not None:
                self._hear(entry.payload)
            come.append((entry.payload, entry.at_ns))
            come_bytes += len(entry.payload)
            if number % between == 0 or come_bytes >= LOOK_BYTES * self.state.world_size:
                come_bytes = 0
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
        yield from self._ready(1, unusual=unusual, last=True)
        if self._next >= 0:
            # Of a rank that was killed, or whose data has ended, the others have some more.
            furthest = max((rank.steps.newest for rank in self.state.ranks.values()), default=-1)
            self.skipped += max(furthest - self._next + 1, 0)

    def _take(self, come: list[tuple[bytes | memoryview, int]]) -> None:
        self.state.ingest_all(come)
        come.clear()

    def _bridged(self, before: int, *, unusual: bool) -> Iterator[Window]:
        """Where frames are missing, because they were let go, could not be written or cannot be read: what the
        checkpoints between tell of them.
        """
        for checkpoint in self._recorded.checkpoints(self.attempt, self._position, before):
            if self._next >= 0:
                # It may be so far on that what is there has to make room for it.
                yield from self._ready(1, unusual=unusual, last=True)
            checkpoint.apply(self.state)
            self._position = checkpoint.position
            yield from self._ready(CHUNK_STEPS, unusual=unusual)

    @property
    def _all_heard(self) -> bool:
        ranks = self.state.ranks.values()
        return len(ranks) >= self.state.world_size and all(rank.snapped for rank in ranks)

    def _ready(self, least: int, *, unusual: bool, last: bool = False) -> Iterator[Window]:
        """Steps go out when there are at least so many. Those that a rank has not told are waited for as long as its
        history may still bring them, unless this is the `last` time: after a recorder went on into the file, or a host
        came back, the first live steps come before the histories of the time between.
        """
        ranks = together(self.state)
        yield from self._with_those_left_out(ranks, unusual=unusual)
        front = min((rank.steps.newest for rank in ranks), default=-1)
        if self._next < 0 and front >= 0:
            self._next = max(int(rank.steps.indices()[0]) for rank in ranks)
        furthest = max((rank.steps.newest for rank in ranks), default=-1)
        # Later steps take the place of those up to here before the next look.
        pressing = furthest - int(self.state.kept_steps * (1 - RESERVE))
        if last:
            pressing = furthest
        elif self._awaits_others(ranks):
            front, least = min(front, pressing), 1
        yield from self._up_to(front, ranks, least, pressing, unusual=unusual)

    def _with_those_left_out(self, ranks: Sequence[RankState], *, unusual: bool) -> Iterator[Window]:
        """Who is not compared with the others any more goes out with them as far as it has come."""
        before, self._compared = self._compared, ranks
        if {rank.rank for rank in before} - {rank.rank for rank in ranks}:
            front = min(rank.steps.newest for rank in before)
            yield from self._up_to(front, before, 1, -1, unusual=unusual)

    def _up_to(
        self, front: int, ranks: Sequence[RankState], least: int, pressing: int, *, unusual: bool
    ) -> Iterator[Window]:
        """The steps of these ranks up to `front`. One that a rank has not told is passed over if it is not later than
        `pressing`, and else is where it ends.
        """
        while self._next >= 0 and front - self._next + 1 >= least:
            until = min(front, self._next + CHUNK_STEPS - 1)
            indices = np.arange(self._next, until + 1, dtype=np.int64)
            held, usual = held_by_all(ranks, indices)
            if not held[0]:
                begun = self._next_held(ranks, front)
                if begun > pressing:
                    return
                self.skipped += begun - self._next
                self._next = begun
                continue
            if not held.all():
                # Up to the first that is missing.
                whole = int(held.argmin())
                indices, held, usual = indices[:whole], held[:whole], usual[:whole]
            chosen = indices[held if unusual else usual]
            self.skipped += len(indices) - len(chosen)
            self._next += len(indices)
            if len(chosen):
                yield aligned_window(self.state, ranks, chosen)

    def _awaits_others(self, ranks: Sequence[RankState]) -> bool:
        """Whether somebody who is not compared just now may come back and tell what was missed."""
        compared = {rank.rank for rank in ranks}
        return any(
            rank.last_received_ns is not None
            and rank.bye is None
            and rank.gone_ns is None
            and rank.rank not in compared
            for rank in self.state.ranks.values()
        )

    def _next_held(self, ranks: Sequence[RankState], front: int) -> int:
        """The first step from the next one on that all have; the one after `front`, if there is none."""
        first = self._next
        while first <= front:
            # What nobody keeps any more, or what is a gap or claims to be one, is not gone through one by one.
            first = max(first, *(int(rank.steps.indices()[0]) for rank in ranks))
            indices = np.arange(first, min(front, first + CHUNK_STEPS - 1) + 1, dtype=np.int64)
            held, _ = held_by_all(ranks, indices)
            if held.any():
                return first + int(held.argmax())
            first += CHUNK_STEPS
        return front + 1


NEARLY: Final = 0.99


class WholeRun:
    """One attempt, read from its first frame to its last."""

    def __init__(self, recorded: Recorded, attempt: Attempt) -> None:
        """Nothing is read yet, nor is it looked how much there is: somebody may wait for the first picture."""
        self.attempt = attempt
        self.done = False
        self.aggregate = Aggregate()
        """The steps so far."""
        self._recorded = recorded
        self._frames, self._read = 1, 0
        self._portions: Iterator[Window | None] | None = None

    @property
    def part(self) -> float:
        """How much of it was read, from 0 to 1, which is the end and nothing else."""
        return 1.0 if self.done else min(self._read / self._frames, NEARLY)

    def go_on(self, budget_s: float) -> None:
        """Read for so long at most."""
        until_s = time.monotonic() + budget_s
        if self._portions is None:
            readout = Readout(self._recorded, self.attempt, self._count)
            self._frames, self._portions = max(readout.frames, 1), readout.portions()
        while not self.done and time.monotonic() < until_s:
            try:
                window = next(self._portions)
            except (StopIteration, Unreadable):
                self.done = True
                return
            if window is not None:
                self._take(window)

    def _count(self, frames: int) -> None:
        self._read += frames

    def _take(self, window: Window) -> None:
        if not window.complete:
            return
        if not self.aggregate.steps:
            self.aggregate = Aggregate(window.ranks)
        # The first step holds warming up.
        self.aggregate.add(window.where(window.indices > 0))
