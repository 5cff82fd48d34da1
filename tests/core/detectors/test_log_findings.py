"""Findings from watched logs beside those from the ranks: each is reported once."""

from __future__ import annotations

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.rank_failed import rank_failed
from ddpwatch.core.detectors.rank_lost import rank_lost
from ddpwatch.core.detectors.timeout import timeout
from ddpwatch.core.limits import EvaluationLimits, LivenessLimits
from ddpwatch.core.monitor import Monitor
from tests.builders.ended_run import LARGE, SMALL, beating, broken, end, ended_with, fail, outlived
from tests.builders.hung_run import GLOO, failed, one_missing
from tests.builders.synthetic_run import SECOND, look, only

RAISED = "[rank1]: ValueError: bad"
MISMATCH = (
    "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8192 vs 4096. "
    "Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?"
)
LOST = "[rank2]: RuntimeError: [gloo/transport/tcp/pair.cc:539] Connection closed by peer [127.0.0.1]:28345"


def logged(state, *lines, source="job.log"):
    """Ingest these lines of a log."""
    numbered = [wire.LogLine(number, line) for number, line in enumerate(lines, 1)]
    state.apply(wire.LogLines(rank=0, seq=0, source=source, lines=numbered), state.now_ns)
    return state


@pytest.mark.parametrize("line", [RAISED, "ValueError: bad"])
def test_an_exception_in_a_log_is_no_failure_as_long_as_the_ranks_that_may_have_raised_it_live(line):
    """Scripts print exceptions that they catch."""
    state = logged(beating({}), line)
    assert rank_failed(look(state)) == []

    state.tick(state.now_ns + LivenessLimits.NO_HEARTBEAT_NS)
    assert only(rank_failed(look(state))).subject == "logs"


def test_a_failure_that_is_in_the_log_too_is_reported_once_with_its_line():
    finding = only(rank_failed(look(logged(fail(beating({}), 1), RAISED))))

    assert (finding.subject, finding.ranks, finding.severity) == ("rank 1", (1,), Severity.CRITICAL)
    assert "Rank 1 raised ValueError: bad" in finding.evidence["logs"]
    assert finding.evidence["line_1"] == f"job.log:1 {RAISED}"


def test_a_log_that_names_another_rank_is_a_finding_of_its_own():
    state = logged(end(fail(beating({}), 2), 1), RAISED)

    assert {finding.subject for finding in rank_failed(look(state))} == {"rank 2", "logs"}


def test_a_timeout_that_is_in_the_log_too_is_reported_once():
    state = failed(one_missing(), {0: GLOO, 1: GLOO, 3: GLOO})
    finding = only(timeout(look(logged(state, f"[rank0]: {GLOO}", f"[rank1]: {GLOO}"))))

    assert (finding.subject, finding.ranks) == ("fired", (2,))
    assert "timed out" in finding.evidence["logs"]


def test_a_signal_to_the_launcher_is_reported_with_the_ranks_that_it_ended():
    state = beating(dict.fromkeys(range(4), 99.9), now_s=100)
    for rank in range(4):
        state.apply(wire.Gone(rank=rank, seq=0, exit_code=-15), state.now_ns)
    state.tick(state.now_ns + SECOND)
    finding = only(rank_lost(look(logged(state, "Received 15 death signal, shutting down workers"))))

    assert finding.ranks == (0, 1, 2, 3)
    assert "terminated from outside by SIGTERM" in finding.evidence["logs"]


def reported_in_time(monitor, seconds):
    """Rules with an alert above INFO at any evaluation of the next seconds."""
    reported = set()
    for _ in range(int(seconds * SECOND / EvaluationLimits.INTERVAL_NS)):
        monitor.state.tick(monitor.state.now_ns + EvaluationLimits.INTERVAL_NS)
        monitor.evaluate_now()
        reported |= {alert.key for alert in monitor.book.open.values() if alert.finding.severity > Severity.INFO}
    return reported


@pytest.mark.parametrize("line", [MISMATCH, LOST])
def test_an_abort_that_is_in_the_log_before_the_end_is_seen_is_reported_once(line):
    """The line is read at once; the end of a process counts once no other can have been the first."""
    state = logged(beating(dict.fromkeys(range(4), 99.9), now_s=100), line)
    monitor = Monitor(state)
    assert reported_in_time(monitor, 0.75) == set()
    ended_with(state, {0: -6, 1: -15, 2: -15, 3: -15})

    assert reported_in_time(monitor, 6) == {("rank-lost", "aborted")}
    evidence = monitor.book.open["rank-lost", "aborted"].finding.evidence
    assert evidence["line_1"] == f"job.log:1 {line}"


@pytest.mark.parametrize("line", [MISMATCH, LOST])
def test_an_abort_with_known_operations_is_reported_once_with_the_rank_out_of_line(line):
    state = logged(broken(0, {1: LARGE, 2: SMALL, 3: SMALL}).state, line)
    monitor = Monitor(state)

    assert reported_in_time(monitor, 6) == {("desync", "broken")}
    reported = monitor.book.open["desync", "broken"].finding
    assert (reported.ranks, "line_1" in reported.evidence) == ((1,), True)


def test_a_log_without_a_culprit_opens_an_alert_where_nothing_else_explains_it():
    state = logged(beating(dict.fromkeys(range(4), 99.9), now_s=100), MISMATCH)
    monitor = Monitor(state)
    for _ in range(5):
        outlived(state)
        reported = reported_in_time(monitor, 0.75)

    assert reported == {("desync", "logs")}


def test_a_failure_is_reported_once_though_its_line_is_read_before_it_is_settled():
    state = logged(beating({}), RAISED)
    monitor = Monitor(state)
    state.apply(wire.Bye(rank=1, seq=5, reason="failed", text="ValueError: bad", mono_ns=1), state.now_ns)
    reported = reported_in_time(monitor, 0.25)
    reported |= (outlived(state), reported_in_time(monitor, 0.5))[1]

    assert reported == {("rank-failed", "rank 1")}


@pytest.mark.parametrize("code", [-9, -11])
def test_a_killed_or_crashed_rank_is_reported_once_though_the_launcher_logs_its_exit_code(code):
    report = ("Root Cause (first observed failure):", "[0]:", "  rank      : 2 (local_rank: 2)",
              f"  exitcode  : {code} (pid: 1002)")  # fmt: skip
    state = ended_with(beating(dict.fromkeys(range(4), 99.9), now_s=100), {2: code, 0: -15, 1: -15, 3: -15})
    monitor = Monitor(logged(state, *report))

    assert reported_in_time(monitor, 4) == {("rank-lost", "rank 2")}
    assert "logs" in monitor.book.open["rank-lost", "rank 2"].finding.evidence
