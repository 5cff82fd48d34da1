"""A run at one of its steps: now, and looked back at."""

from __future__ import annotations

from fake_rank import make_snap, make_step
from pages import make_picture, make_watch

from ddpwatch.core.alerts import Finding, Moment, Severity
from ddpwatch.core.timeline import Timeline
from ddpwatch.view.picture import alerts_at, picture


def finding(rule="slowdown", severity=Severity.WARNING, **more):
    return Finding(rule, severity, "the job", "message", "advice", **more)


def at(step):
    return Moment(step, (step or 0) * 1000, 0)


def test_now_it_holds_all_ranks_the_latest_step_and_the_open_alerts():
    now = make_picture(make_watch())

    assert (now.last_step, now.at, now.paused) == (119, None, False)
    assert [row.state.rank for row in now.rows] == [0, 1, 2, 3]
    assert {row.state.rank for row in now.rows if row.stands_out} == {2}
    assert now.worst[2].rule == "straggler"
    assert now.condition == "live"


def test_looked_back_at_the_figures_are_those_of_then():
    watch = make_watch(slow=None, steps=0)
    for rank in range(4):
        late = [{"backward": 26} if rank == 2 else {"sync": 12}] * 60
        steps = [make_step(index) for index in range(60)]
        steps += [make_step(60 + index, **change) for index, change in enumerate(late)]
        watch.state.apply(make_snap(rank, 6, steps), 2)
    then, now = make_picture(watch, at=59), make_picture(watch)

    assert then.last_step == 59
    assert round(then.figures.step_ns / 1e6) == 30
    assert round(now.figures.step_ns / 1e6) == 40
    assert not any(row.stands_out for row in then.rows)
    assert any(row.stands_out for row in now.rows)


def test_a_step_that_is_not_there_yet_is_the_latest_and_before_the_first_there_is_none():
    watch = make_watch()

    assert make_picture(watch, at=10**6).last_step == 119
    assert picture(watch, Timeline(), at=-5).figures is None


def test_alerts_of_a_step_are_those_that_were_open_in_it():
    watch = make_watch(slow=None, steps=0)
    watch.judge_now()
    book = watch.book
    book.update("slowdown", [finding()], at(40), linger=0, by_step=True)
    book.update("slowdown", [], at(80), linger=0, by_step=True)
    book.update("memory", [finding("memory", Severity.CRITICAL)], at(70), linger=0, by_step=True)
    rules = {step: [alert.finding.rule for alert in alerts_at(watch, step)] for step in (39, 40, 75, 79, 80, 10**6)}

    assert rules == {
        39: [], 40: ["slowdown"], 75: ["memory", "slowdown"], 79: ["memory", "slowdown"], 80: ["memory"],
        10**6: ["memory"],
    }  # fmt: skip
    assert [alert.finding.rule for alert in alerts_at(watch, None)] == ["memory"]


def test_an_alert_from_before_the_first_step_was_open_in_all_of_them():
    watch = make_watch(slow=None, steps=0)
    watch.judge_now()
    watch.book.update("rank-lost", [finding("rank-lost")], at(None), linger=0, by_step=False)

    assert len(alerts_at(watch, 0)) == len(alerts_at(watch, 50)) == 1


def test_before_the_history_has_been_judged_to_its_end_nothing_is_told_of_it():
    watch = make_watch(slow=None, steps=0)
    for rank in range(4):
        change = {"backward": 26} if rank == 2 else {"sync": 12}
        watch.state.apply(make_snap(rank, 6, [make_step(index, **change) for index in range(500)]), 2)
    told = []
    while not watch.caught_up:
        watch.tick(watch.state.now_ns + 1_000_000_000)
        told.append((len(watch.book.open), len(picture(watch, Timeline()).alerts), watch.behind))

    assert any(opened for opened, _, _ in told[:-1])
    assert [shown for _, shown, _ in told[:-1]] == [0] * (len(told) - 1)
    assert told[-1] == (len(watch.book.open), len(watch.book.open), False)


def test_the_most_urgent_finding_of_a_rank_is_the_one_it_shows():
    watch = make_watch(slow=None, steps=0)
    for rank in range(4):
        watch.state.apply(make_snap(rank, 6, [make_step(index) for index in range(30)]), 2)
    watch.judge_now()
    book = watch.book
    book.update("memory", [finding("memory", ranks=(1,))], at(20), linger=9, by_step=True)
    book.update("rank-lost", [finding("rank-lost", Severity.CRITICAL, ranks=(1, 2))], at(21), linger=9, by_step=True)
    drawn = picture(watch, Timeline())

    assert [drawn.worst[rank].rule for rank in (1, 2)] == ["rank-lost", "rank-lost"]
    assert drawn.rows[0].finding is None
    assert drawn.alerts[0].finding.rule == "rank-lost"
