"""Steps that come packed, as `wire.pack_steps` writes them, from many ranks at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.ring import COLUMN, COLUMNS, FLAGS, LARGEST, MAX_STEP_NS, PHASES, PRESYNC, SYNC
from ddpwatch.wire import STEP_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.ring import IntArray, StepRing

WORTH_IT: Final = 16
"""Of fewer tables each is sooner read by itself."""
_INDEX: Final = COLUMN["index"]
_SURELY_NS: Final = MAX_STEP_NS // (PHASES.stop - PHASES.start)
"""No phase being longer, no step is too long."""


def put_tables(told: Sequence[tuple[StepRing, bytes]]) -> list[int]:
    """Give each ring the steps of its table, in order; of each how many are impossible, or contradict what was told
    before.
    """
    if len(told) >= WORTH_IT and _put_at_once(told):
        return [0] * len(told)
    return [ring.put_table(table) for ring, table in told]


def _put_at_once(told: Sequence[tuple[StepRing, bytes]]) -> bool:
    """Whether all of them are as nearly all are: possible, without a flag, and each following the one before."""
    store = told[0][0].store
    data = b"".join([table for _, table in told])
    if not data or len(data) % STEP_BYTES:
        return False
    rows: IntArray = np.frombuffer(data, "<i8").reshape(-1, len(COLUMNS)).astype(np.int64, copy=False)
    if not _surely_plain(rows):
        return False
    firsts: list[int] = []
    counts: list[int] = []
    places: list[int] = []
    same_store = True
    for ring, table in told:
        # One after the other: a rank may have told more than one of them.
        count, first = len(table) // STEP_BYTES, ring.newest + 1
        ring.newest += count
        firsts.append(first)
        counts.append(count)
        places.append(ring.row)
        same_store &= ring.store is store
    of_table = np.repeat(np.arange(len(told)), _array(counts))
    indices = rows[:, _INDEX]
    begins = np.cumsum(_array([0, *counts[:-1]]))
    expected = np.arange(len(rows)) + (_array(firsts) - begins)[of_table]
    if not (same_store and (indices == expected).all()):
        for (ring, _), count in zip(told, counts, strict=True):
            ring.newest -= count
        return False
    where = _array(places)[of_table] * store.capacity + indices % store.capacity
    store.table.reshape(-1, len(COLUMNS))[where] = rows
    store.index.reshape(-1)[where] = indices
    return True


def _array(numbers: list[int]) -> IntArray:
    # `np.array` looks at each of them to find out what they are.
    return np.fromiter(numbers, np.int64, len(numbers))


def _surely_plain(rows: IntArray) -> bool:
    # Of all numbers first, which takes no longer than of one column.
    return bool(
        rows.min() >= 0
        and rows.max() <= LARGEST
        and rows[:, PHASES].max() <= _SURELY_NS
        and not rows[:, FLAGS].any()
        and (rows[:, PRESYNC] <= rows[:, SYNC]).all()
    )


def possible(rows: IntArray) -> NDArray[np.bool_]:
    """Which of these steps can be: as `wire.Step` and a rank's state demand it of each that is told one by one."""
    within = ((rows >= 0) & (rows <= LARGEST)).all(axis=1)
    spent = rows[:, PHASES]
    within &= (spent <= MAX_STEP_NS).all(axis=1)
    within &= np.where(within, spent.sum(axis=1), 0) <= MAX_STEP_NS
    fine: NDArray[np.bool_] = within & (rows[:, PRESYNC] <= rows[:, SYNC])
    return fine
