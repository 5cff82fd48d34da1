"""Text layout: wrapping, paragraphs, headings, bars."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.view.cells import Cell, columns_of, line_columns, plain
from ddpwatch.view.layout import bar, beside, capped, facts, heading, paragraph, wrap
from tests.view.pages import texts

words = st.text(st.sampled_from("ab [/]名前שa\u0301 "), max_size=200)


@given(words, st.integers(2, 60))
def test_wrapping_keeps_every_character_and_every_width(text, columns):
    lines = wrap(text, columns)

    assert all(columns_of(line) <= columns for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_lines_are_broken_between_words():
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("名前 名前", 5) == ["名前", "名前"]
    assert wrap("", 5) == [""]


def test_further_lines_of_a_paragraph_stand_below_the_first():
    lead = [Cell("▲ rule  ")]

    assert texts(paragraph("one two three four five", 24, lead=lead)) == ["▲ rule  one two three", "        four five"]


def test_a_paragraph_without_room_beside_its_label_goes_below_it():
    assert texts(paragraph("one two three", 20, lead=[Cell("a long label: ")])) == ["a long label:", "  one two three"]


@given(words, words, st.integers(20, 100))
def test_facts_fit(name, text, columns):
    assert all(line_columns(line) <= columns for line in facts([(name, text)], columns))


@given(words, words, st.integers(20, 100))
def test_a_heading_goes_from_edge_to_edge(title, note, columns):
    assert line_columns(heading(title, columns, note)) == columns


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        (5, ["a", "", "b", "", "c"]),
        (3, ["a", "b", "c"]),
        (2, ["a", "… 2 more lines"]),
        (1, ["… 3 more lines"]),
        (0, []),
    ],
)
def test_blank_lines_go_before_any_text_does(rows, shown):
    lines = [[Cell("a")], [], [Cell("b")], [], [Cell("c")]]

    assert texts(capped(lines, rows)) == shown


def test_two_blocks_beside_each_other():
    lines = beside([[Cell("名")], [Cell("b")]], [[Cell("x")], [Cell("y")], [Cell("z")]], 4, gap=1)

    assert texts(lines) == ["名   x", "b    y", "     z"]


@given(st.floats(-1, 2), st.integers(0, 50))
def test_a_bar_has_its_width(share, columns):
    assert len(bar(share, columns)) == columns


def test_a_bar_grows_by_eighths():
    assert [bar(share, 2) for share in (0, 1 / 16, 0.5, 9 / 16, 1)] == ["  ", "▏ ", "█ ", "█▏", "██"]
    assert plain([Cell(bar(5, 3))]) == "███"


def test_a_number_stays_with_its_unit():
    text = "takes 39.5 ms, others 4.94 ± 0.07 · costs the job 24% of its time, 12 s ago"
    for columns in range(8, 60):
        lines = wrap(text, columns)

        assert not any(line.startswith(("ms", "%", "s ")) for line in lines)
        assert " ".join(lines) == text
