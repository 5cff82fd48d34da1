"""Columns of tables: which are dropped, how the rest grows, and what the heading marks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.view.cells import Cell, Level, line_columns, plain
from ddpwatch.view.columns import ALWAYS, Column, lay_out, sort_keys

COLUMNS = (
    Column("NAME", 4, read=Cell, order=str, right=False, rises=True),
    Column("BAR", 5, 2, draw=lambda _row, width: [Cell("█" * width)], right=False, grow=(7, 20)),
    Column("LEN", 3, 1, read=lambda row: Cell(str(len(row))), order=lambda row: -len(row)),
    Column("NOTE", 6, draw=lambda row, _width: [Cell(row)], right=False, grow=(7, 9), fills=False),
)


@pytest.mark.parametrize(
    ("room", "widths"),
    [
        (10, {"NAME": 4, "NOTE": 6}),
        (17, {"NAME": 4, "BAR": 5, "NOTE": 6}),
        (20, {"NAME": 4, "BAR": 7, "NOTE": 7}),
        (21, {"NAME": 4, "BAR": 5, "LEN": 3, "NOTE": 6}),
        (23, {"NAME": 4, "BAR": 7, "LEN": 3, "NOTE": 6}),
        (25, {"NAME": 4, "BAR": 8, "LEN": 3, "NOTE": 7}),
        (99, {"NAME": 4, "BAR": 20, "LEN": 3, "NOTE": 9}),
    ],
)
def test_the_lowest_keep_is_dropped_first_and_the_rest_grows_in_rounds(room, widths):
    assert {column.title: width for column, width in lay_out(COLUMNS, room, gap=1).columns} == widths


@given(st.integers(1, 120), st.text("abc", max_size=30), st.sampled_from(["", "NAME", "LEN"]), st.booleans())
def test_no_line_is_wider_than_the_room(room, row, sorted_by, backwards):
    layout = lay_out(COLUMNS, room, gap=2)

    assert line_columns(layout.line(row)) <= room
    assert line_columns(layout.heading(sorted_by, backwards=backwards)) <= room
    assert all(column.keep == ALWAYS or room >= 18 for column, _ in layout.columns)


def test_the_heading_marks_the_sorted_column_and_a_click_sorts():
    layout = lay_out(COLUMNS, 30, gap=1)

    assert plain(layout.heading("NAME")).startswith("NAM▴")
    assert plain(layout.heading("NAME", backwards=True)).startswith("NAM▾")
    marked = {cell.text.strip(): (cell.level, cell.action) for cell in layout.heading("LEN")}
    assert marked["LE▾"] == (Level.STRONG, "sort('LEN')")
    assert marked["NAME"] == (Level.DIM, "sort('NAME')")
    assert marked["BAR"] == (Level.DIM, "")
    assert layout.titles == tuple(sort_keys(COLUMNS)) == ("NAME", "LEN")


def test_columns_of_one_figure_share_the_title_over_the_first():
    memory = Column("MEMORY", 8, read=Cell, order=str)
    heading = lay_out([memory, memory], 20, gap=1).heading("MEMORY")

    assert plain(heading).split() == ["MEMORY▾"]
    assert [cell.action for cell in heading if cell.action] == ["sort('MEMORY')"] * 2
