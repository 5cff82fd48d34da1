"""Rules that go by time: memory, ranks that are gone or failed, and what did not arrive."""

from __future__ import annotations

import msgspec
import pytest
from fake_rank import make_beat, make_hello, make_step
from test_detectors_all import SECOND, look, make_run, only, train

from ddpwatch import wire
from ddpwatch.core.alerts import Severity
from ddpwatch.core.detectors.lossy import lossy
from ddpwatch.core.detectors.memory import memory
from ddpwatch.core.detectors.rank_failed import rank_failed
from ddpwatch.core.detectors.rank_lost import rank_lost
from ddpwatch.core.limits import DEFAULTS, MemoryLimits, RankLostLimits
from ddpwatch.core.state import RunState
from ddpwatch.core.watch import Watch

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


# ranks that are gone


def beating(last_s, world=4, now_s=None, **options):
    """A run of 90 steps whose ranks were last heard at these seconds; those not named are heard now."""
    state = make_run({rank: train(0, 90) for rank in range(world)}, now_ns=SECOND, **options)
    now_s = max([100.0, *last_s.values()]) if now_s is None else now_s
    for at_s, rank in sorted((last_s.get(rank, now_s), rank) for rank in range(world)):
        state.apply(make_beat(rank, seq=4, step=90), int(at_s * SECOND))
    state.tick(int(now_s * SECOND))
    return state


def end(state, *ranks):
    for rank in ranks:
        state.apply(wire.Gone(rank=rank, seq=0), state.now_ns)
    return state


def fail(state, rank, text="ValueError: bad"):
    state.apply(wire.Bye(rank=rank, seq=5, reason="failed", text=text, mono_ns=1), state.now_ns)
    return state


def test_a_rank_whose_process_has_ended_is_critical_at_once():
    finding = only(rank_lost(look(end(beating({1: 99.9}), 1))))

    assert finding.message == "rank 1 (node-a, pid 1001): its process has ended without a word at step 90"
    assert finding.severity is Severity.CRITICAL
    assert (finding.ranks, finding.subject, finding.evidence["step"]) == ((1,), "rank 1", 90)
    assert "dmesg" in finding.advice


def test_a_rank_that_ends_before_it_is_heard_is_lost_too():
    state = make_run({0: train()}, world=2)

    assert only(rank_lost(look(end(state, 1)))).message.endswith("without a word before its first step")


def test_a_silent_rank_is_critical_while_others_are_heard():
    finding = only(rank_lost(look(beating({1: 93}))))

    assert finding.message == (
        "rank 1 (node-a, pid 1001) has sent nothing for 7s (frozen, host gone, or network), last heard at step 90"
    )
    assert finding.severity is Severity.CRITICAL
    assert finding.evidence["unheard_s"] == 7.0


@pytest.mark.parametrize(("last_s", "found"), [(95.0, 0), (94.9, 1)])
def test_silence_must_exceed_its_limit(last_s, found):
    assert len(rank_lost(look(beating({1: last_s})))) == found


def test_the_limit_of_silence_can_be_moved():
    limits = msgspec.structs.replace(DEFAULTS, rank_lost=RankLostLimits(silent_s=30))

    assert rank_lost(look(beating({1: 80}), limits=limits)) == []
    assert rank_lost(look(beating({1: 60}), limits=limits))


@pytest.mark.parametrize("world", [1, 4])
def test_when_nobody_is_heard_it_is_the_viewer_that_is_cut_off(world):
    finding = only(rank_lost(look(beating(dict.fromkeys(range(world), 80), world=world, now_s=100))))

    assert finding.message.startswith("nothing is heard of any rank for 20s: the viewer cannot reach 1 host")
    assert (finding.severity, finding.subject) == (Severity.WARNING, "job")


def test_ranks_that_are_killed_after_the_first_are_its_consequence():
    first, after = rank_lost(look(end(beating({1: 80, 0: 82, 2: 82.1, 3: 82.2}, now_s=83), 0, 1, 2, 3)))

    assert first.subject == "rank 1"
    assert first.severity is Severity.CRITICAL
    assert after.message == "ranks 0, 2-3 ended after rank 1"
    assert (after.severity, after.subject, after.ranks) == (Severity.INFO, "after", (0, 2, 3))


def test_ranks_that_are_killed_after_one_failed_are_its_consequence():
    state = fail(beating({1: 80, 0: 82, 2: 82, 3: 82}, now_s=100), 1)
    finding = only(rank_lost(look(end(state, 0, 2))))

    assert finding.message == "ranks 0, 2-3 ended or fell silent after rank 1"
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(("later_s", "consequence"), [(0.2, False), (0.3, True), (60, True), (61, False)])
def test_a_consequence_comes_clearly_later_and_within_a_minute(later_s, consequence):
    findings = rank_lost(look(end(beating({1: 20, 0: 20 + later_s}, now_s=100), 0, 1)))

    assert [finding.subject for finding in findings] == (["rank 1", "after"] if consequence else ["rank 1", "rank 0"])


def test_a_rank_that_was_killed_before_others_failed_is_not_their_consequence():
    state = end(fail(beating({1: 80.0, 0: 80.1}, now_s=81), 0), 1)

    assert only(rank_lost(look(state))).severity is Severity.CRITICAL


@pytest.mark.parametrize("how", ["lost", "silent"])
def test_a_host_that_is_gone_as_a_whole_is_named(how):
    state = beating({2: 80, 3: 80}, hosts=["node-a", "node-a", "node-b", "node-b"])
    finding = only(rank_lost(look(end(state, 2, 3) if how == "lost" else state)))

    assert finding.message.startswith("host node-b (ranks 2-3): ")
    assert (finding.subject, finding.ranks) == ("host node-b", (2, 3))


def test_part_of_a_host_is_told_by_rank():
    state = end(beating({}, hosts=["node-a", "node-b", "node-b", "node-b"]), 1, 2)

    assert [finding.subject for finding in rank_lost(look(state))] == ["rank 1", "rank 2"]


def test_many_ranks_that_end_together_are_one_finding():
    finding = only(rank_lost(look(end(beating({}), 0, 1, 2, 3))))

    assert finding.message == "all 4 ranks: their processes have ended without a word"
    assert finding.severity is Severity.CRITICAL


def test_ranks_that_say_goodbye_are_not_lost():
    state = beating({1: 80})
    state.apply(wire.Bye(rank=1, seq=5, reason="exit", text="", mono_ns=1), state.now_ns)

    assert rank_lost(look(state)) == []


def test_a_rank_that_was_lost_to_sight_closes_its_alert_when_it_is_heard_again():
    watch = Watch(beating({1: 80}))
    watch.judge_now()
    assert ("rank-lost", "rank 1") in watch.book.open

    for at_s in (101, 102, 103):
        for rank in range(4):
            watch.take(wire.encode(make_beat(rank, seq=at_s, step=90)), at_s * SECOND)

    assert not [key for key in watch.book.open if key[0] == "rank-lost"]


# ranks that failed


def test_a_failed_rank_is_told_with_its_exception():
    finding = only(rank_failed(look(fail(beating({}), 1, "ValueError: no such class 12\n  File train.py"))))

    assert finding.message == "rank 1 was ended by ValueError: no such class 12 File train.py"
    assert finding.severity is Severity.CRITICAL
    assert finding.ranks == (1,)
    assert finding.evidence["step"] == 90


def test_a_long_exception_is_cut_in_the_message_and_whole_in_the_evidence():
    finding = only(rank_failed(look(fail(beating({}), 1, "x" * 900))))

    assert len(finding.message) == len("rank 1 was ended by ") + 300
    assert finding.message.endswith("x…")
    assert finding.evidence["text"] == "x" * 900


def test_every_failed_rank_has_a_finding_and_one_without_a_text_too():
    findings = rank_failed(look(fail(fail(beating({}), 1, ""), 3)))

    assert [finding.subject for finding in findings] == ["rank 1", "rank 3"]
    assert findings[0].message == "rank 1 was ended by an exception"


@pytest.mark.parametrize("reason", ["exit", "closed", "off"])
def test_a_rank_that_ended_in_order_has_not_failed(reason):
    state = beating({})
    state.apply(wire.Bye(rank=1, seq=5, reason=reason, text="", mono_ns=1), state.now_ns)

    assert rank_failed(look(state)) == []


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
    state.take(b"junk", state.now_ns)
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
