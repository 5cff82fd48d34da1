"""The alerts panel of the overview."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given

from ddpwatch import wire
from ddpwatch.core.alerts.model import Finding, Moment, Severity
from ddpwatch.view.alerts import panel as alertbox
from ddpwatch.view.alerts.panel import alert_panel, alert_rows
from ddpwatch.view.layout import wrap
from tests.view.pages import assert_fits, heights, make_monitor, make_run_view, page, run_views, texts, widths


@pytest.fixture(scope="module")
def slow():
    return make_run_view(make_monitor())


@pytest.fixture(scope="module")
def bad():
    monitor = make_monitor()
    monitor.state.apply(wire.Bye(rank=1, seq=6, reason="failed", text="ValueError: [bold red]x[/]", mono_ns=9), 2)
    monitor.tick(10**10)
    return make_run_view(monitor)


def test_the_most_urgent_alert_comes_first_in_whole_sentences(bad):
    lines = texts(alert_panel(bad, 60, 40))

    assert lines[0].startswith("✖ rank-failed: rank 1")
    assert "[bold red]x[/]" in page(alert_panel(bad, 60, 40))
    assert re.search(r"straggler: rank 2 slow in backward: .* throughput", page(alert_panel(bad, 60, 40)))


def test_advice_is_shown_where_there_is_room_for_it(slow):
    advice = slow.alerts[0].finding.advice

    assert advice in page(alert_panel(slow, 60, 40))
    assert advice.split()[0] not in page(alert_panel(slow, 60, 4)).split()


@pytest.mark.parametrize("rows", range(1, 30))
def test_what_does_not_fit_is_counted_and_a_cut_is_seen(bad, rows):
    lines = alert_panel(bad, 50, rows)

    assert len(lines) <= rows
    reported = sum(line[0].text.strip() in {"▲", "✖", "·"} for line in lines)
    if reported < len(bad.alerts) and rows > 1:
        left = len(bad.alerts) - reported
        assert texts(lines)[-1] == f"… {left} more alert{'s' if left > 1 else ''}"
    elif reported == len(bad.alerts):
        assert all(alert.finding.message in page(lines) for alert in bad.alerts)


@pytest.mark.parametrize("rows", range(1, 30))
def test_advice_takes_no_alert_its_place_but_that_of_the_first_where_there_are_many_rows(bad, rows):
    shown = page(alert_panel(bad, 50, rows))
    messages, advice = ([getattr(alert.finding, what) for alert in bad.alerts] for what in ("message", "advice"))
    advised = [text in shown for text in advice]

    assert advised[0] or rows < 8
    assert advised == sorted(advised, reverse=True)
    if any(advised[1:]):
        assert all(message in shown for message in messages)


@pytest.mark.parametrize("rows", range(1, 30))
def test_as_many_rows_as_it_asks_for_show_the_same(bad, rows):
    wanted = alert_rows(bad, 50, rows)

    assert wanted <= rows
    assert alert_panel(bad, 50, wanted) == alert_panel(bad, 50, rows)


@pytest.mark.parametrize("rows", range(1, 30))
def test_counting_rows_wraps_no_text_twice(bad, rows, monkeypatch):
    broken = []
    monkeypatch.setattr(alertbox, "wrap", lambda text, width: broken.append(text) or wrap(text, width))
    alert_rows(bad, 50, rows)

    assert broken
    assert len(broken) == len(set(broken))


def test_a_sentence_that_does_not_fit_shows_its_cut(slow):
    (first, *_), lines = slow.alerts, texts(alert_panel(slow, 30, 3))

    assert len(first.finding.message) > 60
    assert lines[-1] == "… 1 more alert"
    assert lines[-2].endswith("…")


def test_nothing_is_wrong_is_said_and_so_is_that_it_is_too_early():
    calm = make_run_view(make_monitor(slow=None, steps=0))
    assert texts(alert_panel(calm, 60, 5)) == ["… too few steps to evaluate yet"]
    from tests.builders.fake_rank import make_snap, make_step

    monitor = make_monitor(slow=None, steps=0)
    for rank in range(4):
        monitor.state.apply(make_snap(rank, 6, [make_step(index) for index in range(80)]), 2)
    assert texts(alert_panel(make_run_view(monitor), 60, 5))[0] == "✔ no alerts"
    suspicion = Finding("straggler", Severity.WARNING, "rank 2", "m", "a", cost=0.03, proven=False)
    run_view = make_run_view(monitor)
    monitor.book.unproven["straggler"] = [suspicion]
    assert "inconclusive: rank 2 looks slower (3%), within noise" in page(alert_panel(run_view, 60, 5))


@given(run_views(), widths, heights)
def test_it_fits_whatever_is_in_it(run_view, columns, rows):
    assert_fits(alert_panel(run_view, columns, rows), columns, rows)


def test_at_an_earlier_step_the_text_is_of_then_and_still_fits():
    monitor = make_monitor()
    reported = {60: "slower by a tenth", 119: "slower by half"}
    for step, words in reported.items():
        found = Finding("slowdown", Severity.WARNING, "job", words, "a")
        monitor.book.update("slowdown", [found], Moment(step, step, 0), close_delay=0, by_step=True)
    back = make_run_view(monitor, at=60)

    assert reported[60] in page(alert_panel(back, 60, 12))
    assert reported[119] not in page(alert_panel(back, 60, 12))
    assert reported[119] in page(alert_panel(make_run_view(monitor), 60, 12))
    for columns in (20, 40, 80):
        for rows in range(1, 12):
            assert_fits(alert_panel(back, columns, rows), columns, rows)


def test_a_share_over_the_limit_that_is_no_alert_yet_is_not_called_fine():
    drawn = replace(make_run_view(make_monitor()), alerts=(), worst={})
    lines = texts(alert_panel(drawn, 60, 10))

    assert lines[0] == "· no alert yet"
    assert "all-reduce took 24% of the last 50 steps" in " ".join(lines)
    assert "✔" not in "".join(lines)
