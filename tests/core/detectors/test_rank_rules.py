"""Rules that go by time: memory, and what did not arrive."""

from __future__ import annotations

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.lossy import lossy
from ddpwatch.core.detectors.memory import memory
from ddpwatch.core.limits import DEFAULTS, MemoryLimits
from ddpwatch.core.state.run import RunState
from tests.builders.ended_run import beating
from tests.builders.fake_rank import make_beat, make_hello, make_step
from tests.builders.synthetic_run import SECOND, look, make_run, only, train

MIB, GIB = 1 << 20, 1 << 30


# memory


def used(bytes_at, world=1, samples=61, ranks=None):
    """Ranks that tell their memory every ten seconds; `bytes_at` takes the rank and a time from 0 to 1."""
    state = RunState("ab12cd34", "train", world)
    for number in range(samples):
        for rank in range(world) if ranks is None else ranks:
            rss_bytes = int(bytes_at(rank, number / (samples - 1)))
            state.apply(make_beat(rank, seq=number + 1, rss_bytes=rss_bytes), (number + 1) * 10 * SECOND)
    return state


def leak(rank, at):
    return GIB + at * 900 * MIB


def test_memory_that_keeps_growing_is_told_with_its_rate():
    finding = only(memory(look(used(lambda rank, at: leak(rank, at) if rank == 1 else GIB, world=3))))

    assert finding.message == "memory of rank 1 keeps growing: 1.1G to 1.7G in 10m 00s, 5.3G an hour"
    assert (finding.ranks, finding.subject, finding.severity) == ((1,), "rank 1", Severity.WARNING)
    assert finding.evidence["bytes_per_hour"] == pytest.approx(5400 * MIB, rel=0.01)
    assert ".item()" in finding.advice


@pytest.mark.parametrize(("world", "subjects"), [(3, ["rank 0", "rank 1", "rank 2"]), (4, ["ranks"])])
def test_many_ranks_that_grow_are_told_together(world, subjects):
    findings = memory(look(used(leak, world=world)))

    assert [finding.subject for finding in findings] == subjects
    assert sorted(rank for finding in findings for rank in finding.ranks) == list(range(world))


@pytest.mark.parametrize(
    "bytes_at",
    [
        lambda rank, at: GIB,
        lambda rank, at: 2 * GIB - leak(rank, at) / 4,
        lambda rank, at: GIB + min(at, 0.3) * 3 * GIB + (at * 7919 % 1) * MIB,
        lambda rank, at: GIB + (at > 0.5) * GIB,
        lambda rank, at: GIB + (at * 6 % 1) * GIB,
        lambda rank, at: GIB + (at if at < 0.9 else 0) * GIB,
    ],
    ids=["steady", "shrinking", "loaded and then steady", "one jump", "saw teeth", "freed at the end"],
)
def test_memory_that_does_not_keep_growing_is_fine(bytes_at):
    assert memory(look(used(bytes_at))) == []


@pytest.mark.parametrize(("samples", "found"), [(30, 0), (31, 1)], ids=["290 s", "300 s"])
def test_memory_must_be_watched_for_long_enough(samples, found):
    assert len(memory(look(used(leak, samples=samples)))) == found


@pytest.mark.parametrize(("growth_bytes", "found"), [(600 * MIB, 1), (601 * MIB, 0)])
def test_the_growth_must_reach_its_limit(growth_bytes, found):
    limits = msgspec.structs.replace(DEFAULTS, memory=MemoryLimits(growth_bytes=growth_bytes))
    # Between the medians of the first and the last third of 61 samples are 41 of 60 parts.
    state = used(lambda rank, at: GIB + at * 600.001 * MIB * 60 / 41)

    assert len(memory(look(state, limits=limits))) == found


def test_an_hour_of_samples_is_judged_like_a_few_minutes():
    finding = only(memory(look(used(leak, samples=360))))

    assert finding.message == "memory of rank 0 keeps growing: 1.2G to 1.7G in 59m 50s, 903M an hour"
    assert memory(look(used(lambda rank, at: GIB, samples=360))) == []


def test_growth_that_is_little_for_a_large_process_is_fine():
    assert memory(look(used(lambda rank, at: 100 * GIB + at * GIB))) == []


def test_memory_of_a_rank_that_has_ended_is_no_trouble():
    state = used(leak)
    state.apply(wire.Bye(rank=0, seq=100, reason="exit", text="", mono_ns=1), state.now_ns)

    assert memory(look(state)) == []


# what did not arrive


@pytest.mark.parametrize(("lost", "severity"), [(1, Severity.INFO), (2, Severity.INFO), (3, Severity.WARNING)])
def test_lost_messages_are_counted(lost, severity):
    state = beating({})
    state.apply(make_beat(1, seq=5 + lost, step=90), state.now_ns)
    finding = only(lossy(look(state)))

    assert finding.message == f"rank 1: {lost} message{'s' if lost > 1 else ''} lost"
    assert (finding.severity, finding.ranks, finding.subject) == (severity, (1,), "rank 1")
    assert finding.evidence["lost_messages"] == lost


def test_records_that_the_agent_dropped_are_told():
    state = beating({})
    state.apply(make_beat(2, seq=5, step=90, dropped=1200), state.now_ns)
    finding = only(lossy(look(state)))

    assert finding.message == "rank 2: 1 200 records dropped by the agent"
    assert finding.severity is Severity.WARNING


def test_what_cannot_be_read_is_counted_against_its_rank_or_nobody():
    state = beating({})
    state.count_bad(1, "wrong type")
    state.ingest(b"junk", state.now_ns)
    mine, nobodys = lossy(look(state))

    assert mine.message == "rank 1: 1 unreadable or impossible record"
    assert nobodys.subject == "unassigned"
    assert nobodys.message.startswith("1 unreadable frame that no rank can be blamed for, the last because: ")


def test_a_rank_whose_times_cannot_be_true_is_told():
    run = {rank: train(backward=900 if rank == 1 else 16) for rank in range(3)}
    finding = only(lossy(look(make_run(run))))

    assert finding.message == "rank 1: its steps do not fit those of the others and are left out"


def test_an_agent_that_switched_itself_off_is_told_with_its_reason():
    state = beating({})
    state.apply(wire.Bye(rank=1, seq=5, reason="off", text="KeyError: 7", mono_ns=1), state.now_ns)
    finding = only(lossy(look(state)))

    assert finding.message == "rank 1: its agent has switched itself off (KeyError: 7)"
    assert finding.evidence["off_reason"] == "KeyError: 7"
    assert "unwatched" in finding.advice


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
