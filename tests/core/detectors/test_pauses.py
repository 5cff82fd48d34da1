"""Garbage collection and checkpoint saves that cost much of the time."""

from __future__ import annotations

import pytest

from ddpwatch.core.detectors.pauses import pauses
from ddpwatch.core.detectors.straggler import straggler
from tests.builders.fake_rank import MS, make_step
from tests.builders.synthetic_run import collecting, look, make_run, only, run_of, saving, train


def test_ranks_that_collect_in_different_steps_cost_the_job_all_their_collections():
    finding = only(pauses(look(collecting(dict.fromkeys(range(4), 10)))))

    assert finding.message == "garbage collection costs 35% of the time: up to 40.0 ms, generation 2 · last 50 steps"
    assert finding.ranks == ()
    assert finding.evidence["paused_steps"] == 20
    assert "gc.freeze()" in finding.advice


def test_collections_at_the_same_step_cost_the_time_of_one():
    together = {rank: [make_step(i, **_collection(i % 10 == 0)) for i in range(10, 60)] for rank in range(4)}
    finding = only(pauses(look(make_run(together))))

    assert finding.cost == pytest.approx(5 * 40 / (50 * 30 + 5 * 40))


def _collection(now):
    return {"other": 41, "gc_ns": 40 * MS, "gc_full_ns": 40 * MS} if now else {}


def test_the_rank_whose_collections_stall_the_others_is_named():
    finding = only(pauses(look(collecting({2: 5}))))

    assert finding.ranks == (2,)
    assert finding.message.startswith("garbage collection on rank 2 costs 21% of the time")
    assert "the others wait for it" in finding.message


@pytest.mark.parametrize(("gc_ns", "found"), [(299_000, False), (310_000, True)], ids=["1%", "more"])
def test_it_opens_above_its_threshold(gc_ns, found):
    finding = only(pauses(look(run_of(gc_ns=gc_ns))))

    assert finding.opens is found


def test_a_collection_while_the_rank_would_have_waited_anyway_costs_nothing():
    steps = {0: train(sync=12, gc_ns=5 * MS), 1: train(backward=26, sync=2)}

    assert pauses(look(make_run(steps))) == []


def test_a_save_is_named_with_its_rank_and_its_cost_from_save_to_save():
    finding = only(pauses(look(saving({0}))))

    assert finding.ranks == (0,)
    assert finding.message.startswith("checkpoint save on rank 0 costs 50% of the time: up to 300 ms")
    assert finding.cost == pytest.approx(300 / (10 * 30 + 300), rel=0.01)
    assert "async_save" in finding.advice


def test_one_save_alone_is_not_the_cost_of_every_step():
    assert pauses(look(saving({0}, every=60))) == []


def test_what_is_claimed_beyond_the_step_does_not_count():
    finding = only(pauses(look(run_of(gc_ns=2**62))))

    assert finding.cost == pytest.approx(28 / 30)


def test_a_run_without_pauses_has_none():
    assert pauses(look(run_of())) == []


@pytest.mark.parametrize(
    ("run", "named", "advice"),
    [
        (collecting({2: 3}), "rank 2 slow in other every 3rd step: garbage collection, ", "gc.disable()"),
        (saving({0}, every=4), "rank 0 slow in other every 4th step: checkpoint save, ", "async_save"),
        (
            saving({0}, every=4, name="eval_ns"),
            "rank 0 slow in other every 4th step: evaluation, ",
            "DistributedSampler",
        ),
    ],
    ids=["gc", "save", "evaluation"],
)
def test_a_straggler_in_a_pause_is_named_with_it(run, named, advice):
    finding = only(straggler(look(run)))

    assert finding.message.startswith(named)
    assert advice in finding.advice
    assert "agent.pause" not in finding.advice
    assert finding.evidence["pause"] in named


def test_a_pause_that_explains_little_of_the_excess_is_not_its_cause():
    steps = {rank: train(**({"other": 41, "gc_ns": 10 * MS} if rank == 2 else {"sync": 42})) for rank in range(4)}
    finding = only(straggler(look(make_run(steps))))

    assert finding.message.startswith("rank 2 slow in other: 41.0 ms")
