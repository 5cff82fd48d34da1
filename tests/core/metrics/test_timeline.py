"""The job step by step: the same however it arrived, with gaps where there is nothing to compare."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.core.metrics.timeline import CHUNK_STEPS, NOT_KNOWN, SERIES, Timeline
from ddpwatch.core.state.run import RunState
from ddpwatch.core.state.step_store import CAPACITY_STEPS
from ddpwatch.simulator.scenario import Fault, Scenario
from tests.builders.fake_rank import MS, make_snap, make_step
from tests.builders.scenario_frames import frames
from tests.builders.synthetic_run import make_run, train


def followed(state):
    timeline = Timeline()
    timeline.follow(state)
    return timeline


def contents(timeline):
    steps = timeline.steps()
    return steps.tolist(), [timeline.series(name, steps) for name in SERIES], timeline.excess(steps)


def assert_same(first, second):
    for one, other in zip(contents(first), contents(second), strict=True):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 7), st.lists(st.integers(0, 60), max_size=20))
def test_following_in_pieces_is_following_at_once(flush_steps, looks):
    scenario = Scenario(3, steps=150, evaluate_every=40, faults=(Fault((1,), "data", 0.3),))
    state, pieces = RunState("x", "sim", 3), Timeline()
    for place, frame in enumerate(frames(scenario, flush_steps=flush_steps)):
        state.ingest(frame.payload, frame.received_ns)
        if place in looks:
            pieces.follow(state)
    pieces.follow(state)

    assert_same(pieces, followed(state))
    assert pieces.newest == 149 - 1 * scenario.evaluates_in(149)


def test_the_series_of_a_step():
    slow, fast = train(1, 3, backward=26), train(1, 3, sync=12)
    timeline = followed(make_run({0: fast, 1: fast, 2: slow}))
    steps = timeline.steps()

    assert steps.tolist() == [1, 2, 3]
    assert timeline.series("step_ns", steps).tolist() == [40 * MS] * 3
    assert timeline.series("wire_ns", steps).tolist() == [2 * MS] * 3
    assert timeline.series("wait_ns", steps) == pytest.approx([20 * MS / 3] * 3)
    assert timeline.series("samples_per_s", steps) == pytest.approx([96 / 0.040] * 3)
    # 38 ms of own work beside 28, in steps of 40.
    assert timeline.series("median_ns", steps).tolist() == [28 * MS] * 3
    assert timeline.excess(steps).tolist() == [[0] * 3, [0] * 3, [25] * 3]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5))
def test_wire_and_waiting_are_all_of_sync(seed, world):
    state = RunState("x", "sim", world)
    for frame in frames(Scenario(world, steps=40, seed=seed, noise=0.1)):
        state.ingest(frame.payload, frame.received_ns)
    timeline = followed(state)
    wire_ns, wait_ns, sync_ns = (timeline.series(name, timeline.steps()) for name in ("wire_ns", "wait_ns", "sync_ns"))

    assert len(wire_ns) == 39
    assert wire_ns + wait_ns == pytest.approx(sync_ns)
    assert (wait_ns >= 0).all()


def test_unusual_steps_and_the_first_one_are_left_out():
    unusual = {7: wire.EVALUATED, 9: wire.PAUSED, 11: wire.SKIPPED}
    of_one = [make_step(index, flags=unusual.get(index, 0)) for index in range(15)]
    timeline = followed(make_run({0: of_one, 1: train(0, 15)}))

    assert timeline.steps().tolist() == [1, 2, 3, 4, 5, 6, 8, 10, 12, 13, 14]
    assert (timeline.oldest, timeline.newest) == (1, 14)


def test_a_step_that_one_rank_never_reported_is_a_gap():
    timeline = followed(make_run({0: train(1, 20), 1: [step for step in train(1, 20) if step.index != 8]}))

    assert timeline.steps().tolist() == [*range(1, 8), *range(9, 21)]


def test_it_goes_as_far_as_the_last_rank():
    timeline = followed(make_run({0: train(1, 20), 1: train(1, 12)}))

    assert timeline.newest == 12


def test_where_a_rank_is_missing_wire_and_waiting_are_unproven():
    timeline = followed(make_run({0: train(1, 5), 2: train(1, 5)}, world=3))
    steps = timeline.steps()

    assert np.isnan(timeline.series("wire_ns", steps)).all()
    assert np.isnan(timeline.series("wait_ns", steps)).all()
    assert np.isnan(timeline.series("samples_per_s", steps)).all()
    assert timeline.series("sync_ns", steps).tolist() == [2 * MS] * 5
    assert timeline.excess(steps).tolist() == [[0] * 5, [NOT_KNOWN] * 5, [0] * 5]


def test_a_rank_that_was_not_listed_makes_it_begin_anew():
    state = make_run({0: train(1, 5)})
    state.world_size = 2
    timeline = followed(state)
    state.apply(make_snap(1, seq=5, steps=train(1, 5)), now_ns=1)
    timeline.follow(state)

    assert timeline.ranks == (0, 1)
    assert timeline.excess(timeline.steps()).shape == (2, 5)


def test_a_history_that_comes_after_the_first_live_steps_is_taken_in():
    state = RunState("x", "train", 2)
    for rank in range(2):
        state.apply(wire.Steps(rank=rank, seq=9, steps=train(100, 2)), now_ns=1)
    timeline = followed(state)
    assert timeline.steps().tolist() == [100, 101]

    for rank in range(2):
        state.apply(make_snap(rank, seq=8, steps=train(1, 99)), now_ns=1)
        timeline.follow(state)

    assert timeline.steps().tolist() == list(range(1, 102))
    assert_same(timeline, followed(state))


@pytest.mark.parametrize("last", [CAPACITY_STEPS, CAPACITY_STEPS + 1, 2 * CAPACITY_STEPS + CHUNK_STEPS // 2])
def test_old_steps_go_when_new_ones_need_their_place(last):
    state, timeline = make_run({0: [], 1: []}), Timeline()
    for first in range(1, last + 1, 50):
        for rank in range(2):
            steps = train(first, min(50, last + 1 - first), backward=16 + first % 7)
            state.apply(wire.Steps(rank=rank, seq=4 + first, steps=steps), now_ns=1)
        timeline.follow(state)

    assert timeline.steps().tolist() == list(range(last - CAPACITY_STEPS + 1, last + 1))
    assert timeline.oldest == last - CAPACITY_STEPS + 1
    assert_same(timeline, followed(state))


def test_what_was_left_out_does_not_show_the_step_that_had_its_place_before():
    state, timeline = make_run({0: train(1, CAPACITY_STEPS)}), Timeline()
    timeline.follow(state)
    evaluated = CAPACITY_STEPS + 5
    later = [make_step(index, flags=wire.EVALUATED * (index == evaluated)) for index in range(601, 611)]
    state.apply(wire.Steps(rank=0, seq=4, steps=later), now_ns=1)
    timeline.follow(state)

    assert timeline.steps().tolist() == [index for index in range(11, 611) if index != evaluated]


def test_steps_can_be_asked_for_up_to_one_and_so_many():
    timeline = followed(make_run({0: train(1, 100)}))

    assert timeline.steps(upto=50, most=3).tolist() == [48, 49, 50]
    assert timeline.steps(most=2).tolist() == [99, 100]
    assert timeline.steps(upto=0).tolist() == []


def test_nothing_received_is_nothing_shown():
    timeline = followed(RunState("x", "train", 4))

    assert (timeline.oldest, timeline.newest) == (-1, -1)
    assert timeline.steps().tolist() == []
    assert timeline.excess(timeline.steps()).shape == (4, 0)


def test_the_excess_of_a_rank_that_is_far_off_is_never_more_than_the_step():
    timeline = followed(make_run({0: train(1, 3), 1: train(1, 3), 2: train(1, 3, data=5000)}))

    assert set(timeline.excess(timeline.steps())[2].tolist()) <= {99, 100}
