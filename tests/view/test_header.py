"""Lines around every screen: header, tabs, keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.monitor import Monitor
from ddpwatch.tui.keys import TABS, keys_of
from ddpwatch.view.cells import Level, columns_of, plain
from ddpwatch.view.header import clock, header_line, key_line, tab_line
from ddpwatch.view.run_view import run_view
from ddpwatch.view.status import status_screen
from tests.builders.fake_rank import make_hello
from tests.builders.synthetic_run import make_run, train
from tests.view.pages import HOSTILE, assert_fits, make_monitor, make_run_view, run_views

anywhere = st.integers(1, 250)


def test_the_header_names_the_run_and_its_facts_and_counts_alerts():
    text = plain(header_line(make_run_view(make_monitor()), 120))

    assert text.startswith(" ddpwatch  train · step 120")
    assert "step 120 · 4 ranks on 1 host" in text
    assert "● LIVE  ▲ 2" in text or "● LIVE  ▲ 1" in text


@pytest.mark.parametrize(("kind", "named"), [("fsdp2", "FSDP2 · "), ("plain", "no wrapper · "), ("ddp", "")])
def test_training_other_than_ddp_is_named(kind, named):
    state = make_run({rank: train() for rank in range(2)}, kind=kind)
    shown = run_view(Monitor(state), Timeline())

    assert f"2 ranks on 1 host · {named}gloo" in plain(header_line(shown, 120))
    assert f"train · {named}gloo · 2 ranks" in plain(status_screen(shown, 120)[0])


def test_facts_give_way_from_the_right_and_the_state_never_does():
    run_view = make_run_view(make_monitor())
    lengths = []
    for columns in range(120, 40, -1):
        text = plain(header_line(run_view, columns))
        assert "● LIVE" in text
        lengths.append(text.count(" · "))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0]


def test_looking_back_is_marked_and_a_click_on_the_mark_returns_to_now():
    line = header_line(make_run_view(make_monitor(), at=60, paused=True), 120)
    (mark,) = [cell for cell in line if cell.text == "‖ STEP 60"]

    assert (mark.level, mark.action) == (Level.WARN, "live")
    assert "step 60" in plain(line)
    assert "LIVE" not in plain(line)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_simulated_data_is_marked(columns):
    assert "SIMULATED" in plain(header_line(make_run_view(make_monitor(), simulated=True), columns))


def test_the_state_of_the_run_is_shown():
    monitor = make_monitor(received=0)
    assert "no heartbeat yet" in plain(header_line(make_run_view(monitor), 120))
    monitor = make_monitor(slow=None)
    monitor.tick(60_000_000_000)
    assert "▲ NO HEARTBEAT" in plain(header_line(make_run_view(monitor), 120))
    monitor = make_monitor(slow=None)
    for rank in range(4):
        monitor.state.apply(wire.Bye(rank=rank, seq=6, reason="closed", text="", mono_ns=9), 2)
    assert "■ ENDED" in plain(header_line(make_run_view(monitor), 120))


def test_the_running_time_is_shown_if_the_ranks_report_their_clocks():
    hello = {"started_unix_ns": 10**18, "unix_ns": 10**18, "mono_ns": 0}
    monitor = make_monitor(slow=None)
    assert "00:" not in plain(header_line(make_run_view(monitor), 120))
    for rank in monitor.state.ranks.values():
        rank.hello = make_hello(rank.rank, **hello)
    monitor.tick(2_537_000_000_000)
    assert "00:42:17" in plain(header_line(make_run_view(monitor), 120))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "00:00:00"), (2537.9, "00:42:17"), (90061, "1d 01:01:01"), (-1, "00:00:00")]
)
def test_a_clock_counts_hours_and_days(seconds, text):
    assert clock(seconds) == text


@given(run_views(), anywhere)
def test_the_header_fits_whatever_the_run_is_called(run_view, columns):
    assert_fits([header_line(run_view, columns)], columns)


def test_text_from_outside_does_not_break_the_header():
    monitor = make_monitor(slow=None)
    monitor.state.name = monitor.state.name + "[bold red]x[/]"
    text = plain(header_line(make_run_view(monitor), 120))

    assert "train[bold red]x[/]" in text
    assert "\x1b" in HOSTILE


@pytest.mark.parametrize("columns", [80, 100, 250])
def test_tabs_are_numbered_the_chosen_one_is_marked_and_all_can_be_clicked(columns):
    line = tab_line(TABS, "ranks", columns)

    assert plain(line) == "  1 overview [2 ranks] 3 all-reduce  4 GPUs  5 alerts  6 logs"
    assert [cell.action for cell in line if cell.action] == [f"show('{name}')" for name, _ in TABS]


def test_on_narrow_terminals_only_the_chosen_tab_keeps_its_name():
    assert plain(tab_line(TABS, "ranks", 40)).split() == ["1", "[2", "ranks]", "3", "4", "5", "6"]


@given(st.sampled_from([name for name, _ in TABS]), anywhere)
def test_tabs_and_keys_fit(name, columns):
    assert_fits([tab_line(TABS, name, columns), key_line(keys_of(name), columns)], columns)


@pytest.mark.parametrize("columns", [20, 30, 40, 60, 80])
def test_help_and_the_way_out_are_the_last_keys_to_go(columns):
    text = plain(key_line(keys_of("overview"), columns))

    assert text.endswith("? help  q quit")
    assert "…" not in text
    assert columns_of(text) <= columns


def test_every_key_is_shown_if_there_is_room():
    assert plain(key_line(keys_of("overview"), 200)) == " " + "  ".join(
        f"{key} {word}" for key, word, _ in keys_of("overview")
    )


def test_looking_back_the_key_to_return_is_shown():
    assert "l" not in [key for key, _, _ in keys_of("overview")]
    assert [key for key, _, _ in keys_of("overview", paused=True)][:2] == ["space", "l"]
    assert "l" not in [key for key, _, _ in keys_of("overview", ended=True)]
    assert keys_of("overview", paused=True, ended=True)[0] == ("l", "the end", "live")
    for width in (80, 120):
        assert "l live" in plain(key_line(keys_of("ranks", paused=True), width))
