"""The demo's schedule is played in order, by rank 0's clock, with faults sized by the machine."""

from itertools import pairwise

import pytest

from ddpwatch.core.limits import DEFAULTS, WindowLimits
from ddpwatch.demo.fault_schedule import (
    DIRECTIVE_STEPS,
    LAG,
    MAX_PACE,
    MAX_WORK_S,
    MIN_LAG_S,
    SCHEDULE,
    WORK_S,
    Directive,
    Director,
    pace_for,
    work_for,
)
from ddpwatch.simulator.scenario import Fault, Segment, segment_at

ROUND_S = sum(segment.length for segment in SCHEDULE)


def test_it_is_healthy_then_data_then_backward_with_health_between_and_again():
    reported = [SCHEDULE[segment_at(SCHEDULE, second)[0]] for second in range(int(2 * ROUND_S))]
    slow = [
        (fault.ranks[0], fault.phase) for segment in reported for fault in segment.faults or [Fault((None,), "", 0.0)]
    ]

    changes = [slow[0]] + [now for before, now in pairwise(slow) if now != before]
    healthy = (None, "")
    once = [healthy, (1, "data"), healthy, (2, "backward")]
    assert changes == [*once, *once, healthy]
    assert slow.index((1, "data")) <= 15


def test_segments_are_long_enough_for_an_alert_to_open_and_close():
    """At steps of 40 ms."""
    healthy_s = [run for run in _healthy_spans_s() if run]
    assert min(healthy_s) > 0.04 * DEFAULTS.straggler.linger_steps + DEFAULTS.judge.least_s
    slow_s = [segment.length for segment in SCHEDULE if segment.faults]
    assert min(slow_s) > 3 * DEFAULTS.judge.least_s


def _healthy_spans_s():
    """Time from one slow segment to the next, around the end of the schedule."""
    first = next(number for number, segment in enumerate(SCHEDULE) if segment.faults)
    spans_s = [0.0]
    for segment in SCHEDULE[first:] + SCHEDULE[:first]:
        if not segment.faults:
            spans_s[-1] += segment.length
        else:
            spans_s.append(0.0)
    return spans_s


def test_the_lag_is_a_fraction_of_healthy_steps_only():
    schedule = (Segment(10.0), Segment(10.0, (Fault((1,), "data", 0.5),)))
    director = Director(100.0, 1000.0, pace=1.0, schedule=schedule)
    now_s, lags_s = 100.0, []
    for _ in range(200):
        directive = director.next_directive(now_s)
        slow = directive.lag_in("data", 1, 4, schedule)
        lags_s.append(slow)
        now_s += DIRECTIVE_STEPS * (0.04 + slow)

    assert {round(lag_s, 6) for lag_s in lags_s} == {0.0, 0.02}


def test_on_a_fast_machine_the_lag_is_one_that_a_scheduler_cannot_hide():
    schedule = (Segment(1.0), Segment(1.0, (Fault((0,), "backward", LAG),)))
    director = Director(0.0, 100.0, pace=1.0, schedule=schedule)
    for second in (0.0, 0.01, 0.02):
        director.next_directive(second)

    assert director.next_directive(1.5).lag_in("backward", 0, 2, schedule) == MIN_LAG_S


def test_only_the_slow_rank_lags_and_only_in_its_phase():
    directive = Directive(over=0.0, segment=3.0, step_s=0.5)

    lags_s = {(rank, phase): directive.lag_in(phase, rank, 4) for rank in range(4) for phase in ("data", "backward")}
    assert {key for key, lag_s in lags_s.items() if lag_s} == {(2, "backward")}
    assert directive.lag_in("backward", 0, 2) == 0.5 * LAG, "with two ranks the first takes the place of the third"


def test_it_is_over_when_the_time_is_up():
    director = Director(50.0, 30.0, pace_for(30.0))

    assert [bool(director.next_directive(second).over) for second in (50.0, 79.9, 80.0)] == [False, False, True]


def test_a_short_demo_plays_faster_up_to_a_bound():
    assert pace_for(600.0) == 1.0
    assert pace_for(ROUND_S / 2) == pytest.approx(2.0)
    assert pace_for(1.0) == MAX_PACE
    director = Director(0.0, ROUND_S / 2, pace_for(ROUND_S / 2))
    assert int(director.next_directive(SCHEDULE[0].length / 2 + 0.5).segment) == 1


def test_a_healthy_step_is_long_beside_an_all_reduce_wherever_that_is_possible():
    """Ranks that compute take about twice as long for one, and then the share is well below the limit's lower edge."""
    closes = DEFAULTS.comm_share.share * DEFAULTS.comm_share.close_part
    for reduce_s in (0.0002, 0.0005, 0.001, 0.002, 0.004, 0.006):
        work_s = work_for(reduce_s)

        assert WORK_S <= work_s <= MAX_WORK_S
        assert 2 * reduce_s / (work_s + 2 * reduce_s) < closes / 1.5
    assert work_for(10.0) == MAX_WORK_S


def test_a_faster_pace_has_shorter_steps():
    assert work_for(0.004, 4.0) == pytest.approx(work_for(0.004) / 4)
    assert work_for(0.004, 0.5) == work_for(0.004)


def test_on_the_slowest_machine_a_segment_has_enough_steps_for_the_rules():
    first, *others = SCHEDULE
    assert first.length / MAX_WORK_S > DEFAULTS.judge.warmup_steps + WindowLimits.MIN_STEPS
    for segment in others:
        if segment.faults:
            assert segment.length / (MAX_WORK_S * (1 + LAG)) > 2 * DEFAULTS.straggler.recent_steps
