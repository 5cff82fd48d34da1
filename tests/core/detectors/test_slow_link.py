"""Wire time vs its own history."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpwatch.core.detectors.slow_link import slow_link
from ddpwatch.core.detectors.slowdown import slowdown
from tests.builders.synthetic_run import look, make_run, only, remember, run_of, train


def test_a_wire_slower_than_before_is_reported_in_milliseconds():
    history = remember(*[run_of(sync=2, comm_bytes=98 << 20)] * 4)
    finding = only(slow_link(look(run_of(sync=6, comm_bytes=98 << 20), history)))

    assert finding.message == (
        "wire takes 6.00 ms per step vs 2.00 ms before for the same 98 MiB of gradients · costs 12% throughput"
    )
    assert finding.cost == pytest.approx(4 / 34)
    assert (finding.ranks, finding.evidence["usual_wire_ms"], finding.proven) == ((), 2.0, True)


@pytest.mark.parametrize(
    ("hosts", "said", "unsaid"),
    [(("node-a",) * 4, "CPU", "between the hosts"), (("node-a", "node-a", "node-b", "node-b"), "ethtool", "CPU")],
    ids=["one host", "two hosts"],
)
def test_the_advice_on_a_slow_wire_fits_what_is_between_the_ranks(hosts, said, unsaid):
    history = remember(*[run_of(sync=2)] * 4)
    finding = only(slow_link(look(make_run({rank: train(sync=6) for rank in range(4)}, hosts=hosts), history)))

    assert said in finding.advice
    assert unsaid not in finding.advice


@pytest.mark.parametrize(("rule", "changed"), [(slow_link, {"sync": 9}), (slowdown, {"backward": 30})])
def test_what_is_compared_with_the_past_must_last_and_needs_a_past_that_lasted(rule, changed):
    finding = only(rule(look(run_of(**changed), remember(*[run_of()] * 4))))
    brief = remember(*[run_of()] * 4)
    brief.blocks = [replace(block, last_step=60 + 50 * number) for number, block in enumerate(brief.blocks)]

    assert finding.lasting * look(run_of(**changed)).window.step_ns.mean() == pytest.approx(20e9)
    assert rule(look(run_of(**changed), brief)) == []


@pytest.mark.parametrize(("sync_ns", "found"), [(2_990_000, 0), (3_010_000, 1)])
def test_the_wire_must_reach_its_factor(sync_ns, found):
    history = remember(*[run_of(sync=2)] * 4)

    assert len(slow_link(look(run_of(sync_ns=sync_ns), history))) == found


def test_a_slower_wire_that_hardly_matters_is_not_reported():
    history = remember(*[run_of(sync_ns=100_000)] * 4)

    assert slow_link(look(run_of(sync_ns=400_000), history)) == []


def test_other_bytes_are_not_compared():
    history = remember(*[run_of(sync=2, comm_bytes=1000)] * 4)

    assert slow_link(look(run_of(sync=9, comm_bytes=2000), history)) == []


def test_too_little_history_or_too_few_steps_or_a_missing_rank_prove_no_slow_link():
    history = remember(*[run_of(sync=2)] * 4)

    assert slow_link(look(run_of(sync=9), remember(*[run_of(sync=2)] * 2))) == []
    assert slow_link(look(make_run({rank: train(count=19, sync=9) for rank in range(4)}), history)) == []
    assert slow_link(look(make_run({rank: train(sync=9) for rank in range(3)}, world=4), history)) == []


def test_a_wire_that_was_never_steady_is_a_suspicion_only():
    history = remember(*[run_of(sync=sync) for sync in (1, 3, 5, 20, 30, 40)])

    assert not only(slow_link(look(run_of(sync=9), history))).proven


def test_waiting_for_a_slow_rank_is_no_slow_link():
    history = remember(*[run_of()] * 4)
    late = {rank: {"backward": 36} if rank == 2 else {"sync": 22} for rank in range(4)}

    assert slow_link(look(make_run({rank: train(**late[rank]) for rank in range(4)}), history)) == []
