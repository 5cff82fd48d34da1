"""Rules about where the time goes: all-reduce, the wire, data, and the pace of the whole job."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.comm_share import UNEVEN_ADVICE, comm_share
from ddpwatch.core.detectors.data_bound import data_bound
from ddpwatch.core.detectors.slow_link import slow_link
from ddpwatch.core.detectors.slowdown import slowdown
from ddpwatch.core.limits import DEFAULTS, CommShareLimits
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.simulator.scenario import Fault, Scenario
from tests.builders.fake_rank import MS, make_hello, make_step
from tests.builders.scenario_frames import frames
from tests.builders.synthetic_run import look, make_run, only, remember, train


def even(world=4, **phases):
    return make_run({rank: train(**phases) for rank in range(world)})


def watched(**scenario):
    """The rules that have fired on a made-up run."""
    made = Scenario(**scenario)
    monitor = Monitor(RunState("ab12cd34", "train", made.world_size))
    for frame in frames(made):
        monitor.ingest(frame.payload, frame.received_ns)
    monitor.evaluate_now()
    return {key[0] for key in monitor.book.open} | {alert.key[0] for alert in monitor.book.closed}


# all-reduce share


def test_an_expensive_wire_is_told_with_its_share_and_advice_on_buckets():
    finding = only(comm_share(look(even(sync=12))))

    assert finding.message == "all-reduce takes 30 % of the last 50 steps: wire 30 %, waiting 0 %"
    assert "bucket_cap_mb" in finding.advice
    assert "network" not in finding.advice, "all ranks are on one host"
    assert finding.cost == pytest.approx(0.3)
    assert (finding.severity, finding.subject, finding.ranks) == (Severity.WARNING, "job", ())


def test_one_step_in_which_the_job_stood_still_is_no_share_of_the_others():
    steps = {rank: train(sync=1) for rank in range(4)}
    for rank in (0, 1, 3):
        steps[rank][30] = make_step(40, sync=15_000)
    steps[2][30] = make_step(40, other=15_000)

    assert comm_share(look(make_run(steps))) == []


def test_waiting_is_told_from_the_wire():
    late = {rank: {"backward": 26} if rank == 2 else {"sync": 12} for rank in range(4)}
    finding = only(comm_share(look(make_run({rank: train(**late[rank]) for rank in range(4)}))))

    assert finding.message == "all-reduce takes 24 % of the last 50 steps: wire 5 %, waiting 19 %"
    assert finding.advice.startswith("Most of the waiting is for rank 2: ")
    assert finding.cost == pytest.approx(finding.evidence["waiting_percent"] / 100, abs=1e-4)


def test_waiting_now_for_one_rank_and_now_for_another_points_at_nobody():
    late, early = {"backward": 26}, {"sync": 12}
    steps = {
        rank: [make_step(10 + index, **(late if index % 4 == rank else early)) for index in range(48)]
        for rank in range(4)
    }
    finding = only(comm_share(look(make_run(steps))))

    assert finding.advice == UNEVEN_ADVICE
    assert "straggler" not in finding.advice


@pytest.mark.parametrize("backward", range(20, 30))
def test_the_parts_of_the_share_add_up_as_they_are_read(backward):
    late = {rank: {"backward": backward} if rank == 2 else {"sync": backward - 14} for rank in range(4)}
    message = only(comm_share(look(make_run({rank: train(**late[rank]) for rank in range(4)})))).message
    share, *parts = (int(number) for number in re.findall(r"(\d+) %", message))

    assert sum(parts) == share


def test_with_a_rank_missing_the_parts_of_the_share_are_not_claimed():
    finding = only(comm_share(look(make_run({rank: train(sync=12) for rank in range(3)}, world=4))))

    assert finding.message.startswith("all-reduce takes 30 % of the last 50 steps; wire and waiting cannot be told")
    assert "1 rank of 4" in finding.message
    assert finding.cost is None
    assert "wire_percent" not in finding.evidence


@pytest.mark.parametrize(("sync_ns", "opens"), [(3 * MS, False), (3 * MS + 60_000, True)], ids=["10 %", "more"])
def test_the_share_must_exceed_its_limit(sync_ns, opens):
    assert only(comm_share(look(even(sync_ns=sync_ns, other=0)))).opens == opens


# Of a step with 27 ms of work, 8 % are 2.35 ms.
@pytest.mark.parametrize(("sync_ns", "keeps"), [(2_340_000, False), (2_360_000, True)], ids=["less than 8 %", "more"])
@pytest.mark.parametrize("received", [3, 4])
def test_an_open_share_is_kept_open_until_it_falls_below_a_part_of_its_limit(sync_ns, keeps, received):
    run = make_run({rank: train(sync_ns=sync_ns, other=0) for rank in range(received)}, world=4)

    found = comm_share(look(run))
    assert [finding.opens for finding in found] == [False] * keeps
    assert all("steps, after more than 10 %" in finding.message for finding in found)


def test_a_share_around_its_limit_is_opened_once():
    """It goes above and below the limit every 150 steps, for longer than an alert lingers."""
    monitor = Monitor(RunState("ab12cd34", "train", 2))
    for first in range(0, 1500, 150):
        sync = 3_300_000 if first % 300 == 0 else 2_700_000
        for rank in range(2):
            steps = train(first, 150, sync_ns=sync, other=0)
            if not first:
                monitor.ingest(wire.encode(make_hello(rank, 1, world_size=2)), 1)
            monitor.ingest(wire.encode(wire.Steps(rank=rank, seq=2 + first, steps=steps)), 1)
        monitor.evaluate_now()

    assert [event.kind for event in monitor.book.drain() if event.alert.finding.rule == "comm-share"] == ["opened"]


def test_the_limit_of_the_share_can_be_moved():
    limits = msgspec.structs.replace(DEFAULTS, comm_share=CommShareLimits(share=0.05))

    assert only(comm_share(look(even(sync=2), limits=limits))).opens
    assert not comm_share(look(even(sync=2)))


def test_communication_of_a_world_of_one_is_nobodys_fault():
    assert comm_share(look(even(world=1, sync=20))) == []


def test_one_rank_of_four_is_too_few_to_speak_for_the_job():
    assert comm_share(look(make_run({0: train(sync=20)}, world=4))) == []


# the wire against its own history


def test_a_wire_slower_than_before_is_told_in_milliseconds():
    history = remember(*[even(sync=2, comm_bytes=98 << 20)] * 4)
    finding = only(slow_link(look(even(sync=6, comm_bytes=98 << 20), history)))

    assert finding.message == (
        "the wire takes 6.00 ms a step for the same 98M of gradients, 2.00 before · 12 % of the step longer"
    )
    assert finding.cost == pytest.approx(4 / 34)
    assert (finding.ranks, finding.evidence["usual_wire_ms"], finding.proven) == ((), 2.0, True)


@pytest.mark.parametrize(
    ("hosts", "said", "unsaid"),
    [(("node-a",) * 4, "CPU", "between the hosts"), (("node-a", "node-a", "node-b", "node-b"), "ethtool", "CPU")],
    ids=["one host", "two hosts"],
)
def test_the_advice_on_a_slow_wire_fits_what_is_between_the_ranks(hosts, said, unsaid):
    history = remember(*[even(sync=2)] * 4)
    finding = only(slow_link(look(make_run({rank: train(sync=6) for rank in range(4)}, hosts=hosts), history)))

    assert said in finding.advice
    assert unsaid not in finding.advice


@pytest.mark.parametrize(("rule", "changed"), [(slow_link, {"sync": 9}), (slowdown, {"backward": 30})])
def test_what_is_compared_with_the_past_must_last_and_needs_a_past_that_lasted(rule, changed):
    finding = only(rule(look(even(**changed), remember(*[even()] * 4))))
    brief = remember(*[even()] * 4)
    brief.blocks = [replace(block, last_step=60 + 50 * number) for number, block in enumerate(brief.blocks)]

    assert finding.lasting * look(even(**changed)).window.step_ns.mean() == pytest.approx(20e9)
    assert rule(look(even(**changed), brief)) == []


@pytest.mark.parametrize(("sync_ns", "found"), [(2_990_000, 0), (3_010_000, 1)])
def test_the_wire_must_reach_its_factor(sync_ns, found):
    history = remember(*[even(sync=2)] * 4)

    assert len(slow_link(look(even(sync_ns=sync_ns), history))) == found


def test_a_slower_wire_that_hardly_matters_is_not_told():
    history = remember(*[even(sync_ns=100_000)] * 4)

    assert slow_link(look(even(sync_ns=400_000), history)) == []


def test_other_bytes_are_not_compared():
    history = remember(*[even(sync=2, comm_bytes=1000)] * 4)

    assert slow_link(look(even(sync=9, comm_bytes=2000), history)) == []


def test_too_little_history_or_too_few_steps_or_a_missing_rank_prove_no_slow_link():
    history = remember(*[even(sync=2)] * 4)

    assert slow_link(look(even(sync=9), remember(*[even(sync=2)] * 2))) == []
    assert slow_link(look(make_run({rank: train(count=19, sync=9) for rank in range(4)}), history)) == []
    assert slow_link(look(make_run({rank: train(sync=9) for rank in range(3)}, world=4), history)) == []


def test_a_wire_that_was_never_steady_is_a_suspicion_only():
    history = remember(*[even(sync=sync) for sync in (1, 3, 5, 20, 30, 40)])

    assert not only(slow_link(look(even(sync=9), history))).proven


def test_waiting_for_a_slow_rank_is_no_slow_link():
    history = remember(*[even()] * 4)
    late = {rank: {"backward": 36} if rank == 2 else {"sync": 22} for rank in range(4)}

    assert slow_link(look(make_run({rank: train(**late[rank]) for rank in range(4)}), history)) == []


# data


def test_ranks_that_all_wait_for_data_make_the_job_data_bound():
    finding = only(data_bound(look(even(data=19))))

    assert finding.message == "all ranks wait for data: 40 % of the step"
    assert finding.ranks == ()
    assert finding.phase == "data"
    assert finding.cost == pytest.approx(19 / 48)
    assert finding.evidence["data_ms"] == 19.0
    assert "num_workers" in finding.advice


def test_most_ranks_that_wait_for_data_are_named():
    run = {rank: train(data=19) if rank else train(sync=20) for rank in range(4)}
    finding = only(data_bound(look(make_run(run))))

    assert finding.message == "ranks 1-3 wait for data: 40 % of the step"
    assert finding.ranks == (1, 2, 3)


def test_half_of_the_ranks_are_not_most():
    run = {rank: train(data=19) if rank > 1 else train(sync=20) for rank in range(4)}

    assert data_bound(look(make_run(run))) == []


@pytest.mark.parametrize(("data_ns", "found"), [(7_250_000, 0), (7_260_000, 1)], ids=["20 %", "more"])
def test_waiting_for_data_must_exceed_its_limit(data_ns, found):
    assert len(data_bound(look(even(data_ns=data_ns)))) == found


def test_a_world_of_one_may_wait_for_its_data_too():
    assert only(data_bound(look(even(world=1, data=19)))).message.startswith("rank 0 waits for data")


# the whole job against its own history


def test_a_job_slower_than_before_is_told_by_how_much():
    history = remember(*[even(backward=16)] * 4)
    finding = only(slowdown(look(even(backward=22), history)))

    assert finding.message == ("the whole job is 20 % slower than it was: 36.0 ms of work and wire a step, 30.0 before")
    assert finding.cost == pytest.approx(6 / 36)
    assert (finding.ranks, finding.proven, finding.evidence["usual_work_ms"]) == ((), True, 28.0)
    assert "nvidia-smi" in finding.advice


@pytest.mark.parametrize(("backward_ns", "found"), [(18_990_000, 0), (19_010_000, 1)], ids=["9.97 %", "10.03 %"])
def test_a_slowdown_must_reach_its_factor(backward_ns, found):
    history = remember(*[even(backward=16)] * 4)

    assert len(slowdown(look(even(backward_ns=backward_ns), history))) == found


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_slow_ranks_up_to_half_of_them_are_no_slowdown_of_the_job(world):
    history = remember(*[even(world)] * 4)
    late = {rank: {"backward": 36} if rank < world // 2 else {"sync": 22} for rank in range(world)}

    assert slowdown(look(make_run({rank: train(**late[rank]) for rank in range(world)}), history)) == []


def test_a_slower_wire_that_slows_the_job_is_told_as_such():
    finding = only(slowdown(look(even(sync=12), remember(*[even(sync=2)] * 4))))

    assert "slow-link" in finding.advice


def test_with_a_rank_missing_only_work_is_compared():
    history = remember(*[even()] * 4)

    assert slowdown(look(make_run({rank: train(sync=30) for rank in range(3)}, world=4), history)) == []
    slower = make_run({rank: train(backward=26) for rank in range(3)}, world=4)
    assert "38.0 ms of work a step, 28.0 before" in only(slowdown(look(slower, history))).message


def test_a_job_that_was_never_steady_is_a_suspicion_only():
    history = remember(*[even(backward=backward) for backward in (10, 14, 18, 40, 50, 60)])

    assert not only(slowdown(look(even(backward=24), history))).proven


def test_a_job_that_becomes_faster_or_stays_is_not_told():
    history = remember(*[even(backward=16)] * 4)

    assert slowdown(look(even(backward=8), history)) == []
    assert slowdown(look(even(backward=16), history)) == []


# whole runs


def test_noise_alone_fires_none_of_these_rules():
    assert not watched(world_size=4, steps=400, seed=3) & {"comm-share", "slow-link", "data-bound", "slowdown"}


def test_a_slowdown_of_all_ranks_is_found_in_a_noisy_run():
    fault = Fault(ranks=(0, 1, 2, 3), phase="forward", size=0.3, onset=300)

    assert "slowdown" in watched(world_size=4, steps=520, faults=(fault,), drift=0.0)


def test_some_seconds_of_load_on_all_ranks_are_no_slowdown_and_no_slow_link():
    """Steps of 10 ms, and the machine busy with something else for 10 s of 40."""
    load = Fault(ranks=(0, 1), phase="forward", size=1.0, onset=2500, burst=(500, 10**6))

    assert not watched(world_size=2, steps=4000, step_ms=10, faults=(load,)) & {"slow-link", "slowdown"}


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_slow_rank_in_a_noisy_run_is_no_slowdown(world_size):
    fault = Fault(ranks=(1,), phase="forward", size=0.5, onset=300)

    assert "slowdown" not in watched(world_size=world_size, steps=400, faults=(fault,), drift=0.0)
