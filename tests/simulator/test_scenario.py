"""A synthetic run is consistent with synchronous DDP, and its faults are where they were placed."""

import numpy as np
import pytest

from ddpwatch import wire
from ddpwatch.core.metrics.live_metrics import measure
from ddpwatch.core.state.run import RunState
from ddpwatch.simulator.scenario import Fault, Scenario
from tests.builders.scenario_frames import frames, host_of

SYNC = wire.PHASES.index("sync")
OPTIMIZER = wire.PHASES.index("optimizer")


def state_after(scenario: Scenario) -> RunState:
    state = RunState("00000000", "simulated", scenario.world_size)
    for frame in frames(scenario):
        state.ingest(frame.payload, frame.received_ns)
    return state


def test_all_ranks_leave_the_all_reduce_at_the_same_time():
    """From the end of one all-reduce to the end of the next all ranks take the same time."""
    durations_ns = Scenario(world_size=6, faults=(Fault((2,), "forward", 0.5),)).phases_ns()
    before = durations_ns.sum(axis=1) - durations_ns[:, OPTIMIZER]
    round_ns = before[:, 1:] + durations_ns[:, OPTIMIZER, :-1]

    assert np.ptp(round_ns, axis=0).max() <= len(wire.PHASES)  # nanoseconds, from rounding


def test_the_last_to_arrive_waits_least():
    durations_ns = Scenario(
        world_size=4, noise=0.01, spikes=0.0, faults=(Fault((1,), "data", 0.3, onset=0),)
    ).phases_ns()

    assert set(durations_ns[:, SYNC, 1:].argmin(axis=0)) == {1}


@pytest.mark.parametrize(("after", "slow"), [("forward", "data"), ("optimizer", "optimizer")])
def test_the_others_wait_for_a_slow_rank_in_the_collective_that_follows_its_phase(after, slow):
    scenario = Scenario(4, noise=0.01, spikes=0.0, faults=(Fault((1,), slow, 0.3, onset=0),), collective_after=after)
    durations_ns = scenario.phases_ns()
    point_ns = scenario.script_sync_ns(durations_ns)

    assert np.median(point_ns[0] - point_ns[1]) > 0.25 * scenario.step_ms * 1e6
    all_reduce_ns = durations_ns[:, SYNC] - point_ns
    assert np.median(abs(all_reduce_ns[0] - all_reduce_ns[1])) < 0.05 * scenario.step_ms * 1e6
    assert state_after(scenario).has_sync_points


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "other"])
def test_a_fault_is_seen_in_its_rank_and_phase(phase):
    state = state_after(Scenario(world_size=8, faults=(Fault((5,), phase, 0.4),)))

    figures = measure(state)
    assert figures is not None
    assert figures.complete
    own_ns = {rank: each.self_ns for rank, each in figures.ranks.items()}
    assert max(own_ns, key=own_ns.get) == 5
    others_ns = getattr(figures.ranks[0], f"{phase}_ns")
    assert getattr(figures.ranks[5], f"{phase}_ns") > others_ns + 30e6


def test_a_healthy_run_has_no_rank_that_stands_out_and_loses_nothing():
    state = state_after(Scenario(world_size=16))

    own_ns = [each.self_ns for each in measure(state).ranks.values()]
    assert max(own_ns) < 1.05 * min(own_ns)
    assert state.bad == state.unknown == sum(rank.lost for rank in state.ranks.values()) == 0


def test_the_same_seed_is_the_same_run_and_another_is_another():
    one, same, other = ([*frames(Scenario(world_size=3, seed=seed))] for seed in (1, 1, 2))

    assert one == same
    assert one != other


@pytest.mark.parametrize(
    ("fault", "hit"),
    [
        (Fault((0,), "data", 1.0, onset=2), [2, 3, 4, 5, 6, 7, 8, 9]),
        (Fault((0,), "data", 1.0, onset=1, every=4), [1, 5, 9]),
        (Fault((0,), "data", 1.0, onset=1, burst=(2, 3)), [1, 2, 6, 7]),
    ],
)
def test_a_pattern_hits_the_steps_it_names(fault, hit):
    assert np.flatnonzero(fault.hits(10)).tolist() == hit


def test_ranks_are_spread_over_hosts():
    state = state_after(Scenario(world_size=4, ranks_per_host=2, steps=10))

    assert [rank.host for rank in state.ranks.values()] == ["node-0", "node-0", "node-1", "node-1"]
    assert host_of(Scenario(world_size=4, ranks_per_host=2), 3) == "node-1"
