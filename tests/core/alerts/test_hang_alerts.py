"""The length of a hang that no step has come after, and when a hang is over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.hang_alerts import Hang, is_over, last_hang
from ddpwatch.core.alerts.model import Alert, Finding, Moment, Severity
from tests.builders.fake_rank import make_step
from tests.builders.hung_run import one_missing


def reported(waited, since=89, rule="stall", ranks=(2,), closed=None):
    """An alert on a wait; the run has done 90 steps, the last is number 89."""
    evidence = {"waiting_s": waited, "waiting": "ranks 0-1, 3"}
    finding = Finding(rule, Severity.CRITICAL, "group 0", "m", "a", ranks, evidence=evidence)
    end = None if closed is None else Moment(closed, 2, 0)
    return Alert(finding, Moment(since, 1, 0), Moment(since, 1, 0), end)


def test_the_longest_wait_since_the_last_step_counts_with_its_missing_ranks():
    alerts = [reported(12.0), reported(33.2, rule="timeout"), reported(33.0, rule="desync", ranks=())]

    assert last_hang(one_missing(), alerts) == Hang(33.2, (2,))


@pytest.mark.parametrize(
    "alert",
    [
        reported(33.0, since=40, closed=60),
        reported(33.0, since=40),
        reported(33.0, rule="straggler"),
        reported("nonsense"),
        reported(float("nan")),
        reported(float("inf")),
        reported(-1.0),
    ],
)
def test_a_hang_that_steps_came_after_another_rule_and_nonsense_count_for_nothing(alert):
    assert last_hang(one_missing(), [alert]) is None


def test_a_hang_before_the_first_step_counts():
    assert last_hang(one_missing(steps=0), [reported(125.0, since=None)]) == Hang(125.0, (2,))


def left(state, reason="exit", ranks=range(4)):
    """All of them have said goodbye, or these."""
    for rank in ranks:
        state.apply(wire.Bye(rank=rank, seq=9, reason=reason, text="", mono_ns=9), state.now_ns)
    return state


def test_a_hang_is_over_when_all_ranks_have_done_a_step_since_it_was_last_found():
    state = one_missing()
    alert = reported(4.0)
    assert not is_over(state, alert)

    for rank in (0, 1, 3):
        state.apply(wire.Steps(rank=rank, seq=5, steps=[make_step(90)]), state.now_ns)
    assert not is_over(state, alert), "one has not"
    state.apply(wire.Steps(rank=2, seq=5, steps=[make_step(90)]), state.now_ns)
    assert is_over(state, alert)
    assert not is_over(state, replace(alert, last=Moment(90, 2, 0))), "it was found again"
    assert not is_over(state, reported(4.0, rule="straggler")), "another rule is about no wait"


@pytest.mark.parametrize(("reason", "over"), [("exit", True), ("closed", True), ("failed", False), ("off", False)])
def test_a_hang_is_over_when_all_ranks_have_said_goodbye_well(reason, over):
    assert not is_over(left(one_missing(), ranks=(0, 1, 3)), reported(4.0)), "one of them has not"
    state = left(left(one_missing(), ranks=(0, 1, 3)), reason)

    assert is_over(state, reported(4.0)) is over
    assert (last_hang(state, [reported(4.0)]) is None) is over


def test_a_timeout_does_not_end_a_hang():
    gave_up = replace(reported(4.0), finding=Finding("timeout", Severity.CRITICAL, "fired", "m", "a", ends_wait=True))

    assert not is_over(left(one_missing()), gave_up)
