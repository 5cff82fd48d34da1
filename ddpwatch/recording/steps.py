"""Windows of aligned steps from a recorded attempt, read once from its first frame to its last.

Reports, exports and comparisons are made from them. Memory is bounded by the state, however long the run was.
`WholeRun` adds all steps up within time budgets, for a viewer that does something else in between.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.metrics.aggregate import Aggregate
from ddpwatch.core.metrics.window import aligned_window, held_by_all, ranks_to_compare
from ddpwatch.core.state.step_store import MANY_RANKS_STEPS
from ddpwatch.recording.reader import Checkpoint
from ddpwatch.recording.schema import Unreadable
from ddpwatch.wire import STEP_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.recording.reader import Attempt, Recording

CHUNK_STEPS: Final = MANY_RANKS_STEPS // 2
"""Max steps in a window: few enough that all ranks still store them, however many ranks there are."""
BETWEEN_LOOKS: Final = 256
"""Max frames between two checks for steps that are ready."""
LOOKS: Final = 512
"""Number of checks in a short recording, as far as `MIN_BETWEEN` permits."""
MIN_BETWEEN: Final = 8
"""Min frames between two checks."""
LOOK_BYTES: Final = 64 * STEP_BYTES
"""Bytes per rank after which steps are checked too: with many steps a second, before their ring overwrites them."""
RESERVE: Final = 0.25
"""Fraction of a rank's step ring that is left free for the steps up to the next check."""
SILENCE_NS: Final = 1_500_000_000
"""Nanoseconds without any frame after which the ranks may have advanced beyond the ring: pending steps go out first."""
PATIENCE_FRAMES: Final = 16
"""Frames per rank after which steps go out without missing histories. Histories arrive one after another, after the
first live steps, and that of a late rank later still."""
NEARLY: Final = 0.99
"""Max fraction shown as read before the end."""


class StepReader:
    """One pass over an attempt."""

    def __init__(
        self,
        recorded: Recording,
        attempt: Attempt,
        progress: Callable[[int], None] | None = None,
        hear: Callable[[bytes], None] | None = None,
    ) -> None:
        """`progress` gets the number of frames read since its last call, `hear` each payload before the state does."""
        self.attempt = attempt
        self.frames = recorded.frames(attempt)
        self.state = attempt.new_state()
        """State up to the last frame read; at the end, how the run ended."""
        self.skipped = 0
        """Number of steps that not all ranks had, or that were unusual and not requested."""
        self._recorded = recorded
        self._progress, self._hear = progress, hear
        self._unusual = False
        self._next = -1
        """Index of the next step to go out; -1 = no step is known."""
        self._compared: Sequence[RankState] = ()

    def windows(self, *, unusual: bool = False) -> Iterator[Window]:
        """All aligned steps in order; those with a pause, an evaluation, a skipped update or the host's
        times instead of a GPU's only if `unusual`.
        """
        return (window for window in self.portions(unusual=unusual) if window is not None)

    def portions(self, *, unusual: bool = False) -> Iterator[Window | None]:
        """The same windows, with None after every portion of frames, so that the caller can do something else."""
        self._unusual = unusual
        done = number = pending_bytes = received_ns = 0
        restored = False
        between = min(max(self.frames // LOOKS, MIN_BETWEEN), BETWEEN_LOOKS)
        # Ingesting many frames together is faster in a large run.
        pending: list[tuple[bytes | memoryview, int]] = []
        for item in self._recorded.bridged(self.attempt):
            if isinstance(item, Checkpoint):
                restored, received_ns = True, item.at_ns
                self._ingest(pending)
                # The checkpoint may be so far ahead that it overwrites the steps in the ring.
                yield from self._flushed()
                item.apply(self.state)
                yield from self._ready(CHUNK_STEPS)
                continue
            if item.at_ns - received_ns >= SILENCE_NS:
                self._ingest(pending)
                yield from self._flushed()
            received_ns = item.at_ns
            number += 1
            if self._hear is not None:
                self._hear(item.payload)
            pending.append((item.payload, item.at_ns))
            pending_bytes += len(item.payload)
            if number % between == 0 or pending_bytes >= LOOK_BYTES * self.state.world_size:
                pending_bytes = 0
                self._ingest(pending)
                if self._progress is not None:
                    self._progress(number - done)
                    done = number
                if self._all_snapped or number > PATIENCE_FRAMES * self.state.world_size:
                    yield from self._ready(CHUNK_STEPS)
                yield None
        self._ingest(pending)
        if not number and not restored and self._recorded.damaged:
            raise Unreadable(f"{self._recorded.path} is damaged, and nothing of this attempt can be read")
        self.state.tick(self.attempt.last_ns)
        yield from self._ready(1, last=True)
        if self._next >= 0:
            # Other ranks may have steps after the last one of a rank that was killed or ran out of data.
            furthest = max((rank.steps.newest for rank in self.state.ranks.values()), default=-1)
            self.skipped += max(furthest - self._next + 1, 0)

    def _ingest(self, pending: list[tuple[bytes | memoryview, int]]) -> None:
        self.state.ingest_all(pending)
        pending.clear()

    @property
    def _all_snapped(self) -> bool:
        ranks = self.state.ranks.values()
        return len(ranks) >= self.state.world_size and all(rank.snapped for rank in ranks)

    def _flushed(self) -> Iterator[Window]:
        """All steps so far, before later ones may overwrite them."""
        if self._next >= 0:
            yield from self._ready(1, last=True)

    def _ready(self, least: int, *, last: bool = False) -> Iterator[Window]:
        """Steps that are ready, if there are `least` of them. Steps that a rank has not sent are waited for as long as
        its history may bring them, unless this is the `last` time: after a recorder restarted, or a host came back, the
        first live steps arrive before the histories of the time between.
        """
        ranks = ranks_to_compare(self.state)
        before, self._compared = self._compared, ranks
        if {rank.rank for rank in before} - {rank.rank for rank in ranks}:
            # Steps with a rank that is not compared any more go out up to its last one.
            yield from self._up_to(min(rank.steps.newest for rank in before), before, 1, -1)
        front = min((rank.steps.newest for rank in ranks), default=-1)
        if self._next < 0 and front >= 0:
            self._next = max(int(rank.steps.indices()[0]) for rank in ranks)
        furthest = max((rank.steps.newest for rank in ranks), default=-1)
        # Later steps overwrite those up to here before the next check.
        pressing = furthest - int(self.state.kept_steps * (1 - RESERVE))
        if last:
            pressing = furthest
        elif self._awaits_others(ranks):
            front, least = min(front, pressing), 1
        yield from self._up_to(front, ranks, least, pressing)

    def _up_to(self, front: int, ranks: Sequence[RankState], least: int, pressing: int) -> Iterator[Window]:
        """The steps of these ranks up to `front`. A step that a rank has not sent is skipped if it is not later than
        `pressing`; otherwise it ends the windows.
        """
        while self._next >= 0 and front - self._next + 1 >= least:
            until = min(front, self._next + CHUNK_STEPS - 1)
            indices = np.arange(self._next, until + 1, dtype=np.int64)
            held, _, ordinary = held_by_all(ranks, indices)
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
                indices, held, ordinary = indices[:whole], held[:whole], ordinary[:whole]
            chosen = indices[held if self._unusual else ordinary]
            self.skipped += len(indices) - len(chosen)
            self._next += len(indices)
            if len(chosen):
                yield aligned_window(self.state, ranks, chosen)

    def _awaits_others(self, ranks: Sequence[RankState]) -> bool:
        """Whether a rank that is not compared at the moment may come back and send the steps that are missing."""
        compared = {rank.rank for rank in ranks}
        return any(
            rank.last_received_ns is not None
            and rank.bye is None
            and rank.gone_ns is None
            and rank.rank not in compared
            for rank in self.state.ranks.values()
        )

    def _next_held(self, ranks: Sequence[RankState], front: int) -> int:
        """The first step from the next one on that all ranks have; `front + 1` if there is none."""
        first = self._next
        while first <= front:
            # Skips what no ring holds at once: a gap, or what claims to be one, may be of any length.
            first = max(first, *(int(rank.steps.indices()[0]) for rank in ranks))
            indices = np.arange(first, min(front, first + CHUNK_STEPS - 1) + 1, dtype=np.int64)
            held = held_by_all(ranks, indices).held
            if held.any():
                return first + int(held.argmax())
            first += CHUNK_STEPS
        return front + 1


class WholeRun:
    """Aggregate of all recorded steps of an attempt, read within time budgets."""

    def __init__(self, recorded: Recording, attempt: Attempt) -> None:
        """Read nothing yet, not even the number of frames: the first screen may be waiting."""
        self.attempt = attempt
        self.done = False
        self.aggregate = Aggregate()
        """The steps so far."""
        self._recorded = recorded
        self._frames, self._read = 1, 0
        self._portions: Iterator[Window | None] | None = None

    @property
    def part(self) -> float:
        """Fraction read, from 0 to 1; 1 only at the end."""
        return 1.0 if self.done else min(self._read / self._frames, NEARLY)

    def go_on(self, budget_s: float) -> None:
        """Read for at most that many seconds."""
        until_s = time.monotonic() + budget_s
        if self._portions is None:
            reader = StepReader(self._recorded, self.attempt, self._count)
            self._frames, self._portions = max(reader.frames, 1), reader.portions()
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
