"""The job step by step, for charts: a few figures of every aligned step, and how far each rank was from the others.

Grows with the steps that all ranks have finished, each looked at once, so that drawing costs the same however many
ranks there are. Steps with a pause, an evaluation or a skipped update are left out, as in the figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.limits import HungStepLimits
from ddpwatch.core.metrics.aggregate import Aggregate
from ddpwatch.core.metrics.histogram import MEDIAN, Histogram
from ddpwatch.core.metrics.hung_steps import HungStepFinder, blamed_ranks
from ddpwatch.core.metrics.window import NOT_KNOWN, aligned_window, held_by_all, together
from ddpwatch.core.state.step_store import CAPACITY_STEPS, TIMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.metrics.hung_steps import HungSteps
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.core.state.step_store import IntArray

CHUNK_STEPS: Final = 32
"""Steps that are aligned at a time: bounds the memory when a whole history arrives at once."""


class Timeline:
    """The last aligned steps in arrays of a fixed size, oldest first in what the methods give.

    Where not all ranks are heard, wire and waiting cannot be told apart: both are nan.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.ranks: tuple[int, ...] = ()
        """The rows of what `excess` gives."""
        self.aggregate = Aggregate()
        """All steps that were followed with all ranks, those that have left the arrays among them. Without all ranks
        nobody's wait is known."""
        self._aggregated = np.full(CAPACITY_STEPS, -1, dtype=np.int64)
        """By slot, the last step in the aggregate: one that comes again, because a history came late, counts once."""
        self._index = np.full(CAPACITY_STEPS, -1, dtype=np.int64)
        self._series = np.full((len(SERIES), CAPACITY_STEPS), np.nan)
        # By step, then rank: the steps that are asked for are then copied whole, which thousands of ranks need.
        self._excess = np.full((CAPACITY_STEPS, 0), NOT_KNOWN, dtype=np.uint8)
        self._next = 1
        self._heard = 0

    @property
    def newest(self) -> int:
        """The last step; -1 = none yet."""
        return int(self._index.max())

    @property
    def oldest(self) -> int:
        """The first step that is still there; -1 = none yet."""
        held = self._index[self._index > self._next - 1 - CAPACITY_STEPS]
        held = held[held >= 0]
        return int(held.min()) if len(held) else -1

    def follow(self, state: RunState) -> None:
        """Take in what all ranks have finished since."""
        if tuple(state.ranks) != self.ranks:
            self._restart(tuple(state.ranks))
        # A history comes after the first live steps, and one rank before another: what they fill in was passed over.
        received = sum((rank.last_received_ns is not None) + rank.snapped for rank in state.ranks.values())
        if received != self._heard:
            self._heard, self._next = received, 1
        ranks = together(state)
        front = min((rank.steps.newest for rank in ranks), default=-1)
        self._next = max(self._next, front - CAPACITY_STEPS + 1)
        while self._next <= front:
            upto = min(front, self._next + CHUNK_STEPS - 1)
            self._take(state, ranks, np.arange(self._next, upto + 1, dtype=np.int64))
            self._next = upto + 1

    def steps(self, upto: int | None = None, most: int = CAPACITY_STEPS) -> IntArray:
        """Indices of the last steps, ascending."""
        last = self.newest if upto is None else min(upto, self.newest)
        candidates = np.arange(max(self._next - CAPACITY_STEPS, last - most + 1, 0), last + 1, dtype=np.int64)
        kept: IntArray = candidates[self._index[candidates % CAPACITY_STEPS] == candidates]
        return kept

    def series(self, name: str, steps: IntArray) -> NDArray[np.float64]:
        """One figure of these steps: see `SERIES`. All of them must be from `steps()`."""
        values: NDArray[np.float64] = self._series[SERIES.index(name), steps % CAPACITY_STEPS]
        return values

    def excess(self, steps: IntArray) -> NDArray[np.uint8]:
        """By how much the own work of each rank exceeded the middle rank's, in per cent of the step: (rank, step)."""
        excess: NDArray[np.uint8] = self._excess[steps % CAPACITY_STEPS].T
        return excess

    def hung_steps(self, steps: IntArray) -> HungSteps | None:
        """The hung steps among these, without what they cost; None = there are none."""
        step_ns, finder = self.series("step_ns", steps), HungStepFinder()
        long = step_ns > HungStepLimits.EXTRA_NS
        if not long.any():
            # The usual case: thousands of ranks need not be searched for one to blame.
            return None
        finder.add(steps[long], step_ns[long], blamed_ranks(self.ranks, self.excess(steps[long])))
        lengths = Histogram()
        lengths.add(step_ns)
        return finder.found(lengths.quantile(MEDIAN), float(step_ns.sum()))

    def _restart(self, ranks: tuple[int, ...]) -> None:
        self.__init__()  # type: ignore[misc]  # begins anew, with nothing left
        self.ranks = ranks
        self.aggregate = Aggregate(ranks)
        self._excess = np.full((CAPACITY_STEPS, len(ranks)), NOT_KNOWN, dtype=np.uint8)

    def _take(self, state: RunState, ranks: Sequence[RankState], indices: IntArray) -> None:
        indices = indices[held_by_all(ranks, indices)[1]]
        if not len(indices):
            return
        window = aligned_window(state, ranks, indices, TIMES)
        slots = indices % CAPACITY_STEPS
        if window.complete:
            self.aggregate.add(window.where(self._aggregated[slots] != indices))
            self._aggregated[slots] = indices
        self._series[:, slots] = _figures(window)
        self._excess[slots] = NOT_KNOWN
        rows = np.searchsorted(self.ranks, window.ranks)
        self._excess[slots[:, None], rows] = window.excess_percent.T
        # Last: whoever reads meanwhile does not see the step before its figures are there.
        self._index[slots] = indices


SERIES: Final = ("step_ns", "sync_ns", "wire_ns", "wait_ns", "median_ns", "samples_per_s")
"""Means over the ranks, but `median_ns` is the own work of the middle one, and throughput the whole job's. What cannot
be told is nan."""


def _figures(window: Window) -> NDArray[np.float64]:
    unknown = np.full(len(window), np.nan)
    of_all = (window.wire_ns, window.job_wait_ns, window.samples_per_s) if window.complete else (unknown,) * 3
    wire_ns, wait_ns, per_s = of_all
    return np.stack([window.job_step_ns, window.job_sync_ns, wire_ns, wait_ns, window.median_self_ns, per_s])
