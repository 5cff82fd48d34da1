"""The last steps of many ranks as one piece of bytes, for checkpoints: a thousand ranks are read in milliseconds.

What can be foretold of a number is taken off it, and bytes of the same weight stand together: most are zero, and those
are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from ddpwatch.core.state.ingest import possible
from ddpwatch.core.state.step_store import COLUMN, COLUMNS
from ddpwatch.wire import MAX_COLUMNS, MAX_SNAP_STEPS, MIN_COLUMNS, NO_MESSAGE, PHASES, STEP_DEFAULTS, Count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpwatch.core.state.run import RunState
    from ddpwatch.core.state.step_store import IntArray, StepRing

TABLE_RANKS: Final = 64
"""Ranks in one table."""
MAX_ROWS: Final = TABLE_RANKS * MAX_SNAP_STEPS
"""A table that claims more steps is not read: it may be small, and what becomes of it is not."""
_PREDICTED: Final = [
    COLUMN[name] for name in ("index", "end_ns", "samples", "batch", "backwards", "flags", "comm_bytes")
]
"""Of these columns only the difference to the row before is kept. A column never enters or leaves: tables exist."""
WEIGHTS: Final = 8
"""Bytes of a number."""
_SPENT: Final = slice(COLUMN["data_ns"], COLUMN["data_ns"] + len(PHASES))


class _Table(msgspec.Struct, array_like=True):
    ranks: Annotated[list[Count], Meta(max_length=TABLE_RANKS)]
    counts: Annotated[list[Count], Meta(max_length=TABLE_RANKS)]
    """Steps of each of them, which follow each other."""
    weights: Annotated[bytes, Meta(min_length=MIN_COLUMNS, max_length=MAX_COLUMNS)]
    """For each column of the writer's version, a bit for each of the eight bytes of a number: whether it is there."""
    data: bytes


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Table)


def write_tables(rings: Sequence[tuple[int, StepRing]], most: int) -> Iterator[bytes]:
    """The latest steps of these ranks, so many of each."""
    reported = [(rank, rows) for rank, ring in rings if len(rows := ring.latest(most))]
    for first in range(0, len(reported), TABLE_RANKS):
        yield _written(reported[first : first + TABLE_RANKS])


def apply_table(state: RunState, payload: bytes, *, earlier: bool = False) -> None:
    """Give the ranks the steps of a table; with `earlier` only those that came before what is known. What cannot be
    read, or cannot be, is passed over.
    """
    for number, rows in read_table(payload):
        rank = state.ranks.get(number)
        if rank is not None:
            rank.steps.put_rows(rows[rows[:, 0] <= rank.steps.newest] if earlier else rows)


def read_table(payload: bytes) -> Iterator[tuple[int, IntArray]]:
    """By rank its steps, each as its `COLUMNS`, in order; none if it is no table."""
    try:
        table = _decoder.decode(memoryview(payload)[len(NO_MESSAGE) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    rows = _rows(table) if payload.startswith(NO_MESSAGE) else None
    if rows is None:
        return
    fine = possible(rows)
    first = 0
    for rank, count in zip(table.ranks, table.counts, strict=True):
        own = slice(first, first + count)
        yield rank, rows[own][fine[own]]
        first += count


def _written(reported: Sequence[tuple[int, IntArray]]) -> bytes:
    # Column by column in memory: each is worked on by itself.
    columns = np.ascontiguousarray(np.concatenate([rows for _, rows in reported]).T)
    # Steps follow each other without a gap: when one ended is known from the one before and its phases.
    columns[COLUMN["end_ns"]] -= columns[_SPENT].sum(axis=0).cumsum()
    for place in _PREDICTED:
        changed = np.diff(columns[place], prepend=0)
        # Small ones of either sign become small ones without a sign.
        columns[place] = (changed << 1) ^ (changed >> 63)
    columns = columns.astype("<i8", copy=False)
    there = np.bitwise_or.reduce(columns, axis=1).view(np.uint8) != 0
    by_weight = columns.view(np.uint8).reshape(len(columns), -1, WEIGHTS)
    weights = np.flatnonzero(there).tolist()
    data = b"".join([by_weight[weight // WEIGHTS, :, weight % WEIGHTS].tobytes() for weight in weights])
    counts = [len(rows) for _, rows in reported]
    return NO_MESSAGE + _encoder.encode(
        _Table([rank for rank, _ in reported], counts, np.packbits(there).tobytes(), data)
    )


def _rows(table: _Table) -> IntArray | None:
    there = np.unpackbits(np.frombuffer(table.weights, np.uint8)).astype(bool)
    count, kept = sum(table.counts), int(there.sum())
    if len(table.ranks) != len(table.counts) or count > MAX_ROWS or len(table.data) != count * kept:
        return None
    columns = len(table.weights)
    by_weight = np.zeros((count, columns * WEIGHTS), np.uint8)
    by_weight[:, there] = np.frombuffer(table.data, np.uint8).reshape(kept, count).T
    rows: IntArray = by_weight.view("<i8").astype(np.int64, copy=False)
    foretold = [column for column in _PREDICTED if column < columns]
    changed = rows[:, foretold]
    halves = (changed.view(np.uint64) >> np.uint64(1)).view(np.int64)
    rows[:, foretold] = (halves ^ -(changed & 1)).cumsum(axis=0)
    rows[:, COLUMN["end_ns"]] += rows[:, _SPENT].sum(axis=1).cumsum()
    if columns == len(COLUMNS):
        return rows
    fitted: IntArray = np.tile(np.array(STEP_DEFAULTS, np.int64), (count, 1))
    fitted[:, :columns] = rows[:, : len(COLUMNS)]
    return fitted
