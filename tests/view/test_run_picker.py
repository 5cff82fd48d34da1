"""Screens for waiting for a run and for choosing one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.view.cells import line_columns
from ddpwatch.view.run_picker import SPINNER, RunRow, picker_lines, waiting_lines
from tests.view.pages import HOSTILE, assert_fits, heights, page, texts, widths

BASE = "/run/user/1000/ddpwatch"
PLACES = [BASE, "/tmp/ddpwatch-1000"]


def make_run(number=0, **changed):
    fields = {"id": f"{number:08x}ab12cd34", "name": f"run-{number}", "attempt": 0, "world_size": 8, "ranks_alive": 8}
    return RunRow(**{**fields, "host": "node-a", "hosts": 1, "age_s": 65.0, **changed})


def rows_of(lines):
    return [text for text in texts(lines) if "run-" in text]


@given(widths, heights, st.sampled_from([BASE, HOSTILE, "/名前" * 90]), st.floats(0, 1e9))
def test_waiting_fits_any_window(columns, rows, base, seconds):
    assert_fits(waiting_lines(columns, rows, places=[base, BASE], seconds=seconds), columns, rows)


@given(st.integers(0, 40), widths, heights, st.integers(-2, 50), st.sampled_from(["run-a", HOSTILE, "名" * 90]))
def test_the_picker_fits_any_window(count, columns, rows, selected, name):
    runs = [make_run(number, name=name, host=name, attempt=number) for number in range(count)]

    assert_fits(picker_lines(runs, columns, rows, selected=selected), columns, rows)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_two_lines_to_add_can_be_read_and_copied(columns):
    lines = [text.strip() for text in texts(waiting_lines(columns, 60, places=PLACES, seconds=0))]

    assert "+ import ddpwatch.agent" in lines
    assert "+ ddpwatch.agent.install(model)" in lines


@pytest.mark.parametrize("columns", [20, 40, 120])
def test_the_directory_is_wrapped_and_never_cut(columns):
    base = "/a/very/long/directory/that/holds/the/runs/of/this/user/and/nobody/else"
    text = "".join(page(waiting_lines(columns, 90, places=[base, BASE], seconds=0)).split())

    assert base in text


def test_all_places_and_one_list_of_reasons_are_shown():
    text = page(waiting_lines(80, 40, places=PLACES, seconds=0))

    assert all(place in text for place in PLACES)
    assert text.count("in this order") == 1


def test_the_spinner_turns_with_time_and_nothing_else_moves():
    first, second = (texts(waiting_lines(80, 24, places=PLACES, seconds=at)) for at in (3.0, 3.25))

    changed = [(one, other) for one, other in zip(first, second, strict=True) if one != other]
    assert len(changed) == 1
    assert changed[0][0].translate(dict.fromkeys(map(ord, SPINNER))) == changed[0][1].translate(
        dict.fromkeys(map(ord, SPINNER))
    )


def test_the_screen_is_centered():
    lines = [line for line in waiting_lines(120, 40, places=PLACES, seconds=0) if line]
    left = min(len(text) - len(text.lstrip()) for text in texts(lines))
    right = 120 - max(line_columns(line) for line in lines)

    assert abs(left - right) <= 1


def test_a_run_shows_its_name_id_ranks_hosts_and_age():
    run = make_run(7, ranks_alive=6, hosts=3, attempt=2)

    [row] = rows_of(picker_lines([run], 120, 24, selected=0))
    assert row.split() == ["▌", "run-7", "00000007", "6", "of", "8", "1m", "05s,", "restart", "2", "node-a", "+2"]


@pytest.mark.parametrize("selected", [0, 11, 29])
def test_the_selected_one_is_marked_and_in_sight_and_the_rest_is_counted(selected):
    lines = picker_lines([make_run(number) for number in range(30)], 80, 14, selected=selected)

    [marked] = [text for text in texts(lines) if "▌" in text]
    assert f"run-{selected} " in marked
    counted = sum(int(text.split()[1]) for text in texts(lines) if "… " in text)
    assert counted + len(rows_of(lines)) == 30


def test_the_keys_are_shown():
    assert "enter attach" in page(picker_lines([make_run()], 80, 24, selected=0))
    assert "esc" not in page(picker_lines([make_run()], 80, 24, selected=0))


def test_the_key_back_names_the_run_and_a_hostile_name_fits():
    assert "q quit esc back to resnet50" in page(picker_lines([make_run()], 80, 24, selected=0, back="resnet50"))
    lines = picker_lines([make_run()], 60, 24, selected=0, back=HOSTILE * 9)
    assert_fits(lines, 60, 24)
    assert "esc back to" in page(lines)
