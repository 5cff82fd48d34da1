"""Ranks that ended or fell silent without a last message: order, hosts, signals."""

from __future__ import annotations

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.rank_failed import rank_failed
from ddpwatch.core.detectors.rank_lost import rank_lost
from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.limits import DEFAULTS, LivenessLimits, RankLostLimits
from ddpwatch.core.monitor import Monitor
from ddpwatch.view.outcome_text import root_cause_text
from tests.builders.ended_run import CLOSED, LARGE, beating, broken, end, ended_with, fail, outlived
from tests.builders.fake_rank import make_beat
from tests.builders.synthetic_run import SECOND, look, make_run, only, train


def test_a_rank_whose_process_has_ended_is_critical_at_once():
    finding = only(rank_lost(look(end(beating({1: 99.9}), 1))))

    assert finding.message == "rank 1 (node-a, pid 1001) exited unexpectedly, last heartbeat in step 90"
    assert finding.severity is Severity.CRITICAL
    assert (finding.ranks, finding.subject, finding.evidence["step"]) == ((1,), "rank 1", 90)
    assert "dmesg" in finding.advice


def test_the_last_step_heard_is_reported_with_the_step_of_the_others():
    state = end(beating({1: 99.9}), 1)
    state.ranks[0].apply_beat(make_beat(0, step=97, mono_ns=state.now_ns + 1), state.now_ns)

    assert only(rank_lost(look(state))).message.endswith("last heartbeat in step 90, the others are at step 97")


def test_a_kill_for_want_of_memory_is_reported():
    state = make_run({rank: train() for rank in range(2)}, world=2)
    state.apply(wire.Gone(rank=1, seq=0, oom_kills=1), state.now_ns)
    finding = only(rank_lost(look(outlived(state))))

    assert "its cgroup had an OOM kill" in finding.message
    assert finding.evidence["oom_kills"] == 1
    assert "memory limit" in finding.advice


def test_a_rank_that_ends_before_it_is_heard_is_lost_too():
    state = make_run({0: train()}, world=2)

    assert only(rank_lost(look(end(state, 1)))).message == (
        "rank 1 (node-a, pid 1001) exited before its first heartbeat"
    )


def test_a_rank_that_was_never_heard_is_no_secondary_failure():
    state = make_run({rank: train() for rank in range(3)}, world=4, now_ns=SECOND)
    first, second = rank_lost(look(end(end(state, 1), 3)))

    assert (first.subject, second.subject) == ("rank 1", "rank 3")
    assert second.severity is Severity.CRITICAL


def test_a_silent_rank_is_critical_while_others_are_heard():
    finding = only(rank_lost(look(beating({1: 93}))))

    assert finding.message == (
        "rank 1 (node-a, pid 1001): no heartbeat for 7 s (hung, host down, or network), last heartbeat in step 90"
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
def test_when_no_rank_is_heard_the_viewer_is_cut_off(world):
    finding = only(rank_lost(look(beating(dict.fromkeys(range(world), 80), world=world, now_s=100))))

    assert finding.message.startswith("no heartbeat from any rank for 20 s: the viewer cannot reach 1 host")
    assert (finding.severity, finding.subject) == (Severity.WARNING, "job")


def test_ranks_that_are_killed_after_the_first_are_secondary():
    first, after = rank_lost(look(end(beating({1: 80, 0: 82, 2: 82.1, 3: 82.2}, now_s=83), 0, 1, 2, 3)))

    assert first.subject == "rank 1"
    assert first.severity is Severity.CRITICAL
    assert after.message == "ranks 0, 2-3 exited after rank 1 (secondary failures)"
    assert (after.severity, after.subject, after.ranks) == (Severity.INFO, "after", (0, 2, 3))


def test_ranks_that_are_killed_after_one_failed_are_secondary():
    state = fail(beating({1: 80, 0: 82, 2: 82, 3: 82}, now_s=100), 1, at_s=80)
    finding = only(rank_lost(look(end(state, 0, 2))))

    assert finding.message == "ranks 0, 2-3 exited or stopped sending heartbeats after rank 1 (secondary failures)"
    assert finding.severity is Severity.INFO


def test_a_rank_that_ends_as_another_fails_with_an_error_of_its_own_is_secondary():
    """A launcher ends the others so soon that their last heartbeat may be older than the goodbye."""
    state = end(fail(beating({1: 99.8, 0: 99.8}, now_s=100), 1), 0)

    assert only(rank_failed(look(state))).ranks == (1,)
    assert only(rank_lost(look(state))).message == "rank 0 exited after rank 1 (secondary failure)"


@pytest.mark.parametrize(("later_s", "consequence"), [(0.3, True), (60, True), (61, False)])
def test_a_secondary_failure_comes_clearly_later_and_within_a_minute(later_s, consequence):
    findings = rank_lost(look(end(beating({1: 20, 0: 20 + later_s}, now_s=100), 0, 1)))

    assert [finding.subject for finding in findings] == (["rank 1", "after"] if consequence else ["rank 1", "rank 0"])


@pytest.mark.parametrize("later_s", [0, 0.2])
def test_of_ranks_that_end_too_close_together_none_is_called_the_first(later_s):
    finding = only(rank_lost(look(end(beating({1: 20, 0: 20 + later_s}, now_s=100), 0, 1))))

    assert finding.message == ("ranks 0-1: exited unexpectedly, too close together to know which was first")
    assert finding.severity is Severity.CRITICAL
    assert "the launcher terminated the rest" in finding.advice


def test_an_end_is_reported_once_every_other_rank_has_outlived_it_or_ended():
    state = beating({1: 99.9, 2: 99.95}, now_s=100)
    state.apply(wire.Gone(rank=1, seq=0), state.now_ns)
    state.apply(make_beat(0, seq=9, step=90), state.now_ns + RankLostLimits.PROOF_NS)
    state.apply(make_beat(3, seq=9, step=90), state.now_ns)
    assert rank_lost(look(state)) == [], "rank 2 has not been heard since"

    state.tick(state.now_ns + LivenessLimits.NO_HEARTBEAT_NS - RankLostLimits.PROOF_NS)
    outlived(state)
    assert only(rank_lost(look(state))).ranks == (1,), "rank 2 is silent, which takes longer to tell"


def test_a_rank_that_was_killed_before_others_failed_is_not_their_secondary_failure():
    state = fail(end(beating({1: 80.0, 0: 80.1}, now_s=81), 1), 0)

    assert only(rank_lost(look(state))).severity is Severity.CRITICAL


@pytest.mark.parametrize("how", ["lost", "silent"])
def test_a_host_that_is_gone_as_a_whole_is_named(how):
    state = beating({2: 80, 3: 80}, hosts=["node-a", "node-a", "node-b", "node-b"])
    finding = only(rank_lost(look(end(state, 2, 3) if how == "lost" else state)))

    assert finding.message.startswith("host node-b (ranks 2-3)")
    assert (finding.subject, finding.ranks) == ("host node-b", (2, 3))


def test_a_lost_host_that_ended_all_other_ranks_is_no_viewer_that_is_cut_off():
    state = beating({2: 90, 3: 90}, hosts=["node-a", "node-a", "node-b", "node-b"])
    for rank in (0, 1):
        text = "RuntimeError: Connection closed by peer [10.99.0.2]:4711"
        state.apply(wire.Bye(rank=rank, seq=9_000_000, reason="failed", text=text, mono_ns=1), int(91e9))
    state.tick(int(110e9))

    (finding,) = [each for each in rank_lost(look(state)) if each.subject == "host node-b"]
    assert "is down or unreachable: no heartbeat from its 2 ranks for 20 s" in finding.message
    assert finding.ranks == (2, 3)


def test_the_first_silent_rank_of_a_host_waits_for_the_others():
    hosts = ["node-a", "node-a", "node-b", "node-b"]

    assert rank_lost(look(beating({2: 94.9, 3: 95.1}, hosts=hosts))) == []
    assert only(rank_lost(look(beating({2: 94.7, 3: 94.9}, hosts=hosts)))).subject == "host node-b"
    assert only(rank_lost(look(beating({2: 94.0, 3: 97.0}, hosts=hosts)))).subject == "rank 2"


def test_part_of_a_host_is_reported_by_rank():
    state = end(beating({2: 20}, hosts=["node-a", "node-b", "node-b", "node-b"]), 1, 2)

    assert [finding.subject for finding in rank_lost(look(state))] == ["rank 2", "rank 1"]


def test_many_ranks_that_end_together_are_one_finding():
    finding = only(rank_lost(look(end(beating({}), 0, 1, 2, 3))))

    assert finding.message == ("all 4 ranks: exited unexpectedly, too close together to know which was first")
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


@pytest.mark.parametrize(
    ("code", "words"), [(-9, "was killed (SIGKILL)"), (-11, "crashed (SIGSEGV)"), (7, "exited with code 7")]
)
def test_ranks_that_were_asked_to_end_are_secondary_to_the_one_that_was_not(code, words):
    """The last heartbeat of rank 3 is older than that of rank 1, which proves nothing."""
    state = ended_with(beating({0: 99.9, 1: 99.9, 2: 99.9, 3: 99.7}, now_s=100), {0: -15, 1: code, 2: -15, 3: -15})
    first, after = rank_lost(look(state))

    assert first.message == f"rank 1 (node-a, pid 1001) {words}, last heartbeat in step 90"
    assert (first.ranks, after.ranks, after.message) == (
        (1,),
        (0, 2, 3),
        "ranks 0, 2-3 exited after rank 1 (secondary failures)",
    )


def test_two_ranks_killed_at_once_are_both_causes_of_what_follows():
    state = ended_with(beating(dict.fromkeys(range(3), 99.9), world=3, now_s=100), {0: -9, 1: -15, 2: -9})
    first, after = rank_lost(look(state))

    assert first.ranks == (0, 2)
    assert after.message == "rank 1 exited after ranks 0, 2 (secondary failure)"
    assert "what ended ranks 0, 2" in after.advice


def test_ends_without_an_order_have_no_single_cause():
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


def test_ranks_that_were_asked_to_end_at_once_are_one_finding():
    state = ended_with(beating(dict.fromkeys(range(3), 99.9), world=3, now_s=100), dict.fromkeys(range(3), -15))

    finding = only(rank_lost(look(state)))
    assert finding.message == "ranks 0-2: each was terminated (SIGTERM)"
    assert "stopped the job from outside" in finding.advice
    assert "OOM" not in finding.advice
    assert root_cause_text(outcome_of(state, ())) == "ranks 0-2 were terminated (SIGTERM)"


def ended_one_after_another(ends, hosts=("node-a",) * 4):
    """Ranks whose ends were observed: by rank, milliseconds before now, and the exit code."""
    state = beating(dict.fromkeys(range(4), 90), now_s=100, hosts=hosts)
    for rank, (ago_ms, code) in ends.items():
        state.apply(wire.Gone(rank=rank, seq=0, exit_code=code, ago_ns=ago_ms * 1_000_000), state.now_ns)
    return outlived(state)


@pytest.mark.parametrize("agos_ms", [(90, 60, 30, 1), (900, 890, 880, 100), (3000, 2200, 1400, 600)])
def test_one_signal_that_ends_ranks_one_after_another_has_no_first_failure(agos_ms):
    """However long it takes in all, if each ends shortly after another."""
    state = ended_one_after_another({rank: (ago_ms, -15) for rank, ago_ms in zip((1, 0, 3, 2), agos_ms, strict=True)})

    assert only(rank_lost(look(state))).ranks == (0, 1, 2, 3)
    assert root_cause_text(outcome_of(state, ())) == "ranks 0-3 were terminated (SIGTERM)"


def test_one_signal_to_several_hosts_has_no_first_failure():
    ends = {0: (700, -15), 1: (660, -15), 2: (110, -15), 3: (60, -15)}
    state = ended_one_after_another(ends, hosts=("node-a", "node-a", "node-b", "node-b"))

    assert root_cause_text(outcome_of(state, ())) == "ranks 0-3 were terminated (SIGTERM)"


@pytest.mark.parametrize(
    ("first", "reported"),
    [
        ((130, -9), "rank 2 was killed (SIGKILL); ranks 0-1, 3 after it"),
        ((60, -9), "rank 2 was killed (SIGKILL); ranks 0-1, 3 after it"),
        ((130, 1), "rank 2 exited with code 1; ranks 0-1, 3 after it"),
        ((1200, -15), "rank 2 was terminated (SIGTERM); ranks 0-1, 3 after it"),
        ((130, -1), "rank 2 was terminated (SIGHUP); ranks 0-1, 3 after it"),
    ],
)
def test_a_rank_that_ended_otherwise_or_long_before_is_the_first_failure(first, reported):
    """The launcher ends the others one after another, possibly before the first end is observed."""
    state = ended_one_after_another({2: first, 0: (90, -15), 1: (55, -15), 3: (20, -15)})

    assert root_cause_text(outcome_of(state, ())) == reported


def test_with_a_lost_connection_the_first_rank_ended_by_the_signal_is_the_first_failure():
    state = ended_one_after_another({1: (130, -15), 3: (20, -15)})
    for rank in (0, 2):
        state = fail(state, rank, CLOSED, at_s=99.95)

    assert root_cause_text(outcome_of(state, ())) == "rank 1 was terminated (SIGTERM); ranks 0, 2-3 after it"


LAUNCHER = "W1117 14:38:19.8 17639 torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal"


def test_a_signal_in_the_launchers_log_is_what_is_reported():
    """The line may be read after the ends were reported."""
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
    assert message.startswith("ranks 0-1: terminated (SIGTERM). The launcher was terminated from outside by SIGTERM")


def test_one_that_is_aborted_while_all_others_agree_was_most_likely_elsewhere():
    lost = only(rank_lost(broken(0, {1: LARGE, 2: LARGE, 3: LARGE})))

    assert lost.ranks == (0,)
    assert "all others were in all_reduce #66" in lost.message
