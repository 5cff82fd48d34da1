"""Sparklines: flat is flat, a spike is never lost, and what is not known is blank."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.view.cells import Level, line_columns
from ddpwatch.view.charts.sparkline import EIGHTHS, spark


def drawn(values, columns):
    return "".join(cell.text for cell in spark(values, columns))


@given(st.lists(st.floats(), max_size=200), st.integers(0, 80))
def test_it_is_exactly_as_wide_as_asked_whatever_the_values(values, columns):
    text = drawn(values, columns)

    assert line_columns(spark(values, columns)) == columns
    assert set(text) <= set(EIGHTHS)
    assert (text.strip() != "") == (columns > 0 and any(map(math.isfinite, values)))


@given(st.lists(st.floats(96, 104), min_size=1, max_size=60))
def test_a_flat_series_looks_flat(values):
    assert drawn(values, 60).strip() == "▄" * len(values)


def test_zero_is_the_lowest_and_the_scale_begins_there():
    assert drawn([0, 1, 2, 4, 8], 5) == "▁▁▂▄█"
    assert drawn([0, 0, 0], 3) == "▁▁▁"
    assert drawn([-5, 4, 8], 3) == "▁▄█"


@given(st.integers(1, 599), st.integers(5, 100))
def test_a_spike_shows_however_many_values_share_its_column(place, columns):
    values = np.full(600, 10.0)
    values[place] = 40.0

    assert drawn(values, columns).count("█") == 1


def test_one_value_far_above_all_others_does_not_flatten_them():
    values = [100.0] * 50
    values[0] = 30_000.0

    assert drawn(values, 50) == "█" + "▄" * 49


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
def test_what_is_not_known_is_blank(hole):
    assert drawn([4, hole, 4], 5) == "▄ ▄  "
    assert drawn([hole] * 4, 3) == "   "


def test_it_carries_its_level():
    assert spark([1], 1, level=Level.DIM)[0].level is Level.DIM
