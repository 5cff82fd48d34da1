"""A run in numbers: against windows whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from ddpwatch.core.metrics.aggregate import COLUMNS, Digest
from ddpwatch.wire import PHASES
from tests.builders.fake_rank import MS
from tests.builders.windows import FAST, SLOW, digest_of, window


def test_the_slow_rank_has_all_of_the_cost_and_its_phase():
    (cost,) = digest_of(window([FAST, FAST, SLOW, FAST])).costs()

    assert (cost.who, cost.phases) == (2, ("backward",))
    assert cost.share == pytest.approx(10 / 40)
    assert cost.seconds == pytest.approx(50 * 0.010)


def test_wire_and_waiting_add_up_to_the_share():
    digest = digest_of(window([FAST, FAST, SLOW, FAST]))
    share, wire, wait = digest.shares()

    assert share == pytest.approx((3 * 12 + 2) / 4 / 40)
    assert wire == pytest.approx(2 / 40)
    assert wait == pytest.approx(3 * 10 / 4 / 40)
    assert digest.waits_ns().tolist() == pytest.approx([10 * MS, 10 * MS, 0, 10 * MS])
    by_column = [values.tolist() for values in digest.shares_over_time()]
    assert by_column == [pytest.approx([part] * 50) for part in (share, wire, wait)]


def test_where_a_rank_is_missing_wire_and_waiting_are_not_told():
    digest = digest_of(window([FAST, FAST, SLOW], world=4))

    share, wire, wait = digest.shares()
    assert share is not None
    assert (wire, wait) == (None, None)
    assert np.isnan(digest.shares_over_time()[1]).all()
    assert digest.costs() == []
    assert digest.samples_per_s is None


def test_steps_and_samples_are_counted_and_the_speed_is_theirs():
    digest = digest_of(window([FAST] * 4), window([FAST] * 4, first=51))

    assert (digest.steps, digest.first_step, digest.last_step) == (100, 1, 100)
    assert digest.effective_batch == 4 * 32
    assert digest.samples_per_s == pytest.approx(4 * 32 / 0.040)
    assert digest.total_s == pytest.approx(100 * 0.040)


def test_quantiles_are_within_a_per_cent_also_of_each_column():
    slower = tuple(3 * duration for duration in FAST)
    digest = digest_of(window([FAST] * 4, steps=980), window([slower] * 4, first=981, steps=20))

    assert digest.step_ns(0.5) == pytest.approx(40 * MS)
    assert digest.step_ns(0.99) == pytest.approx(120 * MS)
    assert digest.step_ns_over_time(0.5)[0] == pytest.approx(40 * MS, rel=0.01)
    assert digest.step_ns_over_time(0.99)[-1] == pytest.approx(120 * MS, rel=0.01)


def test_a_run_of_any_length_has_the_same_number_of_columns():
    digest = Digest(range(2))
    for first in range(1, 20_001, 100):
        digest.take(window([FAST, SLOW], first=first, steps=100))

    assert digest.steps == 20_000
    assert COLUMNS / 2 <= digest.over_time.used <= COLUMNS
    assert digest.excess_over_time().shape == (2, digest.over_time.used)
    assert digest.over_time["steps"].sum() == 20_000


def test_the_map_shows_who_was_slow_and_when():
    digest = digest_of(window([FAST] * 4, steps=60), window([FAST, SLOW, FAST, FAST], first=61, steps=60))
    excess = digest.excess_over_time()

    assert excess[1, :60].tolist() == [0.0] * 60
    assert excess[1, 60:].tolist() == [25.0] * 60
    assert not excess[[0, 2, 3]].any()


def test_a_rank_that_was_not_there_is_not_known_and_not_zero():
    digest = digest_of(window([FAST, FAST], world=4))

    assert np.isnan(digest.excess_over_time()[2:]).all()
    assert np.isnan(digest.phases_ns()[2:]).all()


def test_a_host_whose_ranks_all_are_slow_has_the_cost_that_none_of_them_has_alone():
    hosts = ("node-a", "node-a", "node-b", "node-b")
    digest = digest_of(window([FAST, FAST, SLOW, SLOW], hosts=hosts))

    assert digest.costs() == []
    (cost,) = digest.host_costs()
    assert cost.who == "node-b"
    assert cost.share == pytest.approx(0.25)


def test_without_a_step_nothing_is_made_up():
    digest = Digest(range(4))

    assert digest.shares() == (None, None, None)
    assert digest.step_ns(0.5) is None
    assert (digest.costs(), digest.host_costs(), digest.effective_batch) == ([], [], None)


def test_odd_steps_now_in_one_phase_and_now_in_another_name_none():
    longer = [[*FAST] for _ in PHASES]
    for place, phases in enumerate(longer):
        phases[place] += 10
        phases[PHASES.index("sync")] -= 10
    own = [place for place, phase in enumerate(PHASES) if phase != "sync"]
    windows = [window([FAST, FAST, longer[place], FAST], first=1 + 50 * number) for number, place in enumerate(own)]
    (cost,) = digest_of(*windows).costs()
    (of_one,) = digest_of(windows[0]).costs()

    assert (cost.who, cost.phases) == (2, ())
    assert cost.share == pytest.approx(of_one.share)
    assert of_one.phases == (PHASES[own[0]],)


def frozen(seconds, culprit=2, step=101, others="sync", phase="other"):
    """One step in which a rank takes so long for something, while the others wait for it or do the same."""
    rows = [dict(zip(PHASES, FAST, strict=True)) for _ in range(4)]
    for rank, row in enumerate(rows):
        row[phase if rank == culprit else others] += 1000 * seconds
    return window([tuple(row.values()) for row in rows], first=step, steps=1)


def test_a_rank_that_was_stuck_once_is_told_with_its_standstill():
    digest = digest_of(window([FAST] * 4, steps=100), frozen(8), window([FAST] * 4, first=102, steps=100))
    (cost,) = digest.costs()

    assert (cost.who, cost.phases, cost.mainly_still) == (2, ("other",), True)
    assert (cost.still.steps, cost.still.longest_step, cost.still.rank) == (1, 101, 2)
    assert cost.still.lost_s == pytest.approx(8.0)
    assert cost.still.longest_s == pytest.approx(8.040)


def test_standstills_are_counted_and_added_up_for_each_rank():
    parts = [frozen(seconds, culprit, step) for seconds, culprit, step in ((3, 2, 101), (8, 2, 102), (5, 1, 103))]
    digest = digest_of(window([FAST] * 4, steps=100), *parts)
    both, of_two, of_none = digest.standstill(), digest.standstill({2}), digest.standstill({0})

    assert (both.steps, both.longest_step, both.rank) == (3, 102, 2)
    assert both.lost_s == pytest.approx(16.0)
    assert (of_two.steps, of_two.lost_s) == (2, pytest.approx(11.0))
    assert of_none is None


def test_what_all_do_at_once_is_a_standstill_of_nobody():
    digest = digest_of(window([FAST] * 4, steps=100), frozen(8, others="other"))

    assert digest.standstill().rank is None
    assert all(cost.still is None for cost in digest.costs())


def test_the_phases_of_a_rank_that_was_slow_and_stuck_are_those_it_was_slow_in():
    digest = digest_of(window([FAST, FAST, SLOW, FAST], steps=600), frozen(4, step=601))
    (cost,) = digest.costs()

    assert (cost.phases, cost.mainly_still) == (("backward",), False)
    assert cost.still.longest_step == 601


def test_in_the_map_a_column_is_time_over_time_and_never_above_all_of_it():
    """A column of some steps, of which one stood still, is nearly all standstill."""
    digest = digest_of(window([FAST] * 4, steps=300), frozen(6, step=301), window([FAST] * 4, first=302, steps=300))
    assert digest.over_time.width > 1
    excess, of_ranks = digest.excess_over_time(), digest.excess_of_ranks()

    assert 95 < excess[2].max() <= 100
    assert of_ranks[2] == pytest.approx(100 * 6 / digest.total_s, rel=0.01)
    assert of_ranks[[0, 1, 3]].tolist() == [0.0] * 3
    late = [tuple(1000 * (phase == "other") for phase in PHASES), (0,) * 6, (0,) * 6]
    assert digest_of(window(late, steps=1), ranks=3).excess_over_time().max() == 100


def test_one_standstill_does_not_make_slow_steps_look_fast():
    slow = [FAST, FAST, SLOW, FAST]
    digest = digest_of(window(slow, steps=100), frozen(8), window(slow, first=102, steps=100))
    digest.take(window([FAST] * 4, first=202, steps=400))

    last, _ = digest.slow_until(2, 1)
    assert abs(last - 201) < digest.over_time.width
