"""Numbers for people: those shown together add up, those in sentences have whole units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.core import units
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


@pytest.mark.parametrize(
    ("seconds", "text"), [(9.7, "9 s"), (600, "10 min"), (1791, "29 min 51 s"), (90_000, "1 d 1 h")]
)
def test_a_duration_in_a_sentence_has_whole_units(seconds, text):
    assert units.duration_text(seconds) == text


@pytest.mark.parametrize(("ns", "text"), [(50_100_000, "50.1 ms"), (12_000_000_000, "12 s"), (7200 * 10**9, "2.0 h")])
def test_a_time_in_a_sentence_has_one_unit(ns, text):
    assert units.ms_text(ns) == text


@pytest.mark.parametrize(("count_bytes", "text"), [(12, "12 B"), (4 << 20, "4.0 MiB"), (62 << 30, "62 GiB")])
def test_a_size_in_a_sentence_has_its_whole_unit(count_bytes, text):
    assert units.size_text(count_bytes) == text
