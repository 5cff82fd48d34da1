"""A rank's own page, as data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.core.state.rank import RssHistory
from ddpwatch.view.cells import Level, plain
from ddpwatch.view.ranks.detail import rank_page
from tests.builders.fake_rank import make_beat, make_hello, make_snap, make_step
from tests.view.pages import HOSTILE, assert_fits, heights, make_monitor, make_run_view, page, run_views, texts, widths

ALL_ROWS = 200
BLOCKS = "▁▂▃▄▅▆▇█"


def row_of(lines, name):
    """The line of the table whose first word is this, as words."""
    return next(words for text in texts(lines) if (words := text.replace("▲", "").split()) and words[0] == name)


@settings(deadline=None, max_examples=40)
@given(run_views(), st.integers(0, 6), widths, heights)
def test_the_page_fits_any_window_whatever_is_known(drawn, rank, columns, rows):
    assert_fits(rank_page(drawn, rank, columns, rows), columns, rows)


def test_each_phase_stands_against_the_median_of_the_others():
    lines = rank_page(make_run_view(make_monitor()), 2, 100, ALL_ROWS)

    assert row_of(lines, "backward")[:5] == ["backward", "26.0", "16.0", "+10.0", "+62%"]
    assert row_of(lines, "forward")[:5] == ["forward", "8.00", "8.00", "+0.00", "0%"]
    assert row_of(lines, "waiting")[:4] == ["waiting", "0.00", "10.0", "-10.0"]


def test_what_makes_the_others_wait_is_marked_in_words_and_not_by_color_alone():
    drawn = make_run_view(make_monitor())

    slow = [text for text in texts(rank_page(drawn, 2, 100, ALL_ROWS)) if "backward" in text and "26.0" in text]
    assert any(text.startswith("▲ backward") for text in slow)
    assert not any(text.startswith("▲") for text in texts(rank_page(drawn, 0, 100, ALL_ROWS)))


def test_waiting_is_never_marked_as_slowness():
    """The victim waits longest; to blame it for that would be the oldest mistake there is."""
    lines = rank_page(make_run_view(make_monitor(2, slow=1)), 0, 100, ALL_ROWS)
    waiting = next(line for line in lines if "waiting" in plain(line))

    assert "+10.0" in plain(waiting)
    assert "▲" not in plain(waiting)
    assert not {cell.level for cell in waiting} & {Level.WARN, Level.BAD}


def test_the_findings_that_name_the_rank_come_first_with_their_advice():
    drawn = make_run_view(make_monitor())
    finding = drawn.worst[2]

    slow = page(rank_page(drawn, 2, 80, 9))
    assert finding.message in slow
    assert finding.advice in slow
    assert finding.message not in page(rank_page(drawn, 0, 80, ALL_ROWS))


def test_the_cost_is_that_of_the_alert_and_without_one_that_of_the_figures():
    drawn = make_run_view(make_monitor())
    share = drawn.figures.ranks[2].straggler_cost_share
    slow = drawn.rows[2]
    alert = replace(slow.finding, cost=0.31)
    rows = {
        cost: (*drawn.rows[:2], slow._replace(finding=found, stands_out=bool(found)), drawn.rows[3])
        for cost, found in ((0.31, alert), (share, None))
    }
    over = {0.31: "in the steps of its alert", share: "in these 50 steps"}

    for cost, changed in rows.items():
        words = f"Cost {round(cost * 100)}% of the job's time {over[cost]}"
        assert words in page(rank_page(replace(drawn, rows=changed), 2, 80, ALL_ROWS))
    assert "Not a straggler. Waits 10.0 ms per step" in page(rank_page(drawn, 0, 80, ALL_ROWS))


def test_a_rank_below_the_straggler_threshold_is_not_blamed():
    monitor = make_monitor(slow=None, steps=0)
    for rank in range(4):
        # Now this rank is the last, now that one, each time by a millisecond.
        steps = [make_step(index, **({"backward": 17} if index % 4 == rank else {"sync": 3})) for index in range(60)]
        monitor.state.apply(make_snap(rank, 6, steps), 2)
    text = page(rank_page(make_run_view(monitor), 0, 80, ALL_ROWS))

    assert "Was last at times: cost 1% of the job's time in these 50 steps" in text
    assert "▲" not in text


def test_wire_and_waiting_of_a_rank_are_its_sync():
    drawn = make_run_view(make_monitor())
    for rank, mine in drawn.figures.ranks.items():
        words = [plain(line).split() for line in rank_page(drawn, rank, 80, ALL_ROWS)]
        reported = {line[0]: float(line[1]) for line in words if line[:1] in (["waiting"], ["wire"])}

        assert len(reported) == 2
        assert sum(reported.values()) == pytest.approx(mine.sync_ns / 1e6, abs=0.1)


def test_without_all_ranks_neither_cost_nor_waiting_is_claimed():
    text = page(rank_page(make_run_view(make_monitor(received=3)), 2, 80, ALL_ROWS))

    assert "Its straggler cost is unknown" in text
    assert "waiting" not in text
    assert " sync " in text


@pytest.mark.parametrize(("world", "word"), [(2, "OTHER "), (4, "OTHERS ")])
def test_of_two_ranks_there_is_only_one_other(world, word):
    text = page(rank_page(make_run_view(make_monitor(world, slow=1)), 1, 80, ALL_ROWS))

    assert f"THIS {word}" in text
    assert ("the other rank waited" in text) == (world == 2)


def test_the_strip_shows_what_is_beyond_the_middle_rank():
    def strip(rank, **changed):
        drawn = make_run_view(make_monitor(**changed))
        lines = texts(rank_page(drawn, rank, 80, ALL_ROWS))
        first = next(place for place, text in enumerate(lines) if "own work, last" in text)
        return "".join(lines[first + 1 : first + 5])

    assert "█" in strip(2)
    assert "░" in strip(2)
    assert not set(strip(0)) & set(BLOCKS)
    # One ms more of 28 is less than what counts as slow.
    assert not set(strip(2, slow_ms=17)) & set(BLOCKS)


def test_a_strip_that_does_not_fit_as_a_whole_gives_way_to_the_facts():
    drawn = make_run_view(make_monitor())

    assert "own work" in page(rank_page(drawn, 0, 80, 30))
    low = page(rank_page(drawn, 0, 80, 18))
    assert "own work" not in low
    assert "CPU 98%" in low


def test_identity_and_set_up():
    hello = make_hello(
        0, 5, model="ResNet", device="cpu", torch="2.13.0", python="3.11.9", comm="passive",
        ddp={"bucket_cap_mb": "25"}, parameters=1234, parameter_bytes=4936,
    )  # fmt: skip
    loader = wire.Loader(
        rank=0, seq=5, step=0, epoch=2, sampler="DistributedSampler", distributed=True, replicas=4, workers=3,
    )  # fmt: skip
    text = page(rank_page(make_run_view(make_monitor(hello=hello, loaders=[loader])), 0, 120, ALL_ROWS))

    for reported in (
        "node-a",
        "pid 1000",
        "ResNet, 1,234 parameters",
        "torch 2.13.0",
        "Python 3.11.9",
        "bucket_cap_mb=25",
    ):
        assert reported in text
    assert "DistributedSampler, over 4 ranks" in text
    assert "3 workers" in text
    assert "epoch 3 since start" in text


def test_what_watching_costs_and_what_is_missing():
    monitor = make_monitor()
    rank = monitor.state.ranks[0]
    rank.beat = wire.Beat(rank=0, seq=9, mono_ns=9, step=100, phase=0, phase_ns=0, hook_ns=2_500_000, dropped=3)
    text = page(rank_page(make_run_view(monitor), 0, 80, ALL_ROWS))

    assert "25 µs per step" in text
    assert "3 records dropped" in text


def test_logged_values_are_shown_with_their_step():
    monitor = make_monitor()
    values = {"loss": 0.25, "\x1b[31mrate": 1e-4}
    monitor.state.apply(make_beat(0, 6, steps=[make_step(120, values=values), make_step(121)]), 2)
    text = page(rank_page(make_run_view(monitor), 0, 80, ALL_ROWS))

    assert "loss 0.25" in text
    assert "rate 0.0001" in text
    assert "at step 120" in text
    assert "logged by the script" not in page(rank_page(make_run_view(monitor), 1, 80, ALL_ROWS))


def test_memory_is_shown_with_its_change():
    monitor = make_monitor()
    rss_history = monitor.state.ranks[0].rss_history = RssHistory()
    rss_history.put(0, 100 << 20)
    rss_history.put(60_000_000_000, 612 << 20)

    assert "812M, +512M in 1m 00s" in page(rank_page(make_run_view(monitor), 0, 80, ALL_ROWS))


def test_a_failed_rank_shows_its_last_words_without_markup():
    monitor = make_monitor()
    monitor.state.apply(wire.Bye(rank=1, seq=6, reason="failed", text=HOSTILE, mono_ns=9), 2)
    lines = rank_page(make_run_view(monitor), 1, 80, ALL_ROWS)

    assert texts(lines)[0].startswith("rank 1  ✖ failed")
    assert "[bold red]evil[/]" in page(lines)
    assert_fits(lines, 80)


def test_a_rank_that_never_came_and_one_that_does_not_exist():
    drawn = make_run_view(make_monitor(received=2))

    assert "missing" in texts(rank_page(drawn, 3, 80, ALL_ROWS))[0]
    assert page(rank_page(drawn, 9, 80, ALL_ROWS)) == "This run has no rank 9."


def test_what_does_not_fit_is_announced():
    lines = rank_page(make_run_view(make_monitor()), 2, 80, 12)

    assert len(lines) == 12
    assert plain(lines[-1]).startswith("… ")
    assert plain(lines[-1]).endswith(" more lines")


def test_pauses_are_named_with_their_share_of_the_time():
    drawn = make_run_view(make_monitor(1, slow=None))
    paused = {"other": 121, "gc_ns": 120_000_000, "gc_full_ns": 120_000_000}
    evaluated = {"other": 61, "eval_ns": 60_000_000, "flags": wire.EVALUATED}
    saved = {"other": 301, "save_ns": 300_000_000}
    steps = [make_step(120, **paused), make_step(121, **evaluated), make_step(122, **saved), make_step(123, **saved)]
    drawn.state.ranks[0].add_steps(steps)
    text = page(rank_page(drawn, 0, 100, ALL_ROWS))

    assert "GC 2.1% of the time, generation 2, up to 120 ms in 1 step, last in step 120" in text
    assert "saves 10.5% of the time, up to 300 ms in 2 steps, last in step 123" in text
    assert "evaluation 1.1% of the time, up to 60.0 ms in 1 step, last in step 121" in text
    assert "pauses" not in page(rank_page(make_run_view(make_monitor(1)), 0, 100, ALL_ROWS))


def test_the_settings_of_the_loader_its_workers_and_first_batches_are_shown():
    loaders = [
        wire.Loader(
            rank=0, seq=5, step=step, epoch=epoch, sampler="S", distributed=True, workers=2, pin_memory=False,
            prefetch_factor=4, persistent_workers=False,
        )
        for epoch, step in enumerate((20, 40, 60))
    ]  # fmt: skip
    workers = wire.LoaderWorkers(rank=0, seq=5, step=60, mono_ns=1, workers=2, cpu_percent=97, queued_percent=12)
    text = page(rank_page(make_run_view(make_monitor(loaders=loaders, workers=workers)), 0, 100, ALL_ROWS))

    assert "2 workers, prefetch_factor 4, new in each epoch, memory not pinned" in text
    assert "97% of a core each, waited for one 12% of the time" in text
    assert "first batch 1.00 ms, later ones 1.00 ms" in text


def test_what_a_rank_does_right_now_has_its_name():
    busy = {"phase": wire.PHASES.index("other"), "activity": "torch.save", "phase_ns": 40_000_000_000}
    drawn = make_run_view(make_monitor(1, beat=make_beat(0, 5, step=120, **busy)))

    assert "has been in torch.save for 40 s" in page(rank_page(drawn, 0, 100, ALL_ROWS))
