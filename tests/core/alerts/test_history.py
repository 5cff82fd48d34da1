"""Looking back, alerts read as they read then."""

from __future__ import annotations

import pytest

from ddpwatch.core.alerts.history import KEPT_CLOSED, KEPT_STEPS, NOTE_STEPS, AlertHistory
from ddpwatch.core.alerts.model import Alert, AlertEvent
from tests.builders.findings import CLOSE_DELAY_STEPS, Book, at, finding


@pytest.fixture(params=[True, False], ids=["by step", "by time"])
def book(request):
    return Book(by_step=request.param)


def words(book, step):
    return [alert.finding.message for alert in book.book.at(step)]


def test_an_alert_reads_as_it_read_at_the_step_that_is_looked_at(book):
    for step in (10, 20, 30):
        book.judge(step, finding(message=f"words of {step}", cost=step / 1000))

    assert [words(book, step) for step in (9, 10, 19, 20, 29, 30, 99)] == [
        [], ["words of 10"], ["words of 10"], ["words of 20"], ["words of 20"], ["words of 30"], ["words of 30"],
    ]  # fmt: skip
    assert [alert.last for alert in book.book.at(25)] == [at(20)]


def test_one_that_is_over_was_open_then_and_says_so(book):
    book.judge(10, finding(message="first", cost=0.1))
    book.judge(20, finding(message="worst", cost=0.9))
    book.judge(30, finding(message="fading", cost=0.05))
    book.judge(30 + CLOSE_DELAY_STEPS)

    assert [(alert.finding.message, alert.closed) for alert in book.book.at(15)] == [("first", None)]
    assert words(book, 35) == ["fading"]
    assert words(book, 30 + CLOSE_DELAY_STEPS) == []


def test_one_that_came_back_is_told_by_its_own_words(book):
    book.judge(10, finding(message="the first time"))
    book.judge(10 + CLOSE_DELAY_STEPS)
    book.judge(50, finding(message="the second time"))

    assert words(book, 12) == ["the first time"]
    assert words(book, 50) == ["the second time"]


def test_a_phase_that_was_not_believed_is_not_told_afterwards_either(book):
    book.judge(10, finding(message="in forward", phase="forward"))
    book.judge(20, finding(message="in data", phase="data"))

    assert words(book, 20) == ["in forward"]
    assert book.book.at(20)[0].last == at(20)


def test_what_is_kept_is_bounded_and_the_opening_stays_as_long_as_it_can_be_looked_at():
    history = AlertHistory()
    for step in range(100, 100 + KEPT_STEPS):
        alert = Alert(finding(message=f"words of {step}"), at(100), at(step))
        history.note(alert)

    assert history.at([alert], 100)[0].finding.message == "words of 100"
    for step in range(100, 100 + KEPT_STEPS):
        assert step - NOTE_STEPS < history.at([alert], step)[0].last.step <= step
    for step in range(100 + KEPT_STEPS, 100 + 5 * KEPT_STEPS):
        alert = Alert(finding(message=f"words of {step}"), at(100), at(step))
        history.note(alert)
    (notes,) = history._notes.values()
    assert len(notes) <= KEPT_STEPS // (NOTE_STEPS - 1) + 2


def test_words_that_stay_the_same_are_kept_once():
    history = AlertHistory()
    for step in range(0, 100, 10):
        history.note(Alert(finding(), at(0), at(step)))

    (notes,) = history._notes.values()
    assert len(notes) == 10
    assert len({id(found) for _, found in notes}) == 1


def test_of_alerts_long_over_the_words_of_their_worst_moment_remain():
    book = Book()
    for number in range(KEPT_CLOSED + 1):
        first = 100 * number
        book.judge(first, finding(message="worst", cost=0.9))
        book.judge(first + 10, finding(message="fading", cost=0.1))
        book.judge(first + 10 + CLOSE_DELAY_STEPS)

    assert words(book, 15) == ["worst"]
    assert words(book, 100 + 15) == ["fading"]
    assert len(book.book._history._notes) == KEPT_CLOSED


def test_alerts_that_are_told_again_leave_a_trail_too():
    book = Book().book
    opened = Alert(finding(message="opened"), at(10), at(10))
    book.apply(AlertEvent("opened", opened))
    book.revise(Alert(finding(message="later"), at(10), at(40)))

    assert [alert.finding.message for alert in book.at(20)] == ["opened"]
    assert [alert.finding.message for alert in book.at(40)] == ["later"]
