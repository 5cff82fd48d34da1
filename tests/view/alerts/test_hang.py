"""The banner of a hang: missing rank, waiting ranks, what it is doing, and the time left."""

from dataclasses import replace

import pytest
from hypothesis import given

from ddpwatch import wire
from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.limits import LivenessLimits
from ddpwatch.view.alerts.page import alert_facts, alert_list
from ddpwatch.view.alerts.panel import alert_panel, hang_lines, stuck_rank
from ddpwatch.view.columns import Ordering
from ddpwatch.view.header import header_line
from ddpwatch.view.outcome_text import lost_text
from ddpwatch.view.ranks.columns import badge
from ddpwatch.view.ranks.detail import rank_page
from ddpwatch.view.ranks.table import arrange
from ddpwatch.view.run_view import current_view
from ddpwatch.view.status import status_screen
from ddpwatch.view.summary import summary_lines
from tests.builders.fake_rank import make_beat, make_group, make_stack, make_step
from tests.view.pages import HOSTILE, assert_fits, heights, make_monitor, make_run_view, page, texts, widths

SECOND = 1_000_000_000
SYNC = wire.PHASES.index("sync")


def hanging(missing=2, waited_s=12, timeout_s=600, shape="[1056] Float", world=4, **stack):
    """Rank 2 of 4 has not joined operation 1042, in which the others wait."""
    monitor = make_monitor(slow=None, world=world)
    now_ns = 100 * SECOND
    for rank in range(world):
        waits = rank != missing
        group = make_group(
            enqueued=1042 if waits else 1041,
            completed=1041,
            size=world,
            **({"op": "all_reduce", "bytes": 4 << 20, "shape": shape, "age_ns": waited_s * SECOND,
                "timeout_ns": timeout_s * SECOND} if waits else {}),
        )  # fmt: skip
        phase = SYNC if waits else 0
        beat = make_beat(rank, 6, mono_ns=now_ns, step=120, phase=phase, phase_ns=waited_s * SECOND, groups=[group])
        monitor.ingest(wire.encode(beat), now_ns)
    if stack:
        monitor.ingest(wire.encode(make_stack(missing, **stack)), now_ns)
    return make_run_view(monitor)


def test_the_time_of_a_hang_that_the_run_did_not_come_out_of_is_lost_time():
    drawn = hanging(waited_s=33)
    hang = outcome_of(drawn.state, drawn.alerts).hang
    assert lost_text(drawn, hang).startswith("33.0 s in the hang at the end, waiting for rank 2")
    assert "33.0 s in the hang" in page(summary_lines(drawn, 120, 40, duration_s=60.0))
    assert outcome_of(make_monitor(slow=None).state, ()).hang is None


def test_a_hang_has_a_banner_with_the_time_left():
    lines = hang_lines(hanging(), 100)

    assert texts(lines)[0] == (
        "✖ rank 2 has not joined all_reduce #1042 (4.0 MiB): ranks 0-1, 3 have waited in sync for 12 s"
    )
    assert "rank 2 has been in data for 12 s" in page(lines)
    assert "9 min 48 s left of 10 min until torch aborts the job x its stack" in page(lines)


def test_without_a_hang_there_is_no_banner():
    assert hang_lines(make_run_view(make_monitor()), 100) == []


def test_the_banner_is_not_shown_at_an_earlier_step():
    drawn = hanging()
    assert hang_lines(make_run_view(drawn.monitor, at=50, paused=True), 100) == []


def assert_no_hang_on_any_screen(drawn, condition):
    assert hang_lines(drawn, 100) == []
    assert stuck_rank(drawn) is None
    assert condition.upper() in page([header_line(drawn, 100)])
    assert texts(status_screen(drawn, 100))[0].endswith(condition)


def test_a_run_that_has_ended_does_not_hang():
    monitor = hanging().monitor
    for rank in range(4):
        monitor.state.apply(wire.Bye(rank=rank, seq=7, reason="failed", text="", mono_ns=9), monitor.state.now_ns)

    assert_no_hang_on_any_screen(current_view(monitor), "■ ended")


def test_a_hang_whose_ranks_fall_silent_is_a_hang_on_every_screen():
    monitor = hanging().monitor
    monitor.tick(monitor.state.now_ns + 2 * LivenessLimits.NO_HEARTBEAT_NS)
    drawn = current_view(monitor)

    assert drawn.condition == "silent"
    assert "has not joined" in page(hang_lines(drawn, 100))
    assert "✖ HANGS" in page([header_line(drawn, 100)])
    assert texts(status_screen(drawn, 100))[0].endswith("✖ hangs")
    assert outcome_of(drawn.state, drawn.alerts).stuck_on is drawn.hang


def test_a_hang_leaves_the_top_with_the_next_step_of_all_ranks_before_its_alert_closes():
    monitor = hanging().monitor
    for rank in range(4):
        assert current_view(monitor).hang is not None, "a rank has not done the step"
        done = make_beat(rank, 7, mono_ns=101 * SECOND, step=121, steps=[make_step(120)], groups=[make_group(1043)])
        monitor.ingest(wire.encode(done), 101 * SECOND)
    over = current_view(monitor)

    assert_no_hang_on_any_screen(over, "● live")
    assert outcome_of(over.state, over.alerts).stuck_on is None
    assert "has not joined" in page(alert_panel(over, 100, 20)), "it is open as long as it may come back"


def test_a_viewer_that_attaches_late_shows_since_when_the_ranks_wait():
    drawn = hanging(waited_s=70)
    (alert,) = (alert for alert in drawn.alerts if alert.finding.rule == "stall")

    assert dict(alert_facts(alert))["last seen"].endswith("after 1 min 10 s")
    assert "open 1m 10s" in page(alert_list(drawn, 120, 40, selected=0, first=0))


def test_a_timeout_that_is_not_known_or_over_is_said():
    assert "the timeout of torch is unknown" in page(hang_lines(hanging(timeout_s=0), 100))
    assert "the timeout has expired" in page(hang_lines(hanging(waited_s=700), 100))


def test_the_header_says_it_and_the_alert_box_does_not_repeat_it():
    drawn = hanging()

    assert "✖ HANGS" in page([header_line(drawn, 100)])
    assert "has not joined" not in page(alert_panel(drawn, 100, 20))


def test_the_missing_rank_looks_different_from_those_that_wait():
    rows = hanging().rows

    assert badge(rows[2]).text == "✖ not joined: data"
    assert badge(rows[0]).text == "▲ 12 s in sync"


@pytest.mark.parametrize("column", ["", "RANK"])
def test_the_missing_rank_comes_to_the_top_unless_another_order_is_wanted(column):
    drawn = hanging(world=8, missing=6)
    ranks = [row.state.rank for row in arrange(drawn.rows, drawn.urgent, Ordering(column=column))]

    assert ranks == ([0, 1, 2, 3, 4, 5, 6, 7] if column else [6, 0, 1, 2, 3, 4, 5, 7])


def test_status_shows_a_hang_and_marks_the_missing_rank_also_in_a_low_window():
    drawn = hanging(world=12, missing=9)
    whole, low = (texts(status_screen(drawn, 100, rows)) for rows in (None, 14))

    assert [line.split()[0] for line in whole if "✖ not joined: data" in line] == ["9"]
    assert whole[0].endswith("✖ hangs")
    assert sum("▲ 12 s in sync" in line for line in whole) == 11
    assert next(line for line in low if "ONE STEP" not in line and "✖ not joined" in line).split()[0] == "9"


def test_one_whose_data_has_ended_is_shown_as_a_hang_too():
    """The rule itself is tested with the detectors."""
    drawn = hanging()
    (stall,) = (alert for alert in drawn.alerts if alert.finding.rule == "stall")
    ended = replace(stall, finding=replace(stall.finding, rule="uneven-batch"))
    drawn.monitor.book.open = {ended.key: ended}
    drawn = current_view(drawn.monitor)

    assert "has not joined" in page(hang_lines(drawn, 100))
    assert stuck_rank(drawn) == 2


def test_the_page_of_the_missing_rank_begins_with_its_stack():
    drawn = hanging()
    assert "has not answered" in page(rank_page(drawn, 2, 100, 40))

    frames = [wire.StackFrame("sleep", "/usr/lib/python3.11/t.py", 3), wire.StackFrame("collate", "/a/train.py", 88)]
    drawn = hanging(
        threads=[wire.ThreadStack("MainThread", True, frames)],
        collectives=[wire.Collective("0", 1041, "all_reduce", "[1056] Float", True)],
    )
    reported = page(rank_page(drawn, 2, 100, 60))
    assert "▸ collate train.py:88" in reported
    assert "all_reduce #1041 [1056] Float, group 0: done" in reported
    assert reported.index("collate") < reported.index("has not joined")


@pytest.fixture(scope="module")
def hostile():
    frames = [wire.StackFrame(HOSTILE[:80], HOSTILE[:80], 1)] * 40
    return hanging(shape=HOSTILE[:100], threads=[wire.ThreadStack(HOSTILE[:80], True, frames)])


@given(columns=widths, rows=heights)
def test_it_fits_whatever_the_ranks_claim(hostile, columns, rows):
    assert_fits(hang_lines(hostile, columns), columns)
    assert_fits(rank_page(hostile, 2, columns, rows), columns, rows)
