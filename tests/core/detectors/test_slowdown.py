"""Work and wire of the whole job vs their own history."""

from __future__ import annotations

import pytest

from ddpwatch.core.detectors.slowdown import slowdown
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.simulator.scenario import Fault, Scenario
from tests.builders.scenario_frames import frames
from tests.builders.synthetic_run import look, make_run, only, remember, run_of, train


def watched(**scenario):
    """Rules that have fired on a synthetic run."""
    made = Scenario(**scenario)
    monitor = Monitor(RunState("ab12cd34", "train", made.world_size))
    for frame in frames(made):
        monitor.ingest(frame.payload, frame.received_ns)
    monitor.evaluate_now()
    return {key[0] for key in monitor.book.open} | {alert.key[0] for alert in monitor.book.closed}


def test_a_job_slower_than_before_is_reported_by_how_much():
    history = remember(*[run_of(backward=16)] * 4)
    finding = only(slowdown(look(run_of(backward=22), history)))

    assert finding.message == ("the whole job is 20% slower than before: 36.0 ms vs 30.0 ms of work and wire per step")
    assert finding.cost == pytest.approx(6 / 36)
    assert (finding.ranks, finding.proven, finding.evidence["usual_work_ms"]) == ((), True, 28.0)
    assert "nvidia-smi" in finding.advice


@pytest.mark.parametrize(("backward_ns", "found"), [(18_990_000, 0), (19_010_000, 1)], ids=["9.97%", "10.03%"])
def test_a_slowdown_must_reach_its_factor(backward_ns, found):
    history = remember(*[run_of(backward=16)] * 4)

    assert len(slowdown(look(run_of(backward_ns=backward_ns), history))) == found


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_slow_ranks_up_to_half_of_them_are_no_slowdown_of_the_job(world):
    history = remember(*[run_of(world)] * 4)
    late = {rank: {"backward": 36} if rank < world // 2 else {"sync": 22} for rank in range(world)}

    assert slowdown(look(make_run({rank: train(**late[rank]) for rank in range(world)}), history)) == []


def test_a_slowdown_by_the_wire_says_so():
    finding = only(slowdown(look(run_of(sync=12), remember(*[run_of(sync=2)] * 4))))

    assert "slow-link" in finding.advice


def test_with_a_rank_missing_only_work_is_compared():
    history = remember(*[run_of()] * 4)

    assert slowdown(look(make_run({rank: train(sync=30) for rank in range(3)}, world=4), history)) == []
    slower = make_run({rank: train(backward=26) for rank in range(3)}, world=4)
    assert "38.0 ms vs 28.0 ms of work per step" in only(slowdown(look(slower, history))).message


def test_a_job_that_was_never_steady_is_a_suspicion_only():
    history = remember(*[run_of(backward=backward) for backward in (10, 14, 18, 40, 50, 60)])

    assert not only(slowdown(look(run_of(backward=24), history))).proven


def test_a_job_that_becomes_faster_or_stays_is_not_reported():
    history = remember(*[run_of(backward=16)] * 4)

    assert slowdown(look(run_of(backward=8), history)) == []
    assert slowdown(look(run_of(backward=16), history)) == []


def test_noise_alone_fires_none_of_these_rules():
    assert not watched(world_size=4, steps=400, seed=3) & {"comm-share", "slow-link", "data-bound", "slowdown"}


def test_a_slowdown_of_all_ranks_is_found_in_a_noisy_run():
    fault = Fault(ranks=(0, 1, 2, 3), phase="forward", size=0.3, onset=300)

    assert "slowdown" in watched(world_size=4, steps=520, faults=(fault,), drift=0.0)


def test_some_seconds_of_load_on_all_ranks_are_no_slowdown_and_no_slow_link():
    """Steps of 10 ms, on a machine that is busy with something else for 10 s of 40."""
    load = Fault(ranks=(0, 1), phase="forward", size=1.0, onset=2500, burst=(500, 10**6))

    assert not watched(world_size=2, steps=4000, step_ms=10, faults=(load,)) & {"slow-link", "slowdown"}


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_slow_rank_in_a_noisy_run_is_no_slowdown(world_size):
    fault = Fault(ranks=(1,), phase="forward", size=0.5, onset=300)

    assert "slowdown" not in watched(world_size=world_size, steps=400, faults=(fault,), drift=0.0)
