"""Alerts as objects and as lines."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta, timezone

import pytest

from ddpwatch.core.alerts.model import Alert, AlertEvent, Finding, Moment, Severity
from ddpwatch.core.alerts.severity import most_urgent_first
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.view.alerts.format import alert_object, event_lines, event_object
from ddpwatch.view.alerts.page import alert_facts
from ddpwatch.view.cells import Level, line_columns, plain
from ddpwatch.view.run_view import current_view
from ddpwatch.view.status import status_object, status_screen
from tests.builders.fake_rank import make_hello, make_snap, make_step

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202eevil\nname"
UNIX_NS = 1_794_809_551_123_999_999
KEYS = [
    "rule", "severity", "ranks", "phase", "phases", "message", "advice", "cost", "evidence", "since", "since_step",
    "opened",
    "from_step", "upto_step", "last", "open",
]  # fmt: skip


def make_alert(*, since_ns=1, unix_ns=UNIX_NS, closed=False, seen=59, **changed):
    fields = {
        "rule": "straggler",
        "severity": Severity.WARNING,
        "subject": "rank 3",
        "message": "rank 3 is slow",
        "advice": "look at it",
        "ranks": (3,),
        "phase": "backward",
        "cost": 0.123456,
        "evidence": {"excess_ms": 1.5, "steps": 40, "pattern": "lasting"},
    }
    at = Moment(17, since_ns, unix_ns)
    return Alert(Finding(**{**fields, **changed}), at, replace(at, step=seen), at if closed else None)


def put(monitor, *alerts):
    """Open these in the book, whatever the rules find."""
    monitor.evaluate_now()
    for alert in alerts:
        monitor.book.open[alert.key] = alert
    return monitor


def make_monitor(world=2, steps=60):
    state = RunState("ab12cd34", "train", world)
    for rank in range(world):
        history = [make_step(index, sync=1) for index in range(steps)]
        state.apply(make_snap(rank, hello=make_hello(rank, world_size=world), steps=history), now_ns=1)
    return Monitor(state)


def first_line(alert, kind="opened", zone=timezone.utc):
    return event_lines(AlertEvent(kind, alert), zone)[0]


def screen(monitor, columns=80, rows=None):
    return [plain(line) for line in status_screen(current_view(monitor), columns, rows)]


def test_an_alert_as_an_object():
    assert alert_object(make_alert()) == {
        "rule": "straggler",
        "severity": "warning",
        "ranks": [3],
        "phase": "backward",
        "phases": ["backward"],
        "message": "rank 3 is slow",
        "advice": "look at it",
        "cost": 0.1235,
        "evidence": {"excess_ms": 1.5, "steps": 40, "pattern": "lasting"},
        "since": "2026-11-16T06:12:31.123Z",
        "since_step": 17,
        "opened": "2026-11-16T06:12:31.123Z",
        "from_step": None,
        "upto_step": None,
        "last": "2026-11-16T06:12:31.123Z",
        "open": True,
    }


def test_since_is_when_a_wait_began_and_opened_when_its_alert_was():
    alert = replace(make_alert(from_step=19, upto_step=79), waited_ns=5_000_000_000)
    reported = alert_object(alert)

    assert (reported["from_step"], reported["upto_step"]) == (19, 79)
    assert (reported["since"], reported["opened"]) == ("2026-11-16T06:12:26.123Z", "2026-11-16T06:12:31.123Z")
    assert ("since", "06:12:26 UTC, step 17") in alert_facts(alert)


def test_what_is_not_known_is_none_and_no_key_is_left_out():
    bare = alert_object(make_alert(unix_ns=0, closed=True, phase=None, cost=None, evidence={}, ranks=()))

    assert list(bare) == KEYS
    assert [bare[key] for key in ("phase", "cost", "since", "last", "open")] == [None, None, None, None, False]


@pytest.mark.parametrize("unix_ns", [2**62, 2**80, -5])
def test_a_time_that_no_calendar_has_is_not_known(unix_ns):
    alert = make_alert(unix_ns=unix_ns)

    assert alert_object(alert)["since"] is None
    assert plain(first_line(alert)).startswith("--:--:-- ▲ warning")


def test_numbers_that_json_has_no_word_for_are_none():
    endless = alert_object(make_alert(cost=float("nan"), evidence={"x": float("inf")}))

    assert (endless["cost"], endless["evidence"]) == (None, {"x": None})
    json.dumps(endless, allow_nan=False)


def test_a_change_names_its_kind_and_its_run():
    change = event_object(AlertEvent("opened", make_alert()), run_id="ab12", run_name="train")

    assert list(change) == ["schema", "event", "run", *KEYS]
    assert (change["schema"], change["event"], change["run"]) == (1, "opened", {"id": "ab12", "name": "train"})


def test_a_line_has_time_severity_kind_and_rule():
    east = timezone(timedelta(hours=2))

    assert plain(first_line(make_alert())) == "06:12:31 ▲ warning opened straggler: rank 3 is slow"
    assert plain(first_line(make_alert(), "changed", east)).startswith("08:12:31 ▲ warning changed straggler")
    critical = first_line(make_alert(severity=Severity.CRITICAL))
    assert "✖ critical" in plain(critical)
    assert Level.BAD in {cell.level for cell in critical}


def test_only_what_is_opened_comes_with_advice():
    opened, advice = event_lines(AlertEvent("opened", make_alert()))

    assert plain(advice) == "           look at it"
    assert plain(advice).index("l") == plain(opened).index("w")
    assert len(event_lines(AlertEvent("changed", make_alert()))) == 1
    assert len(event_lines(AlertEvent("closed", make_alert(closed=True)))) == 1


def test_hostile_text_is_sanitized():
    event = AlertEvent(
        "opened", make_alert(message=HOSTILE * 500, advice=HOSTILE, evidence={"host": HOSTILE}, subject=HOSTILE)
    )
    monitor = put(make_monitor(), event.alert)
    change = event_object(event, run_id=HOSTILE, run_name=HOSTILE)
    text = "".join([*map(plain, event_lines(event)), *screen(monitor), json.dumps(change, ensure_ascii=False)])

    assert text.isprintable()
    assert "owned" not in text
    assert len(change["message"]) <= 1000


def test_the_most_severe_come_first_and_of_these_the_oldest():
    alerts = [
        make_alert(subject="c", since_ns=3),
        make_alert(subject="a", since_ns=9, severity=Severity.CRITICAL),
        make_alert(subject="d", severity=Severity.INFO),
        make_alert(subject="b", since_ns=2),
    ]
    monitor = put(make_monitor(), *alerts)
    status = status_object(current_view(monitor))

    assert [alert.finding.subject for alert in most_urgent_first(alerts)] == ["a", "b", "c", "d"]
    assert [alert["severity"] for alert in status["alerts"]] == ["critical", "warning", "warning", "info"]


def test_what_stops_the_job_comes_before_what_costs_much():
    slow = make_alert(rule="straggler", subject="slow", severity=Severity.CRITICAL, cost=0.5)
    lost = make_alert(rule="rank-lost", subject="lost", severity=Severity.CRITICAL, since_ns=9)
    waits = make_alert(rule="stall", subject="waits", severity=Severity.WARNING)

    assert [alert.finding.subject for alert in most_urgent_first([slow, waits, lost])] == ["lost", "slow", "waits"]


def test_the_screen_shows_the_three_most_urgent_and_how_many_more():
    monitor = put(
        make_monitor(),
        make_alert(rule="memory", subject="x", severity=Severity.INFO, message="it grows"),
        make_alert(rule="rank-lost", subject="x", severity=Severity.CRITICAL, message="rank 0 is gone"),
        make_alert(),
        make_alert(rule="uneven-batch", subject="x", message="differ"),
        make_alert(rule="drift", subject="x", severity=Severity.INFO, message="apart"),
    )
    lines = screen(monitor)
    first = lines.index("✖ rank-lost   rank 0 is gone")

    assert lines[first + 1] == "▲ straggler   rank 3 is slow"
    assert lines[first + 2] == "▲ uneven-batch  differ"
    assert lines[first + 3].strip() == "2 more alerts"
    assert "it grows" not in "".join(lines)
    assert any(line == "✖ rank-lost   (+4 more) rank 0 is gone" for line in screen(monitor, rows=9))


@pytest.mark.parametrize("word", ["模型 ", "word ", "x"])
def test_a_long_alert_gets_two_lines_and_is_cut_to_the_terminal(word):
    short, long = (put(make_monitor(), make_alert(message=word * count)) for count in (1, 300))
    lines = screen(long)

    assert max(line_columns(line) for line in status_screen(current_view(long), 80)) <= 80
    assert len(lines) == len(screen(short)) + 1
    first = next(number for number, line in enumerate(lines) if line.startswith("▲ straggler"))
    assert lines[first + 1].endswith("…")


def test_alerts_are_shown_before_there_are_figures():
    monitor = put(Monitor(RunState("ab12cd34", "train", 2)), make_alert(rule="rank-lost", message="gone"))

    assert "▲ rank-lost   gone" in screen(monitor)


def test_the_table_marks_ranks_with_open_alerts_and_the_own_work_of_stragglers():
    monitor = put(make_monitor(world=4), make_alert(ranks=(1, 3)), make_alert(rule="memory", ranks=(0,)))
    rows = [line for line in screen(monitor) if line.lstrip()[:1].isdigit()]

    assert [row.count("▲") for row in rows] == [1, 2, 0, 2]
    assert rows[0].endswith("▲ memory")


def test_a_finding_within_the_noise_is_called_unproven():
    monitor = make_monitor()
    suspicion = make_alert(subject="rank 1", evidence={"excess_ms": 1.74}).finding
    monitor.book.unproven["straggler"] = [make_alert(subject="rank 0", evidence={}).finding, suspicion]

    assert "slowest rank  inconclusive: rank 1 looks 6% slower, which is within noise" in screen(monitor)
    put(monitor, make_alert())
    assert not any(line.startswith("slowest rank") for line in screen(monitor))


def test_before_the_first_evaluation_no_rank_is_cleared():
    assert "slowest rank  unknown: too few steps yet" in screen(make_monitor(steps=15))
    assert "slowest rank  none stands out" in screen(make_monitor(steps=60))
