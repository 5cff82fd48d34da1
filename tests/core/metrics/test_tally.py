"""A whole run added up: every step once, however often it is looked at."""

from __future__ import annotations

import pytest

from ddpwatch import wire
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import MS, make_snap, make_step

STEPS = 500


def snapped(state, rank, first, last, **phases):
    state.apply(make_snap(rank, seq=last, steps=[make_step(index, **phases) for index in range(first, last)]), now_ns=1)


def trained(timeline, *pieces):
    """Two ranks, of which the second has `backward` more; each piece is (first, last, backward)."""
    state = RunState("x", "sim", 2)
    for first, last, backward in pieces:
        snapped(state, 0, first, last, sync=2 + backward)
        snapped(state, 1, first, last, backward=16 + backward, sync=2)
        timeline.follow(state)
        timeline.follow(state)
    return timeline.tally


def test_steps_that_have_left_the_history_still_count_and_each_counts_once():
    tally = trained(Timeline(), (0, 400, 10), (400, STEPS, 0), (STEPS, 2 * STEPS, 0))

    # The first step is never counted.
    assert tally.steps == 2 * STEPS - 1
    slow, whole = 399 * 10, 399 * 40 + (2 * STEPS - 400) * 30
    assert tally.costs()[1] == pytest.approx(slow / whole)
    assert tally.costs()[0] == 0.0
    assert tally.share == pytest.approx((399 * 7 + (2 * STEPS - 400) * 2) / whole)
    assert tally.wire_share == pytest.approx((2 * STEPS - 1) * 2 / whole)
    assert tally.step_ns == pytest.approx(30 * MS)
    assert tally.samples_per_s == pytest.approx(2 * 32 * (2 * STEPS - 1) * 1000 / whole)


def test_a_history_that_comes_late_is_counted_with_the_rest():
    state, timeline = RunState("x", "sim", 2), Timeline()
    for rank in (0, 1):
        live = [make_step(index) for index in range(50, 60)]
        state.apply(wire.Steps(rank=rank, seq=90, steps=live), now_ns=1)
    timeline.follow(state)
    assert timeline.tally.steps == 10
    for rank in (0, 1):
        snapped(state, rank, 0, 55)
        timeline.follow(state)
    assert timeline.tally.steps == 59


def test_without_all_ranks_nothing_is_told():
    state, timeline = RunState("x", "sim", 3), Timeline()
    for rank in (0, 1):
        snapped(state, rank, 0, 60)
    timeline.follow(state)

    assert timeline.tally.steps == 0
    assert timeline.tally.step_ns is None
    assert timeline.tally.samples_per_s is None
