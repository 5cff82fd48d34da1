"""A run in numbers: against windows whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from ddpwatch import wire
from ddpwatch.core.metrics.aggregate import COLUMNS, RunAggregate
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.state.run import RunState
from ddpwatch.wire import PHASES
from tests.builders.fake_rank import MS, make_snap, make_step
from tests.builders.windows import FAST, SLOW, aggregate_of, window


def test_the_slow_rank_has_all_of_the_cost_and_its_phase():
    (cost,) = aggregate_of(window([FAST, FAST, SLOW, FAST])).costs()

    assert (cost.subject, cost.phases) == (2, ("backward",))
    assert cost.share == pytest.approx(10 / 40)
    assert cost.seconds == pytest.approx(50 * 0.010)


def test_wire_and_waiting_add_up_to_the_share():
    aggregate = aggregate_of(window([FAST, FAST, SLOW, FAST]))
    share, wire, wait = aggregate.shares()

    assert share == pytest.approx((3 * 12 + 2) / 4 / 40)
    assert wire == pytest.approx(2 / 40)
    assert wait == pytest.approx(3 * 10 / 4 / 40)
    assert aggregate.waits_ns().tolist() == pytest.approx([10 * MS, 10 * MS, 0, 10 * MS])
    by_column = [values.tolist() for values in aggregate.shares_over_time()]
    assert by_column == [pytest.approx([part] * 50) for part in (share, wire, wait)]


def test_where_a_rank_is_missing_wire_and_waiting_are_unknown():
    aggregate = aggregate_of(window([FAST, FAST, SLOW], world=4))

    share, wire, wait = aggregate.shares()
    assert share is not None
    assert (wire, wait) == (None, None)
    assert np.isnan(aggregate.shares_over_time()[1]).all()
    assert aggregate.costs() == []
    assert aggregate.samples_per_s is None


def test_steps_and_samples_are_counted_and_the_speed_is_theirs():
    aggregate = aggregate_of(window([FAST] * 4), window([FAST] * 4, first=51))

    assert (aggregate.steps, aggregate.first_step, aggregate.last_step) == (100, 1, 100)
    assert aggregate.effective_batch == 4 * 32
    assert aggregate.samples_per_s == pytest.approx(4 * 32 / 0.040)
    assert aggregate.total_ns == pytest.approx(100 * 40 * MS)


def test_quantiles_are_within_a_per_cent_also_of_each_column():
    slower = tuple(3 * duration for duration in FAST)
    aggregate = aggregate_of(window([FAST] * 4, steps=980), window([slower] * 4, first=981, steps=20))

    assert aggregate.step_ns(0.5) == pytest.approx(40 * MS)
    assert aggregate.step_ns(0.99) == pytest.approx(120 * MS)
    assert aggregate.step_ns_over_time(0.5)[0] == pytest.approx(40 * MS, rel=0.01)
    assert aggregate.step_ns_over_time(0.99)[-1] == pytest.approx(120 * MS, rel=0.01)


def test_a_run_of_any_length_has_the_same_number_of_columns():
    aggregate = RunAggregate(range(2))
    for first in range(1, 20_001, 100):
        aggregate.add(window([FAST, SLOW], first=first, steps=100))

    assert aggregate.steps == 20_000
    assert COLUMNS / 2 <= aggregate.over_time.used <= COLUMNS
    assert aggregate.excess_over_time().shape == (2, aggregate.over_time.used)
    assert aggregate.over_time["steps"].sum() == 20_000


def test_the_map_shows_which_rank_was_slow_and_when():
    aggregate = aggregate_of(window([FAST] * 4, steps=60), window([FAST, SLOW, FAST, FAST], first=61, steps=60))
    excess = aggregate.excess_over_time()

    assert excess[1, :60].tolist() == [0.0] * 60
    assert excess[1, 60:].tolist() == [25.0] * 60
    assert not excess[[0, 2, 3]].any()


def test_a_rank_that_was_not_there_is_not_known_and_not_zero():
    aggregate = aggregate_of(window([FAST, FAST], world=4))

    assert np.isnan(aggregate.excess_over_time()[2:]).all()
    assert np.isnan(aggregate.phases_ns()[2:]).all()


def test_a_host_whose_ranks_all_are_slow_has_the_cost_that_none_of_them_has_alone():
    hosts = ("node-a", "node-a", "node-b", "node-b")
    aggregate = aggregate_of(window([FAST, FAST, SLOW, SLOW], hosts=hosts))

    assert aggregate.costs() == []
    (cost,) = aggregate.host_costs()
    assert cost.subject == "node-b"
    assert cost.share == pytest.approx(0.25)


def test_without_a_step_nothing_is_made_up():
    aggregate = RunAggregate(range(4))

    assert aggregate.shares() == (None, None, None)
    assert aggregate.step_ns(0.5) is None
    assert (aggregate.costs(), aggregate.host_costs(), aggregate.effective_batch) == ([], [], None)


def test_odd_steps_now_in_one_phase_and_now_in_another_name_none():
    longer = [[*FAST] for _ in PHASES]
    for place, phases in enumerate(longer):
        phases[place] += 10
        phases[PHASES.index("sync")] -= 10
    own = [place for place, phase in enumerate(PHASES) if phase != "sync"]
    windows = [window([FAST, FAST, longer[place], FAST], first=1 + 50 * number) for number, place in enumerate(own)]
    (cost,) = aggregate_of(*windows).costs()
    (of_one,) = aggregate_of(windows[0]).costs()

    assert (cost.subject, cost.phases) == (2, ())
    assert cost.share == pytest.approx(of_one.share)
    assert of_one.phases == (PHASES[own[0]],)


def frozen(seconds, culprit=2, step=101, others="sync", phase="other"):
    """One step in which a rank takes `seconds` for a phase, while the others wait for it or do the same."""
    rows = [dict(zip(PHASES, FAST, strict=True)) for _ in range(4)]
    for rank, row in enumerate(rows):
        row[phase if rank == culprit else others] += 1000 * seconds
    return window([tuple(row.values()) for row in rows], first=step, steps=1)


def test_a_rank_that_was_stuck_once_has_its_hung_step():
    aggregate = aggregate_of(window([FAST] * 4, steps=100), frozen(8), window([FAST] * 4, first=102, steps=100))
    (cost,) = aggregate.costs()

    assert (cost.subject, cost.phases, cost.mainly_hung) == (2, ("other",), True)
    assert (cost.hung.steps, cost.hung.longest_step, cost.hung.rank) == (1, 101, 2)
    assert cost.hung.lost_s == pytest.approx(8.0)
    assert cost.hung.longest_s == pytest.approx(8.040)


def test_hung_steps_are_counted_and_added_up_for_each_rank():
    parts = [frozen(seconds, culprit, step) for seconds, culprit, step in ((3, 2, 101), (8, 2, 102), (5, 1, 103))]
    aggregate = aggregate_of(window([FAST] * 4, steps=100), *parts)
    both, of_two, of_none = aggregate.hung_steps(), aggregate.hung_steps({2}), aggregate.hung_steps({0})

    assert (both.steps, both.longest_step, both.rank) == (3, 102, 2)
    assert both.lost_s == pytest.approx(16.0)
    assert (of_two.steps, of_two.lost_s) == (2, pytest.approx(11.0))
    assert of_none is None


def test_what_all_do_at_once_is_a_hung_step_of_no_rank():
    aggregate = aggregate_of(window([FAST] * 4, steps=100), frozen(8, others="other"))

    assert aggregate.hung_steps().rank is None
    assert all(cost.hung is None for cost in aggregate.costs())


def test_the_phases_of_a_rank_that_was_slow_and_stuck_are_those_it_was_slow_in():
    aggregate = aggregate_of(window([FAST, FAST, SLOW, FAST], steps=600), frozen(4, step=601))
    (cost,) = aggregate.costs()

    assert (cost.phases, cost.mainly_hung) == (("backward",), False)
    assert cost.hung.longest_step == 601


def test_in_the_map_a_column_is_time_over_time_and_never_above_all_of_it():
    """A column of some steps, of which one hung, is nearly all hung time."""
    aggregate = aggregate_of(
        window([FAST] * 4, steps=300), frozen(6, step=301), window([FAST] * 4, first=302, steps=300)
    )
    assert aggregate.over_time.width > 1
    excess, of_ranks = aggregate.excess_over_time(), aggregate.excess_of_ranks()

    assert 95 < excess[2].max() <= 100
    assert of_ranks[2] == pytest.approx(100 * 6e9 / aggregate.total_ns, rel=0.01)
    assert of_ranks[[0, 1, 3]].tolist() == [0.0] * 3
    late = [tuple(1000 * (phase == "other") for phase in PHASES), (0,) * 6, (0,) * 6]
    assert aggregate_of(window(late, steps=1), ranks=3).excess_over_time().max() == 100


def test_one_hung_step_does_not_make_slow_steps_look_fast():
    slow = [FAST, FAST, SLOW, FAST]
    aggregate = aggregate_of(window(slow, steps=100), frozen(8), window(slow, first=102, steps=100))
    aggregate.add(window([FAST] * 4, first=202, steps=400))

    last, _ = aggregate.slow_until(2, 1)
    assert abs(last - 201) < aggregate.over_time.width


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
    return timeline.aggregate


def test_steps_that_have_left_the_history_still_count_and_each_counts_once():
    aggregate = trained(Timeline(), (0, 400, 10), (400, STEPS, 0), (STEPS, 2 * STEPS, 0))

    # The first step is never counted.
    assert aggregate.steps == 2 * STEPS - 1
    slow, whole = 399 * 10, 399 * 40 + (2 * STEPS - 400) * 30
    assert aggregate.straggler_costs()[1] == pytest.approx(slow / whole)
    assert aggregate.straggler_costs()[0] == 0.0
    share, wire, _ = aggregate.shares()
    assert share == pytest.approx((399 * 7 + (2 * STEPS - 400) * 2) / whole)
    assert wire == pytest.approx((2 * STEPS - 1) * 2 / whole)
    assert aggregate.step_ns() == pytest.approx(30 * MS)
    assert aggregate.samples_per_s == pytest.approx(2 * 32 * (2 * STEPS - 1) * 1000 / whole)


def test_a_history_that_comes_late_is_counted_with_the_rest():
    state, timeline = RunState("x", "sim", 2), Timeline()
    for rank in (0, 1):
        live = [make_step(index) for index in range(50, 60)]
        state.apply(wire.Steps(rank=rank, seq=90, steps=live), now_ns=1)
    timeline.follow(state)
    assert timeline.aggregate.steps == 10
    for rank in (0, 1):
        snapped(state, rank, 0, 55)
        timeline.follow(state)
    assert timeline.aggregate.steps == 59


def test_without_all_ranks_nothing_is_shown():
    state, timeline = RunState("x", "sim", 3), Timeline()
    for rank in (0, 1):
        snapped(state, rank, 0, 60)
    timeline.follow(state)

    assert timeline.aggregate.steps == 0
    assert timeline.aggregate.step_ns() is None
    assert timeline.aggregate.samples_per_s is None


def test_pauses_are_fractions_of_the_time_by_rank():
    steps = window([FAST] * 4)
    steps.column("gc_ns")[1] = 4 * MS
    steps.column("save_ns")[0] = 1 * MS
    shares = aggregate_of(steps).pause_shares()

    assert shares["gc_ns"] == pytest.approx({0: 0, 1: 0.1, 2: 0, 3: 0})
    assert shares["save_ns"] == pytest.approx({0: 1 / 40, 1: 0, 2: 0, 3: 0})
    assert set(shares["eval_ns"].values()) == {0}
