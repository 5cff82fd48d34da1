"""Replayed alerts: between two recorded events they have neither more nor less than was recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Alert, AlertEvent, Moment
from ddpwatch.core.alerts.recorded import RecordedAlerts, read_alerts, write_alerts
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from tests.builders.findings import finding

SECOND_NS = 1_000_000_000


def at(step):
    return Moment(step, step * SECOND_NS, 0)


def watched(*words):
    """A straggler that opened at step 10 and never closed, whose finding was recorded at these steps."""
    slow = finding(from_step=5, upto_step=10)
    engine = RecordedAlerts([(10 * SECOND_NS, AlertEvent("opened", Alert(slow, at(10), at(10))))])
    monitor = Monitor(RunState("ab12cd34", "train", 2), engine=engine)
    for step in words:
        monitor.tick(step * SECOND_NS)
        reads = Alert(finding(message=f"words of {step}", from_step=5, upto_step=step), at(10), at(step))
        engine.refresh(write_alerts([reads]), step * SECOND_NS)
    monitor.tick(100 * SECOND_NS)
    (alert,) = monitor.book.open.values()
    return alert


def test_findings_recorded_between_events_have_the_last_step():
    alert = watched(20, 60)

    assert (alert.finding.message, alert.finding.upto_step, alert.last.now_ns) == ("words of 60", 60, 100 * SECOND_NS)


def test_an_alert_that_had_ended_was_not_found_since():
    engine = RecordedAlerts([(10 * SECOND_NS, AlertEvent("opened", Alert(finding(), at(10), at(10))))])
    monitor = Monitor(RunState("ab12cd34", "train", 2), engine=engine)
    monitor.tick(20 * SECOND_NS)
    reads = Alert(finding(from_step=5, upto_step=15, ended=True), at(10), at(16))
    engine.refresh(write_alerts([reads]), 20 * SECOND_NS)
    monitor.tick(100 * SECOND_NS)

    (alert,) = monitor.book.open.values()
    assert (alert.finding.upto_step, alert.last) == (15, at(16))


def test_the_finding_of_the_opening_alone_does_not():
    assert watched().finding.upto_step is None
    assert watched().last.now_ns == 100 * SECOND_NS


@pytest.mark.parametrize("steps", [{"upto_step": -1}, {"from_step": 2**63 - 1}, {"again_from": -1}])
def test_impossible_steps_are_refused(steps):
    possible = Alert(finding(from_step=1, upto_step=2), at(1), at(2))
    odd = Alert(finding(**{"from_step": 1, "upto_step": 2, **steps}), at(1), at(2))

    assert [alert.finding for alert in read_alerts(write_alerts([odd, possible]))] == [possible.finding]


def test_a_worst_finding_is_sanitized_and_one_of_another_alert_refused():
    mine = Alert(finding(), at(1), at(2), worst=finding(message="bad\x1b[31m", cost=0.9))
    foreign = Alert(finding(), at(1), at(2), worst=finding(subject="rank 7"))
    odd = Alert(finding(), at(1), at(2), worst=finding(cost=float("inf")))

    sanitized, alone = read_alerts(write_alerts([mine, foreign, odd]))
    assert "\x1b" not in sanitized.at_worst.finding.message
    assert sanitized.at_worst.finding.cost == 0.9
    assert alone.worst is None


def test_what_goes_on_after_its_recorder_was_killed_was_as_bad_as_it_was_before():
    worst, reset = finding(message="worst", cost=0.9), finding(message="judged anew")
    opened, cut = Alert(worst, at(10), at(10)), Alert(worst, at(10), at(20), closed=Moment(None, 20 * SECOND_NS, 0))
    again = Alert(reset, Moment(10, 30 * SECOND_NS, 0), at(30))
    events = [(10, AlertEvent("opened", opened)), (20, AlertEvent("closed", cut)), (30, AlertEvent("opened", again))]
    engine = RecordedAlerts([(s * SECOND_NS, event) for s, event in events])
    monitor = Monitor(RunState("ab12cd34", "train", 2), engine=engine)
    for second in (15, 25, 35):
        monitor.tick(second * SECOND_NS)

    (alert,) = monitor.book.open.values()
    assert (alert.finding.message, alert.at_worst.finding.message) == ("judged anew", "worst")


def test_a_hang_that_its_recorder_closed_after_the_end_of_the_run_is_closed_once():
    waits = finding(rule="stall", evidence={"waiting_s": 4.0, "waiting": "rank 1"})
    alert = Alert(waits, at(10), at(10))
    over = replace(alert, last=at(12), closed=at(14))
    events = [(10, AlertEvent("opened", alert)), (16, AlertEvent("closed", over))]
    engine = RecordedAlerts([(s * SECOND_NS, event) for s, event in events])
    monitor = Monitor(RunState("ab12cd34", "train", 2), engine=engine)
    monitor.tick(11 * SECOND_NS)
    assert monitor.book.open
    for rank in range(2):
        bye = wire.Bye(rank=rank, seq=1, reason="exit", text="", mono_ns=9)
        monitor.ingest(wire.encode(bye), 12 * SECOND_NS)
    monitor.evaluate_now()

    assert (len(monitor.book.open), len(monitor.book.closed)) == (0, 1)
    monitor.tick(20 * SECOND_NS)
    assert (monitor.book.open, [each.closed for each in monitor.book.closed]) == ({}, [at(14)])


def test_staleness_is_as_recorded_and_not_evaluated_anew():
    """The run has no steps by which an alert could be stale."""
    engine = RecordedAlerts([(10 * SECOND_NS, AlertEvent("opened", Alert(finding(), at(10), at(10), stale=False)))])
    monitor = Monitor(RunState("ab12cd34", "train", 2), engine=engine)
    monitor.tick(20 * SECOND_NS)
    seen = Moment(15, 0, 7)
    engine.refresh(write_alerts([Alert(finding(), at(10), at(20), stale=True, seen=seen)]), 20 * SECOND_NS)
    monitor.evaluate_now()

    (alert,) = monitor.book.open.values()
    assert (alert.stale, alert.seen) == (True, seen)
