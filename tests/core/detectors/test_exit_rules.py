"""Ranks that are gone or have failed: which was the first, and which only followed."""

from __future__ import annotations

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.desync import desync
from ddpwatch.core.detectors.rank_failed import rank_failed
from ddpwatch.core.detectors.rank_lost import rank_lost
from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.limits import DEFAULTS, LivenessLimits, RankLostLimits
from ddpwatch.core.monitor import Monitor
from ddpwatch.view.outcome import root_cause_text
from tests.builders.ended_run import CLOSED, LARGE, LOST, SMALL, beating, broken, end, ended_with, fail, outlived
from tests.builders.fake_rank import make_beat, make_stack
from tests.builders.synthetic_run import SECOND, look, make_run, only, train

# ranks that are gone


def test_a_rank_whose_process_has_ended_is_critical_at_once():
    finding = only(rank_lost(look(end(beating({1: 99.9}), 1))))

    assert finding.message == "rank 1 (node-a, pid 1001): its process has ended without a word, last heard in step 90"
    assert finding.severity is Severity.CRITICAL
    assert (finding.ranks, finding.subject, finding.evidence["step"]) == ((1,), "rank 1", 90)
    assert "dmesg" in finding.advice


def test_a_rank_may_have_done_more_than_was_heard_of_it_and_the_others_tell_how_far_the_job_got():
    state = end(beating({1: 99.9}), 1)
    state.ranks[0].apply_beat(make_beat(0, step=97, mono_ns=state.now_ns + 1), state.now_ns)

    assert only(rank_lost(look(state))).message.endswith("last heard in step 90, the others in step 97")


def test_a_kill_for_want_of_memory_is_told():
    state = make_run({rank: train() for rank in range(2)}, world=2)
    state.apply(wire.Gone(rank=1, seq=0, oom_kills=1), state.now_ns)
    finding = only(rank_lost(look(outlived(state))))

    assert "the kernel has killed for want of memory" in finding.message
    assert finding.evidence["oom_kills"] == 1
    assert "memory limit" in finding.advice


def test_a_rank_that_ends_before_it_is_heard_is_lost_too():
    state = make_run({0: train()}, world=2)

    assert only(rank_lost(look(end(state, 1)))).message == (
        "rank 1 (node-a, pid 1001): its process has ended, and nothing was heard of it"
    )


def test_a_rank_of_which_nothing_was_heard_follows_nobody():
    state = make_run({rank: train() for rank in range(3)}, world=4, now_ns=SECOND)
    first, second = rank_lost(look(end(end(state, 1), 3)))

    assert (first.subject, second.subject) == ("rank 1", "rank 3")
    assert second.severity is Severity.CRITICAL


def test_a_silent_rank_is_critical_while_others_are_heard():
    finding = only(rank_lost(look(beating({1: 93}))))

    assert finding.message == (
        "rank 1 (node-a, pid 1001) has sent nothing for 7s (frozen, host gone, or network), last heard in step 90"
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
    state = fail(beating({1: 80, 0: 82, 2: 82, 3: 82}, now_s=100), 1, at_s=80)
    finding = only(rank_lost(look(end(state, 0, 2))))

    assert finding.message == "ranks 0, 2-3 ended or fell silent after rank 1"
    assert finding.severity is Severity.INFO


def test_a_rank_that_ends_as_another_fails_with_an_error_of_its_own_is_its_consequence():
    """A launcher ends the others so soon that their last sign of life may be older than the goodbye."""
    state = end(fail(beating({1: 99.8, 0: 99.8}, now_s=100), 1), 0)

    assert only(rank_failed(look(state))).ranks == (1,)
    assert only(rank_lost(look(state))).message == "rank 0 ended after rank 1"


@pytest.mark.parametrize(("later_s", "consequence"), [(0.3, True), (60, True), (61, False)])
def test_a_consequence_comes_clearly_later_and_within_a_minute(later_s, consequence):
    findings = rank_lost(look(end(beating({1: 20, 0: 20 + later_s}, now_s=100), 0, 1)))

    assert [finding.subject for finding in findings] == (["rank 1", "after"] if consequence else ["rank 1", "rank 0"])


@pytest.mark.parametrize("later_s", [0, 0.2])
def test_of_ranks_that_end_too_close_together_none_is_called_the_first(later_s):
    finding = only(rank_lost(look(end(beating({1: 20, 0: 20 + later_s}, now_s=100), 0, 1))))

    assert finding.message == (
        "ranks 0-1: their processes have ended without a word, too close together to tell which was first"
    )
    assert finding.severity is Severity.CRITICAL
    assert "killed one and the others went with it" in finding.advice


def test_an_end_is_told_when_no_rank_that_may_have_ended_before_it_is_left():
    state = beating({1: 99.9, 2: 99.95}, now_s=100)
    state.apply(wire.Gone(rank=1, seq=0), state.now_ns)
    state.apply(make_beat(0, seq=9, step=90), state.now_ns + RankLostLimits.PROOF_NS)
    state.apply(make_beat(3, seq=9, step=90), state.now_ns)
    assert rank_lost(look(state)) == [], "rank 2 has not been heard since"

    state.tick(state.now_ns + LivenessLimits.NO_HEARTBEAT_NS - RankLostLimits.PROOF_NS)
    outlived(state)
    assert only(rank_lost(look(state))).ranks == (1,), "rank 2 is silent, which takes longer to tell"


def test_a_rank_that_was_killed_before_others_failed_is_not_their_consequence():
    state = fail(end(beating({1: 80.0, 0: 80.1}, now_s=81), 1), 0)

    assert only(rank_lost(look(state))).severity is Severity.CRITICAL


@pytest.mark.parametrize("how", ["lost", "silent"])
def test_a_host_that_is_gone_as_a_whole_is_named(how):
    state = beating({2: 80, 3: 80}, hosts=["node-a", "node-a", "node-b", "node-b"])
    finding = only(rank_lost(look(end(state, 2, 3) if how == "lost" else state)))

    assert finding.message.startswith("host node-b (ranks 2-3): ")
    assert (finding.subject, finding.ranks) == ("host node-b", (2, 3))


def test_a_host_whose_loss_ended_all_others_is_told_and_not_a_viewer_that_is_cut_off():
    state = beating({2: 90, 3: 90}, hosts=["node-a", "node-a", "node-b", "node-b"])
    for rank in (0, 1):
        text = "RuntimeError: Connection closed by peer [10.99.0.2]:4711"
        state.apply(wire.Bye(rank=rank, seq=9_000_000, reason="failed", text=text, mono_ns=1), int(91e9))
    state.tick(int(110e9))

    (finding,) = [each for each in rank_lost(look(state)) if each.subject == "host node-b"]
    assert "gone or not reachable, all 2 ranks have been silent for 20s" in finding.message
    assert finding.ranks == (2, 3)


def test_the_first_rank_of_a_host_that_is_gone_is_not_told_before_the_others_can_be():
    hosts = ["node-a", "node-a", "node-b", "node-b"]

    assert rank_lost(look(beating({2: 94.9, 3: 95.1}, hosts=hosts))) == []
    assert only(rank_lost(look(beating({2: 94.7, 3: 94.9}, hosts=hosts)))).subject == "host node-b"
    assert only(rank_lost(look(beating({2: 94.0, 3: 97.0}, hosts=hosts)))).subject == "rank 2"


def test_part_of_a_host_is_told_by_rank():
    state = end(beating({2: 20}, hosts=["node-a", "node-b", "node-b", "node-b"]), 1, 2)

    assert [finding.subject for finding in rank_lost(look(state))] == ["rank 2", "rank 1"]


def test_many_ranks_that_end_together_are_one_finding():
    finding = only(rank_lost(look(end(beating({}), 0, 1, 2, 3))))

    assert finding.message == (
        "all 4 ranks: their processes have ended without a word, too close together to tell which was first"
    )
    assert finding.severity is Severity.CRITICAL


def test_ranks_that_say_goodbye_are_not_lost():
    state = beating({1: 80})
    state.apply(wire.Bye(rank=1, seq=5, reason="exit", text="", mono_ns=1), state.now_ns)

    assert rank_lost(look(state)) == []


def test_a_rank_that_was_lost_to_sight_closes_its_alert_when_it_is_heard_again():
    monitor = Monitor(beating({1: 80}))
    monitor.evaluate_now()
    assert ("rank-lost", "rank 1") in monitor.book.open

    for at_s in (101, 102, 103):
        for rank in range(4):
            monitor.ingest(wire.encode(make_beat(rank, seq=at_s, step=90)), at_s * SECOND)

    assert not [key for key in monitor.book.open if key[0] == "rank-lost"]


# ranks that failed


def test_an_exit_with_a_code_in_the_middle_of_the_data_opens_one_critical_alert():
    """As it comes in: goodbye, the others wait, they lose their connections, and the launcher tells the exit code."""
    state = make_run({rank: train(0, 90) for rank in range(3)}, world=3, now_ns=SECOND)
    monitor = Monitor(state)
    for rank in range(3):
        state.apply(wire.Loader(rank=rank, seq=9, step=0, epoch=0, sampler="S", distributed=True, length=400), SECOND)
    state.apply(wire.Bye(rank=2, seq=10, reason="exit", text="", mono_ns=1), SECOND)
    for quarter in range(5, 14):
        for rank in range(2):
            waits = {"phase": wire.PHASES.index("sync"), "phase_ns": (quarter - 4) * SECOND // 4}
            state.apply(make_beat(rank, seq=10 + quarter, step=90, **waits), quarter * SECOND // 4)
        monitor.evaluate_now()
    for rank in range(2):
        state.apply(wire.Bye(rank=rank, seq=30, reason="failed", text=CLOSED, mono_ns=1), 4 * SECOND)
    monitor.evaluate_now()
    state.tick(6 * SECOND)
    state.apply(wire.Gone(rank=2, seq=0, exit_code=3, ago_ns=1), 6 * SECOND)
    monitor.evaluate_now()

    reported = [(event.kind, event.alert.finding) for event in monitor.book.drain()]
    bad = [
        (kind, finding.subject, finding.message) for kind, finding in reported if finding.severity is Severity.CRITICAL
    ]
    assert bad == [
        ("opened", "rank 2", "ranks 0-1 lost their connections and failed after rank 2 had ended"),
        ("changed", "rank 2", "rank 2 was ended by its exit code 3, without an exception: sys.exit"),
    ]


def ended_with_its_data(quarters, world=3, left=10):
    """As it comes in: the data of the last rank ends, and it; the others wait for so many quarters of a second with
    so many batches left, lose their connections one after another, and are judged four times a second. Without a number
    of batches nobody tells how many there are.
    """
    state = make_run({rank: train(0, 90) for rank in range(world)}, world=world, now_ns=SECOND)
    monitor = Monitor(state)
    batches = len(state.ranks[0].steps.indices())
    for rank in range(world if left is not None else 0):
        length = batches + (left if rank < world - 1 else 0)
        loader = wire.Loader(rank=rank, seq=4, step=0, epoch=0, sampler="S", distributed=True, length=length)
        state.apply(loader, SECOND)
    state.apply(wire.Bye(rank=world - 1, seq=5, reason="exit", text="", mono_ns=1), SECOND)
    for quarter in range(1, quarters + 1):
        for rank in range(world - 1):
            waits = {"phase": wire.PHASES.index("sync"), "phase_ns": quarter * SECOND // 4}
            state.apply(make_beat(rank, seq=4 + quarter, step=90, **waits), SECOND + quarter * SECOND // 4)
        monitor.evaluate_now()
    for rank in range(world - 1):
        now_ns = state.now_ns + rank * SECOND // 2
        state.apply(wire.Bye(rank=rank, seq=5 + quarters, reason="failed", text=CLOSED, mono_ns=1), now_ns)
        monitor.evaluate_now()
    for quarter in range(12):
        state.tick(now_ns + quarter * SECOND // 4)
        monitor.evaluate_now()
    return monitor


@pytest.mark.parametrize(("world", "names"), [(2, "rank 0"), (3, "ranks 0-1")])
@pytest.mark.parametrize("quarters", [2, 8])
def test_an_end_at_the_end_of_the_data_opens_one_alert_and_those_that_fail_without_it_are_its_consequence(
    quarters, world, names
):
    monitor = ended_with_its_data(quarters, world)
    reported = [(event.kind, event.alert.finding) for event in monitor.book.drain()]

    bad = [(kind, finding.rule, finding.ranks) for kind, finding in reported if finding.severity > Severity.INFO]
    assert bad == [("opened", "uneven-batch", (world - 1,))]
    end, after = sorted((alert.finding for alert in monitor.book.open.values()), key=lambda finding: -finding.severity)
    their = "its connection" if world == 2 else "their connections"
    assert end.message == (
        f"rank {world - 1} has ended after 90 steps while the others go on: {names} lost {their} and failed"
    )
    assert after.message == (
        f"{names} failed after rank {world - 1} had ended at the end of its data, because of it: connection lost"
    )
    assert (after.rule, after.severity) == ("rank-failed", Severity.INFO)
    assert after.evidence["text"] == CLOSED


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("quarters", "rule"), [(2, "rank-failed"), (3, "rank-failed"), (5, "uneven-batch"), (20, "uneven-batch")]
)
def test_of_data_without_a_length_one_alert_is_opened_whether_the_others_fail_at_once_or_wait(quarters, rule, world):
    monitor = ended_with_its_data(quarters, world, left=None)
    reported = [(event.kind, event.alert.finding) for event in monitor.book.drain()]
    bad = [(kind, finding.rule, finding.ranks) for kind, finding in reported if finding.severity > Severity.INFO]

    assert [each for each in bad if each[0] == "opened"] == bad
    assert [each[1] for each in bad] == [rule], bad
    open_now = {alert.finding.rule for alert in monitor.book.open.values() if alert.finding.severity > Severity.INFO}
    assert open_now == {rule}


def test_where_all_are_at_the_end_of_their_data_it_is_not_the_data_that_has_ended_early():
    """What the others still do is something else, such as an evaluation."""
    monitor = ended_with_its_data(2, left=0)

    assert {alert.finding.rule for alert in monitor.book.open.values()} == {"rank-failed"}


def test_a_failed_rank_is_told_with_its_exception():
    finding = only(rank_failed(look(fail(beating({}), 1, "ValueError: no such class 12\n  File train.py"))))

    assert finding.message == "rank 1 was ended by ValueError: no such class 12 · File train.py"
    assert finding.severity is Severity.CRITICAL
    assert finding.ranks == (1,)
    assert finding.evidence["step"] == 90


def test_a_long_exception_is_cut_in_the_message_and_whole_in_the_evidence():
    finding = only(rank_failed(look(fail(beating({}), 1, "x" * 900))))

    assert len(finding.message) == len("rank 1 was ended by ") + 300
    assert finding.message.endswith("x…")
    assert finding.evidence["text"] == "x" * 900


def test_every_failed_rank_has_a_finding_and_one_without_a_text_too():
    findings = rank_failed(look(fail(fail(beating({}), 1, "", at_s=100), 3, at_s=100)))

    assert [finding.subject for finding in findings] == ["rank 1", "rank 3"]
    assert findings[0].message == "rank 1 was ended by an exception"


PEER_ERRORS = [
    CLOSED,
    "RuntimeError: [pair.cc:589] Read error [10.0.0.9]:25266: Connection reset by peer",
    "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    "DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a network error",
    "DistBackendError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "DistBackendError: [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "BrokenPipeError: [Errno 32] Broken pipe",
]


@pytest.mark.parametrize("text", PEER_ERRORS, ids=lambda text: text[:40])
@pytest.mark.parametrize("later_s", [0.02, 1, 1800])
def test_ranks_that_fail_because_another_was_lost_are_its_consequence(text, later_s):
    state = beating({1: 80.0}, now_s=80.1)
    state.apply(wire.Gone(rank=1, seq=0), int(81.5 * SECOND))
    for rank in (0, 2, 3):
        state = fail(state, rank, text, at_s=80 + later_s)
    after = only(rank_failed(look(state)))

    assert only(rank_lost(look(state))).ranks == (1,)
    why = "they waited in vain" if "imed out" in text or "timeout" in text else "connection lost"
    assert after.message == f"ranks 0, 2-3 failed after rank 1 was lost, because of it: {why}"
    assert (after.severity, after.subject, after.ranks) == (Severity.INFO, "after", (0, 2, 3))
    assert after.evidence["text"] == text


@pytest.mark.parametrize("text", ["ValueError: no such class 12", "torch.OutOfMemoryError: CUDA out of memory.", ""])
def test_what_is_no_complaint_of_a_peer_ends_a_rank_by_itself(text):
    """It is the first even where the complaints of the others were heard a little earlier."""
    state = beating({})
    for rank, words, at_s in ((0, CLOSED, 100.0), (3, CLOSED, 100.1), (1, text, 100.2)):
        state = fail(state, rank, words, at_s=at_s)
    first, after = rank_failed(look(state))

    assert (first.ranks, first.severity) == ((1,), Severity.CRITICAL)
    assert (after.ranks, after.severity) == ((0, 3), Severity.INFO)
    assert after.message == "ranks 0, 3 failed after rank 1 failed, because of it: connection lost"


def test_a_failure_is_not_told_before_the_rank_that_may_have_caused_it_was_heard():
    state = beating({1: 99.9}, now_s=100)
    for rank in (0, 2, 3):
        state.apply(wire.Bye(rank=rank, seq=5, reason="failed", text=CLOSED, mono_ns=1), state.now_ns)
    assert rank_failed(look(state)) == []

    lives = only(rank_failed(look(outlived(state))))
    assert (lives.subject, lives.severity, lives.ranks) == ("connections", Severity.CRITICAL, (0, 2, 3))
    assert lives.message.endswith("too close together to tell which was first")


def test_one_rank_that_complains_of_a_peer_while_all_others_live_is_critical():
    finding = only(rank_failed(look(fail(beating({}), 2, CLOSED))))

    assert (finding.ranks, finding.severity) == ((2,), Severity.CRITICAL)
    assert "another rank" in finding.advice


def test_a_failure_clearly_after_another_is_told_as_such():
    state = fail(fail(beating({}, now_s=100), 1, "ValueError: bad", at_s=100), 3, "KeyError: 7", at_s=101)
    first, after = rank_failed(look(state))

    assert first.ranks == (1,)
    assert after.message == "rank 3 failed after rank 1 failed"


def test_all_ranks_that_fail_alike_at_once_are_told_each():
    state = beating({})
    for rank in range(4):
        state = fail(state, rank, "FileNotFoundError: train.csv", at_s=100 + rank / 20)

    assert [finding.severity for finding in rank_failed(look(state))] == [Severity.CRITICAL] * 4


@pytest.mark.parametrize("reason", ["exit", "closed", "off"])
def test_a_rank_that_ended_in_order_has_not_failed(reason):
    state = beating({})
    state.apply(wire.Bye(rank=1, seq=5, reason=reason, text="", mono_ns=1), state.now_ns)

    assert rank_failed(look(state)) == []


# how a process ended, where that can be seen


@pytest.mark.parametrize(
    ("code", "words"), [(-9, "was killed (SIGKILL)"), (-11, "crashed (SIGSEGV)"), (7, "ended with exit code 7")]
)
def test_one_that_went_by_itself_is_told_and_those_that_were_asked_to_end_followed_it(code, words):
    """Rank 3 was heard before rank 1 for the last time, which says nothing."""
    state = ended_with(beating({0: 99.9, 1: 99.9, 2: 99.9, 3: 99.7}, now_s=100), {0: -15, 1: code, 2: -15, 3: -15})
    first, after = rank_lost(look(state))

    assert first.message == f"rank 1 (node-a, pid 1001): its process {words} without a word, last heard in step 90"
    assert (first.ranks, after.ranks, after.message) == ((1,), (0, 2, 3), "ranks 0, 2-3 ended after rank 1")


def test_two_that_were_killed_at_once_are_both_told_and_what_follows_is_said_to_follow_both():
    state = ended_with(beating(dict.fromkeys(range(3), 99.9), world=3, now_s=100), {0: -9, 1: -15, 2: -9})
    first, after = rank_lost(look(state))

    assert first.ranks == (0, 2)
    assert after.message == "rank 1 ended after ranks 0, 2"
    assert "what ended ranks 0, 2" in after.advice


def test_without_an_order_nobody_is_made_the_cause_of_what_followed():
    state = fail(end(beating({1: 99.8, 3: 99.9}, now_s=100), 1, 3), 0, "RuntimeError: Connection closed by peer")
    (lost,), (after,) = rank_lost(look(state)), rank_failed(look(state))

    assert "too close together" in lost.message
    assert after.message == "rank 0 failed after ranks 1, 3 were lost: connection lost"


def test_ends_that_were_seen_as_they_happened_have_an_order():
    state = beating({0: 99.9, 1: 99.9}, now_s=100)
    state.apply(wire.Gone(rank=1, seq=0, ago_ns=90_000_000), state.now_ns)
    state.apply(wire.Gone(rank=0, seq=0, ago_ns=30_000_000), state.now_ns)
    first, after = rank_lost(look(outlived(state)))

    assert (first.ranks, after.ranks) == ((1,), (0,))


def test_all_that_were_asked_to_end_at_once_are_told_together():
    state = ended_with(beating(dict.fromkeys(range(3), 99.9), world=3, now_s=100), dict.fromkeys(range(3), -15))

    finding = only(rank_lost(look(state)))
    assert finding.message == "ranks 0-2: their processes have ended without a word: each was ended (SIGTERM)"
    assert "who stopped the job" in finding.advice
    assert "OOM" not in finding.advice
    assert root_cause_text(outcome_of(state, ())) == "ranks 0-2 were ended (SIGTERM)"


def ended_one_after_another(ends, hosts=("node-a",) * 4):
    """Ranks whose ends were seen as they happened: by rank, milliseconds before now, and the exit code."""
    state = beating(dict.fromkeys(range(4), 90), now_s=100, hosts=hosts)
    for rank, (ago_ms, code) in ends.items():
        state.apply(wire.Gone(rank=rank, seq=0, exit_code=code, ago_ns=ago_ms * 1_000_000), state.now_ns)
    return outlived(state)


@pytest.mark.parametrize("agos_ms", [(90, 60, 30, 1), (900, 890, 880, 100), (3000, 2200, 1400, 600)])
def test_of_those_that_one_signal_has_ended_one_after_another_nobody_began_it(agos_ms):
    """However far apart they are together, while each comes shortly after another."""
    state = ended_one_after_another({rank: (ago_ms, -15) for rank, ago_ms in zip((1, 0, 3, 2), agos_ms, strict=True)})

    assert only(rank_lost(look(state))).ranks == (0, 1, 2, 3)
    assert root_cause_text(outcome_of(state, ())) == "ranks 0-3 were ended (SIGTERM)"


def test_nor_where_the_signal_came_to_several_hosts():
    ends = {0: (700, -15), 1: (660, -15), 2: (110, -15), 3: (60, -15)}
    state = ended_one_after_another(ends, hosts=("node-a", "node-a", "node-b", "node-b"))

    assert root_cause_text(outcome_of(state, ())) == "ranks 0-3 were ended (SIGTERM)"


@pytest.mark.parametrize(
    ("first", "reported"),
    [
        ((130, -9), "rank 2 was killed (SIGKILL); ranks 0-1, 3 after it"),
        ((60, -9), "rank 2 was killed (SIGKILL); ranks 0-1, 3 after it"),
        ((130, 1), "rank 2 ended with exit code 1; ranks 0-1, 3 after it"),
        ((1200, -15), "rank 2 was ended (SIGTERM); ranks 0-1, 3 after it"),
        ((130, -1), "rank 2 was ended (SIGHUP); ranks 0-1, 3 after it"),
    ],
)
def test_one_that_ended_otherwise_or_long_before_the_others_has_begun_it(first, reported):
    """The launcher ends the others one after another, and may have been quicker than what was seen of the first."""
    state = ended_one_after_another({2: first, 0: (90, -15), 1: (55, -15), 3: (20, -15)})

    assert root_cause_text(outcome_of(state, ())) == reported


def test_where_one_has_lost_its_connection_the_first_that_was_ended_has_begun_it():
    state = ended_one_after_another({1: (130, -15), 3: (20, -15)})
    for rank in (0, 2):
        state = fail(state, rank, CLOSED, at_s=99.95)

    assert root_cause_text(outcome_of(state, ())) == "rank 1 was ended (SIGTERM); ranks 0, 2-3 after it"


LAUNCHER = "W1117 14:38:19.8 17639 torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal"


def test_where_the_launchers_log_says_that_it_was_told_to_end_that_is_what_is_told():
    """The line may be read after the ends were told."""
    state = ended_with(beating(dict.fromkeys(range(2), 99.9), world=2, now_s=100), dict.fromkeys(range(2), -15))
    monitor = Monitor(state)
    monitor.evaluate_now()
    line = wire.LogLine(3, f"{LAUNCHER}, shutting down workers")
    state.apply(wire.LogLines(rank=0, seq=0, source="torchrun.log", lines=[line]), state.now_ns)
    monitor.evaluate_now()

    reported = [(event.kind, event.alert.finding) for event in monitor.book.drain()]
    reported = [
        (kind, finding) for kind, finding in reported if finding.rule in {"rank-lost", "rank-failed", "timeout"}
    ]
    assert [(kind, finding.ranks) for kind, finding in reported] == [("opened", (0, 1)), ("changed", (0, 1))]
    message = reported[-1][1].message
    assert message.startswith("ranks 0-1: ended (SIGTERM). The launcher was ended from outside by SIGTERM, and ended")


def test_an_interrupt_from_the_keyboard_is_one_alert_about_all_whom_it_reached():
    state = beating({})
    monitor = Monitor(state)
    words = "KeyboardInterrupt\n/home/me/train.py:88 in fit"
    for rank, text, at_s in ((1, words, 100.0), (0, words, 100.1), (3, CLOSED, 100.3), (2, words, 101.5)):
        state = fail(state, rank, text, at_s=at_s)
        monitor.evaluate_now()
    reported = [event.alert.finding for event in monitor.book.drain() if event.kind == "opened"]
    bad = [finding.subject for finding in reported if finding.severity is Severity.CRITICAL]

    assert bad == ["interrupted"]
    finding = monitor.book.open["rank-failed", "interrupted"].finding
    assert finding.message == "ranks 0-2 were interrupted from the keyboard (SIGINT)"
    assert monitor.book.open["rank-failed", "after"].finding.ranks == (3,)
    began = root_cause_text(outcome_of(state, monitor.book.open.values()))
    assert began == "ranks 0-2 were interrupted from the keyboard; rank 3 after them"


def test_an_interrupt_that_followed_the_failure_of_another_is_its_consequence():
    state = fail(beating({}), 1, "ValueError: bad", at_s=100)
    for rank in (0, 2, 3):
        state = fail(state, rank, "KeyboardInterrupt", at_s=101)
    first, after = rank_failed(look(state))

    assert (first.ranks, after.ranks) == ((1,), (0, 2, 3))


def test_a_rank_that_left_with_an_exit_code_has_failed():
    state = beating({})
    state.apply(wire.Bye(rank=1, seq=5, reason="exit", text="", mono_ns=1), state.now_ns)
    assert rank_failed(look(outlived(state))) == []

    finding = only(rank_failed(look(ended_with(state, {1: 3}))))
    assert finding.message == "rank 1 was ended by its exit code 3, without an exception: sys.exit"


# gloo aborts who receives more than it expects


def test_of_an_abort_the_few_are_blamed_and_not_who_was_aborted():
    evidence = broken(0, {1: LARGE, 2: SMALL, 3: SMALL})
    reported, lost = only(desync(evidence)), only(rank_lost(evidence))

    assert reported.ranks == (1,)
    assert reported.message.startswith(
        "rank 1 was out of line when their connections broke: all_reduce #66 [1000] Float on ranks 0, 2-3 against "
        "all_reduce #66 [9000] Float on rank 1. "
    )
    assert "/home/me/train.py:88 in fit" in reported.message
    assert (lost.severity, "`desync` tells" in lost.message) == (Severity.INFO, True)


def test_of_an_abort_with_as_many_on_either_side_nobody_is_blamed():
    reported = only(desync(broken(0, {1: LARGE, 2: SMALL, 3: LARGE})))

    assert reported.ranks == (0, 1, 2, 3)
    assert "which of them is wrong cannot be told" in reported.message


def test_an_abort_of_which_too_little_is_known_blames_nobody():
    evidence = broken(0, {1: LARGE})
    lost, after = rank_lost(evidence)

    assert desync(evidence) == []
    assert (lost.ranks, lost.severity) == ((), Severity.CRITICAL)
    assert "which of them is wrong cannot be told. rank 1 was in all_reduce #66 [9000] Float" in lost.message
    assert "because" not in only(rank_failed(evidence)).message
    assert "need not be to blame" in after.advice


def asked(ops, before_s=0.0):
    """Rank 0 is aborted and seen to be; the launcher ends the others, which have told their operations when asked."""
    state = beating(dict.fromkeys(range(4), 99.9), now_s=100)
    for rank, op in ops.items():
        stack = make_stack(rank, ("fit", "/home/me/train.py", 88), collectives=[op])
        state.apply(stack, int(state.now_ns - before_s * SECOND))
    for rank, code in {0: -6, 1: -15, 2: -15, 3: -15}.items():
        state.apply(wire.Gone(rank=rank, seq=0, exit_code=code, ago_ns=1), state.now_ns)
    return look(outlived(state))


def test_those_that_the_launcher_ended_before_their_last_words_have_told_when_they_were_asked():
    evidence = asked({1: LARGE, 2: SMALL, 3: SMALL})
    reported = only(desync(evidence))

    assert reported.ranks == (1,)
    assert (
        "all_reduce #66 [1000] Float on ranks 0, 2-3 against all_reduce #66 [9000] Float on rank 1" in reported.message
    )
    assert "rank 1 was at fit (train.py:88)" in reported.message
    assert not [finding for finding in rank_lost(evidence) if finding.severity is Severity.CRITICAL]


def test_what_they_told_before_the_abort_is_no_evidence():
    evidence = asked({1: LARGE, 2: SMALL, 3: SMALL}, before_s=5.0)

    assert desync(evidence) == []
    assert rank_lost(evidence)[0].message.endswith(
        "which of them is wrong cannot be told. ranks 1-3 were ended before they could tell in which operation"
    )


def test_of_those_that_could_not_tell_it_is_said_and_they_may_be_of_either_side():
    evidence = asked({1: LARGE, 2: SMALL})
    reported = only(desync(evidence))
    assert reported.ranks == (0, 1, 2)
    assert "which of them is wrong cannot be told" in reported.message

    lost = rank_lost(asked({1: LARGE}))[0]
    assert lost.ranks == ()
    assert lost.message.endswith("at fit (train.py:88); ranks 2-3 were ended before they could tell in which operation")


def test_who_was_at_the_same_place_in_the_script_was_in_the_same_operation():
    state = beating(dict.fromkeys(range(5), 99.9), world=5, now_s=100)
    places = {1: 140, 2: 104, 3: 104, 4: 104}
    for rank, op in {1: [LARGE], 2: [SMALL], 3: [], 4: []}.items():
        stack = make_stack(rank, ("fit", "/home/me/train.py", places[rank]), collectives=op)
        state.apply(stack, state.now_ns)
    for rank in range(5):
        state.apply(wire.Gone(rank=rank, seq=0, exit_code=-15 if rank else -6, ago_ns=1), state.now_ns)
    reported = only(desync(look(outlived(state))))

    assert reported.ranks == (1,)
    assert "[1000] Float on ranks 0, 2-4 against" in reported.message


def test_a_goodbye_that_was_announced_and_never_came_is_taken_as_said():
    state = beating(dict.fromkeys(range(4), 99.9), now_s=100)
    note = wire.Note(
        rank=2, seq=5, kind=wire.FAILING, text="ValueError: bad\n/home/me/train.py:9 in fit", step=90, mono_ns=1
    )
    state.apply(note, state.now_ns)
    assert rank_failed(look(outlived(state))) == [], "it may come yet"

    finding = only(rank_failed(look(ended_with(state, {2: -15}))))
    assert finding.message == "rank 2 was ended by ValueError: bad · /home/me/train.py:9 in fit"


def test_one_that_is_aborted_while_all_others_agree_was_most_likely_elsewhere():
    lost = only(rank_lost(broken(0, {1: LARGE, 2: LARGE, 3: LARGE})))

    assert lost.ranks == (0,)
    assert "all others were in all_reduce #66" in lost.message


def test_a_viewer_that_did_not_see_how_a_rank_ended_blames_nobody_whom_one_that_did_would_not():
    """Rank 0 was aborted, and belongs to rank 1: as many on either side. Without its exit code it may be on any."""
    evidence = broken(0, {1: SMALL, 2: LARGE, 3: LARGE})
    assert only(desync(evidence)).ranks == (0, 1, 2, 3)
    state = evidence.state
    state.ranks[0].exit_code = None
    reported = only(desync(look(state)))

    assert reported.ranks == (1, 2, 3)
    assert "which of them is wrong cannot be told; how rank 0 ended was not seen" in reported.message
    assert rank_lost(look(state)) == [], "it is told once"


def test_ranks_that_lost_one_that_was_killed_are_not_compared():
    state = beating(dict.fromkeys(range(3), 99.9), world=3, now_s=100)
    for rank, op in {0: SMALL, 2: LARGE}.items():
        bye = wire.Bye(rank=rank, seq=5, reason="failed", text=LOST, mono_ns=1, collectives=[op])
        state.apply(bye, state.now_ns)
    evidence = look(ended_with(state, {1: -9}))

    assert desync(evidence) == []
    assert only(rank_lost(evidence)).ranks == (1,)


def test_a_rank_that_has_just_fallen_silent_is_named_with_those_that_lost_their_connections():
    """Its node was killed: the others fail at once, and its own silence is too short yet to be called a loss."""
    state = beating({2: 97.5}, world=3, hosts=("node1", "node2", "node3"))
    for rank in (0, 1):
        bye = wire.Bye(rank=rank, seq=5, reason="failed", text="Connection reset by peer", mono_ns=1)
        state.apply(bye, int(97.7 * SECOND))
    finding = only(rank_failed(look(state)))

    assert finding.message == "ranks 0-1 lost their connections and failed, and rank 2 (node3) has fallen silent, too"
    assert finding.advice == "Look at rank 2 first, and whether its host answers."
    assert finding.ranks == (2,)
    assert rank_lost(look(state)) == []

    state.tick(int(103 * SECOND))
    assert only(rank_failed(look(state))).message == (
        "ranks 0-1 failed after rank 2 fell silent, because of it: connection lost"
    )
    assert only(rank_lost(look(state))).ranks == (2,)
