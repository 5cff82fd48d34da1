"""Figures of every aligned step, and the excess of each rank, for charts.

Each step that all ranks have finished is processed once, so that drawing costs the same for any number of ranks. Steps
with a pause, an evaluation or a skipped update are excluded, as in the figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.limits import HungStepLimits
from ddpwatch.core.metrics.aggregate import Aggregate
from ddpwatch.core.metrics.histogram import MEDIAN, Histogram
from ddpwatch.core.metrics.hung_steps import HungStepFinder, blamed_ranks
from ddpwatch.core.metrics.window import NOT_KNOWN, aligned_window, held_by_all, ranks_to_compare
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
    """Ring buffer of the latest aligned steps; methods return them oldest first.

    Without all ranks, wire and wait cannot be separated: both are NaN.
    """

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        """Rows of `excess`."""
        self.aggregate = Aggregate()
        """All complete steps so far, including those that have left the ring."""
        self._aggregated = np.full(CAPACITY_STEPS, -1, dtype=np.int64)
        """By slot, the last step in the aggregate: a late history repeats steps, and each counts once."""
        self._index = np.full(CAPACITY_STEPS, -1, dtype=np.int64)
        self._series = np.full((len(SERIES), CAPACITY_STEPS), np.nan)
        # Step before rank, so that requested steps are contiguous: it matters with thousands of ranks.
        self._excess = np.full((CAPACITY_STEPS, 0), NOT_KNOWN, dtype=np.uint8)
        self._next = 1
        self._received = 0

    @property
    def newest(self) -> int:
        """The last step; -1 = none."""
        return int(self._index.max())

    @property
    def oldest(self) -> int:
        """The first step in the ring; -1 = none."""
        held = self._index[self._index > self._next - 1 - CAPACITY_STEPS]
        held = held[held >= 0]
        return int(held.min()) if len(held) else -1

    def follow(self, state: RunState) -> None:
        """Add the steps that all ranks have finished since the last call."""
        if tuple(state.ranks) != self.ranks:
            self._restart(tuple(state.ranks))
        # A history arrives after the first live steps, and at different times for the ranks: start over to fill the
        # gaps.
        received = sum((rank.last_received_ns is not None) + rank.snapped for rank in state.ranks.values())
        if received != self._received:
            self._received, self._next = received, 1
        ranks = ranks_to_compare(state)
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
        """One of `SERIES` for these steps, which must be from `steps()`."""
        values: NDArray[np.float64] = self._series[SERIES.index(name), steps % CAPACITY_STEPS]
        return values

    def excess(self, steps: IntArray) -> NDArray[np.uint8]:
        """(rank, step): own work beyond the median rank's, in percent of the step."""
        excess: NDArray[np.uint8] = self._excess[steps % CAPACITY_STEPS].T
        return excess

    def hung_steps(self, steps: IntArray) -> HungSteps | None:
        """The hung steps among these, without their cost; None = there are none."""
        step_ns, finder = self.series("step_ns", steps), HungStepFinder()
        long = step_ns > HungStepLimits.EXTRA_NS
        if not long.any():
            # The common case: avoids a search through thousands of ranks.
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
        indices = indices[held_by_all(ranks, indices).ordinary]
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
        # Last, so that a concurrent reader does not see the step before its figures.
        self._index[slots] = indices


SERIES: Final = ("step_ns", "sync_ns", "wire_ns", "wait_ns", "median_ns", "samples_per_s")
"""Means over ranks, except `median_ns`, the own work of the median rank, and the throughput of the whole job; NaN = not
known."""


def _figures(window: Window) -> NDArray[np.float64]:
    unknown = np.full(len(window), np.nan)
    of_all = (window.wire_ns, window.job_wait_ns, window.samples_per_s) if window.complete else (unknown,) * 3
    wire_ns, wait_ns, per_s = of_all
    return np.stack([window.job_step_ns, window.job_sync_ns, wire_ns, wait_ns, window.median_self_ns, per_s])
