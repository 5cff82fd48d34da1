"""All-reduce share: wire and waiting, hysteresis, runs that are not seen whole."""

from __future__ import annotations

import re

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.comm_share import UNEVEN_ADVICE, comm_share
from ddpwatch.core.limits import DEFAULTS, CommShareLimits
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import MS, make_hello, make_step
from tests.builders.synthetic_run import look, make_run, only, run_of, train


def test_an_expensive_wire_is_reported_with_its_share_and_advice_on_buckets():
    finding = only(comm_share(look(run_of(sync=12))))

    assert finding.message == "exposed all-reduce takes 30% of the step: wire 30%, waiting 0% · last 50 steps"
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


def test_waiting_is_separated_from_the_wire():
    late = {rank: {"backward": 26} if rank == 2 else {"sync": 12} for rank in range(4)}
    finding = only(comm_share(look(make_run({rank: train(**late[rank]) for rank in range(4)}))))

    assert finding.message == "exposed all-reduce takes 24% of the step: wire 5%, waiting 19% · last 50 steps"
    assert finding.advice.startswith("Most of the waiting is for rank 2: ")
    assert finding.cost == pytest.approx(finding.evidence["waiting_percent"] / 100, abs=1e-4)


def test_waiting_for_varying_ranks_names_no_rank():
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
    share, *parts = (int(number) for number in re.findall(r"(\d+)%", message))

    assert sum(parts) == share


def test_with_a_rank_missing_the_parts_of_the_share_are_not_claimed():
    finding = only(comm_share(look(make_run({rank: train(sync=12) for rank in range(3)}, world=4))))

    assert finding.message.startswith("exposed all-reduce takes 30% of the step; wire and waiting are not separable")
    assert "1 of 4 ranks" in finding.message
    assert finding.cost is None
    assert "wire_percent" not in finding.evidence


@pytest.mark.parametrize(("sync_ns", "opens"), [(3 * MS, False), (3 * MS + 60_000, True)], ids=["10%", "more"])
def test_the_share_must_exceed_its_limit(sync_ns, opens):
    assert only(comm_share(look(run_of(sync_ns=sync_ns, other=0)))).opens == opens


# Of a step with 27 ms of work, 8% are 2.35 ms.
@pytest.mark.parametrize(("sync_ns", "keeps"), [(2_340_000, False), (2_360_000, True)], ids=["less than 8%", "more"])
@pytest.mark.parametrize("received", [3, 4])
def test_an_open_share_is_kept_open_until_it_falls_below_a_part_of_its_limit(sync_ns, keeps, received):
    run = make_run({rank: train(sync_ns=sync_ns, other=0) for rank in range(received)}, world=4)

    found = comm_share(look(run))
    assert [finding.opens for finding in found] == [False] * keeps
    assert all("step, down from more than 10%" in finding.message for finding in found)


def test_a_share_around_its_limit_is_opened_once():
    """The share crosses the threshold every 150 steps, which is longer than the close delay."""
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

    assert only(comm_share(look(run_of(sync=2), limits=limits))).opens
    assert not comm_share(look(run_of(sync=2)))


def test_communication_of_a_single_rank_is_ignored():
    assert comm_share(look(run_of(world=1, sync=20))) == []


def test_one_rank_of_four_is_no_majority():
    assert comm_share(look(make_run({0: train(sync=20)}, world=4))) == []
