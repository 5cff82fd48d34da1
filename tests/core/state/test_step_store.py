"""The ring keeps the last 600 steps, each once, in any order of arrival."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.core.state.rank import RankState
from ddpwatch.core.state.step_store import CAPACITY_STEPS, COLUMNS, TIMES, StepRing, StepStore, _values
from ddpwatch.wire import Step
from tests.builders.fake_rank import MS, make_step


def filled(indices):
    ring = StepRing()
    for index in indices:
        ring.put_all([make_step(index, forward=index + 1)])
    return ring


def test_every_number_of_a_step_is_kept():
    """Except logged values, which do not fit into an array of integers."""
    assert {"values"} == set(Step.__struct_fields__) - set(COLUMNS)


def test_the_oldest_steps_are_dropped():
    ring = filled(range(1000))

    assert list(range(400, 1000)) == ring.indices().tolist()
    assert len(ring.indices()) == CAPACITY_STEPS


def test_late_and_doubled_steps_find_their_place():
    ring = filled([3, 1, 2, 1, 3])

    assert ring.indices().tolist() == [1, 2, 3]
    assert ring.column("forward_ns", np.array([1, 2, 3])).tolist() == [2 * MS, 3 * MS, 4 * MS]


def test_a_step_from_before_the_window_is_not_kept():
    """Its slot is free because step 605 never arrived."""
    ring = filled([5, 1000])

    assert ring.indices().tolist() == [1000]
    assert not ring.holds(np.array([5])).any()


def test_an_empty_ring_holds_nothing():
    assert StepRing().indices().tolist() == []
    assert StepRing().newest == -1


@given(
    order=st.lists(st.integers(0, 40), max_size=60),
    flagged=st.sets(st.integers(0, 40)),
    first=st.integers(0, 45),
    length=st.integers(1, 10),
)
def test_a_range_is_plain_if_all_its_steps_are_held_and_unflagged(order, flagged, first, length):
    ring = StepRing(StepStore(1, 16))
    for index in order:
        ring.put_all([make_step(index, flags=int(index in flagged))])
    wanted = np.arange(first, first + length)
    held, flags = np.ones(length, dtype=bool), np.zeros(length, dtype=np.int64)
    ring.narrow(wanted, held, flags, np.full(length, -1))

    if ring.is_plain(first, first + length - 1):
        assert held.all()
        assert not flags.any()
    elif held.all() and not flags.any():
        # It may say no where it could say yes, but only after a flag behind the window, before a gap, or after one that
        # was filled late.
        gap = len(set(order)) <= max(order) - min(order)
        assert gap or any(index in flagged for index in order) or order != sorted(order)


def test_consecutive_steps_are_plain_after_the_ring_wraps():
    ring = StepRing(StepStore(1, 16))
    for index in range(100):
        ring.put_all([make_step(index)])

    assert ring.is_plain(84, 99)
    assert not ring.is_plain(83, 99)
    assert not ring.is_plain(84, 100)


@given(
    order=st.lists(st.integers(0, 40), max_size=60),
    flagged=st.sets(st.integers(0, 40)),
    ends=st.sets(st.integers(0, 60)),
)
def test_steps_in_one_batch_equal_steps_one_by_one(order, flagged, ends):
    steps = [
        make_step(index, flags=int(index in flagged), end_ns=10**9 + (place in ends))
        for place, index in enumerate(order)
    ]
    together, one_by_one = StepRing(StepStore(1, 16)), StepRing(StepStore(1, 16))
    refused = sum(not one_by_one._put(_values(step)) for step in steps)

    assert together.put_all(steps) == refused
    assert together.latest(40).tolist() == one_by_one.latest(40).tolist()
    assert [row[0] for row in together.latest(40).tolist()] == together.indices().tolist()
    assert all(
        together.is_plain(first, last) == one_by_one.is_plain(first, last)
        for first in range(42)
        for last in range(first, 42)
    )


def test_the_end_of_a_history_longer_than_the_ring_is_kept():
    steps = [make_step(index) for index in range(100, 140)]
    at_once, one_by_one = (RankState(0, steps=StepRing(StepStore(1, 16))) for _ in range(2))
    at_once.add_steps(steps)
    for step in steps:
        one_by_one.add_steps([step])

    assert at_once.steps.latest(40).tolist() == one_by_one.steps.latest(40).tolist()
    assert at_once.steps.indices().tolist() == list(range(124, 140))
    assert at_once.bad == one_by_one.bad == 0


@given(held=st.sets(st.integers(24, 39), min_size=1), columns=st.sampled_from([COLUMNS, TIMES, (*TIMES, "flags")]))
def test_the_same_steps_of_several_rings_are_read_at_once(held, columns):
    """Contiguous, wrapped around the end of the ring, and with gaps."""
    store = StepStore(2, 16)
    rings = [StepRing(store, row) for row in range(2)]
    for row, ring in enumerate(rings):
        ring.put_all([make_step(index, data_ns=1000 * row + index) for index in range(40)])
    indices = np.array(sorted(held))
    read = store.read([0, 1], indices, columns)

    for row, ring in enumerate(rings):
        for place, name in enumerate(columns):
            assert read[row, place].tolist() == ring.column(name, indices).tolist()
