"""Starved hosts, and that bursts of starvation name no rank."""

from __future__ import annotations

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.detectors.cpu_starvation import cpu_starvation
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.simulator.scenario import Fault, Scenario
from tests.builders.fake_rank import make_hello
from tests.builders.scenario_frames import frames
from tests.builders.synthetic_run import look, only


def watched(scenario):
    monitor = Monitor(RunState("ab12cd34", "train", scenario.world_size))
    for frame in frames(scenario):
        monitor.ingest(frame.payload, frame.received_ns)
    monitor.evaluate_now()
    return monitor


def starved_by(*shares, **hello):
    """A run whose ranks wait for a core for these fractions of the time."""
    state = RunState("ab12cd34", "train", len(shares))
    for frame in frames(Scenario(len(shares), steps=60)):
        message = wire.decode(frame.payload)
        if isinstance(message, wire.Beat):
            message = msgspec.structs.replace(message, queued_ns=int(shares[message.rank] * message.mono_ns) + 1)
        state.apply(message, frame.received_ns)
    for rank in range(len(shares)) if hello else ():
        again = make_hello(rank, 900, world_size=len(shares), host="node-0", mono_ns=10**12, **hello)
        state.apply(again, state.now_ns)
    return state


def test_a_host_whose_ranks_are_starved_is_reported_and_no_rank_is_blamed():
    finding = only(cpu_starvation(look(starved_by(0.2, 0.3, cores=2))))

    assert finding.message.startswith("ranks 0-1 on node-0 may use 2 cores and wait for one 20% to 30% of the time")
    assert (finding.subject, finding.ranks) == ("host node-0", ())
    assert finding.cost == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("shares", [(0.02, 0.03), (0.01, 0.4), (0.01, 0.01, 0.02, 0.5), (0.9,)])
def test_less_than_half_of_the_ranks_is_no_finding(shares):
    assert cpu_starvation(look(starved_by(*shares))) == []


def test_the_advice_has_what_is_set():
    state = starved_by(0.3, 0.3, cores=8, environment={"OMP_NUM_THREADS": "16"})
    for rank in range(2):
        loader = wire.Loader(rank=rank, seq=901, step=0, epoch=0, sampler="S", distributed=True, workers=6)
        state.apply(loader, state.now_ns)
    advice = only(cpu_starvation(look(state))).advice

    assert advice.startswith("Set OMP_NUM_THREADS=4 (it is 16). Use fewer DataLoader workers than 6 per rank.")
    assert "taskset" in advice


def test_what_is_right_already_is_not_advised():
    advice = only(cpu_starvation(look(starved_by(0.3, 0.3, cores=8, environment={"OMP_NUM_THREADS": "4"})))).advice

    assert "OMP_NUM_THREADS" not in advice
    assert "workers" not in advice


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("world", [2, 4])
def test_short_steps_on_oversubscribed_cores_name_no_rank(world, seed):
    """The scheduler starves one rank after another for a second or two."""
    monitor = watched(Scenario(world, steps=1500, step_ms=4.0, noise=0.05, starved=0.2, seed=seed))
    opened = [event.alert.finding for event in monitor.book.drain()]

    assert [finding.message for finding in opened if finding.ranks] == []


def test_a_slow_rank_is_found_on_busy_cores_nevertheless():
    fault = Fault((1,), "data", 3.0, onset=300)
    monitor = watched(Scenario(2, steps=1200, step_ms=10.0, noise=0.05, starved=0.03, faults=(fault,), seed=3))

    assert {alert.finding.ranks for key, alert in monitor.book.open.items() if key[0] == "straggler"} == {(1,)}
