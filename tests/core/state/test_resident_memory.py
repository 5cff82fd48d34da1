"""Resident memory is kept now and then, for an hour, in few bytes."""

from __future__ import annotations

from itertools import pairwise

from ddpwatch.core.state.rank import RSS_SAMPLE_NS, RSS_SAMPLES_KEPT, RssHistory


def reported(moments, every_ns=RSS_SAMPLE_NS):
    rss_history = RssHistory()
    for moment in range(moments):
        rss_history.put(moment * every_ns, moment + 1)
    return rss_history


def test_one_is_taken_now_and_then():
    rss_history = reported(41, RSS_SAMPLE_NS // 4)

    assert len(rss_history) == 11
    assert rss_history.spread(100) == ([k * RSS_SAMPLE_NS for k in range(11)], [4 * k + 1 for k in range(11)])


def test_what_is_not_known_is_no_moment():
    rss_history = RssHistory()
    rss_history.put(5, 0)
    assert (len(rss_history), rss_history.span, rss_history.spread(10)) == (0, None, ([], []))
    rss_history.put(6, 7)
    assert (len(rss_history), rss_history.span, rss_history.spread(10)) == (1, None, ([6], [7]))


def test_the_oldest_make_room():
    rss_history = reported(RSS_SAMPLES_KEPT + 5)

    assert len(rss_history) == RSS_SAMPLES_KEPT
    assert rss_history.span == ((5 * RSS_SAMPLE_NS, 6), ((RSS_SAMPLES_KEPT + 4) * RSS_SAMPLE_NS, RSS_SAMPLES_KEPT + 5))


def test_of_many_some_are_told_evenly_spread_and_the_last_among_them():
    times_ns, used = reported(RSS_SAMPLES_KEPT).spread(60)

    assert len(used) == 60
    assert used[-1] == RSS_SAMPLES_KEPT
    assert {later - earlier for earlier, later in pairwise(used)} == {6}
    assert times_ns == [(each - 1) * RSS_SAMPLE_NS for each in used]


def test_a_copy_goes_its_own_way():
    rss_history = reported(3)
    other = rss_history.copy()
    rss_history.put(3 * RSS_SAMPLE_NS, 4)

    assert (len(rss_history), len(other)) == (4, 3)
    other.put(3 * RSS_SAMPLE_NS, 9)
    assert other.span[1] == (3 * RSS_SAMPLE_NS, 9)
