"""Lost messages are counted once; resident memory is sampled at an interval and kept for an hour."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.core.state.rank import RSS_SAMPLE_NS, RSS_SAMPLES_KEPT, WINDOW, RssHistory, SequenceTracker


def taken(sequence, numbers):
    return [number for number in numbers if sequence.accept(number)]


def test_a_gap_is_a_loss():
    sequence = SequenceTracker()

    assert taken(sequence, [5, 6, 9]) == [5, 6, 9]
    assert sequence.lost == 2


def test_a_late_message_was_not_lost():
    sequence = SequenceTracker()

    assert taken(sequence, [1, 3, 2]) == [1, 3, 2]
    assert sequence.lost == 0


def test_a_duplicate_is_used_once():
    sequence = SequenceTracker()

    assert taken(sequence, [1, 2, 2, 1]) == [1, 2]
    assert sequence.lost == 0


def test_a_snapshot_covers_what_came_before():
    sequence = SequenceTracker()
    taken(sequence, [3, 6])
    assert sequence.lost == 2

    sequence.cover(10)

    assert sequence.lost == 0
    assert taken(sequence, [9, 10, 11, 13]) == [11, 13]
    assert sequence.lost == 1


def test_a_snapshot_that_arrives_after_newer_messages_forgives_only_what_it_covers():
    sequence = SequenceTracker()
    taken(sequence, [1, 4, 6])
    assert sequence.lost == 3

    sequence.cover(3)

    assert sequence.lost == 1
    assert taken(sequence, [2, 3, 4, 5, 6]) == [5]
    assert sequence.lost == 0


def test_an_older_snapshot_changes_nothing():
    sequence = SequenceTracker()
    sequence.cover(10)
    taken(sequence, [12])

    sequence.cover(5)

    assert sequence.lost == 1
    assert taken(sequence, [10]) == []


def test_a_leap_beyond_the_window_is_counted_whole():
    sequence = SequenceTracker()
    taken(sequence, [1, 2**62])

    assert sequence.lost == 2**62 - 2
    assert taken(sequence, [2]) == [], "too old to be distinguished from a duplicate"


@given(st.lists(st.integers(0, WINDOW - 1), min_size=1, max_size=200), st.randoms(use_true_random=False))
def test_the_count_does_not_depend_on_the_order_of_arrival(numbers, random):
    sequence = SequenceTracker()
    random.shuffle(numbers)
    used = taken(sequence, numbers)

    assert sorted(set(numbers)) == sorted(used)
    assert max(numbers) - min(numbers) + 1 - len(set(numbers)) == sequence.lost


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
