"""The last steps of one rank, in arrays of a fixed size."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddpwatch.wire import MAX_SNAP_STEPS

if TYPE_CHECKING:
    from ddpwatch.wire import Step

IntArray: TypeAlias = NDArray[np.int64]

COLUMNS: Final = (
    "index",
    "end_ns",
    "data_ns",
    "forward_ns",
    "backward_ns",
    "sync_ns",
    "optimizer_ns",
    "other_ns",
    "presync_ns",
    "samples",
    "batch",
    "backwards",
    "flags",
    "fingerprint",
    "busy_ns",
    "comm_bytes",
    "hook_ns",
)
"""The fields of `wire.Step` that are kept, one row of the array each."""
COLUMN: Final = {name: row for row, name in enumerate(COLUMNS)}
_values = attrgetter(*COLUMNS)

CAPACITY_STEPS: Final = MAX_SNAP_STEPS
"""As many as a snapshot brings, so that a late viewer knows what an early one knows."""
CROWDED_STEPS: Final = 256
"""As many are kept of each rank where there are very many ranks, so that memory stays within bounds."""


class StepRing:
    """Steps by index, each at most once. Late ones find their place; those older than the window are dropped.

    A step lives in slot `index % capacity`, so taking one costs the same however long the run is, and what is kept does
    not depend on the order of arrival.
    """

    __slots__ = ("_capacity", "_flagged", "_rows", "_whole_from", "newest")

    def __init__(self, capacity: int = CAPACITY_STEPS) -> None:
        """Set aside all the memory that the ring will ever use."""
        self._capacity = capacity
        # Only the index needs a value: an untouched slot is never read, and its memory never becomes real.
        self._rows: IntArray = np.empty((len(COLUMNS), capacity), dtype=np.int64)
        self._rows[COLUMN["index"]] = -1
        self.newest = -1
        """Index of the newest step; -1 = none yet."""
        self._whole_from = 0
        """From here to the newest no step is missing."""
        self._flagged = -1
        """Index of the newest step with a flag."""

    def put(self, step: Step) -> bool:
        """Keep the step, unless a newer one has its place. False = it contradicts what was told before.

        A rank counts upwards: one that has fallen far behind its own count contradicts itself, too.
        """
        index = step.index
        slot = index % self._capacity
        stored = int(self._rows[0, slot])
        if stored < index:
            self._rows[:, slot] = _values(step)
            if step.flags:
                self._flagged = max(self._flagged, index)
            self._follow(index)
        elif stored == index:
            return int(self._rows[1, slot]) == step.end_ns
        # A snapshot may be a little behind the live steps that came before it.
        return index > self.newest - 2 * CAPACITY_STEPS

    def _follow(self, index: int) -> None:
        """Keep track of what is newest, and of where nothing is missing."""
        if index > self.newest:
            if index > self.newest + 1:
                self._whole_from = index
            self.newest = index
        elif index == self._whole_from - 1:
            while self._whole_from and self.has(self._whole_from - 1):
                self._whole_from -= 1

    def is_plain(self, first: int, last: int) -> bool:
        """Whether all steps from the first to the last are there, and none of them has a flag: the usual case."""
        return (
            first >= self._whole_from
            and first > self.newest - self._capacity
            and self._flagged < first <= last <= self.newest
        )

    def has(self, index: int) -> bool:
        """Whether one step is there."""
        return int(self._rows[0, index % self._capacity]) == index and index > self.newest - self._capacity

    def holds(self, indices: IntArray) -> NDArray[np.bool_]:
        """Which of these steps are there."""
        stored: IntArray = self._rows[0, indices % self._capacity]
        held: NDArray[np.bool_] = (stored == indices) & (indices > self.newest - self._capacity)
        return held

    def narrow(self, indices: IntArray, held: NDArray[np.bool_], flags: IntArray) -> None:
        """Take out of `held` the steps that are not there, and add to `flags` those of the others."""
        slots = indices % self._capacity
        held &= self._rows[0, slots] == indices
        held &= indices > self.newest - self._capacity
        flags |= np.where(held, self._rows[COLUMN["flags"], slots], 0)

    def copy(self, indices: IntArray, into: IntArray) -> None:
        """Write these steps into an array with a row for each name in `COLUMNS`. All of them must be held."""
        if not len(indices):
            return
        first, last = int(indices[0]) % self._capacity, int(indices[-1]) % self._capacity
        if last - first == len(indices) - 1:
            into[:] = self._rows[:, first : last + 1]
        else:
            into[:] = self._rows[:, indices % self._capacity]

    def column(self, name: str, indices: IntArray) -> IntArray:
        """One number of these steps. All of them must be held."""
        values: IntArray = self._rows[COLUMN[name], indices % self._capacity]
        return values

    def indices(self) -> IntArray:
        """Indices of the steps that are there, ascending."""
        candidates = np.arange(max(0, self.newest - self._capacity + 1), self.newest + 1, dtype=np.int64)
        return candidates[self.holds(candidates)]
