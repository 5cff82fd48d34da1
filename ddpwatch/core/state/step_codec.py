"""Compact binary tables of the latest steps of many ranks, for checkpoints: a thousand ranks are decoded in
milliseconds.

Predictable columns are delta coded and the bytes of equal significance are stored together (byte shuffle); byte planes
that are all zero are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from ddpwatch.core.state.step_store import COLUMN, COLUMNS, valid_rows
from ddpwatch.wire import MAX_COLUMNS, MAX_SNAP_STEPS, MIN_COLUMNS, NO_MESSAGE, PHASES, STEP_DEFAULTS, Count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpwatch.core.state.run import RunState
    from ddpwatch.core.state.step_store import IntArray, StepRing

TABLE_RANKS: Final = 64
"""Maximum number of ranks in one table."""
MAX_ROWS: Final = TABLE_RANKS * MAX_SNAP_STEPS
"""A table that claims more steps is not decoded: all-zero planes take no bytes, so that a small table could claim any
number."""
_PREDICTED: Final = [COLUMN[n] for n in ("index", "end_ns", "samples", "batch", "backwards", "flags", "comm_bytes")]
"""Delta coded columns. The list never changes: recordings depend on it."""
NUMBER_BYTES: Final = 8
"""Bytes of a number."""
_SPENT: Final = slice(COLUMN["data_ns"], COLUMN["data_ns"] + len(PHASES))


class _Table(msgspec.Struct, array_like=True):
    ranks: Annotated[list[Count], Meta(max_length=TABLE_RANKS)]
    counts: Annotated[list[Count], Meta(max_length=TABLE_RANKS)]
    """Number of steps of each rank; the rows of the ranks follow each other."""
    planes: Annotated[bytes, Meta(min_length=MIN_COLUMNS, max_length=MAX_COLUMNS)]
    """For each column of the writer's version, a bit for each of the eight bytes of a number: whether that plane is
    stored."""
    data: bytes


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Table)


def write_tables(rings: Sequence[tuple[int, StepRing]], steps: int) -> Iterator[bytes]:
    """Encode the latest `steps` steps of these ranks."""
    latest = [(rank, rows) for rank, ring in rings if len(rows := ring.latest(steps))]
    for first in range(0, len(latest), TABLE_RANKS):
        yield _encode(latest[first : first + TABLE_RANKS])


def apply_table(state: RunState, payload: bytes, *, earlier: bool = False) -> None:
    """Store the steps of a table in the ranks' rings; with `earlier` only those before the newest known. Invalid tables
    and steps are skipped.
    """
    for number, rows in read_table(payload):
        rank = state.ranks.get(number)
        if rank is not None:
            rank.steps.put_rows(rows[rows[:, 0] <= rank.steps.newest] if earlier else rows)


def read_table(payload: bytes) -> Iterator[tuple[int, IntArray]]:
    """Decode a table into each rank's steps, as rows of `COLUMNS` in order; nothing if it is invalid."""
    try:
        table = _decoder.decode(memoryview(payload)[len(NO_MESSAGE) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    rows = _decode(table) if payload.startswith(NO_MESSAGE) else None
    if rows is None:
        return
    valid = valid_rows(rows)
    first = 0
    for rank, count in zip(table.ranks, table.counts, strict=True):
        own = slice(first, first + count)
        yield rank, rows[own][valid[own]]
        first += count


def _encode(ranks: Sequence[tuple[int, IntArray]]) -> bytes:
    columns = np.ascontiguousarray(np.concatenate([rows for _, rows in ranks]).T)
    # Predict the end of a step from the end of the one before and its phases: steps follow each other without a gap.
    columns[COLUMN["end_ns"]] -= columns[_SPENT].sum(axis=0).cumsum()
    for place in _PREDICTED:
        changed = np.diff(columns[place], prepend=0)
        # Zigzag coding: small numbers of either sign become small unsigned ones.
        columns[place] = (changed << 1) ^ (changed >> 63)
    columns = columns.astype("<i8", copy=False)
    stored = np.bitwise_or.reduce(columns, axis=1).view(np.uint8) != 0
    by_byte = columns.view(np.uint8).reshape(len(columns), -1, NUMBER_BYTES)
    places = [divmod(plane, NUMBER_BYTES) for plane in np.flatnonzero(stored).tolist()]
    data = b"".join([by_byte[column, :, byte].tobytes() for column, byte in places])
    counts = [len(rows) for _, rows in ranks]
    table = _Table([rank for rank, _ in ranks], counts, np.packbits(stored).tobytes(), data)
    return NO_MESSAGE + _encoder.encode(table)


def _decode(table: _Table) -> IntArray | None:
    stored = np.unpackbits(np.frombuffer(table.planes, np.uint8)).astype(bool)
    count, kept = sum(table.counts), int(stored.sum())
    if len(table.ranks) != len(table.counts) or count > MAX_ROWS or len(table.data) != count * kept:
        return None
    columns = len(table.planes)
    by_byte = np.zeros((count, columns * NUMBER_BYTES), np.uint8)
    by_byte[:, stored] = np.frombuffer(table.data, np.uint8).reshape(kept, count).T
    rows: IntArray = by_byte.view("<i8").astype(np.int64, copy=False)
    predicted = [column for column in _PREDICTED if column < columns]
    changed = rows[:, predicted]
    halves = (changed.view(np.uint64) >> np.uint64(1)).view(np.int64)
    rows[:, predicted] = (halves ^ -(changed & 1)).cumsum(axis=0)
    rows[:, COLUMN["end_ns"]] += rows[:, _SPENT].sum(axis=1).cumsum()
    if columns == len(COLUMNS):
        return rows
    fitted: IntArray = np.tile(np.array(STEP_DEFAULTS, np.int64), (count, 1))
    fitted[:, :columns] = rows[:, : len(COLUMNS)]
    return fitted
