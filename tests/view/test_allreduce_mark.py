"""The mark beside the all-reduce share agrees with the alert."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpwatch.core.alerts.model import Alert, Finding, Moment, Severity
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.view.allreduce import share_lines, share_mark
from ddpwatch.view.overview import allreduce_card
from tests.builders.fake_rank import make_snap, make_step
from tests.view.pages import make_run_view, texts

KEY = ("comm-share", "job")


def make_monitor(sync_ms, steps=120):
    state = RunState("ab12cd34ab12cd34", "train", 2)
    for rank in range(2):
        done = [make_step(index, sync=sync_ms) for index in range(steps)]
        state.apply(make_snap(rank, 5, done), now_ns=1)
    return Monitor(state)


def with_alert(monitor, *, is_open, last=119):
    """Run view with the alert open or not, whatever the rule finds."""
    seen = make_run_view(monitor)
    at = Moment(last, 1, 0)
    alert = Alert(Finding(*KEY[:1], Severity.WARNING, "job", "m", "a"), at, at)
    return replace(seen, alerts=(alert,) if is_open else ())


@pytest.mark.parametrize(
    ("sync_ms", "is_open", "mark"),
    [
        (2, False, ""),
        (2, True, "▲ was over 10%"),
        (9, True, "▲ over 10%"),
        (9, False, ""),
    ],
)
def test_it_is_there_while_the_alert_is_open(sync_ms, is_open, mark):
    seen = with_alert(make_monitor(sync_ms), is_open=is_open)

    assert share_mark(seen) == mark
    card = texts(allreduce_card(seen, 40))[0]
    headline = texts(share_lines(seen, 100, 3))[0]
    assert ("▲" in card) == ("▲" in headline) == bool(mark)
    assert ("✓ under" in headline) == (sync_ms == 2 and not is_open)


def test_with_too_few_steps_for_the_rule_the_share_alone_decides():
    assert share_mark(make_run_view(make_monitor(9, steps=15))) == "▲ over 10%"
    assert share_mark(make_run_view(make_monitor(2, steps=15))) == ""


def test_a_stale_alert_marks_nothing():
    seen = with_alert(make_monitor(2), is_open=True, last=40)

    assert share_mark(replace(seen, alerts=tuple(replace(alert, stale=True) for alert in seen.alerts))) == ""


@pytest.mark.parametrize("sync_ms", [2, 9])
def test_the_mark_agrees_with_the_rule(sync_ms):
    seen = make_run_view(make_monitor(sync_ms))

    assert bool(share_mark(seen)) == (KEY in seen.monitor.book.open) == (sync_ms == 9)
