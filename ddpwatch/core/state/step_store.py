"""The last steps of one rank, in arrays of a fixed size."""

from __future__ import annotations

import struct
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddpwatch.wire import MAX_SNAP_STEPS, STEP_BYTES, STEP_COLUMNS, unpack_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.wire import Step

IntArray: TypeAlias = NDArray[np.int64]

COLUMNS: Final = STEP_COLUMNS
"""What is kept of a step, one row of the array each."""
COLUMN: Final = {name: row for row, name in enumerate(COLUMNS)}
TIMES: Final = COLUMNS[COLUMN["data_ns"] : COLUMN["samples"] + 1]
"""What nearly everybody looks at: the phases, which stand together in their order, and how much was done in them."""
SYNC: Final = COLUMN["sync_ns"]
PRESYNC: Final = COLUMN["presync_ns"]
FLAGS: Final = COLUMN["flags"]
PHASES: Final = slice(COLUMN["data_ns"], COLUMN["other_ns"] + 1)
"""A step is their sum."""
MAX_STEP_NS: Final = 2**55
"""More than a year: a step that claims to be longer is not believed. It keeps sums inside int64."""
LARGEST: Final = 2**62
"""As `wire.Count` has it."""
_values = attrgetter(*COLUMNS)
_pack: Final = struct.Struct(f"{len(COLUMNS)}q").pack_into
_INDEX: Final = COLUMN["index"]
_END: Final = COLUMN["end_ns"]

CAPACITY_STEPS: Final = MAX_SNAP_STEPS
"""As many as a snapshot brings, so that a late viewer knows what an early one knows."""
CROWDED_STEPS: Final = 256
"""As many are kept of each rank where there are very many ranks, so that memory stays within bounds."""


class StepStore:
    """The memory of many rings in one piece, so that the same steps of all ranks are read at once."""

    __slots__ = ("capacity", "index", "table")

    def __init__(self, rings: int, capacity: int = CAPACITY_STEPS) -> None:
        """Set aside all the memory that the rings will ever use."""
        self.capacity = capacity
        self.index: IntArray = np.full((rings, capacity), -1, dtype=np.int64)
        """(ring, slot): which step is there; -1 = none."""
        # Only the index needs values: an untouched slot is never read, and its memory never becomes real.
        self.table: IntArray = np.empty((rings, capacity, len(COLUMNS)), dtype=np.int64)
        """(ring, slot, column): a step is written in one piece, and read together with its neighbours."""

    def read(self, rings: Sequence[int], indices: IntArray, columns: Sequence[str] = COLUMNS) -> IntArray:
        """(ring, column, step) of steps that all of these rings hold, and of these columns, which begin with `TIMES` if
        they are not all. Of a thousand ranks all columns are megabytes.
        """
        table = self.table if list(rings) == list(range(len(self.table))) else self.table[list(rings)]
        read: IntArray = np.empty((len(rings), len(columns), len(indices)), dtype=np.int64)
        everything = len(columns) == len(COLUMNS)
        first, together = (0, len(COLUMNS)) if everything else (COLUMN[TIMES[0]], len(TIMES))
        for where, slots in _runs(indices % self.capacity):
            cut = table[:, slots]
            read[:, :together, where] = cut[:, :, first : first + together].transpose(0, 2, 1)
            for place in range(together, len(columns)):
                read[:, place, where] = cut[:, :, COLUMN[columns[place]]]
        return read


def _runs(slots: IntArray) -> list[tuple[slice, slice | IntArray]]:
    """Which of the slots stand side by side, and where: nothing of these is copied on the way. Steps that go round the
    end of the ring are two runs; of more they are left as they are.
    """
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    if len(breaks) > 1:
        return [(slice(None), slots)]
    edges = [0, *breaks.tolist(), len(slots)]
    return [
        (slice(begin, end), slice(int(slots[begin]), int(slots[end - 1]) + 1))
        for begin, end in pairwise(edges)
        if begin < end
    ]


class StepRing:
    """Steps by index, each at most once. Late ones find their place; those older than the window are dropped.

    A step lives in slot `index % capacity`, so taking one costs the same however long the run is, and what is kept does
    not depend on the order of arrival.
    """

    __slots__ = ("_bytes", "_capacity", "_flagged", "_index", "_slots", "_whole_from", "newest", "row", "store")

    def __init__(self, store: StepStore | None = None, row: int = 0) -> None:
        """Live in a row of the store, or in a store of its own."""
        self._live_in(store if store is not None else StepStore(1), row)
        self.newest = -1
        """Index of the newest step; -1 = none yet."""
        self._whole_from = 0
        """From here to the newest no step is missing."""
        self._flagged = -1
        """Index of the newest step with a flag."""

    def _live_in(self, store: StepStore, row: int) -> None:
        self.store, self.row = store, row
        self._capacity = store.capacity
        self._index = store.index[row]
        # Views that give and take plain integers: numpy's own would cost more than all the rest.
        self._slots = memoryview(self._index)
        self._bytes = memoryview(store.table[row].reshape(-1).view(np.uint8))

    def __getstate__(self) -> tuple[StepStore, int, int, int, int]:
        """For copies: views cannot be copied, what they look at can."""
        return self.store, self.row, self.newest, self._whole_from, self._flagged

    def __setstate__(self, state: tuple[StepStore, int, int, int, int]) -> None:
        """Look at the copy of the store."""
        store, row, self.newest, self._whole_from, self._flagged = state
        self._live_in(store, row)

    def put_all(self, steps: Sequence[Step]) -> int:
        """Keep finished steps; how many of them are impossible, or contradict what was told before."""
        return self._put_values(map(_values, steps))

    def put_table(self, table: bytes, *, upto: int | None = None) -> int:
        """The same of steps as `wire.pack_steps` writes them, without those later than `upto`. What is left over counts
        as one that is impossible.
        """
        reported = [values for values in unpack_steps(table) if upto is None or values[_INDEX] <= upto]
        fine = [values for values in reported if min(values) >= 0 and max(values) <= LARGEST]
        return len(reported) - len(fine) + bool(len(table) % STEP_BYTES) + self._put_values(fine)

    def _put_values(self, reported: Iterable[tuple[int, ...]]) -> int:
        refused, follower = 0, self.newest + 1
        for values in reported:
            index = values[_INDEX]
            if values[PRESYNC] > values[SYNC] or sum(values[PHASES]) > MAX_STEP_NS:
                refused += 1
            elif index == follower and not values[FLAGS]:
                # Nearly every step there is; with thousands of ranks it is worth a shorter way.
                slot = index % self._capacity
                _pack(self._bytes, slot * STEP_BYTES, *values)
                self._slots[slot] = self.newest = index
                follower += 1
            else:
                refused += not self._put(values)
                follower = self.newest + 1
        return refused

    def put(self, step: Step) -> bool:
        """Keep the step, unless a newer one has its place. False = it contradicts what was told before.

        A rank counts upwards: one that has fallen far behind its own count contradicts itself, too.
        """
        return self._put(_values(step))

    def _put(self, values: tuple[int, ...]) -> bool:
        index = values[_INDEX]
        slot = index % self._capacity
        stored = self._slots[slot]
        if stored < index:
            _pack(self._bytes, slot * STEP_BYTES, *values)
            self._slots[slot] = index
            if values[FLAGS] and index > self._flagged:
                self._flagged = index
            if index == self.newest + 1:
                self.newest = index
            else:
                self._follow(index)
        elif stored == index:
            return bool(self._table[slot, _END] == values[_END])
        # A snapshot may be a little behind the live steps that came before it.
        return index > self.newest - 2 * CAPACITY_STEPS

    def put_rows(self, rows: IntArray) -> None:
        """Keep many steps at once, each as its `COLUMNS`, as if they were put one after the other; what was told before
        stays. Those that do not come in their order are left out.
        """
        if not len(rows):
            return
        in_a_row = self.newest < 0 and bool((rows[1:, 0] - rows[:-1, 0] == 1).all())
        if in_a_row:
            rows = rows[-self._capacity :]
            self._write(rows)
            self._whole_from = int(rows[0, 0])
            return
        rows = rows[np.concatenate(([True], rows[1:, 0] > np.maximum.accumulate(rows[:-1, 0])))][-self._capacity :]
        rows = rows[rows[:, 0] > max(self.newest, int(rows[-1, 0])) - self._capacity]
        rows = rows[self._index[rows[:, 0] % self._capacity] < rows[:, 0]]
        if not len(rows):
            return
        self._write(rows)
        there = self.indices()
        gaps = np.flatnonzero(there[1:] - there[:-1] > 1)
        self._whole_from = int(there[gaps[-1] + 1] if len(gaps) else there[0])

    def _write(self, rows: IntArray) -> None:
        indices = rows[:, 0]
        slots = indices % self._capacity
        self._table[slots] = rows
        self._index[slots] = indices
        flagged = rows[:, COLUMN["flags"]] != 0
        if flagged.any():
            self._flagged = max(self._flagged, int(indices[flagged][-1]))
        self.newest = max(self.newest, int(indices[-1]))

    def amend(self, index: int, busy_ns: int, comm_bytes: int) -> None:
        """Fill in what is told of a step's all-reduces after the step, if it is still there."""
        if self.has(index):
            row = self._table[index % self._capacity]
            row[COLUMN["busy_ns"]], row[COLUMN["comm_bytes"]] = busy_ns, comm_bytes

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
        return self._slots[index % self._capacity] == index and index > self.newest - self._capacity

    def holds(self, indices: IntArray) -> NDArray[np.bool_]:
        """Which of these steps are there."""
        stored: IntArray = self._index[indices % self._capacity]
        held: NDArray[np.bool_] = (stored == indices) & (indices > self.newest - self._capacity)
        return held

    def narrow(self, indices: IntArray, held: NDArray[np.bool_], flags: IntArray) -> None:
        """Take out of `held` the steps that are not there, and add to `flags` those of the others."""
        held &= self.holds(indices)
        flags |= np.where(held, self._table[indices % self._capacity, COLUMN["flags"]], 0)

    def column(self, name: str, indices: IntArray) -> IntArray:
        """One number of these steps. All of them must be held."""
        values: IntArray = self._table[indices % self._capacity, COLUMN[name]]
        return values

    def indices(self) -> IntArray:
        """Indices of the steps that are there, ascending."""
        candidates = np.arange(max(0, self.newest - self._capacity + 1), self.newest + 1, dtype=np.int64)
        return candidates[self.holds(candidates)]

    def rows(self, most: int) -> list[list[int]]:
        """The latest steps, each as its `COLUMNS`: what `wire.Step` is on the wire."""
        rows: list[list[int]] = self.latest(most).tolist()
        return rows

    def latest(self, most: int) -> IntArray:
        """(step, column) of the latest steps: a copy."""
        first = max(0, self.newest - most + 1)
        if not self.is_plain(first, self.newest):
            return self._table[self.indices()[-most:] % self._capacity]
        begin, end = first % self._capacity, self.newest % self._capacity + 1
        table = self._table
        return table[begin:end].copy() if begin < end else np.concatenate((table[begin:], table[:end]))

    @property
    def _table(self) -> IntArray:
        """(slot, column)."""
        table: IntArray = self.store.table[self.row]
        return table
