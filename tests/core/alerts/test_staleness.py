"""A stale alert stays open, but is not the headline, and every screen agrees on that."""

from __future__ import annotations

import random
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from operator import ne

import pytest

from ddpwatch.core.alerts.model import Alert, Finding, Moment, Severity
from ddpwatch.core.alerts.staleness import with_staleness
from ddpwatch.core.limits import DEFAULTS, AlertLimits, WindowLimits
from ddpwatch.core.metrics.live_metrics import measure
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.simulator.scenario import Fault, Scenario
from ddpwatch.view.alerts.format import message_of
from ddpwatch.view.alerts.page import alert_detail, alert_list, alert_text
from ddpwatch.view.alerts.panel import alert_panel
from ddpwatch.view.allreduce import waited_for
from ddpwatch.view.cells import Level
from ddpwatch.view.header import header_line
from ddpwatch.view.overview import allreduce_card
from ddpwatch.view.ranks.columns import badge
from ddpwatch.view.ranks.detail import rank_page
from ddpwatch.view.run_view import run_view
from ddpwatch.view.status import status_screen
from tests.builders.fake_rank import make_snap, make_step
from tests.builders.scenario_frames import frames
from tests.view.pages import page, texts

SLOW, ONSET, LASTS = 2, 60, 60
END = ONSET + LASTS
LOUD = {Level.WARN, Level.BAD}


@cache
def watched(steps, **fault):
    """A run in which one rank is slow from step 60 on, by default for sixty steps."""
    scenario = Scenario(
        4,
        steps=steps,
        spikes=0.0,
        faults=(Fault((SLOW,), "backward", 0.5, onset=ONSET, **(fault or {"burst": (LASTS, 100_000)})),),
    )
    monitor = Monitor(RunState("ab12cd34ab12cd34", "train", 4))
    for frame in frames(scenario):
        monitor.ingest(frame.payload, frame.received_ns)
    monitor.evaluate_now()
    return monitor


def drawn(monitor, **options):
    monitor.evaluate_now()
    timeline = Timeline()
    timeline.follow(monitor.state)
    return run_view(monitor, timeline, **options)


def stale(seen):
    """By key, the steps in which stale alerts were last seen."""
    return {alert.key: alert.seen.step for alert in seen.alerts if alert.stale}


def levels(lines):
    return {cell.level for line in lines for cell in line}


def test_while_it_lasts_it_is_the_headline():
    seen = drawn(watched(END))

    assert not stale(seen)
    assert "rank 2 slow in backward" in page(alert_panel(seen, 60, 12))
    assert badge(seen.rows[SLOW]).text.startswith("▲ slow backward")


def test_soon_after_its_last_slow_step_the_box_says_since_when_and_is_not_loud():
    """The rule goes on finding it, in an ever smaller part of its window."""
    seen = drawn(watched(END + AlertLimits.STALE_STEPS + 15))
    box = [line for line in alert_panel(seen, 60, 12) if "straggler:" in texts([line])[0]]

    assert ("straggler", "rank 2") in seen.monitor.book.open
    assert texts(box) == [f"△ straggler: rank 2, backward, not seen since step {END - 1}"]
    assert levels(box) == {Level.DIM}
    assert "of the steps" not in page(alert_panel(seen, 60, 12))


def test_rows_badges_and_the_tile_agree_with_the_box():
    seen = drawn(watched(END + AlertLimits.STALE_STEPS + 15))

    assert [badge(row).text for row in seen.rows] == ["ok"] * 4
    assert not any(row.stands_out for row in seen.rows)
    assert (
        waited_for(seen)[0] != (SLOW,) or seen.figures.ranks[SLOW].straggler_cost_share >= seen.limits.straggler.share
    )
    assert "(r2)" not in page(allreduce_card(seen, 40))
    assert "not seen since" in page(rank_page(seen, SLOW, 100, 60))


def test_when_all_are_stale_nothing_is_wrong_by_now_and_the_header_counts_none():
    seen = drawn(watched(END + 100))

    assert {alert.key for alert in seen.alerts} == set(stale(seen)) != set()
    assert texts(alert_panel(seen, 60, 12))[0] == "✔ no active alert"
    assert "▲" not in texts([header_line(seen, 120)])[0]
    assert not levels(alert_panel(seen, 60, 12)) & LOUD
    assert not any("▲" in text for text in texts(status_screen(seen, 100)))


def test_the_list_and_the_details_say_it_too():
    seen = drawn(watched(END + 100))
    lines = alert_list(seen, 120, 12, selected=0, first=0)[1:]
    key, step = next((alert, stale(seen)[alert.key]) for alert in seen.alerts if alert.finding.rule == "straggler")

    assert any(f"not seen since step {step}" in text for text in texts(lines))
    assert not levels(lines) & LOUD
    detail = alert_detail(key, 80)
    assert f"open, but not seen since step {step}" in texts(detail)[0]
    assert not levels(detail) & LOUD


def test_one_that_recurs_every_few_steps_does_not_become_stale_between_them():
    for steps in range(200, 210):
        seen = drawn(watched(steps, every=7))

        assert ("straggler", "rank 2") in seen.monitor.book.open
        assert ("straggler", "rank 2") not in stale(seen)


def test_looking_back_it_is_the_headline_where_it_was():
    monitor = watched(END + 100)

    assert ("straggler", "rank 2") not in stale(drawn(monitor, at=END - 5))
    assert ("straggler", "rank 2") in stale(drawn(monitor, at=END + 60))


def test_the_all_reduce_share_becomes_stale_when_the_figure_beside_it_has_fallen():
    """Since when it was not seen does not move as long as nothing happens, though its rule goes on finding it."""
    reported = set()
    for steps in (END + 70, END + 80, END + 90, END + 100):
        monitor = watched(steps)
        since, last = Moment(ONSET + 20, 1, 0), Moment(steps - 1, 2, 0)
        alert = Alert(Finding("comm-share", Severity.WARNING, "job", "all-reduce takes 11%", "do it"), since, last)
        with opened(monitor, alert):
            seen = drawn(monitor)
            assert seen.figures.share < 0.08
            reported.add(stale(seen)[alert.key])
            # One that was opened when it was over already was seen then.
            late = replace(alert, since=replace(last, step=END + 50))
            with opened(monitor, late):
                assert stale(drawn(monitor))[alert.key] == END + 50
    assert len(reported) == 1
    assert END - 1 <= reported.pop() < END + WindowLimits.MIN_STEPS


def test_a_share_that_wanders_about_the_threshold_does_not_make_the_alert_flap():
    walk = random.Random(4)
    shares = [0.12] * 60 + [walk.uniform(0.02, 0.138) for _ in range(240)]
    state = RunState("ab12cd34ab12cd34", "train", 2)
    for rank in range(2):
        done = [make_step(index, sync_ns=int(28e6 * share / (1 - share))) for index, share in enumerate(shares)]
        state.apply(make_snap(rank, 5, done), now_ns=1)
    monitor = Monitor(state)
    monitor.evaluate_now()
    alert = Alert(
        Finding("comm-share", Severity.WARNING, "job", "all-reduce takes 11%", "do it"),
        Moment(20, 1, 0),
        Moment(299, 2, 0),
    )
    below = [measure(state, step).share <= 0.08 for step in range(60, 300)]
    assert sum(map(ne, below, below[1:])) > 2  # by the figure alone it would come and go
    carried, kept = [], alert
    for step in range(60, 300):
        (kept,) = with_staleness(state, DEFAULTS, [kept], step)
        carried.append(kept.seen)
    derived = [with_staleness(state, DEFAULTS, [alert], step)[0].seen for step in range(60, 300)]
    assert sum(map(ne, carried, carried[1:])) == 1  # it becomes stale, and that is all
    assert carried[0] is None
    assert isinstance(carried[-1].step, int)
    assert derived == carried  # looking back, and in recordings without it


def test_the_details_name_one_step_and_its_time_as_the_last_in_which_it_was_seen():
    monitor = watched(END + 100)
    seen = drawn(monitor)
    alert = next(alert for alert in seen.alerts if alert.finding.rule == "straggler")
    moment = alert.seen

    assert alert.last.step > moment.step == stale(seen)[alert.key]
    for text in (page(alert_detail(alert, 100)), alert_text(alert)):
        assert f"open, but not seen since step {moment.step}" in text
        assert re.search(rf"last seen +step {moment.step}\b", text)
        assert f"step {alert.last.step}" not in text
    since, later = replace(alert.since, unix_ns=10**18), replace(moment, unix_ns=10**18 + 3 * 10**9)
    assert ", after 3 s" in page(alert_detail(replace(alert, since=since, seen=later), 100))


@contextmanager
def opened(monitor, alert):
    """With this alert open beside the others; the run is shared."""
    before = dict(monitor.book.open)
    try:
        monitor.book.open[alert.key] = alert
        yield
    finally:
        monitor.book.open.clear()
        monitor.book.open.update(before)


@pytest.mark.parametrize("rule", ["memory", "lossy"])
def test_any_other_rule_becomes_stale_by_when_it_was_last_found(rule):
    monitor = watched(50)
    book = monitor.book.open
    before = dict(book)
    at = Moment(40, 1, 0)
    alert = Alert(Finding(rule, Severity.WARNING, "job", "it is so", "do it"), at, at)
    try:
        book[alert.key] = alert
        assert alert.key not in stale(drawn(monitor))
        book[alert.key] = replace(alert, since=replace(at, step=10), last=replace(at, step=20))
        seen = drawn(monitor)
        assert stale(seen)[alert.key] == 20
        assert f"{rule}: not seen since step 20" in page(alert_panel(seen, 60, 12))
        assert "it is so" not in " ".join(texts(status_screen(seen, 100)))
    finally:
        book.clear()
        book.update(before)


@cache
def of_short_steps():
    monitor = Monitor(RunState("ab12cd34ab12cd34", "train", 2))
    for frame in frames(Scenario(2, steps=1500, step_ms=2.0, spikes=0.0)):
        monitor.ingest(frame.payload, frame.received_ns)
    monitor.evaluate_now()
    return monitor


def staleness(monitor, finding, ago, last=None):
    """The step in which an alert opened `ago` steps before the latest was last seen; None = it is not stale."""
    newest = monitor.figures().last_step
    since = Moment(newest - ago, 1, 0)
    (alert,) = with_staleness(monitor.state, monitor.limits, [Alert(finding, since, last or since)])
    assert alert.stale == (alert.seen is not None)
    return alert.seen and alert.seen.step


@pytest.mark.parametrize(("ago", "is_stale"), [(200, False), (900, False), (1200, True)])
def test_of_short_steps_nothing_becomes_stale_between_two_evaluations_of_the_rules(ago, is_stale):
    finding = Finding("same-data", Severity.INFO, "job", "it is so", "do it")

    assert (staleness(of_short_steps(), finding, ago) is not None) == is_stale


@pytest.mark.parametrize("ended", [True, False])
def test_of_short_steps_one_that_its_rule_reports_as_ended_is_stale_all_the_same(ended):
    last = of_short_steps().figures().last_step
    reported = Finding("straggler", Severity.WARNING, "rank 1", "it is so", "do it", upto_step=last - 200, ended=ended)

    assert staleness(of_short_steps(), reported, 400, Moment(last, 1, 0)) == (last - 200 if ended else None)


def test_of_many_ranks_nothing_becomes_stale_while_its_rule_is_not_evaluated(monkeypatch):
    finding = Finding("memory", Severity.WARNING, "rank 1", "it is so", "do it")
    assert staleness(of_short_steps(), finding, 1100) is not None
    monkeypatch.setattr("ddpwatch.core.alerts.staleness.MANY_RANKS", 1)
    monkeypatch.setattr("ddpwatch.core.limits.EvaluationLimits.GRADUAL_NS", 5 * 10**8)
    assert staleness(of_short_steps(), finding, 1100) is None
    assert staleness(of_short_steps(), finding, 1450) is not None


def test_a_stale_hang_names_the_missing_ranks_and_not_the_group():
    hang = Finding("stall", Severity.CRITICAL, "group 0", "rank 1 has not joined", "", (1,), "other")
    at = Moment(20, 1, 0)

    assert message_of(Alert(hang, at, at, stale=True, seen=at)) == "rank 1, other, not seen since step 20"
