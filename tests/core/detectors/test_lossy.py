"""Lost, dropped, unreadable and implausible measurements."""

from __future__ import annotations

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.lossy import lossy
from ddpwatch.core.state.run import RunState
from tests.builders.ended_run import beating
from tests.builders.fake_rank import make_beat, make_hello, make_step
from tests.builders.synthetic_run import look, make_run, only, train


@pytest.mark.parametrize(("lost", "severity"), [(1, Severity.INFO), (2, Severity.INFO), (3, Severity.WARNING)])
def test_lost_messages_are_counted(lost, severity):
    state = beating({})
    state.apply(make_beat(1, seq=5 + lost, step=90), state.now_ns)
    finding = only(lossy(look(state)))

    assert finding.message == f"rank 1: {lost} message{'s' if lost > 1 else ''} lost"
    assert (finding.severity, finding.ranks, finding.subject) == (severity, (1,), "rank 1")
    assert finding.evidence["lost_messages"] == lost


def test_records_that_the_agent_dropped_are_reported():
    state = beating({})
    state.apply(make_beat(2, seq=5, step=90, dropped=1200), state.now_ns)
    finding = only(lossy(look(state)))

    assert finding.message == "rank 2: 1,200 records dropped by the agent"
    assert finding.severity is Severity.WARNING


def test_an_unreadable_frame_counts_for_its_rank_or_as_unassigned():
    state = beating({})
    state.count_bad(1, "wrong type")
    state.ingest(b"junk", state.now_ns)
    mine, nobodys = lossy(look(state))

    assert mine.message == "rank 1: 1 unreadable or invalid record"
    assert nobodys.subject == "unassigned"
    assert nobodys.message.startswith("1 unreadable frame of unknown origin; last reason: ")


def test_a_rank_whose_times_cannot_be_true_is_reported():
    run = {rank: train(backward=900 if rank == 1 else 16) for rank in range(3)}
    finding = only(lossy(look(make_run(run))))

    assert finding.message == "rank 1: its step times are implausible beside the others and are excluded"


def test_an_agent_that_switched_itself_off_is_reported_with_its_reason():
    state = beating({})
    state.apply(wire.Bye(rank=1, seq=5, reason="off", text="KeyError: 7", mono_ns=1), state.now_ns)
    finding = only(lossy(look(state)))

    assert finding.message == "rank 1: its agent disabled itself (KeyError: 7)"
    assert finding.evidence["off_reason"] == "KeyError: 7"
    assert "without monitoring" in finding.advice


@pytest.mark.parametrize(("affected", "findings"), [(8, 8), (9, 1)])
def test_losses_of_many_ranks_are_one_finding(affected, findings):
    state = beating({}, world=12)
    for rank in range(affected):
        state.apply(make_beat(rank, seq=9, step=90), state.now_ns)
    found = lossy(look(state))

    assert len(found) == findings
    if findings == 1:
        assert found[0].message == "ranks 0-8: 36 messages lost"
        assert found[0].subject == "ranks"


def test_a_world_of_one_can_lose_messages_as_well():
    state = RunState("ab12cd34", "train", 1)
    state.apply(make_hello(0, 1, world_size=1), 1)
    state.apply(wire.Steps(rank=0, seq=9, steps=[make_step(0)]), 1)

    assert only(lossy(look(state))).evidence["lost_messages"] == 7
