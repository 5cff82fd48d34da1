"""Charts as data: never wider or higher than asked, bands in their glyphs, round ticks, gaps that stay gaps."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.view.cells import Level, line_columns, plain
from ddpwatch.view.charts.axis import round_steps, round_ticks, scale_top, tick_text
from ddpwatch.view.charts.chart import GUTTER_COLUMNS, Band, Mark, chart, fold


def make_bands(*values, glyphs="▒░▤"):
    return [
        Band(f"band-{place}", np.asarray(band, dtype=np.float64), Level.WIRE, glyphs[place])
        for place, band in enumerate(values)
    ]


def drawn(*values, columns=40, rows=10, steps=None, glyphs="▒░▤", **options):
    steps = np.arange(len(values[0])) if steps is None else np.asarray(steps)
    lines = chart(make_bands(*values, glyphs=glyphs), steps, columns, rows, unit="%", **options)
    return [plain(line) for line in lines]


def column(lines, place, rows):
    """One column of the plot, from below."""
    return "".join(line.ljust(99)[GUTTER_COLUMNS + place] for line in reversed(lines[:rows]))


any_steps = st.lists(st.integers(0, 3000), min_size=0, max_size=120, unique=True).map(sorted)


@given(any_steps, st.data(), st.integers(0, 130), st.integers(0, 30), st.sampled_from(["mean", "max"]))
def test_it_fits_any_size_and_any_values(steps, data, columns, rows, how):
    values = [
        np.array(data.draw(st.lists(st.floats(), min_size=len(steps), max_size=len(steps))), dtype=np.float64)
        for _ in range(2)
    ]
    cursor = data.draw(st.none() | st.integers(0, 3000))
    marks = [Mark(data.draw(st.floats(0, 1e6)), "limit")]
    indices = np.array(steps, dtype=np.int64)
    lines = chart(make_bands(*values), indices, columns, rows, unit="ms", how=how, marks=marks, cursor=cursor)

    assert len(lines) <= rows
    assert all(line_columns(line) <= columns for line in lines)
    if rows and columns and any(np.isfinite(band[-1:]).any() for band in values):
        assert lines


@pytest.mark.parametrize("values", [[], [math.nan] * 5])
def test_without_a_finite_value_there_is_no_chart(values):
    assert drawn(values) == []


def test_bands_stand_on_each_other_each_in_its_glyph():
    lines = drawn([20] * 5, [60] * 5, columns=40, rows=11)

    assert column(lines, 0, 8) == "▒▒░░░░░░"
    assert lines[-1].strip() == "▒ band-0   ░ band-1"


def test_ticks_are_equally_far_apart_down_to_nothing_on_the_line_below():
    lines = drawn([80] * 5, columns=40, rows=11)
    places = [place for place, line in enumerate(lines) if "%" in line]

    assert [lines[place].split("%")[0].strip() for place in places] == ["80", "60", "40", "20", "0"]
    assert "└" in lines[places[-1]]
    assert {after - before for before, after in pairwise(places)} == {2}


def test_the_top_of_a_solid_stack_has_the_resolution_of_an_eighth():
    tops = [column(drawn([value, 80.0], columns=40, rows=11, glyphs="█"), 0, 8) for value in (10, 11.25, 12.5, 79)]

    assert tops == ["█       ", "█▁      ", "█▂      ", "███████▇"]


def test_the_top_of_a_shaded_one_is_shaded_and_ends_with_a_row():
    tops = [column(drawn([value, 80.0], columns=40, rows=11), 0, 8) for value in (10, 14, 16, 79)]

    assert tops == ["▒       ", "▒       ", "▒▒      ", "▒▒▒▒▒▒▒▒"]


def test_a_little_is_not_nothing():
    lines = drawn([0.001, 50.0, 0.0], rows=11)

    assert [column(lines, place, 8)[0] for place in range(3)] == ["▁", "▒", " "]


def test_the_axes_have_round_labels_with_the_unit():
    lines = drawn(np.full(60, 23.0), columns=90, rows=13)

    assert [line[:8].strip() for line in lines if "%" in line[:8]] == ["30%", "20%", "10%", "0%"]
    assert lines[-2].split() == ["step", "0", "20", "40"]
    assert lines[-3][GUTTER_COLUMNS + 20] == "┬"
    assert lines[-2].index("20") == GUTTER_COLUMNS + 20


def test_a_gap_in_the_steps_is_a_gap_in_the_chart():
    lines = drawn([8.0] * 6, steps=[0, 1, 2, 6, 7, 8])

    assert lines[6][GUTTER_COLUMNS:].rstrip() == "▒▒▒   ▒▒▒"


def test_steps_that_share_a_column_show_their_mean_or_maximum_and_the_legend_says_so():
    values = [0.0, 80.0] * 60
    mean = drawn(values, columns=69, rows=11, how="mean")
    largest = drawn(values, columns=69, rows=11, how="max")

    assert "1 column = 2 steps, mean" in mean[-1]
    assert "1 column = 2 steps, max" in largest[-1]
    assert column(mean, 5, 8).rstrip() == "▒" * 8
    assert mean[0].split()[0] == "40%"
    assert largest[0].split()[0] == "80%"
    assert "column" not in drawn(values, columns=140)[-1]


def test_a_mark_is_a_dashed_line_with_its_label_and_leaves_columns_readable():
    lines = drawn([40.0] * 10, columns=40, rows=13, marks=[Mark(20, "limit 20%")])
    row = next(line for line in lines if line.strip().startswith("20%"))

    assert row[GUTTER_COLUMNS:] == "╌▒▒▒╌▒▒▒╌▒" + "╌" * 21
    assert "╌╌ limit 20%" in lines[-1]


def test_a_mark_is_a_notch_through_solid_columns_and_tears_none_apart():
    lines = drawn([50.0, 50.0, 10.0, 50.0, 50.0], columns=40, rows=11, glyphs="█", marks=[Mark(20, "limit 20%")])
    (row,) = [line for line in lines if "20% ┼" in line]

    assert row[GUTTER_COLUMNS : GUTTER_COLUMNS + 7] == "▆▆╌▆▆╌╌"
    assert sum("▆▆" in line for line in lines) == 1


def test_a_mark_above_all_values_is_in_the_chart():
    assert any("10% ┼╌╌╌" in line for line in drawn([1.0] * 3, rows=12, marks=[Mark(10, "limit")]))


def test_the_cursor_marks_its_step_and_names_it():
    lines = drawn(np.full(100, 5.0), np.full(100, 1.0), columns=120, rows=12, cursor=37)

    assert lines[0][GUTTER_COLUMNS + 37] == "▼"
    assert lines[-2][GUTTER_COLUMNS + 37 :].startswith("37")
    assert "▼" not in "".join(drawn(np.full(100, 5.0), columns=120, rows=12, cursor=500))


def test_columns_far_above_the_others_say_so_and_do_not_flatten_them():
    values = np.full(60, 100.0)
    values[1] = 30_000.0
    lines = drawn(values, columns=80, rows=12)

    assert lines[0][GUTTER_COLUMNS + 1] == "▲"
    assert "▲ off the scale" in lines[-1]
    assert len(column(lines, 5, 9).rstrip()) >= 4


def test_small_charts_lose_the_axes_first_and_then_the_legend():
    values = [5.0] * 30
    assert "%" in "".join(drawn(values, rows=5))
    assert "%" not in "".join(drawn(values, rows=4))
    assert "band-0" in drawn(values, rows=4)[-1]
    assert "band-0" not in "".join(drawn(values, rows=2))
    assert len(drawn(values, rows=1)) == 1


@given(any_steps, st.integers(1, 100))
def test_folding_keeps_the_newest_step_and_never_takes_more_columns(steps, columns):
    folding = fold(np.array(steps, dtype=np.int64), columns)

    if not steps:
        assert folding is None
        return
    assert 1 <= folding.columns <= columns
    assert folding.column_of(steps[-1]) == folding.columns - 1
    kept = steps[folding.kept]
    assert len(steps) - len(kept) < folding.per_column
    assert folding.places.tolist() == sorted({folding.column_of(step) for step in kept})
    assert [folding.column_of(kept[start]) for start in folding.starts] == folding.places.tolist()


def test_a_new_step_changes_the_last_column_only():
    first, second = (fold(np.arange(100, last), 50) for last in (399, 400))

    assert first.per_column == second.per_column == 6
    assert first.first == second.first
    assert first.starts.tolist() == second.starts.tolist()


@given(st.floats(1e-3, 1e15), st.integers(1, 60))
def test_ticks_are_two_to_five_and_reach_the_top(top, rows):
    ticks = round_ticks(top, rows)

    assert 2 <= len(ticks) <= 5
    assert ticks[0] == 0
    assert ticks[-1] >= top * (1 - 1e-6)
    assert len(tick_text(ticks[-1], "ms")) <= GUTTER_COLUMNS


@given(st.integers(1, 10_000))
def test_step_labels_are_far_enough_apart_to_be_read(per_column):
    apart = round_steps(per_column)

    assert apart % 10 == 0
    assert apart >= 14 * per_column * 0.95


def test_a_scale_without_values_is_still_one():
    assert scale_top(np.array([])) == 1.0
    assert scale_top(np.array([math.nan, 0.0])) == 1.0
    assert scale_top(np.array([3.0]), [10.0]) == pytest.approx(11.0)


def test_the_words_on_folding_become_fewer_and_are_never_cut():
    values = np.full(400, 20.0)
    bands = [Band("wire", values, Level.WIRE, "▒"), Band("waiting", values, Level.WAITING, "░")]
    for columns in range(62, 100):
        legend = plain(chart(bands, np.arange(400), columns, 12, unit="%", marks=[Mark(10.0, "limit 10%")])[-1])

        assert "…" not in legend
        assert legend.endswith(("/column", "mean"))
