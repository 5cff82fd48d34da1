"""Collectives of the script that take much of the step."""

from __future__ import annotations

import pytest

from ddpwatch import wire
from ddpwatch.core.detectors.sync_point import sync_point
from tests.builders.fake_rank import MS
from tests.builders.synthetic_run import look, make_run, only, run_of, train, with_sync_points

PATH = wire.ALL_POINTS | 1 << 8
METRIC = ("all_reduce", "train.py:88", "other")


def test_a_metric_that_costs_much_of_the_step_is_named_with_its_line():
    finding = only(sync_point(look(with_sync_points(run_of(sync=6, point1_ns=4 * MS, sync_path=PATH), METRIC))))

    assert finding.message == "all_reduce at train.py:88 takes 12% of the step: 4.00 ms · last 50 steps"
    assert finding.cost == pytest.approx(4 / 34)
    assert finding.ranks == ()
    assert "every 10 or 100 steps" in finding.advice


def test_waiting_for_a_slow_rank_is_not_the_cost_of_the_metric():
    late = {rank: {"sync": 12, "point1_ns": 10 * MS} if rank else {"sync": 2, "forward": 18} for rank in range(4)}
    run = make_run({rank: train(sync_path=PATH, **each) for rank, each in late.items()})

    assert sync_point(look(with_sync_points(run, METRIC))) == []


@pytest.mark.parametrize(("kind", "place"), [("tensor-parallel", "train.py:88"), ("fsdp2", "FSDP")])
def test_collectives_of_the_model_itself_are_not_the_scripts(kind, place):
    run = make_run({rank: train(sync=6, point1_ns=4 * MS, sync_path=PATH) for rank in range(4)}, kind=kind)

    assert sync_point(look(with_sync_points(run, ("all_gather", place, "forward")))) == []


def test_the_time_of_several_calls_at_one_line_adds_up():
    run = run_of(sync=6, point1_ns=2 * MS, point2_ns=2 * MS, sync_path=PATH)
    finding = only(sync_point(look(with_sync_points(run, METRIC, METRIC))))

    assert finding.cost == pytest.approx(4 / 34)


@pytest.mark.parametrize(("point_ns", "found"), [(1_500_000, False), (1_510_000, True)], ids=["5%", "more"])
def test_it_opens_above_its_threshold(point_ns, found):
    run = run_of(sync=2, point1_ns=point_ns, sync_path=PATH)
    finding = only(sync_point(look(with_sync_points(run, METRIC))))

    assert finding.opens is found


def test_what_ranks_do_not_share_is_not_reported():
    steps = {rank: train(sync=6, point1_ns=4 * MS, sync_path=PATH + (rank << 8)) for rank in range(4)}

    assert sync_point(look(with_sync_points(make_run(steps), METRIC))) == []


def test_a_run_without_collectives_of_its_own_has_none():
    assert sync_point(look(run_of(sync=12))) == []
