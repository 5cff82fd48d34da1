"""Ring buffers of the latest steps of each rank, in numpy arrays of a fixed size."""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddpwatch.wire import MAX_SNAP_STEPS, STEP_BYTES, STEP_COLUMNS, unpack_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.wire import Step

IntArray: TypeAlias = NDArray[np.int64]

COLUMNS: Final = STEP_COLUMNS
"""Fields of a step, the last axis of the table."""
COLUMN: Final = {name: row for row, name in enumerate(COLUMNS)}
TIMES: Final = COLUMNS[COLUMN["data_ns"] : COLUMN["samples"] + 1]
"""The fields that most readers need: the phases, contiguous and in order, and the number of samples."""
SYNC: Final = COLUMN["sync_ns"]
SYNC_PARTS: Final = [COLUMN["presync_ns"], *range(COLUMN["point1_ns"], COLUMN["more_points_ns"] + 1)]
"""Parts of `sync`, which cannot exceed it together."""
_sync_parts: Final = itemgetter(*SYNC_PARTS)
FLAGS: Final = COLUMN["flags"]
PHASES: Final = slice(COLUMN["data_ns"], COLUMN["other_ns"] + 1)
"""Phase durations of a row; their sum is the step."""
MAX_STEP_NS: Final = 2**55
"""Longest valid step, more than a year. It keeps sums within int64."""
MAX_VALUE: Final = 2**62
"""Largest valid value, the bound of `wire.Count`."""
_values = attrgetter(*COLUMNS)
_pack: Final = struct.Struct(f"{len(COLUMNS)}q").pack_into
_INDEX: Final = COLUMN["index"]
_END: Final = COLUMN["end_ns"]

CAPACITY_STEPS: Final = MAX_SNAP_STEPS
"""Steps kept of each rank: as many as a snapshot holds, so that a late viewer knows what an early one knows."""
MANY_RANKS_STEPS: Final = 256
"""Steps kept of each rank in runs of more than `MANY_RANKS` ranks, to bound memory."""


class StepStore:
    """Memory of many rings in one array, so that the same steps of all ranks are read at once."""

    __slots__ = ("capacity", "index", "table")

    def __init__(self, rings: int, capacity: int = CAPACITY_STEPS) -> None:
        self.capacity = capacity
        self.index: IntArray = np.full((rings, capacity), -1, dtype=np.int64)
        """(ring, slot): index of the step in the slot; -1 = none."""
        # Only the index needs values: an untouched slot is never read, and its pages are never allocated.
        self.table: IntArray = np.empty((rings, capacity, len(COLUMNS)), dtype=np.int64)
        """(ring, slot, column): the values of a step are contiguous."""

    def read(self, rings: Sequence[int], indices: IntArray, columns: Sequence[str] = COLUMNS) -> IntArray:
        """Read steps that all of these rings hold as (ring, column, step).

        Few `columns`, because all columns of a thousand ranks are megabytes.
        """
        table = self.table if list(rings) == list(range(len(self.table))) else self.table[list(rings)]
        read: IntArray = np.empty((len(rings), len(columns), len(indices)), dtype=np.int64)
        for where, slots in _ranges(indices % self.capacity):
            cut = table[:, slots]
            for begin, end in _adjacent(tuple(columns)):
                first = COLUMN[columns[begin]]
                read[:, begin:end, where] = cut[:, :, first : first + end - begin].transpose(0, 2, 1)
        return read


@lru_cache(maxsize=16)
def _adjacent(columns: tuple[str, ...]) -> list[tuple[int, int]]:
    """Begins and ends of columns that are adjacent in the table: those are on the same cache line."""
    places = [COLUMN[name] for name in columns]
    breaks = [place for place in range(1, len(places)) if places[place] != places[place - 1] + 1]
    return list(pairwise([0, *breaks, len(places)]))


def _ranges(slots: IntArray) -> list[tuple[slice, slice | IntArray]]:
    """Contiguous ranges of slots as pairs of slices, which numpy reads without a copy. Steps that wrap around the end
    of the ring are two ranges; slots in more than two stay an index array.
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
    """Ring buffer of steps by index. Late steps find their slot; those older than the capacity are dropped.

    A step is in slot `index % capacity`, so that a write takes constant time and the contents do not depend on the
    order of arrival.
    """

    __slots__ = ("_bytes", "_capacity", "_flagged", "_index", "_slots", "_whole_from", "newest", "row", "store")

    def __init__(self, store: StepStore | None = None, row: int = 0) -> None:
        """Use a row of the store, or a store of its own."""
        self._attach(store if store is not None else StepStore(1), row)
        self.newest = -1
        """Index of the newest step; -1 = none."""
        self._whole_from = 0
        """First step of the gapless range that ends with the newest."""
        self._flagged = -1
        """Index of the newest step with a flag."""

    def _attach(self, store: StepStore, row: int) -> None:
        self.store, self.row = store, row
        self._capacity = store.capacity
        self._index = store.index[row]
        # Memory views read and write plain integers; numpy scalars would cost more than all the rest.
        self._slots = memoryview(self._index)
        self._bytes = memoryview(store.table[row].reshape(-1).view(np.uint8))

    def __getstate__(self) -> tuple[StepStore, int, int, int, int]:
        """Supports pickling: memory views cannot be pickled."""
        return self.store, self.row, self.newest, self._whole_from, self._flagged

    def __setstate__(self, state: tuple[StepStore, int, int, int, int]) -> None:
        """Create views into the unpickled store."""
        store, row, self.newest, self._whole_from, self._flagged = state
        self._attach(store, row)

    def put_all(self, steps: Sequence[Step]) -> int:
        """Store finished steps. Returns the number of invalid ones and of those that contradict a stored step."""
        return self._put_values(map(_values, steps))

    def put_table(self, table: bytes, *, upto: int | None = None) -> int:
        """Store the steps of a `wire.pack_steps` table up to index `upto`; returns as `put_all` does. Excess bytes
        count as one invalid step.
        """
        received = [values for values in unpack_steps(table) if upto is None or values[_INDEX] <= upto]
        valid = [values for values in received if min(values) >= 0 and max(values) <= MAX_VALUE]
        return len(received) - len(valid) + bool(len(table) % STEP_BYTES) + self._put_values(valid)

    def _put_values(self, rows: Iterable[tuple[int, ...]]) -> int:
        refused, following = 0, self.newest + 1
        for values in rows:
            index = values[_INDEX]
            if sum(_sync_parts(values)) > values[SYNC] or sum(values[PHASES]) > MAX_STEP_NS:
                refused += 1
            elif index == following and not values[FLAGS]:
                # Fast path for nearly every step; it matters with thousands of ranks.
                slot = index % self._capacity
                _pack(self._bytes, slot * STEP_BYTES, *values)
                self._slots[slot] = self.newest = index
                following += 1
            else:
                refused += not self._put(values)
                following = self.newest + 1
        return refused

    def _put(self, values: tuple[int, ...]) -> bool:
        """Store a step, unless a newer one has its slot. False = it contradicts a stored step, or is far older than the
        newest: a rank counts upwards.
        """
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
        # A snapshot may be slightly behind live steps that arrived before it.
        return index > self.newest - 2 * CAPACITY_STEPS

    def put_rows(self, rows: IntArray) -> None:
        """Store many steps at once, each as its `COLUMNS`; stored steps stay. Rows out of order are skipped."""
        if not len(rows):
            return
        if self.newest < 0 and bool((rows[1:, 0] - rows[:-1, 0] == 1).all()):
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
        stored = self.indices()
        gaps = np.flatnonzero(stored[1:] - stored[:-1] > 1)
        self._whole_from = int(stored[gaps[-1] + 1] if len(gaps) else stored[0])

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
        """Add the all-reduce figures of a step, which arrive after it, if the step is still stored."""
        if self.has(index):
            row = self._table[index % self._capacity]
            row[COLUMN["busy_ns"]], row[COLUMN["comm_bytes"]] = busy_ns, comm_bytes

    def _follow(self, index: int) -> None:
        """Update the newest step and the gapless range."""
        if index > self.newest:
            if index > self.newest + 1:
                self._whole_from = index
            self.newest = index
        elif index == self._whole_from - 1:
            while self._whole_from and self.has(self._whole_from - 1):
                self._whole_from -= 1

    def is_plain(self, first: int, last: int) -> bool:
        """Whether the ring holds all steps of the range and none has a flag: the common case."""
        return (
            first >= self._whole_from
            and first > self.newest - self._capacity
            and self._flagged < first <= last <= self.newest
        )

    def has(self, index: int) -> bool:
        """Whether the ring holds one step."""
        return self._slots[index % self._capacity] == index and index > self.newest - self._capacity

    def holds(self, indices: IntArray) -> NDArray[np.bool_]:
        """Which of these steps the ring holds."""
        stored: IntArray = self._index[indices % self._capacity]
        held: NDArray[np.bool_] = (stored == indices) & (indices > self.newest - self._capacity)
        return held

    def narrow(self, indices: IntArray, held: NDArray[np.bool_], any_flags: IntArray, all_flags: IntArray) -> None:
        """Clear `held` for steps that the ring does not hold; OR the flags of the others into `any_flags`, and AND them
        into `all_flags`.
        """
        held &= self.holds(indices)
        flags = np.where(held, self._table[indices % self._capacity, COLUMN["flags"]], 0)
        any_flags |= flags
        all_flags &= flags

    def column(self, name: str, indices: IntArray) -> IntArray:
        """One field of these steps, all of which must be held."""
        values: IntArray = self._table[indices % self._capacity, COLUMN[name]]
        return values

    def indices(self) -> IntArray:
        """Indices of the stored steps, ascending."""
        candidates = np.arange(max(0, self.newest - self._capacity + 1), self.newest + 1, dtype=np.int64)
        return candidates[self.holds(candidates)]

    def latest(self, steps: int) -> IntArray:
        """Copy of the latest steps as (step, column), the layout of `wire.Step`."""
        first = max(0, self.newest - steps + 1)
        if not self.is_plain(first, self.newest):
            return self._table[self.indices()[-steps:] % self._capacity]
        begin, end = first % self._capacity, self.newest % self._capacity + 1
        table = self._table
        return table[begin:end].copy() if begin < end else np.concatenate((table[begin:], table[:end]))

    @property
    def _table(self) -> IntArray:
        """(slot, column)."""
        table: IntArray = self.store.table[self.row]
        return table


MIN_BATCH: Final = 16
"""Fewer tables are faster to store one by one."""
_SAFE_NS: Final = MAX_STEP_NS // (PHASES.stop - PHASES.start)
"""If no phase is longer, no step exceeds `MAX_STEP_NS`."""


def put_tables(tables: Sequence[tuple[StepRing, bytes]]) -> list[int]:
    """Store `wire.pack_steps` tables of many ranks, in order; returns for each what `StepRing.put_table` returns."""
    if len(tables) >= MIN_BATCH and _put_batch(tables):
        return [0] * len(tables)
    return [ring.put_table(table) for ring, table in tables]


def _put_batch(tables: Sequence[tuple[StepRing, bytes]]) -> bool:
    """Store all tables in one numpy operation. False = not in the common case: valid, unflagged, consecutive steps."""
    store = tables[0][0].store
    data = b"".join([table for _, table in tables])
    if not data or len(data) % STEP_BYTES:
        return False
    rows: IntArray = np.frombuffer(data, "<i8").reshape(-1, len(COLUMNS)).astype(np.int64, copy=False)
    if not (_are_plain(rows) and all(ring.store is store for ring, _ in tables)):
        return False
    firsts: list[int] = []
    counts = [len(table) // STEP_BYTES for _, table in tables]
    for (ring, _), count in zip(tables, counts, strict=True):
        # In order: several tables may be of one rank.
        firsts.append(ring.newest + 1)
        ring.newest += count
    of_table = np.repeat(np.arange(len(tables)), _array(counts))
    indices = rows[:, _INDEX]
    begins = np.cumsum(_array([0, *counts[:-1]]))
    expected = np.arange(len(rows)) + (_array(firsts) - begins)[of_table]
    if not (indices == expected).all():
        for (ring, _), count in zip(tables, counts, strict=True):
            ring.newest -= count
        return False
    where = _array([ring.row for ring, _ in tables])[of_table] * store.capacity + indices % store.capacity
    store.table.reshape(-1, len(COLUMNS))[where] = rows
    store.index.reshape(-1)[where] = indices
    return True


def _array(numbers: list[int]) -> IntArray:
    # `np.array` would inspect each element to find the type.
    return np.fromiter(numbers, np.int64, len(numbers))


def _are_plain(rows: IntArray) -> bool:
    # The whole table first: that takes no longer than one column.
    return bool(
        rows.min() >= 0
        and rows.max() <= MAX_VALUE
        and rows[:, PHASES].max() <= _SAFE_NS
        and not rows[:, FLAGS].any()
        and rows[:, SYNC_PARTS].max() <= _SAFE_NS
        and (rows[:, SYNC_PARTS].sum(axis=1) <= rows[:, SYNC]).all()
    )


def valid_rows(rows: IntArray) -> NDArray[np.bool_]:
    """Which of these steps are valid, by the checks that `wire.Step` and `StepRing` make of single ones."""
    within = ((rows >= 0) & (rows <= MAX_VALUE)).all(axis=1)
    phases_ns = rows[:, PHASES]
    within &= (phases_ns <= MAX_STEP_NS).all(axis=1)
    within &= np.where(within, phases_ns.sum(axis=1), 0) <= MAX_STEP_NS
    parts_ns = np.where(within[:, None], rows[:, SYNC_PARTS], 0)
    valid: NDArray[np.bool_] = within & (parts_ns <= MAX_STEP_NS).all(axis=1)
    valid &= np.where(valid, parts_ns.sum(axis=1), 0) <= rows[:, SYNC]
    return valid
