"""Lines never exceed the terminal, and numbers never exceed their column."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.core.metrics.live_metrics import RankFigures
from ddpwatch.core.units import count, duration, ms, plural, size
from ddpwatch.view.cells import Cell, clip, columns_of, fit, line_columns, pad, plain
from ddpwatch.view.charts.phase_bar import PIECES, legend, phase_bar
from tests.builders.fake_rank import MS


@pytest.mark.parametrize(("text", "columns"), [("abc", 3), ("模型", 4), ("e\u0301", 1), ("▚█", 2), ("", 0)])
def test_width_is_counted_in_terminal_columns(text, columns):
    assert columns_of(text) == columns


@given(st.text(st.characters(blacklist_categories=["Cc", "Cf", "Cs"])), st.integers(0, 20))
def test_clipped_and_padded_text_fits(text, columns):
    assert columns_of(clip(text, columns)) <= columns
    assert columns_of(pad(text, columns)) == columns
    assert columns_of(pad(text, columns, right=True)) == columns


def test_a_cut_shows():
    assert clip("abcdef", 4) == "abc…"
    assert clip("模型模型", 4) == "模…"
    assert plain(fit([Cell("abc"), Cell("def")], 5)) == "abcd…"[:3] + "d…"
    assert line_columns(fit([Cell("abc"), Cell("def")], 3)) == 3


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "–"),
        (0, "0.00"),
        (0.41 * MS, "0.41"),
        (9.996 * MS, "10.0"),
        (31.24 * MS, "31.2"),
        (99.96 * MS, "100"),
        (1800 * MS, "1800"),
        (12_000 * MS, "12s"),
        (3_700_000 * MS, "1.0h"),
        (2**55, ">9h"),
    ],
)
def test_times_take_at_most_four_characters(ns, text):
    assert ms(ns) == text
    assert len(text) <= 4


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0B"), (999, "999B"), (1 << 20, "1.0M"), (812 << 20, "812M"), (3 << 29, "1.5G"), (2**62, "4096P")],
)
def test_sizes_are_short(value, text):
    assert size(value) == text


def test_counts_are_grouped_and_durations_have_two_units():
    assert count(12431) == "12,431"
    assert plural(1, "rank") == "1 rank"
    assert plural(4, "rank") == "4 ranks"
    assert [duration(s) for s in (5, 65, 3700, 90000)] == ["5s", "1m 05s", "1h 01m", "1d 01h"]


def make_figures(wait=0.0, **phases):
    fields = {"data": 0, "forward": 0, "backward": 0, "sync": 0, "optimizer": 0, "other": 0, **phases}
    step = sum(fields.values())
    return RankFigures(
        rank=0,
        step_ns=step,
        self_ns=step - fields["sync"],
        **{f"{name}_ns": value for name, value in fields.items()},
        wait_ns=wait,
        straggler_cost_share=None,
        batch=None,
    )


def test_the_bar_shows_each_phase_with_its_own_glyph():
    figures = make_figures(data=10, forward=20, backward=30, sync=20, optimizer=10, other=10, wait=15)

    assert plain(phase_bar(figures, 100, 20)) == "▚▚▓▓▓▓██████░░░▒▞▞··"
    assert len({piece.glyph for piece in PIECES}) == len(PIECES)
    assert all(piece.name in plain(legend()) + plain(legend(split=False)) for piece in PIECES)


def test_a_shorter_step_has_a_shorter_bar():
    assert plain(phase_bar(make_figures(forward=50), 100, 20)) == "▓" * 10


def test_unproven_waiting_shows_as_plain_sync():
    assert plain(phase_bar(make_figures(sync=100, wait=None), 100, 10)) == "▤" * 10
    assert "▤" in plain(legend(split=False))
    assert "▤" not in plain(legend())


times_ns = st.floats(0, 1e12)


@given(st.tuples(*[times_ns] * 7), st.floats(0, 1e12), st.integers(1, 120))
def test_the_bar_is_exactly_as_wide_as_asked(times, full_ns, columns):
    names = ("data", "forward", "backward", "sync", "optimizer", "other")
    figures = make_figures(**dict(zip(names, times, strict=False)), wait=times[6])

    assert line_columns(phase_bar(figures, full_ns, columns)) == columns
