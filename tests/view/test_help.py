"""Help screen and glossary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.view.charts.phase_bar import PIECES
from ddpwatch.view.glossary import GLOSSARY
from ddpwatch.view.gpus.columns import SORT_KEYS as GPU_SORT_KEYS
from ddpwatch.view.help import help_lines
from ddpwatch.view.ranks.columns import SORT_KEYS as RANK_SORT_KEYS
from tests.view.pages import assert_fits, page, texts, widths

KEYS = [("1-6", "screens"), ("enter", "page of the selected rank"), ("?", "this help"), ("q", "quit")]
TERMS = {term: text for terms in GLOSSARY.values() for term, text in terms.items()}


@given(st.lists(st.tuples(st.text("abc←", max_size=12), st.text("words ", max_size=80)), max_size=12), widths)
def test_it_fits_any_width(keys, columns):
    assert_fits(help_lines(keys, columns), columns)


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_every_key_and_every_term_is_there_and_no_sentence_is_cut(columns):
    text = page(help_lines(KEYS, columns))

    assert "…" not in text.replace("slow …", "").replace("in …", "").replace("‖ …", "")
    for sentence in (*TERMS.values(), *(word for _, word in KEYS)):
        assert sentence in text or columns < 200


def test_each_explanation_is_one_plain_sentence():
    for term, text in TERMS.items():
        assert text.endswith((".", "?")), term
        assert ". " not in text, term
        assert 20 < len(text) < 200, term


def test_no_term_is_explained_twice():
    assert len(TERMS) == sum(map(len, GLOSSARY.values()))


def test_the_columns_of_the_rank_and_the_gpu_table_are_explained():
    known = {word.strip().casefold() for term in TERMS for word in term.split(",")}
    titles = {title.casefold().replace("%", " %") for title in (*RANK_SORT_KEYS, *GPU_SORT_KEYS)}

    assert titles - known <= {"rank", "host", "pid", "state"}


def test_each_glyph_of_the_bar_is_explained_with_its_colour():
    lines = help_lines(KEYS, 100)

    for piece in PIECES:
        [line] = [line for line in lines if line and line[0].text == piece.glyph * 2 + " "]
        assert line[0].level is piece.level


def test_keys_stand_beside_each_other_where_there_is_room():
    def height(columns):
        lines = texts(help_lines(KEYS, columns))
        return lines.index("") - 1

    assert height(200) == 1
    assert height(40) == len(KEYS)
