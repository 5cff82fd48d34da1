"""The alerts page, as data."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch.core.alerts.model import Alert, Finding, Moment, Severity
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.view.alerts.page import alert_detail, alert_facts, alert_list, alert_text, all_alerts, evidence_facts
from ddpwatch.view.run_view import run_view
from tests.view.pages import HOSTILE, assert_fits, heights, make_monitor, page, run_views, texts, widths

MINUTE_NS = 60_000_000_000
LAST_STEP = 119
UNIX_NS = 1_790_000_000_000_000_000
"""21 September 2026, 14:13:20 UTC."""


def moment(step, unix_ns=UNIX_NS):
    return Moment(step, step * MINUTE_NS, unix_ns + step * MINUTE_NS if unix_ns else 0)


def make_alert(subject, severity=Severity.WARNING, since=1, closed=None, rule="straggler", **changed):
    finding = Finding(rule, severity, subject, f"{subject} is slow", "Buy a new one.", **changed)
    return Alert(finding, moment(since), moment(closed or since), None if closed is None else moment(closed))


def with_alerts(*alerts, seen=LAST_STEP, **options):
    """A view of a healthy run with these alerts, the open ones last found at a step."""
    monitor = make_monitor(slow=None)
    monitor.evaluate_now()
    for alert in alerts:
        if alert.closed is None:
            monitor.book.open[alert.key] = replace(alert, last=replace(alert.last, step=seen))
        else:
            monitor.book.closed.append(alert)
    # The others wait for nobody, but sync takes its share: that alert is not what is looked at here.
    monitor.book.open.pop(("comm-share", "job"), None)
    monitor.state.tick(10 * MINUTE_NS)
    return run_view(monitor, Timeline(), **options)


@st.composite
def alerts(draw):
    text = draw(st.sampled_from(["", "plain words " * 20, HOSTILE, "名" * 300, "x" * 500]))
    value = st.one_of(st.floats(), st.integers(-(2**62), 2**62), st.just(text))
    evidence = draw(st.dictionaries(st.sampled_from(["a_ms", "b_percent", "c_bytes", "d_s", "e", "_", text]), value))
    cost = draw(st.sampled_from([None, 0.0, 0.3, 5.0]))
    at = st.builds(Moment, st.sampled_from([None, 0, 10**6]), st.integers(0, 2**62), st.sampled_from([0, UNIX_NS, -5]))
    finding = Finding(
        rule=draw(st.sampled_from(["straggler", "lossy", "no-such-rule"])),
        severity=draw(st.sampled_from(Severity)),
        subject=text,
        message=text,
        advice=text,
        ranks=tuple(draw(st.lists(st.integers(0, 5000), max_size=50))),
        phase=draw(st.sampled_from([None, text])),
        cost=cost,
        evidence=evidence,
    )
    return Alert(finding, draw(at), draw(at), draw(st.one_of(st.none(), at)))


@settings(deadline=None, max_examples=60)
@given(alerts(), widths)
def test_a_detail_fits_any_width_and_its_text_has_no_controls(alert, columns):
    assert_fits(alert_detail(alert, columns), columns)
    assert all(char.isprintable() or char == "\n" for char in alert_text(alert))


@settings(deadline=None, max_examples=60)
@given(run_views(), widths, heights, st.integers(-1, 50), st.integers(-1, 50))
def test_a_list_fits_any_window(drawn, columns, rows, selected, first):
    assert_fits(alert_list(drawn, columns, rows, selected=selected, first=first), columns, rows)


def test_open_ones_come_first_most_urgent_on_top_then_closed_ones_newest_on_top():
    drawn = with_alerts(
        make_alert("old", closed=2),
        make_alert("warned", since=3),
        make_alert("new", closed=5, severity=Severity.CRITICAL),
        make_alert("burning", Severity.CRITICAL, since=4),
    )

    assert [alert.finding.subject for alert in all_alerts(drawn)] == ["burning", "warned", "new", "old"]


def test_looking_back_what_closed_later_is_open_and_what_opened_later_is_not_there():
    drawn = with_alerts(make_alert("past", closed=20), make_alert("then", since=25, closed=90), at=50)

    assert [alert.finding.subject for alert in all_alerts(drawn)] == ["then", "past"]
    lines = texts(alert_list(drawn, 120, 20, selected=0, first=0))
    assert "was open" in lines[1]
    assert "ended, 19m 00s" in lines[2]


def test_one_line_each_with_mark_state_rule_and_message():
    drawn = with_alerts(make_alert("rank 3", Severity.CRITICAL, since=4), make_alert("rank 1", closed=2))
    _, first, second = texts(alert_list(drawn, 120, 20, selected=1, first=0))

    assert first.split() == ["✖", "14:17:20", "open", "6m", "00s", "straggler", "rank", "3", "is", "slow"]
    assert second.split() == ["▌", "▲", "14:14:20", "ended,", "1m", "00s", "straggler", "rank", "1", "is", "slow"]


def test_where_no_clock_is_known_the_step_says_since_when():
    alert = replace(make_alert("rank 3"), since=moment(1, unix_ns=0))

    assert "step 1 " in texts(alert_list(with_alerts(alert), 120, 20, selected=0, first=0))[1]


def test_exactly_the_selected_one_is_marked():
    drawn = with_alerts(*(make_alert(f"rank {number}") for number in range(5)))
    lines = texts(alert_list(drawn, 80, 20, selected=3, first=0))

    assert [text.startswith("▌") for text in lines] == [False, False, False, False, True, False]


def test_what_is_above_and_below_is_announced():
    drawn = with_alerts(*(make_alert(f"rank {number}") for number in range(10)))
    lines = texts(alert_list(drawn, 80, 5, selected=4, first=3))

    assert "↑ 3 more" in lines[0]
    assert [text.split()[-4:-2] for text in lines[1:4]] == [["rank", "3"], ["rank", "4"], ["rank", "5"]]
    assert lines[4].strip() == "… 4 more"


def test_an_empty_list_names_the_rules():
    lines = alert_list(with_alerts(), 60, 20, selected=0, first=0)
    text = page(lines)

    assert text.startswith(f"● No alerts. {len(DETECTORS)} rules check every step: ")
    assert all(detector.rule in text for detector in DETECTORS)


def test_the_detail_has_evidence_with_units_advice_and_the_rule_in_words():
    evidence = {"excess_ms": 12.345, "share_percent": 7.5, "first_bytes": 3 << 30, "window_steps": 1500, "pattern": "x"}
    alert = make_alert("rank 3", closed=4, ranks=(3,), phase="data", cost=0.26, evidence=evidence)
    text = page(alert_detail(alert, 80))

    for reported in (
        "excess 12.35 ms",
        "share 7.50%",
        "first 3.0G",
        "window steps 1,500",
        "pattern x",
        "26% of the job's",
    ):
        assert reported in text
    assert "what to try Buy a new one." in text
    assert "14:14:20 UTC, step 1" in text
    assert "closed 14:17:20 UTC, step 4, 3 min after it began" in text
    assert next(detector.text for detector in DETECTORS if detector.rule == "straggler") in text


def test_a_stall_is_not_said_to_have_lasted_until_its_alert_was_closed():
    evidence = {"waiting_s": 8.0, "waiting": "ranks 0-1"}
    facts = dict(alert_facts(make_alert("group 0", rule="stall", closed=4, evidence=evidence)))

    assert (facts["lasted"], facts["closed"]) == ("at least 8.0 s", "14:17:20 UTC, step 4")
    assert evidence_facts(evidence) == [("waited", "8.00 s"), ("waiting ranks", "ranks 0-1")]


def test_evidence_is_aligned():
    alert = make_alert("rank 3", evidence={"a_ms": 1.0, "long_name_ms": 1234.5})
    lines = [text for text in texts(alert_detail(alert, 80)) if text.endswith(" ms")]

    assert len({len(text) for text in lines}) == 1


def test_times_are_in_the_requested_zone():
    zone = timezone(timedelta(hours=2), "CEST")

    assert "16:14:20 CEST" in page(alert_detail(make_alert("rank 3"), 80, zone=zone))


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_long_messages_are_wrapped_in_the_detail_and_not_cut(columns):
    message = " ".join(f"word{number}" for number in range(60))
    alert = make_alert("rank 3")
    alert = replace(alert, finding=replace(alert.finding, message=message))

    assert message in page(alert_detail(alert, columns))


def test_the_text_to_copy_says_all_and_nothing_of_the_terminal():
    alert = make_alert("rank 3", evidence={"text": HOSTILE})
    text = alert_text(alert)

    assert "[bold red]evil[/]" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "Buy a new one." in text


def test_identifiers_have_no_thousands_separators():
    evidence = {"pid": 31005, "first_rank": 1024, "port": 29500, "step": 13503, "steps": 13503, "samples": 4096}
    lines = texts(alert_detail(make_alert("rank 3", evidence=evidence), 80))

    shown = dict(line.rsplit("  ", 1) for line in lines if line.startswith(("pid", "first", "port", "step", "sampl")))
    reported = {name.strip(): number.strip() for name, number in shown.items()}
    assert reported["pid"] == "31005"
    assert reported["first rank"] == "1024"
    assert reported["port"] == "29500"
    assert reported["step"] == "13503"
    assert reported["steps"] == "13,503"
    assert reported["samples"] == "4,096"
