"""Rounded numbers that are shown together add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.core.units import rounded_to_total, wire_and_waiting

shares = st.floats(0.0, 1.0)


@given(shares, shares)
def test_wire_and_waiting_add_up_to_the_share_and_each_is_off_by_less_than_a_point(share, part):
    wire = share * part
    reported = wire_and_waiting(share, wire)

    assert sum(reported) == round(share * 100)
    assert all(abs(shown - exact * 100) < 1 for shown, exact in zip(reported, (wire, share - wire), strict=True))


@pytest.mark.parametrize(
    ("share", "wire", "reported"),
    [
        (0.6846, 0.4062, (40, 28)),  # the one that is cut most is rounded up: it is not 41 and 27
        (0.2995, 0.2950, (30, 0)),
        (0.10, 0.10, (10, 0)),
        (0.10, 0.1001, (10, 0)),  # more than all of it is noise
        (0.0, 0.0, (0, 0)),
    ],
)
def test_the_largest_remainder_is_rounded_up(share, wire, reported):
    assert wire_and_waiting(share, wire) == reported


def test_losses_and_gains_add_up_too():
    assert rounded_to_total((0.126, 0.046, -0.022), 15) == [13, 4, -2]
