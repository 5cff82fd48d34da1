"""What the watched logs say, beside what the ranks tell themselves: once."""

from __future__ import annotations

import pytest
from test_core_arrivals import one_missing
from test_detectors_all import SECOND, look, only
from test_detectors_endings import beating, end, fail
from test_detectors_hangs import GLOO, failed

from ddpwatch import wire
from ddpwatch.core.alerts import Severity
from ddpwatch.core.detectors.rank_failed import rank_failed
from ddpwatch.core.detectors.rank_lost import rank_lost
from ddpwatch.core.detectors.timeout import timeout
from ddpwatch.core.state import SILENT_AFTER_NS

RAISED = "[rank1]: ValueError: bad"


def logged(state, *lines, source="job.log"):
    """These lines have come in a log."""
    numbered = [wire.LogLine(number, line) for number, line in enumerate(lines, 1)]
    state.apply(wire.LogLines(rank=0, seq=0, source=source, lines=numbered), state.now_ns)
    return state


@pytest.mark.parametrize("line", [RAISED, "ValueError: bad"])
def test_an_exception_in_a_log_is_no_failure_as_long_as_the_ranks_that_may_have_raised_it_live(line):
    """Scripts print what they catch."""
    state = logged(beating({}), line)
    assert rank_failed(look(state)) == []

    state.tick(state.now_ns + SILENT_AFTER_NS)
    assert only(rank_failed(look(state))).subject == "logs"


def test_a_failure_that_the_log_tells_too_is_told_once_with_its_line():
    finding = only(rank_failed(look(logged(fail(beating({}), 1), RAISED))))

    assert (finding.subject, finding.ranks, finding.severity) == ("rank 1", (1,), Severity.CRITICAL)
    assert "Rank 1 raised ValueError: bad" in finding.evidence["logs"]
    assert finding.evidence["line_1"] == f"job.log:1 {RAISED}"


def test_a_log_that_names_another_rank_is_told_beside():
    state = logged(end(fail(beating({}), 2), 1), RAISED)

    assert {finding.subject for finding in rank_failed(look(state))} == {"rank 2", "logs"}


def test_a_timeout_that_the_log_tells_too_is_told_once():
    state = failed(one_missing(), {0: GLOO, 1: GLOO, 3: GLOO})
    finding = only(timeout(look(logged(state, f"[rank0]: {GLOO}", f"[rank1]: {GLOO}"))))

    assert (finding.subject, finding.ranks) == ("fired", (2,))
    assert "timed out" in finding.evidence["logs"]


def test_a_launcher_that_was_told_to_end_is_told_with_the_ranks_that_it_ended():
    state = beating(dict.fromkeys(range(4), 99.9), now_s=100)
    for rank in range(4):
        state.apply(wire.Gone(rank=rank, seq=0, exit_code=-15), state.now_ns)
    state.tick(state.now_ns + SECOND)
    finding = only(rank_lost(look(logged(state, "Received 15 death signal, shutting down workers"))))

    assert finding.ranks == (0, 1, 2, 3)
    assert "ended from outside by SIGTERM" in finding.evidence["logs"]
