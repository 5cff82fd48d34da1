"""The heat map: slow ranks show, however many ranks and steps share a glyph."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.core.metrics.window import NOT_KNOWN
from ddpwatch.view.cells import Level, line_columns, plain
from ddpwatch.view.charts.heatmap import HEAT, heat_legend, heat_map


def make_excess(ranks, steps, slow=None, percent=0):
    excess = np.zeros((ranks, steps), dtype=np.uint8)
    if slow is not None:
        excess[slow] = percent
    return excess


def drawn(excess, columns=80, rows=20, steps=None, **options):
    steps = np.arange(excess.shape[1]) if steps is None else np.asarray(steps)
    return [plain(line) for line in heat_map(excess, range(len(excess)), steps, columns, rows, **options)]


@given(st.integers(0, 40), st.integers(0, 50), st.integers(0, 90), st.integers(0, 25), st.integers(0, 9), st.booleans())
def test_it_fits_any_size(ranks, steps, columns, rows, seed, with_hosts):
    excess = np.random.default_rng(seed).integers(0, 256, (ranks, steps)).astype(np.uint8)
    hosts = [f"host-{rank // 4}-模型" for rank in range(ranks)] if with_hosts else None
    lines = heat_map(excess, range(ranks), np.arange(steps) * 3, columns, rows, hosts=hosts)

    assert len(lines) <= rows
    assert all(line_columns(line) <= columns for line in lines)
    assert bool(lines) == all((ranks, steps, columns, rows))


@pytest.mark.parametrize(
    ("percent", "glyph"), [(0, "·"), (4, "·"), (5, "░"), (10, "▒"), (20, "▓"), (40, "█"), (254, "█")]
)
def test_the_glyph_shows_the_excess(percent, glyph):
    lines = drawn(make_excess(4, 10, slow=2, percent=percent))

    assert lines[2] == "r2 " + glyph * 10
    assert lines[1] == "r1 " + "·" * 10
    assert lines[4] == "steps 0 to 9"


def test_what_is_not_known_is_blank_and_does_not_count():
    excess = make_excess(2, 60, slow=1, percent=30)
    excess[0, :30] = NOT_KNOWN
    excess[1, ::2] = NOT_KNOWN

    assert drawn(excess, columns=80)[0] == "r0 " + " " * 30 + "·" * 30
    assert drawn(excess, columns=80)[1] == "r1 " + " ▓" * 30
    # Two steps a column: one is known, and it is all there is.
    assert drawn(excess, columns=33)[1] == "r1 " + "▓" * 30


def test_a_rank_that_is_slow_in_every_fourth_step_shows_when_steps_are_folded():
    excess = make_excess(4, 600)
    excess[1, ::4] = 40
    row = drawn(excess, columns=63)[1]

    assert set(row[3:]) <= {"░", "▒"}


def test_one_hiccup_does_not_flare_up_in_a_folded_column_not_even_in_the_newest():
    excess = make_excess(2, 601)
    excess[1, 300] = excess[1, 600] = 40

    assert set(drawn(excess, columns=63)[1][3:]) == {"·"}


def test_the_worst_of_folded_ranks_shows_and_the_last_line_says_so():
    lines = drawn(make_excess(64, 10, slow=37, percent=50), rows=5)

    assert lines == [
        " r0-15 ··········",
        "r16-31 ··········",
        "r32-47 ██████████",
        "r48-63 ··········",
        "each line = the worst of 16 ranks · steps 0 to 9",
    ]


def test_hiccups_of_many_ranks_do_not_hide_the_slow_one():
    excess = make_excess(256, 60)
    excess[np.arange(0, 240, 4), np.arange(60)] = 35
    excess[250, 20:] = 25
    lines = drawn(excess, rows=9)

    assert all(set(line.split()[1]) == {"·"} for line in lines[:7])
    assert lines[7].endswith("▓" * 30)


def test_an_unknown_rank_does_not_hide_the_others_of_its_line():
    excess = make_excess(8, 6, slow=1, percent=50)
    excess[0] = NOT_KNOWN

    assert drawn(excess, rows=3)[0] == "r0-3 ██████"


def test_hosts_get_a_line_each_where_there_is_room():
    hosts = [f"node-{rank // 8}" for rank in range(32)]
    excess = make_excess(32, 6, slow=9, percent=25)

    assert drawn(excess, rows=8, hosts=hosts)[:3] == ["node-0 ······", "node-1 ▓▓▓▓▓▓", "node-2 ······"]
    assert "each line = the worst rank of a host" in drawn(excess, rows=8, hosts=hosts)[-1]
    assert drawn(excess, rows=40, hosts=hosts)[9] == " r9 ▓▓▓▓▓▓"
    assert drawn(excess, rows=4, hosts=hosts)[0].startswith(" r0-15 ")
    scattered = [f"node-{rank % 4}" for rank in range(32)]
    assert drawn(excess, rows=8, hosts=scattered)[0].startswith("  r0-7 ")


def test_a_gap_in_the_steps_is_a_gap_in_the_map():
    assert drawn(make_excess(1, 4), steps=[0, 1, 5, 6])[0] == "r0 ··   ··"


def test_the_legend_names_every_glyph_with_its_bound():
    for columns in (70, 50, 30):
        legend = heat_legend(columns)

        assert line_columns(legend) <= columns
        for percent, glyph, _ in HEAT[1:]:
            assert f"{glyph} {percent}%" in plain(legend)
        assert Level.HEAT_4 in {cell.level for cell in legend}


def test_the_note_gets_shorter_until_it_fits_and_is_never_cut():
    steps = list(range(13_503, 13_903))
    for columns in range(12, 120):
        for hosts in (None, [f"node-{rank // 8}" for rank in range(32)]):
            note = drawn(make_excess(32, 400), columns=columns, rows=9, steps=steps, hosts=hosts)[-1]

            assert "…" not in note
            assert not note or re.search(r"13,\d\d\d( to |-)13,902", note)
    wide = drawn(make_excess(32, 400), columns=120, rows=9, steps=steps)[-1]
    assert wide.startswith("each line = the worst of 4 ranks · steps 13,5")
    assert wide.endswith("1 column = 4 steps")
    assert drawn(make_excess(32, 400), columns=50, rows=9, steps=steps)[-1].startswith("worst of 4 ranks a line")


def test_thousands_of_ranks_are_cheap():
    # As the timeline keeps them: by step, then rank.
    excess = np.random.default_rng(0).integers(0, 30, (600, 8192)).astype(np.uint8).T
    spent_s = []
    for _ in range(5):
        began_s = time.process_time()
        heat_map(excess, range(8192), np.arange(600), 200, 50)
        spent_s.append(time.process_time() - began_s)

    assert min(spent_s) < 0.05
