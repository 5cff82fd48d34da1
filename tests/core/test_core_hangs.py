"""The time of a hang that no step has come after."""

from __future__ import annotations

import pytest
from test_core_arrivals import one_missing

from ddpwatch.core.alerts import Alert, Finding, Moment, Severity
from ddpwatch.core.hangs import Hang, last_hang


def told(waited, since=89, rule="stall", ranks=(2,), closed=None):
    """An alert on a wait; the run has done 90 steps, the last is number 89."""
    finding = Finding(rule, Severity.CRITICAL, "group 0", "m", "a", ranks, evidence={"waiting_s": waited})
    end = None if closed is None else Moment(closed, 2, 0)
    return Alert(finding, Moment(since, 1, 0), Moment(since, 1, 0), end)


def test_the_longest_wait_since_the_last_step_counts_and_names_who_was_waited_for():
    alerts = [told(12.0), told(33.2, rule="timeout"), told(33.0, rule="desync", ranks=())]

    assert last_hang(one_missing(), alerts) == Hang(33.2, (2,))


@pytest.mark.parametrize(
    "alert",
    [
        told(33.0, since=40, closed=60),
        told(33.0, since=40),
        told(33.0, rule="straggler"),
        told("nonsense"),
        told(float("nan")),
        told(float("inf")),
        told(-1.0),
    ],
)
def test_a_hang_that_steps_came_after_another_rule_and_nonsense_count_for_nothing(alert):
    assert last_hang(one_missing(), [alert]) is None


def test_a_hang_before_the_first_step_counts():
    assert last_hang(one_missing(steps=0), [told(125.0, since=None)]) == Hang(125.0, (2,))
