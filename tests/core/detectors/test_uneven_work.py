"""Inputs of uneven size: the slowest rank changes from step to step, and none is blamed."""

from __future__ import annotations

import pytest

from ddpwatch.core.detectors.comm_share import comm_share
from ddpwatch.core.detectors.uneven_batch import uneven_batch
from ddpwatch.core.detectors.uneven_work import uneven_work
from ddpwatch.core.diagnosis.rotation import rotation
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.simulator.scenario import Fault, Scenario
from tests.builders.fake_rank import make_step
from tests.builders.scenario_frames import frames
from tests.builders.synthetic_run import look, make_run, only


def rules_opened(scenario):
    """Rules with the ranks of each alert of a run."""
    monitor = Monitor(RunState("ab12cd34", "train", scenario.world_size))
    for frame in frames(scenario):
        monitor.ingest(frame.payload, frame.received_ns)
    monitor.evaluate_now()
    return {(event.alert.finding.rule, event.alert.finding.ranks) for event in monitor.book.drain()}


def taking_turns(sizes, **changed):
    """Two ranks that take turns in having the larger input, and the longer forward pass."""
    return make_run(
        {
            rank: [
                make_step(i, **({"forward": 28, "sync": 2} if i % 2 == rank else {"sync": 22}), **sizes(i % 2 == rank))
                for i in range(10, 60)
            ]
            for rank in range(2)
        },
        **changed,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world", [2, 4, 8])
def test_uneven_inputs_are_one_finding_with_its_cost_and_no_rank_is_blamed(world, seed):
    assert rules_opened(Scenario(world, uneven=0.5, noise=0.03, seed=seed)) == {("uneven-work", ())}


def test_the_message_has_the_waiting_and_how_far_it_follows_input_size():
    finding = only(uneven_work(look(taking_turns(lambda large: {"input_elements": 4096 if large else 1024}))))

    assert finding.message == (
        "the slowest rank changes from step to step: ranks wait 20% of the time · 100% of the difference follows input "
        "size · last 50 steps"
    )
    assert finding.cost == pytest.approx(0.2, abs=0.01)
    assert (finding.evidence["min_elements"], finding.evidence["max_elements"]) == (1024, 4096)
    assert "group_by_length=True" in finding.advice


@pytest.mark.parametrize("elements", [0, 1024], ids=["not known", "equal"])
def test_waiting_in_turns_that_inputs_do_not_explain_is_left_to_comm_share(elements):
    context = look(taking_turns(lambda large: {"input_elements": elements}))

    assert uneven_work(context) == []
    assert only(comm_share(context)).cost == pytest.approx(0.2, abs=0.01)


def test_batches_of_uneven_size_are_one_alert_with_its_cost():
    def sizes(large):
        return {"samples": 32 if large else 24, "input_elements": 4096 if large else 3072}

    context = look(taking_turns(sizes))

    assert uneven_work(context) == []
    assert only(uneven_batch(context)).cost == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_one_slow_rank_is_a_straggler_and_no_rotation(world):
    opened = rules_opened(Scenario(world, noise=0.03, faults=(Fault((1,), "forward", 0.4),), seed=1))

    assert ("straggler", (1,)) in opened
    assert "uneven-work" not in {rule for rule, _ in opened}


@pytest.mark.parametrize("world", [2, 4, 16])
def test_a_healthy_run_has_no_uneven_work(world):
    opened = {rule for rule, _ in rules_opened(Scenario(world, noise=0.05, seed=2))}

    assert not opened & {"uneven-work", "straggler"}


def test_ranks_that_are_slow_for_many_steps_in_turn_are_no_rotation():
    steps = {
        rank: [make_step(i, **({"forward": 28} if i // 10 % 2 == rank else {"sync": 22})) for i in range(10, 60)]
        for rank in range(2)
    }

    assert rotation(look(make_run(steps)).window) is None
