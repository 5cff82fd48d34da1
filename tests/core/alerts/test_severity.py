"""Severity of a rank, from its condition and the findings that name it."""

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Alert, Severity
from ddpwatch.core.alerts.severity import findings_by_rank, rank_severity, steady_severity
from ddpwatch.core.limits import LivenessLimits
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import make_beat, make_snap
from tests.builders.findings import at, finding


def make_rank(bye=""):
    state = RunState("ab12cd34", "train", 1)
    state.apply(make_snap(0, seq=5), now_ns=1)
    if bye:
        state.apply(wire.Bye(rank=0, seq=6, reason=bye, text="", mono_ns=9), now_ns=1)
    return state.ranks[0]


@pytest.mark.parametrize(
    ("condition", "found", "severity"),
    [
        ("ok", None, None),
        ("ended", None, None),
        ("paused", Severity.INFO, Severity.INFO),
        ("ok", Severity.CRITICAL, Severity.CRITICAL),
        ("silent", None, Severity.WARNING),
        ("silent", Severity.INFO, Severity.WARNING),
        ("silent", Severity.CRITICAL, Severity.CRITICAL),
        ("missing", None, Severity.CRITICAL),
        ("lost", Severity.INFO, Severity.CRITICAL),
        ("failed", Severity.WARNING, Severity.CRITICAL),
    ],
)
def test_a_rank_is_as_bad_as_the_worse_of_its_condition_and_its_finding(condition, found, severity):
    named = None if found is None else finding(severity=found)

    assert rank_severity(make_rank(), condition, named) is severity


@pytest.mark.parametrize(
    ("condition", "found", "marked"),
    [
        ("ok", None, Severity.WARNING),
        ("ok", Severity.INFO, Severity.WARNING),
        ("ok", Severity.CRITICAL, Severity.CRITICAL),
        ("paused", None, None),
        ("ended", None, None),
    ],
)
def test_a_rank_that_is_long_in_one_phase_is_marked_and_keeps_its_place(condition, found, marked):
    rank, named = make_rank(), None if found is None else finding(severity=found)
    rank.beat = make_beat(0, 6, phase_ns=LivenessLimits.LONG_IN_PHASE_NS)

    assert rank_severity(rank, condition, named) is marked
    assert steady_severity(rank, condition, named) is found


def test_a_rank_whose_agent_switched_itself_off_is_a_warning():
    assert rank_severity(make_rank("off"), "ended", None) is Severity.WARNING
    assert rank_severity(make_rank("exit"), "ended", None) is None


def test_the_most_urgent_alert_that_is_not_stale_speaks_for_a_rank():
    def alert(subject, stale=False, **changed):
        return Alert(finding(subject, **changed), at(1), at(1), stale=stale)

    slow = alert("slow", ranks=(1, 2))
    stuck = alert("stuck", rule="stall", ranks=(2,))
    gone = alert("gone", stale=True, severity=Severity.CRITICAL, ranks=(1, 3))

    assert findings_by_rank([slow, gone, stuck]) == {1: slow.finding, 2: stuck.finding}
