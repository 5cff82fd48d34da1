"""Lost messages are counted; duplicates and late ones are not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.core.state.rank import WINDOW, SequenceTracker


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
