"""At an earlier step, alerts have their findings of then."""

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


def test_an_alert_has_its_finding_of_the_step(book):
    for step in (10, 20, 30):
        book.evaluate(step, finding(message=f"words of {step}", cost=step / 1000))

    assert [words(book, step) for step in (9, 10, 19, 20, 29, 30, 99)] == [
        [], ["words of 10"], ["words of 10"], ["words of 20"], ["words of 20"], ["words of 30"], ["words of 30"],
    ]  # fmt: skip
    assert [alert.last for alert in book.book.at(25)] == [at(20)]


def test_a_closed_alert_is_open_at_an_earlier_step(book):
    book.evaluate(10, finding(message="first", cost=0.1))
    book.evaluate(20, finding(message="worst", cost=0.9))
    book.evaluate(30, finding(message="fading", cost=0.05))
    book.evaluate(30 + CLOSE_DELAY_STEPS)

    assert [(alert.finding.message, alert.closed) for alert in book.book.at(15)] == [("first", None)]
    assert words(book, 35) == ["fading"]
    assert words(book, 30 + CLOSE_DELAY_STEPS) == []


def test_an_alert_that_came_back_has_its_own_findings(book):
    book.evaluate(10, finding(message="the first time"))
    book.evaluate(10 + CLOSE_DELAY_STEPS)
    book.evaluate(50, finding(message="the second time"))

    assert words(book, 12) == ["the first time"]
    assert words(book, 50) == ["the second time"]


def test_a_phase_that_was_not_confirmed_is_not_in_the_history(book):
    book.evaluate(10, finding(message="in forward", phase="forward"))
    book.evaluate(20, finding(message="in data", phase="data"))

    assert words(book, 20) == ["in forward"]
    assert book.book.at(20)[0].last == at(20)


def test_the_history_is_bounded_and_the_opening_stays_within_it():
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


def test_equal_findings_are_kept_once():
    history = AlertHistory()
    for step in range(0, 100, 10):
        history.note(Alert(finding(), at(0), at(step)))

    (notes,) = history._notes.values()
    assert len(notes) == 10
    assert len({id(found) for _, found in notes}) == 1


def test_of_alerts_closed_long_ago_the_worst_finding_remains():
    book = Book()
    for number in range(KEPT_CLOSED + 1):
        first = 100 * number
        book.evaluate(first, finding(message="worst", cost=0.9))
        book.evaluate(first + 10, finding(message="fading", cost=0.1))
        book.evaluate(first + 10 + CLOSE_DELAY_STEPS)

    assert words(book, 15) == ["worst"]
    assert words(book, 100 + 15) == ["fading"]
    assert len(book.book._history._notes) == KEPT_CLOSED


def test_recorded_alerts_have_a_history_too():
    book = Book().book
    opened = Alert(finding(message="opened"), at(10), at(10))
    book.apply(AlertEvent("opened", opened))
    book.revise(Alert(finding(message="later"), at(10), at(40)))

    assert [alert.finding.message for alert in book.at(20)] == ["opened"]
    assert [alert.finding.message for alert in book.at(40)] == ["later"]
