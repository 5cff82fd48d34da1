"""Quantiles are exact to the digits that are shown; full series merge pairs of columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch.core.metrics.histogram import Histogram, MergingColumns

MS = 1e6


def spread_of(values):
    spread = Histogram()
    for part in np.array_split(np.asarray(values, dtype=np.float64), 3):
        spread.add(part)
    return spread


@pytest.mark.parametrize("middle_ms", [1.004, 9.974, 31.37, 99.44, 182.4, 994.6, 7300.0])
@pytest.mark.parametrize("wide", [0.002, 0.02, 0.2])
def test_the_median_is_exact_to_three_digits(middle_ms, wide):
    """For any median and width of the distribution."""
    chance = np.random.default_rng(0)
    values = middle_ms * MS * np.exp(wide * chance.standard_normal(20_001))
    median = float(np.median(values))
    found = spread_of(values).quantile(0.5)

    assert found == pytest.approx(median, rel=0.001)
    third_digit = 10 ** np.floor(np.log10(median)) / 100
    assert abs(found - median) < third_digit


@given(st.lists(st.floats(1.0, 1e15), min_size=1, max_size=50), st.floats(0.0, 1.0))
def test_a_quantile_of_few_values_is_exact(values, part):
    found = spread_of(values).quantile(part)

    assert found == pytest.approx(float(np.quantile(values, part)), rel=0.0011)
    assert min(values) <= found * (1 + 1e-9)
    assert found <= max(values) * (1 + 1e-9)


def test_the_median_of_two_is_between_them():
    assert spread_of([20 * MS, 30 * MS]).quantile(0.5) == 25 * MS


def test_there_is_no_quantile_of_nothing():
    assert spread_of([]).quantile(0.5) is None


def folded(most=8, width=1):
    columns = MergingColumns(most, width)
    columns.keep("sum")
    columns.keep("min", "min")
    columns.keep("max", "max")
    return columns


@settings(max_examples=60)
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=60), st.integers(1, 5))
def test_sum_minimum_and_maximum_are_kept_at_any_length(steps, width):
    columns = folded(width=width)
    steps = np.array(sorted(steps))
    for part in np.array_split(steps, 4):
        if len(part):
            places = columns.places(part)
            for name in ("sum", "min", "max"):
                columns.add(name, places, part.astype(float))

    assert columns.used <= 8
    assert columns["sum"].sum() == steps.sum()
    assert columns["min"].min() == steps.min()
    assert columns["max"].max() == steps.max()
    assert columns.begins[-1] <= steps.max() < columns.begins[-1] + columns.width


def test_a_value_is_in_the_column_of_its_step_after_merging():
    columns = folded()
    columns.add("sum", columns.places(np.array([100])), np.array([7.0]))
    columns.add("sum", columns.places(np.array([131])), np.array([9.0]))

    assert columns.width == 4
    assert columns.begins.tolist() == list(range(100, 132, 4))
    assert columns["sum"].tolist() == [7.0, 0, 0, 0, 0, 0, 0, 9.0]


def test_positions_before_the_origin_count_as_the_first_column():
    columns = folded()
    columns.add("sum", columns.places(np.array([50])), np.array([1.0]))
    columns.add("sum", columns.places(np.array([10])), np.array([2.0]))

    assert columns["sum"].tolist() == [3.0]
