"""Step tables survive a round trip; bytes that are not a table decode to nothing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.core.state.run import RunState
from ddpwatch.core.state.step_codec import MAX_ROWS, TABLE_RANKS, apply_table, read_table, write_tables
from ddpwatch.core.state.step_store import COLUMN, COLUMNS, MAX_STEP_NS, StepRing, StepStore
from ddpwatch.wire import NO_MESSAGE
from tests.builders.fake_rank import make_step

PHASES = ("data", "forward", "backward", "sync", "optimizer", "other")

indices = st.lists(st.integers(0, 40), max_size=40)
numbers = st.integers(0, 2**62)
steps = st.builds(
    lambda index, end_ns, spent_ns, fields: make_step(
        index, end_ns=end_ns, **dict(zip([f"{name}_ns" for name in PHASES], spent_ns, strict=True)), **fields
    ),
    st.integers(0, 40),
    numbers,
    st.lists(st.integers(0, MAX_STEP_NS // 8), min_size=6, max_size=6),
    st.fixed_dictionaries(dict.fromkeys(("samples", "batch", "flags", "fingerprint", "comm_bytes"), numbers)),
)


def ring_of(reported, capacity=16):
    ring = StepRing(StepStore(1, capacity))
    for step in reported:
        ring.put_all([step])
    return ring


def seen(ring):
    """Everything observable of a ring."""
    held = ring.indices()
    plain = [ring.is_plain(first, ring.newest) for first in range(42)]
    return held.tolist(), ring.latest(100).tolist(), ring.newest, plain


@given(st.lists(st.lists(steps, max_size=30), max_size=5))
def test_a_written_table_is_read_back(by_rank):
    rings = [ring_of(reported, 64) for reported in by_rank]
    written = list(write_tables(list(enumerate(rings)), 20))

    read = {rank: rows.tolist() for table in written for rank, rows in read_table(table)}
    assert read == {rank: ring.latest(20).tolist() for rank, ring in enumerate(rings) if ring.newest >= 0}


@given(before=indices, rows=indices, flagged=st.sets(st.integers(0, 40)))
def test_rows_in_one_call_equal_rows_one_by_one(before, rows, flagged):
    later = [make_step(index, flags=int(index in flagged)) for index in sorted(set(rows))]
    at_once, one_by_one = (ring_of(make_step(index) for index in before) for _ in range(2))
    table = np.array([[getattr(step, name) for name in COLUMNS] for step in later], np.int64).reshape(-1, len(COLUMNS))
    at_once.put_rows(table)
    for step in later:
        one_by_one.put_all([step])

    held, latest, newest, plain = seen(at_once)
    assert (held, latest, newest) == seen(one_by_one)[:3]
    # A ring that recomputes its gapless range may know more.
    assert all(knows or not knew for knows, knew in zip(plain, seen(one_by_one)[3], strict=True))
    for first in [index for index, is_plain in enumerate(plain) if is_plain]:
        assert set(range(first, newest + 1)) <= set(held)
        assert not at_once.column("flags", np.arange(first, newest + 1)).any()


def test_rows_out_of_order_are_skipped():
    ring = StepRing(StepStore(1, 16))
    rows = np.zeros((4, len(COLUMNS)), np.int64)
    rows[:, 0] = [5, 3, 5, 6]
    ring.put_rows(rows)

    assert ring.indices().tolist() == [5, 6]


def test_more_ranks_than_a_table_has_go_into_the_next_one():
    rings = [(rank, ring_of([make_step(rank)], 64)) for rank in range(TABLE_RANKS + 3)]

    tables = list(write_tables(rings, 10))
    assert [len(list(read_table(table))) for table in tables] == [TABLE_RANKS, 3]


def test_earlier_steps_do_not_replace_later_ones():
    state = RunState("ab", "run", 1)
    state.ranks[0].add_steps([make_step(index) for index in (5, 6)])
    (table,) = write_tables([(0, ring_of([make_step(index, forward=9) for index in (3, 4, 5, 9)]))], 10)
    apply_table(state, table, earlier=True)

    ring = state.ranks[0].steps
    assert ring.indices().tolist() == [3, 4, 5, 6]
    assert ring.column("forward_ns", np.array([4, 5])).tolist() == [9_000_000, 8_000_000]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("index", -1),
        ("end_ns", -1),
        ("samples", 2**62 + 1),
        ("data_ns", MAX_STEP_NS + 1),
        ("other_ns", 2**63 - 1),
        ("presync_ns", 3_000_000),
    ],
)
def test_an_invalid_step_is_skipped_and_the_others_are_read(column, value):
    ring = ring_of([make_step(index) for index in (1, 2, 3)])
    ring.store.table[0, 2, COLUMN[column]] = value
    (table,) = write_tables([(0, ring)], 10)

    ((_, rows),) = read_table(table)
    assert rows[:, 0].tolist() == [1, 3]


@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 255))
def test_bytes_that_are_not_a_table_are_ignored(noise, place, byte):
    (table,) = write_tables([(0, ring_of([make_step(index) for index in range(9)]))], 10)
    state = RunState("ab", "run", 1)
    damaged = bytearray(table)
    damaged[place % len(damaged)] = byte
    for payload in (noise, NO_MESSAGE + noise, bytes(damaged), table[: place % len(table)]):
        apply_table(state, payload)

    assert len(state.ranks[0].steps.indices()) <= 9
    assert list(read_table(noise)) == []


def test_a_small_table_that_claims_to_be_a_large_one_is_not_read():
    """All-zero planes take no bytes."""
    for counts in ([MAX_ROWS + 1], [2**62]):
        claim = NO_MESSAGE + msgspec.msgpack.encode([[0], counts, bytes(len(COLUMNS)), b""])
        assert list(read_table(claim)) == []
    assert len(next(read_table(NO_MESSAGE + msgspec.msgpack.encode([[0], [3], bytes(len(COLUMNS)), b""])))[1]) == 3


@pytest.mark.parametrize("columns", [len(COLUMNS) - 3, len(COLUMNS) - 1, len(COLUMNS) + 1, len(COLUMNS) + 3])
def test_a_table_of_another_version_is_read_by_its_own_number_of_columns(columns):
    steps = [make_step(index, hook_ns=5, comm_bytes=9, busy_ns=3) for index in range(4, 9)]
    (table,) = write_tables([(0, ring_of(steps))], 10)
    ranks, counts, weights, data = msgspec.msgpack.decode(table[len(NO_MESSAGE) :])
    if columns < len(COLUMNS):
        kept = sum(bits.bit_count() for bits in weights[:columns])
        weights, data = weights[:columns], data[: kept * len(steps)]
    else:
        added = columns - len(COLUMNS)
        weights, data = weights + b"\x80" * added, data + b"c" * (added * len(steps))
    ((_, rows),) = read_table(NO_MESSAGE + msgspec.msgpack.encode([ranks, counts, weights, data]))

    ((_, own),) = read_table(table)
    known = min(columns, len(COLUMNS))
    assert rows[:, :known].tolist() == own[:, :known].tolist()
    assert rows[:, known:].tolist() == [[0] * (len(COLUMNS) - known)] * len(steps)
