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


class StepRing:
    """Steps by index, each at most once. Late ones find their place; those older than the window are dropped.

    A step lives in slot `index % CAPACITY_STEPS`, so taking one costs the same however long the run is, and what is
    kept does not depend on the order of arrival.
    """

    __slots__ = ("_rows", "newest")

    def __init__(self) -> None:
        """Set aside all the memory that the ring will ever use."""
        # Only the index needs a value: an untouched slot is never read, and its memory never becomes real.
        self._rows: IntArray = np.empty((len(COLUMNS), CAPACITY_STEPS), dtype=np.int64)
        self._rows[COLUMN["index"]] = -1
        self.newest = -1
        """Index of the newest step; -1 = none yet."""

    def put(self, step: Step) -> bool:
        """Keep the step, unless a newer one has its place. False = it contradicts what was told before.

        A rank counts upwards: one that has fallen far behind its own count contradicts itself, too.
        """
        slot = step.index % CAPACITY_STEPS
        stored = int(self._rows[0, slot])
        if stored < step.index:
            self._rows[:, slot] = _values(step)
            self.newest = max(self.newest, step.index)
        elif stored == step.index:
            return int(self._rows[1, slot]) == step.end_ns
        # A snapshot may be a little behind the live steps that came before it.
        return step.index > self.newest - 2 * CAPACITY_STEPS

    def has(self, index: int) -> bool:
        """Whether one step is there."""
        return int(self._rows[0, index % CAPACITY_STEPS]) == index and index > self.newest - CAPACITY_STEPS

    def holds(self, indices: IntArray) -> NDArray[np.bool_]:
        """Which of these steps are there."""
        stored: IntArray = self._rows[0, indices % CAPACITY_STEPS]
        held: NDArray[np.bool_] = (stored == indices) & (indices > self.newest - CAPACITY_STEPS)
        return held

    def narrow(self, indices: IntArray, held: NDArray[np.bool_], flags: IntArray) -> None:
        """Take out of `held` the steps that are not there, and add to `flags` those of the others."""
        slots = indices % CAPACITY_STEPS
        held &= self._rows[0, slots] == indices
        held &= indices > self.newest - CAPACITY_STEPS
        flags |= np.where(held, self._rows[COLUMN["flags"], slots], 0)

    def copy(self, indices: IntArray, into: IntArray) -> None:
        """Write these steps into an array with a row for each name in `COLUMNS`. All of them must be held."""
        if not len(indices):
            return
        first, last = int(indices[0]) % CAPACITY_STEPS, int(indices[-1]) % CAPACITY_STEPS
        if last - first == len(indices) - 1:
            into[:] = self._rows[:, first : last + 1]
        else:
            into[:] = self._rows[:, indices % CAPACITY_STEPS]

    def column(self, name: str, indices: IntArray) -> IntArray:
        """One number of these steps. All of them must be held."""
        values: IntArray = self._rows[COLUMN[name], indices % CAPACITY_STEPS]
        return values

    def indices(self) -> IntArray:
        """Indices of the steps that are there, ascending."""
        candidates = np.arange(max(0, self.newest - CAPACITY_STEPS + 1), self.newest + 1, dtype=np.int64)
        return candidates[self.holds(candidates)]
