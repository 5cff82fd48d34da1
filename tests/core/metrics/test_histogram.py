"""Quantiles from a histogram of fixed size are exact to the digits that are shown."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.core.metrics.histogram import Histogram

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
