"""Resident memory is sampled at an interval and kept for an hour."""

from __future__ import annotations

from itertools import pairwise

from ddpwatch.core.state.rank import RSS_SAMPLE_NS, RSS_SAMPLES_KEPT, RssHistory


def reported(moments, every_ns=RSS_SAMPLE_NS):
    rss_history = RssHistory()
    for moment in range(moments):
        rss_history.put(moment * every_ns, moment + 1)
    return rss_history


def test_samples_are_taken_at_the_interval():
    rss_history = reported(41, RSS_SAMPLE_NS // 4)

    assert len(rss_history) == 11
    assert rss_history.spread(100) == ([k * RSS_SAMPLE_NS for k in range(11)], [4 * k + 1 for k in range(11)])


def test_zero_bytes_are_not_a_sample():
    rss_history = RssHistory()
    rss_history.put(5, 0)
    assert (len(rss_history), rss_history.span, rss_history.spread(10)) == (0, None, ([], []))
    rss_history.put(6, 7)
    assert (len(rss_history), rss_history.span, rss_history.spread(10)) == (1, None, ([6], [7]))


def test_the_oldest_samples_are_dropped():
    rss_history = reported(RSS_SAMPLES_KEPT + 5)

    assert len(rss_history) == RSS_SAMPLES_KEPT
    assert rss_history.span == ((5 * RSS_SAMPLE_NS, 6), ((RSS_SAMPLES_KEPT + 4) * RSS_SAMPLE_NS, RSS_SAMPLES_KEPT + 5))


def test_a_subset_is_evenly_spaced_and_ends_with_the_last():
    times_ns, used = reported(RSS_SAMPLES_KEPT).spread(60)

    assert len(used) == 60
    assert used[-1] == RSS_SAMPLES_KEPT
    assert {later - earlier for earlier, later in pairwise(used)} == {6}
    assert times_ns == [(each - 1) * RSS_SAMPLE_NS for each in used]


def test_a_copy_is_independent():
    rss_history = reported(3)
    other = rss_history.copy()
    rss_history.put(3 * RSS_SAMPLE_NS, 4)

    assert (len(rss_history), len(other)) == (4, 3)
    other.put(3 * RSS_SAMPLE_NS, 9)
    assert other.span[1] == (3 * RSS_SAMPLE_NS, 9)
