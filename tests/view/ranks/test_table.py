"""Filter, order and state badges of the rank table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.view.cells import Level
from ddpwatch.view.columns import Ordering
from ddpwatch.view.ranks.columns import SORT_KEYS, attention, badge
from ddpwatch.view.ranks.table import BY_RANK_UP_TO, arrange
from tests.builders.fake_rank import MS, make_beat
from tests.view.pages import make_monitor, make_run_view, run_views


def shown(run_view, ordering):
    return [row.state.rank for row in arrange(run_view.rows, run_view.urgent, ordering)]


@pytest.fixture(scope="module")
def slow():
    return make_run_view(make_monitor())


@pytest.fixture(scope="module")
def crowd():
    return make_run_view(make_monitor(world=BY_RANK_UP_TO + 4, slow=11))


def test_few_ranks_keep_their_places_and_of_many_the_worst_come_first(slow, crowd):
    assert shown(slow, Ordering()) == [0, 1, 2, 3]
    others = [rank for rank in range(BY_RANK_UP_TO + 4) if rank != 11]
    assert shown(crowd, Ordering()) == [11, *others]


def test_follow_worst_goes_before_any_column_and_is_left_by_a_move(slow):
    ordering = Ordering(column="RANK", backwards=True, follow_worst=True)

    assert shown(slow, ordering) == [2, 0, 1, 3]
    assert not ordering.unfollowed().follow_worst
    assert ordering.unfollowed().unfollowed() is not None


def test_a_column_sorts_the_largest_to_the_top_and_once_more_turns_it_round(slow):
    once = Ordering(follow_worst=True).by("bwd")

    assert shown(slow, once)[0] == 2
    assert shown(slow, once.by("bwd"))[-1] == 2
    assert not once.by("bwd").by("bwd").backwards
    assert not once.by("bwd").by("RANK").backwards
    assert shown(slow, Ordering().by("RANK").by("RANK")) == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("wanted", "ranks"),
    [
        ("2", [2]),
        ("r2", [2]),
        ("R2", [2]),
        ("SLOW", [2]),
        ("straggler", [2]),
        ("node-a ok", [0, 1, 2, 3]),
        ("  backward   slow ", [2]),
        ("node-b", []),
        ("22", []),
        ("[bold]", []),
        ("", [0, 1, 2, 3]),
    ],
)
def test_the_filter_asks_for_all_its_words_and_a_number_is_a_rank(slow, wanted, ranks):
    assert shown(slow, Ordering(wanted=wanted)) == ranks


def test_a_number_is_not_every_rank_with_its_digit(crowd):
    assert shown(crowd, Ordering(wanted="1")) == [1]


@given(run_views(), st.sampled_from(["", *SORT_KEYS]), st.booleans(), st.booleans())
def test_any_order_shows_every_rank_once(run_view, column, backwards, follow):
    ordering = Ordering(column=column, backwards=backwards, follow_worst=follow)

    assert sorted(shown(run_view, ordering)) == sorted(row.state.rank for row in run_view.rows)


def test_the_badge_says_what_is_wrong_and_why(slow):
    assert badge(slow.rows[0]) == ("ok", Level.OK, "")
    assert badge(slow.rows[2]).text.startswith("▲ slow backward ")
    assert badge(slow.rows[2]).text.endswith("25%")


@pytest.mark.parametrize(
    ("message", "text", "level"),
    [
        (wire.Bye(rank=1, seq=6, reason="closed", text="", mono_ns=9), "■ exited", Level.DIM),
        (wire.Bye(rank=1, seq=6, reason="off", text="", mono_ns=9), "▲ agent off", Level.WARN),
        (wire.Bye(rank=1, seq=6, reason="failed", text="x", mono_ns=9), "✖ failed", Level.BAD),
        (wire.Gone(rank=1, seq=0), "✖ lost", Level.BAD),
        (make_beat(1, 6, pause="evaluation", mono_ns=99), "‖ evaluation", Level.WARN),
        (make_beat(1, 6, phase=2, phase_ns=7_000 * MS, mono_ns=99), "▲ 7 s in backward", Level.WARN),
    ],
)
def test_every_condition_has_a_badge(message, text, level):
    monitor = make_monitor(slow=None)
    monitor.state.apply(message, 2)
    row = make_run_view(monitor).rows[1]

    assert (badge(row).text, badge(row).level) == (text, level)


def test_missing_and_silent_ranks_have_a_badge():
    monitor = make_monitor(received=2, slow=None)
    monitor.tick(60_000_000_000)
    rows = make_run_view(monitor).rows

    assert [badge(row).text for row in rows] == ["▲ no heartbeat", "▲ no heartbeat", "✖ missing", "✖ missing"]
    assert all(attention(bad) < attention(good) for bad in rows for good in make_run_view(make_monitor(slow=None)).rows)


def test_attention_sorts_lost_ranks_before_slow_ones_before_healthy_ones():
    monitor = make_monitor()
    monitor.state.apply(wire.Gone(rank=3, seq=0), 2)
    run_view = make_run_view(monitor)

    assert [row.state.rank for row in run_view.urgent] == [3, 2, 0, 1]
