"""Series that merge pairs of columns when they are full."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch.core.metrics.histogram import MergingColumns


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
