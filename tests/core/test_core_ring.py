"""The ring keeps the last 600 steps, each once, in whatever order they come."""

from __future__ import annotations

import numpy as np
from fake_rank import MS, make_step

from ddpwatch.core.ring import CAPACITY_STEPS, COLUMNS, StepRing
from ddpwatch.wire import Step


def filled(indices):
    ring = StepRing()
    for index in indices:
        ring.put(make_step(index, forward=index + 1))
    return ring


def test_every_number_of_a_step_is_kept():
    """Only what the script logged has no place in an array of integers."""
    assert {"values"} == set(Step.__struct_fields__) - set(COLUMNS)


def test_old_steps_make_room():
    ring = filled(range(1000))

    assert list(range(400, 1000)) == ring.indices().tolist()
    assert len(ring.indices()) == CAPACITY_STEPS


def test_late_and_doubled_steps_find_their_place():
    ring = filled([3, 1, 2, 1, 3])

    assert ring.indices().tolist() == [1, 2, 3]
    assert ring.column("forward_ns", np.array([1, 2, 3])).tolist() == [2 * MS, 3 * MS, 4 * MS]


def test_a_step_from_before_the_window_is_not_kept():
    """Its slot is free because step 605 never came; it is old all the same."""
    ring = filled([5, 1000])

    assert ring.indices().tolist() == [1000]
    assert not ring.holds(np.array([5])).any()


def test_an_empty_ring_holds_nothing():
    assert StepRing().indices().tolist() == []
    assert StepRing().newest == -1
