"""Run view: of now, and looking back at a step."""

from __future__ import annotations

from dataclasses import replace

from ddpwatch import wire
from ddpwatch.core.alerts.model import Finding, Moment, Severity
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.view.columns import Ordering
from ddpwatch.view.gpus.busy_and_waiting import gpu_rows
from ddpwatch.view.gpus.detail import gpu_curves
from ddpwatch.view.gpus.process_usage import device_table
from ddpwatch.view.gpus.table import gpu_page, gpu_table
from ddpwatch.view.overview import device_card
from ddpwatch.view.ranks.detail import rank_page
from ddpwatch.view.run_view import alerts_at, refreshed_view, run_view
from tests.builders.fake_rank import make_beat, make_gpu, make_gpus, make_hello, make_snap, make_step
from tests.view.pages import make_monitor, make_run_view, texts


def finding(rule="slowdown", severity=Severity.WARNING, **more):
    return Finding(rule, severity, "the job", "message", "advice", **more)


def at(step):
    return Moment(step, (step or 0) * 1000, 0)


def test_now_it_holds_all_ranks_the_latest_step_and_the_open_alerts():
    now = make_run_view(make_monitor())

    assert (now.last_step, now.at, now.paused) == (119, None, False)
    assert [row.state.rank for row in now.rows] == [0, 1, 2, 3]
    assert {row.state.rank for row in now.rows if row.stands_out} == {2}
    assert now.worst[2].rule == "straggler"
    assert now.condition == "live"


def test_looking_back_the_figures_are_of_that_step():
    monitor = make_monitor(slow=None, steps=0)
    for rank in range(4):
        late = [{"backward": 26} if rank == 2 else {"sync": 12}] * 60
        steps = [make_step(index) for index in range(60)]
        steps += [make_step(60 + index, **change) for index, change in enumerate(late)]
        monitor.state.apply(make_snap(rank, 6, steps), 2)
    then, now = make_run_view(monitor, at=59), make_run_view(monitor)

    assert then.last_step == 59
    assert round(then.figures.step_ns / 1e6) == 30
    assert round(now.figures.step_ns / 1e6) == 40
    assert not any(row.stands_out for row in then.rows)
    assert any(row.stands_out for row in now.rows)


def test_new_messages_do_not_change_a_paused_view():
    for has_gpus in (False, True):
        monitor = make_monitor()
        _hear(monitor, 6, has_gpus=has_gpus)
        stands, goes_on = make_run_view(monitor, at=119, paused=True), make_run_view(monitor)
        before = _resampled(stands)
        assert before == _resampled(stands)
        for seq in range(7, 800):
            _hear(monitor, seq, has_gpus=has_gpus)
        assert _resampled(stands) == before
        assert _resampled(goes_on) != before


def test_looking_back_all_screens_agree_on_the_step_of_current_values():
    monitor = make_monitor()
    _hear(monitor, 6, has_gpus=False)
    then = make_run_view(monitor, at=60, paused=True)
    _hear(monitor, 7, has_gpus=False)
    pages = {
        "card": texts(device_card(then, 60)),
        "devices": texts(device_table(then, 110, 40, first=0)),
        "rank": texts(rank_page(then, 1, 120, 80)),
    }
    assert all("as of step 125" in " ".join(page) for page in pages.values())
    assert "424 MiB" in " ".join(pages["card"])
    assert "424M" in " ".join(pages["devices"])
    assert "106M" in " ".join(pages["devices"])
    assert "106M" in " ".join(pages["rank"])
    assert "now at step 126" in " ".join(pages["rank"])


def test_just_paused_the_tile_and_the_page_of_gpus_agree_on_what_is_waiting():
    monitor = make_monitor(hello=make_hello(0, 5, backend="nccl"))
    for rank in range(4):
        monitor.state.apply(make_gpus(rank, [make_gpu(util_percent=100)], seq=6, mono_ns=6), 2)
    live, stands, then = make_run_view(monitor), make_run_view(monitor, at=119), make_run_view(monitor, at=60)

    assert live.totals.gpus.waiting_percent > 10
    assert stands.totals.gpus == live.totals.gpus
    assert then.totals.gpus.waiting_percent is None


def _hear(monitor, seq, *, has_gpus):
    """Heartbeats of all ranks: one step further, with more memory and another utilization."""
    for rank in range(4):
        beat = make_beat(
            rank, seq, step=120 + seq, phase=seq % 5, rss_bytes=100 + seq << 20, cpu_percent=seq % 90, queued_ns=seq
        )
        monitor.state.apply(beat, seq * 10**10)
        if has_gpus:
            gpu = make_gpu(util_percent=seq % 100, used_bytes=seq << 30)
            monitor.state.apply(make_gpus(rank, [gpu], seq=seq + 10**6, mono_ns=seq), seq * 10**10)


def _resampled(shown):
    """All current values of a view."""
    if shown.totals.gpus is None:
        devices = device_table(shown, 120, 40, first=0)
    else:
        page = gpu_page(shown, Ordering())
        devices = gpu_table(shown, page, 160, 40, first=0, chosen=None)
        devices += gpu_curves(gpu_rows(shown.rows)[0], 120, 20)
    return texts([*device_card(shown, 60), *devices, *rank_page(shown, 1, 120, 80)])


def test_a_step_that_is_not_there_yet_is_the_latest_and_before_the_first_there_is_none():
    monitor = make_monitor()

    assert make_run_view(monitor, at=10**6).last_step == 119
    assert run_view(monitor, Timeline(), at=-5).figures is None


def test_alerts_of_a_step_are_those_that_were_open_in_it():
    monitor = make_monitor(slow=None, steps=0)
    monitor.evaluate_now()
    book = monitor.book
    book.update("slowdown", [finding()], at(40), close_delay=0, by_step=True)
    book.update("slowdown", [], at(80), close_delay=0, by_step=True)
    book.update("memory", [finding("memory", Severity.CRITICAL)], at(70), close_delay=0, by_step=True)
    rules = {step: [alert.finding.rule for alert in alerts_at(monitor, step)] for step in (39, 40, 75, 79, 80, 10**6)}

    assert rules == {
        39: [], 40: ["slowdown"], 75: ["memory", "slowdown"], 79: ["memory", "slowdown"], 80: ["memory"],
        10**6: ["memory"],
    }  # fmt: skip
    assert [alert.finding.rule for alert in alerts_at(monitor, None)] == ["memory"]


def test_an_alert_from_before_the_first_step_was_open_in_all_of_them():
    monitor = make_monitor(slow=None, steps=0)
    monitor.evaluate_now()
    monitor.book.update("rank-lost", [finding("rank-lost")], at(None), close_delay=0, by_step=False)

    assert len(alerts_at(monitor, 0)) == len(alerts_at(monitor, 50)) == 1


def test_before_the_history_is_evaluated_there_are_no_alerts():
    monitor = make_monitor(slow=None, steps=0)
    for rank in range(4):
        change = {"backward": 26} if rank == 2 else {"sync": 12}
        monitor.state.apply(make_snap(rank, 6, [make_step(index, **change) for index in range(500)]), 2)
    reported = []
    while not monitor.caught_up:
        monitor.tick(monitor.state.now_ns + 1_000_000_000)
        reported.append((len(monitor.book.open), len(run_view(monitor, Timeline()).alerts), monitor.behind))

    assert any(opened for opened, _, _ in reported[:-1])
    assert [shown for _, shown, _ in reported[:-1]] == [0] * (len(reported) - 1)
    assert reported[-1] == (len(monitor.book.open), len(monitor.book.open), False)


def test_the_most_urgent_finding_of_a_rank_is_the_one_it_shows():
    monitor = make_monitor(slow=None, steps=0)
    for rank in range(4):
        monitor.state.apply(make_snap(rank, 6, [make_step(index) for index in range(30)]), 2)
    monitor.evaluate_now()
    book = monitor.book
    book.update("memory", [finding("memory", ranks=(1,))], at(20), close_delay=9, by_step=True)
    book.update(
        "rank-lost", [finding("rank-lost", Severity.CRITICAL, ranks=(1, 2))], at(21), close_delay=9, by_step=True
    )
    drawn = run_view(monitor, Timeline())

    assert [drawn.worst[rank].rule for rank in (1, 2)] == ["rank-lost", "rank-lost"]
    assert drawn.rows[0].finding is None
    assert drawn.alerts[0].finding.rule == "rank-lost"


def test_a_refreshed_view_is_current_without_iterating_over_all_ranks():
    monitor = make_monitor(hello=make_hello(0, 5, started_unix_ns=10**18, unix_ns=2 * 10**18))
    before = make_run_view(monitor)
    monitor.state.apply(make_beat(1, 6, step=140, mono_ns=10**9), 3_000_000_001)
    after = refreshed_view(before)

    assert after.rows is before.rows
    assert after.urgent is before.urgent
    assert after.figures is before.figures
    assert (before.totals.step, after.totals.step, after.now.step) == (120, 140, 140)
    assert after.totals.running_s == before.totals.running_s + 3
    assert (before.condition, after.condition) == ("live", "live")
    assert [alert.key for alert in after.alerts] == [alert.key for alert in before.alerts]


def test_refreshed_it_knows_that_the_run_has_ended():
    monitor = make_monitor()
    before = make_run_view(monitor)
    for rank in range(4):
        monitor.state.apply(wire.Bye(rank=rank, seq=6, reason="exit", text="", mono_ns=9), 2)

    assert (before.condition, refreshed_view(before).condition) == ("live", "ended")


def test_it_is_not_refreshed_when_other_ranks_or_no_ranks_are_blamed():
    monitor = make_monitor()
    accused = make_run_view(monitor)
    assert refreshed_view(accused) is not None
    nobody = replace(accused, worst={})
    another = replace(accused, worst={1: accused.worst[2]})
    elsewhere = replace(accused, worst={2: replace(accused.worst[2], phase="data")})

    assert [refreshed_view(each) for each in (nobody, another, elsewhere)] == [None] * 3


def test_the_callback_is_called_while_a_view_is_computed():
    asked = []
    monitor = make_monitor()
    timeline = Timeline()
    timeline.follow(monitor.state)
    run_view(monitor, timeline, between=lambda: asked.append(True))

    assert asked


def test_in_a_stall_current_values_are_not_shown_as_of_the_step_before():
    """Even with few steps since: now is long after them."""
    monitor = make_monitor()
    for rank in range(4):
        monitor.state.apply(make_beat(rank, 6, step=120, mono_ns=120 * 30_000_000), 10**9)
    assert not make_run_view(monitor, at=118).hindsight
    later_ns = monitor.state.now_ns + 60_000_000_000
    monitor.tick(later_ns)

    back = make_run_view(monitor, at=118)
    assert back.hindsight == "as of step 119, not of step 118"
    assert all(row.then for row in back.rows)
    assert not make_run_view(monitor, at=119).hindsight
