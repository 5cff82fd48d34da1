"""The alert book: each episode is opened once, kept up to date, and closed after its close delay."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.core.alerts.model import KEPT_CLOSED, KEPT_EVENTS, AlertBook, Moment, Severity
from ddpwatch.core.limits import AlertLimits
from tests.builders.findings import CLOSE_DELAY_STEPS, Book, at, finding


@pytest.fixture(params=[True, False], ids=["by step", "by time"])
def book(request):
    return Book(by_step=request.param)


def test_an_episode_opens_one_alert_however_often_it_is_found(book):
    reported = [book.evaluate(step, finding()) for step in range(0, 200, 5)]

    assert reported == [["opened"]] + [[]] * 39


def test_an_alert_knows_when_it_began_and_when_it_was_last_found(book):
    book.evaluate(5, finding())
    book.evaluate(10, finding(message="it is slower"))
    book.evaluate(15)

    alert = book.book.open["straggler", "rank 1"]
    assert (alert.since, alert.last, alert.closed) == (at(5), at(10), None)
    assert alert.finding.message == "it is slower"


def test_an_alert_closes_after_its_close_delay_and_no_earlier(book):
    book.evaluate(5, finding())

    assert book.evaluate(5 + CLOSE_DELAY_STEPS - 1) == []
    assert book.evaluate(5 + CLOSE_DELAY_STEPS) == ["closed"]
    assert book.evaluate(5 + 2 * CLOSE_DELAY_STEPS) == []
    assert not book.book.open
    assert [(alert.since, alert.last, alert.closed) for alert in book.book.closed] == [(at(5), at(5), at(25))]


def test_the_close_delay_counts_from_the_last_time_it_was_found(book):
    book.evaluate(0, finding())
    book.evaluate(15, finding())

    assert book.evaluate(30) == []
    assert book.evaluate(35) == ["closed"]


def test_time_without_steps_closes_nothing_that_goes_by_steps():
    by_step, by_time = Book(by_step=True), Book(by_step=False)
    for book in (by_step, by_time):
        book.evaluate(5, finding())
        book.book.update("straggler", [], Moment(6, 10**15, 0), close_delay=book.close_delay, by_step=book.by_step)

    assert [event.kind for event in by_step.book.drain()] == []
    assert [event.kind for event in by_time.book.drain()] == ["closed"]


def test_an_alert_without_a_step_is_closed_by_time():
    book = Book(by_step=False)
    book.book.update("lossy", [finding(rule="lossy")], Moment(None, 0, 0), close_delay=10, by_step=False)
    book.book.update("lossy", [], Moment(None, 10, 0), close_delay=10, by_step=False)

    assert [event.kind for event in book.book.drain()] == ["opened", "closed"]


def test_an_episode_that_recurs_within_the_close_delay_does_not_flap(book):
    reported = [book.evaluate(step, *([finding()] if step % 15 == 0 else [])) for step in range(0, 300, 5)]

    assert [kind for kinds in reported for kind in kinds] == ["opened"]


def test_an_episode_that_returns_after_its_alert_closed_opens_another(book):
    assert book.evaluate(0, finding()) == ["opened"]
    assert book.evaluate(20) == ["closed"]
    assert book.evaluate(25, finding()) == ["opened"]
    assert book.book.open["straggler", "rank 1"].since == at(25)


@pytest.mark.parametrize("changed", [{"severity": Severity.CRITICAL}, {"ranks": (1, 2)}, {"cost": 0.151}], ids=str)
def test_a_significant_change_is_one_event(book, changed):
    book.evaluate(0, finding())

    assert book.evaluate(5, finding(**changed)) == ["changed"]
    assert book.evaluate(10, finding(**changed)) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"severity": Severity.INFO},
        {"cost": 0.149},
        {"cost": 0.01},
        {"cost": None},
        {"message": "other words"},
        {"advice": "Other words."},
        {"evidence": {"steps": 3}},
    ],
    ids=str,
)
def test_an_insignificant_change_is_kept_without_an_event(book, changed):
    book.evaluate(0, finding())

    assert book.evaluate(5, finding(**changed)) == []
    assert book.book.open["straggler", "rank 1"].finding == finding(**changed)


def test_a_severity_that_falls_and_rises_again_is_one_event(book):
    book.evaluate(0, finding(severity=Severity.CRITICAL))

    assert book.evaluate(5, finding(severity=Severity.WARNING)) == []
    assert book.evaluate(10, finding(severity=Severity.CRITICAL)) == []


def test_a_cost_that_creeps_is_compared_with_the_reported_one(book):
    book.evaluate(0, finding(cost=0.10))
    reported = [book.evaluate(5 + step, finding(cost=0.10 + 0.01 * step)) for step in range(1, 15)]

    assert [number for number, kinds in enumerate(reported, 1) if kinds] == [6, 14]


def test_a_cost_that_becomes_known_is_an_event_unless_it_is_tiny(book):
    book.evaluate(0, finding(cost=None))

    assert book.evaluate(5, finding(cost=0.029)) == []
    assert book.evaluate(10, finding(cost=0.031)) == ["changed"]


def test_another_phase_is_reported_after_three_evaluations_in_a_row(book):
    book.evaluate(0, finding())
    reported = [book.evaluate(5 * number, finding(phase="data", message="data")) for number in range(1, 6)]

    assert reported == [[]] * (AlertLimits.CONFIRMING_EVALUATIONS - 1) + [["changed"]] + [[]] * 2
    assert book.book.open["straggler", "rank 1"].finding.phase == "data"


def test_until_another_phase_is_confirmed_the_old_message_stands_as_a_whole(book):
    book.evaluate(0, finding(message="slow in forward"))
    book.evaluate(5, finding(phase="data", message="slow in data"))

    alert = book.book.open["straggler", "rank 1"]
    assert (alert.finding.phase, alert.finding.message, alert.last) == ("forward", "slow in forward", at(5))


def test_a_phase_that_alternates_with_the_reported_one_is_never_confirmed(book):
    book.evaluate(0, finding())
    reported = [
        book.evaluate(5 * number, finding(phase=phase)) for number, phase in enumerate(["data", "data", "forward"] * 8)
    ]

    assert reported == [[]] * 24


def test_two_other_phases_in_turn_are_not_one_phase_in_a_row(book):
    book.evaluate(0, finding())
    reported = [
        book.evaluate(5 * number, finding(phase=phase)) for number, phase in enumerate(["data", "other", "data"])
    ]

    assert reported == [[]] * 3


def test_a_pattern_that_becomes_known_or_changes_is_reported_once_confirmed(book):
    book.evaluate(0, finding())
    patterns = ["every 4th step"] * 4 + [None] * 4 + ["every 4th step"] * 4 + ["every 2nd step"] * 4
    reported = [book.evaluate(5 * number, finding(pattern=pattern)) for number, pattern in enumerate(patterns, 1)]

    assert [number for number, kinds in enumerate(reported) if kinds] == [
        AlertLimits.CONFIRMING_EVALUATIONS - 1,
        12 + AlertLimits.CONFIRMING_EVALUATIONS - 1,
    ]
    assert {kind for kinds in reported for kind in kinds} == {"changed"}


def test_a_finding_that_only_keeps_an_alert_open_opens_none(book):
    kept = finding(opens=False)

    assert book.evaluate(0, kept) == []
    assert book.book.unproven == {}
    assert book.evaluate(5, finding()) == ["opened"]
    assert [book.evaluate(step, kept) for step in range(10, 200, 10)] == [[]] * 19
    assert book.evaluate(190 + CLOSE_DELAY_STEPS) == ["closed"]


def test_the_open_delay_passes_when_it_was_found_all_along(book):
    lasting = finding(lasting=book.close_delay)

    assert [book.evaluate(step, lasting) for step in (0, 10, 19)] == [[]] * 3
    assert book.evaluate(20, lasting) == ["opened"]
    assert book.book.open["straggler", "rank 1"].since == at(20)


def test_the_open_delay_begins_anew_when_it_was_not_found(book):
    lasting = finding(lasting=book.close_delay)
    for step in (0, 10):
        book.evaluate(step, lasting)
    book.evaluate(15)
    reported = [book.evaluate(step, lasting) for step in (20, 30, 39, 40)]

    assert reported == [[], [], [], ["opened"]]
    assert book.book._pending == {}


def test_a_closing_follows_its_opening_with_the_latest_finding(book):
    book.book.update("straggler", [finding()], at(0), close_delay=1, by_step=True)
    book.book.update("straggler", [finding(message="slower")], at(5), close_delay=1, by_step=True)
    book.book.update("straggler", [], at(10), close_delay=1, by_step=True)
    opened, closed = book.book.drain()

    assert (opened.kind, opened.alert.since, opened.alert.closed) == ("opened", at(0), None)
    assert (closed.kind, closed.alert.since, closed.alert.closed) == ("closed", at(0), at(10))
    assert closed.alert.finding.message == "slower"


def test_an_inconclusive_finding_opens_nothing_and_is_kept(book):
    suspected = finding(proven=False)

    assert book.evaluate(5, suspected) == []
    assert not book.book.open
    assert book.book.unproven == {"straggler": [suspected]}
    assert book.evaluate(10) == []
    assert book.book.unproven == {}


def test_an_inconclusive_finding_keeps_no_alert_open(book):
    book.evaluate(0, finding())

    assert book.evaluate(5 + CLOSE_DELAY_STEPS, finding(proven=False)) == ["closed"]


def test_rules_and_subjects_have_alerts_of_their_own(book):
    assert book.evaluate(0, finding("rank 1"), finding("rank 2", ranks=(2,))) == ["opened"] * 2
    assert book.evaluate(1, finding(rule="lossy"), rule="lossy") == ["opened"]
    assert book.evaluate(30, rule="lossy") == ["closed"]
    assert set(book.book.open) == {("straggler", "rank 1"), ("straggler", "rank 2")}


def waiting(**changed):
    """Ranks wait for one another."""
    evidence = {"waiting": "ranks 0, 2", "waiting_s": 12.5}
    return finding(**{"rule": "stall", "subject": "group 0", "evidence": evidence, **changed})


def fired():
    return finding(rule="timeout", subject="fired", ends_wait=True)


def test_the_end_of_a_wait_closes_the_alerts_on_it_in_the_same_evaluation():
    book = Book(by_step=False)
    book.evaluate(1, waiting(), rule="stall")
    book.evaluate(1, waiting(rule="uneven-batch", subject="job", evidence={}), rule="uneven-batch")
    book.evaluate(2, rule="stall")
    book.evaluate(2, fired(), rule="timeout")
    book.book.hand_over(at(2))

    assert [(event.kind, event.alert.key) for event in book.book.drain()] == [("closed", ("stall", "group 0"))]
    assert set(book.book.open) == {("timeout", "fired"), ("uneven-batch", "job")}, "an alert about no wait stays"


@pytest.mark.parametrize("order", [("stall", "timeout"), ("timeout", "stall")])
def test_a_wait_that_goes_on_for_others_is_not_closed_by_the_end_of_one(order):
    book = Book(by_step=False)
    for step in (1, 2, 3):
        for rule in order:
            book.evaluate(step, waiting() if rule == "stall" else fired(), rule=rule)
        book.book.hand_over(at(step))

    assert set(book.book.open) == {("timeout", "fired"), ("stall", "group 0")}


def test_an_alert_on_a_wait_began_when_the_ranks_began_to_wait():
    book = Book(by_step=False)
    book.evaluate(200, waiting(), rule="stall")
    book.evaluate(210, waiting(evidence={"waiting": "ranks 0, 2", "waiting_s": 13.5}), rule="stall")
    book.evaluate(210, finding())
    stall, other = book.book.open["stall", "group 0"], book.book.open["straggler", "rank 1"]

    assert (stall.since, stall.began) == (at(200), Moment(200, at(75).now_ns, 0))
    assert other.began == other.since == at(210)


def test_memory_is_bounded():
    book = AlertBook()
    for number in range(2 * KEPT_EVENTS):
        found = [finding(f"rank {number % 7}", phase=("data", "other")[number % 2])] if number % 3 else []
        book.update("straggler", found, at(number), close_delay=1, by_step=True)

    assert len(book.open) <= 7
    assert len(book.closed) == KEPT_CLOSED
    assert set(book._reported) == set(book.open) >= set(book._held)
    assert len(book.drain()) == KEPT_EVENTS
    assert book.drain() == []


found = st.builds(
    finding,
    st.sampled_from(["rank 1", "rank 2", "host a"]),
    severity=st.sampled_from(Severity),
    ranks=st.sampled_from([(1,), (2,), (1, 2)]),
    phase=st.sampled_from(["data", "forward", None]),
    cost=st.one_of(st.none(), st.floats(0, 1)),
    pattern=st.sampled_from([None, "every 2nd step", "every 4th step"]),
    proven=st.booleans(),
)
evaluations = st.lists(st.tuples(st.integers(0, 30), st.lists(found, max_size=4)), max_size=40)


@given(evaluations, st.booleans())
def test_every_alert_is_opened_then_changed_then_closed_whatever_is_found(sequence, by_step):
    book, step, last_found = Book(by_step=by_step), 0, {}
    reported: dict[tuple[str, str], str] = {}
    moments = []
    for later, findings in sequence:
        step += later
        last_found |= {item.subject: step for item in findings if item.proven}
        book.book.update("straggler", findings, at(step), close_delay=book.close_delay, by_step=by_step)
        for event in book.book.drain():
            alert = event.alert
            reported[alert.key] = (
                reported.get(alert.key, "") + {"opened": "<", "changed": "=", "closed": ">"}[event.kind]
            )
            moments.append({"opened": alert.since, "changed": alert.last, "closed": alert.closed}[event.kind].now_ns)
            assert alert.since.now_ns <= alert.last.now_ns <= moments[-1]
            assert alert.finding.proven
            if event.kind == "closed":
                assert step - last_found[alert.finding.subject] >= CLOSE_DELAY_STEPS
        # What was found lately is open, what was not is closed.
        assert {key[1] for key in book.book.open} == {
            subject for subject, when in last_found.items() if step - when < CLOSE_DELAY_STEPS
        }
        assert set(book.book._reported) == set(book.book.open) >= set(book.book._held)

    assert moments == sorted(moments)
    assert all(re.fullmatch("(<=*>)*(<=*)?", kinds) for kinds in reported.values())


def test_the_worst_finding_is_the_most_severe_then_the_costliest_then_the_latest(book):
    book.evaluate(0, finding(message="dear", cost=0.5))
    book.evaluate(5, finding(message="worst, at first", severity=Severity.CRITICAL, cost=0.3, from_step=1, upto_step=5))
    book.evaluate(10, finding(message="worst", severity=Severity.CRITICAL, cost=0.3, from_step=1, upto_step=9))
    # While it fades, an odd step of before counts.
    book.evaluate(15, finding(message="fades", cost=0.4, from_step=0, upto_step=12))

    (alert,) = book.book.open.values()
    assert alert.finding.message == "fades"
    assert (alert.at_worst.finding.message, alert.at_worst.finding.severity) == ("worst", Severity.CRITICAL)
    assert (alert.at_worst.finding.from_step, alert.at_worst.finding.upto_step) == (1, 12)
    book.evaluate(15 + CLOSE_DELAY_STEPS)
    (closed,) = book.book.closed
    assert (closed.finding.message, closed.worst) == ("worst", None)


def ended(**changed):
    return finding(message="it was slow", cost=None, ended=True, opens=False, **changed)


def test_an_ended_finding_sets_the_end_of_its_alert_and_nothing_else(book):
    book.evaluate(0, finding(cost=0.3, from_step=0, upto_step=0))
    book.evaluate(5, finding(from_step=0, upto_step=5))
    assert book.evaluate(10, ended(from_step=2, upto_step=4)) == []

    alert = book.book.open["straggler", "rank 1"]
    assert (alert.last, alert.finding.message) == (at(5), "it is slow")
    assert (alert.finding.from_step, alert.finding.upto_step) == (0, 4)
    assert alert.at_worst.finding.upto_step == 4
    assert book.evaluate(5 + CLOSE_DELAY_STEPS, ended(from_step=2, upto_step=4)) == ["closed"]


def test_an_ended_finding_opens_nothing_unless_it_was_not_evaluated_in_time(book):
    assert book.evaluate(0, ended()) == []
    assert book.evaluate(5, finding(ended=True)) == ["opened"]
    assert book.evaluate(5 + CLOSE_DELAY_STEPS, finding(ended=True)) == ["closed"]


def test_an_ended_episode_is_found_again_when_enough_has_come_since(book):
    book.evaluate(0, finding(from_step=0, upto_step=0))
    book.evaluate(5, ended(from_step=0, upto_step=3))
    book.evaluate(10, finding(message="odd steps", from_step=0, upto_step=9, again_from=2))
    alert = book.book.open["straggler", "rank 1"]
    assert (alert.last, alert.finding.upto_step, alert.finding.ended) == (at(0), 3, True)

    book.evaluate(15, finding(message="again", from_step=0, upto_step=15, again_from=7))
    alert = book.book.open["straggler", "rank 1"]
    assert (alert.last, alert.finding.message) == (at(15), "again")
    assert (alert.finding.upto_step, alert.finding.ended) == (15, False)


def test_an_episode_that_recurred_between_two_evaluations_restarts_the_close_delay(book):
    book.evaluate(0, finding(from_step=0, upto_step=0))
    book.evaluate(5, ended(from_step=0, upto_step=3, again_from=1))
    book.evaluate(15, ended(from_step=0, upto_step=12, again_from=8))

    alert = book.book.open["straggler", "rank 1"]
    assert (alert.last, alert.finding.upto_step, alert.finding.message) == (at(15), 12, "it is slow")


def test_while_another_phase_is_not_confirmed_the_episode_goes_on(book):
    book.evaluate(0, finding(from_step=0, upto_step=0))
    book.evaluate(5, ended(from_step=0, upto_step=3))
    book.evaluate(15, finding(phase="data", from_step=0, upto_step=15, again_from=7))

    alert = book.book.open["straggler", "rank 1"]
    assert (alert.last, alert.finding.phase, alert.finding.ended) == (at(15), "forward", False)


def test_of_a_wait_without_cost_the_latest_finding_is_the_worst(book):
    wait = finding(message="waits for 10s", severity=Severity.CRITICAL, cost=None)
    book.evaluate(0, wait)
    book.evaluate(5, finding(message="waits for 20s", severity=Severity.CRITICAL, cost=None))

    (alert,) = book.book.open.values()
    assert alert.at_worst.finding.message == "waits for 20s"


def test_the_phases_that_it_was_in_one_after_the_other_are_all_known(book):
    book.evaluate(0, finding(phase="data"))
    for look in range(1, AlertLimits.CONFIRMING_EVALUATIONS):
        book.evaluate(look, finding(phase="backward"))
        assert book.book.open["straggler", "rank 1"].phases == ()
    for look, phase in enumerate(
        ["backward", "backward", *["data"] * AlertLimits.CONFIRMING_EVALUATIONS], AlertLimits.CONFIRMING_EVALUATIONS
    ):
        book.evaluate(look, finding(phase=phase))

    assert book.book.open["straggler", "rank 1"].phases == ("data", "backward")


def test_that_it_had_ended_and_has_begun_again_is_known(book):
    book.evaluate(0, finding(from_step=0, upto_step=3))
    book.evaluate(5, ended(from_step=0, upto_step=3))
    assert not book.book.open["straggler", "rank 1"].recurred
    book.evaluate(15, finding(from_step=0, upto_step=15, again_from=11))
    book.evaluate(16, finding(from_step=0, upto_step=16, again_from=12))

    assert book.book.open["straggler", "rank 1"].recurred
