"""The rule engine: findings depend on the steps of the ranks and on nothing else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.core.detectors import DETECTORS, engine
from ddpwatch.core.detectors.context import Detector
from ddpwatch.core.limits import DEFAULTS, EvaluationLimits, limits_from
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.simulator.scenario import Fault, Scenario
from tests.builders.fake_rank import MS, make_beat, make_hello, make_snap, make_step
from tests.builders.scenario_frames import frames

SECOND = 1_000_000_000
WORLD = 4
BY_STEP = {detector.rule for detector in DETECTORS if detector.by_step}
SLOW = Fault((1,), "forward", 0.3, onset=60)
MAX_AHEAD = 12
"""Frames by which one rank may be ahead of another on arrival."""
PACE_NS = 25 * MS
"""Time between two frames; a rank is silent after much longer than the furthest it can be behind."""


def by_rank(scenario, **options):
    """Payloads of each rank, in order."""
    payloads = [[] for _ in range(scenario.world_size)]
    for frame in frames(scenario, **options):
        payloads[wire.decode(frame.payload).rank].append(frame.payload)
    return payloads


def new_monitor(world=WORLD, limits=DEFAULTS):
    return Monitor(RunState("ab12cd34", "train", world), limits)


def feed(monitor, payloads, *, pace_ns=PACE_NS, start_ns=0):
    """Ingest them one after another; returns the time of the last one."""
    now_ns = start_ns
    for payload in payloads:
        now_ns += pace_ns
        monitor.ingest(payload, now_ns)
    return now_ns


def reported(monitor):
    """Events of rules by step."""
    return [
        (event.kind, finding.rule, finding.subject, finding.ranks, finding.phase, event.alert.since.step)
        for event in monitor.book.drain()
        if (finding := event.alert.finding).rule in BY_STEP
    ]


def received(scenario, *, limits=DEFAULTS, pace_ns=PACE_NS):
    monitor = new_monitor(scenario.world_size, limits)
    feed(monitor, [frame.payload for frame in frames(scenario)], pace_ns=pace_ns)
    monitor.evaluate_now()
    return monitor


def open_stragglers(monitor):
    return {
        alert.finding.subject: alert.finding.phase
        for alert in monitor.book.open.values()
        if alert.finding.rule == "straggler"
    }


RUN = Scenario(WORLD, steps=150, faults=(SLOW,), seed=3)
PAYLOADS = by_rank(RUN)
IN_ORDER = reported(received(RUN))


def interleaved(order, again):
    """Frames of all ranks interleaved differently, each rank's in order, some of them twice."""
    left = [list(reversed(payloads)) for payloads in PAYLOADS]
    done, sent, turn = [0] * WORLD, [], 0
    while any(left):
        rank = order[turn % len(order)] if order else 0
        behind = min((number for number in range(WORLD) if left[number]), key=lambda number: done[number])
        if not left[rank] or done[rank] - done[behind] >= MAX_AHEAD:
            rank = behind
        sent.append(left[rank].pop())
        done[rank] += 1
        if again and again[turn % len(again)] and len(sent) >= again[turn % len(again)]:
            sent.append(sent[-again[turn % len(again)]])
        turn += 1
    return sent


def test_the_run_that_is_permuted_has_something_to_tell():
    assert ("opened", "straggler", "rank 1", (1,), "forward", 70) in IN_ORDER
    assert {rule for _, rule, *_ in IN_ORDER} >= {"straggler", "comm-share"}


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(0, WORLD - 1), max_size=60),
    st.lists(st.sampled_from([0, 0, 1, 2, 9, 40]), max_size=20),
    st.sampled_from([5 * MS, PACE_NS, 40 * MS]),
)
def test_neither_order_of_arrival_nor_duplicates_nor_pace_change_the_findings(order, again, pace_ns):
    monitor = new_monitor()
    feed(monitor, interleaved(order, again), pace_ns=pace_ns)
    monitor.evaluate_now()

    assert reported(monitor) == IN_ORDER
    assert [rank.lost for rank in monitor.state.ranks.values()] == [0] * WORLD


@pytest.mark.parametrize(
    ("flush_steps", "pace_ns"),
    [(1, 1), (1, 100 * MS), (7, 10 * MS), (50, 1), (50, 100 * MS)],
    ids=["single, at once", "single, slow", "some, fast", "many, at once", "many, slow"],
)
def test_how_steps_are_bundled_into_messages_changes_nothing(flush_steps, pace_ns):
    monitor = new_monitor()
    feed(monitor, [frame.payload for frame in frames(RUN, flush_steps=flush_steps)], pace_ns=pace_ns)
    monitor.evaluate_now()

    assert reported(monitor) == IN_ORDER


@pytest.mark.parametrize("step_ms", [20, 40])
def test_the_pace_of_the_viewer_changes_nothing_for_short_steps_either(step_ms):
    run = Scenario(WORLD, steps=400, step_ms=step_ms, noise=0.03, faults=(Fault((1,), "forward", 0.3, onset=200),))

    assert reported(received(run, pace_ns=1)) == reported(received(run, pace_ns=20 * MS))


def test_asking_more_often_changes_nothing():
    monitor = new_monitor()
    now_ns = 0
    for frame in frames(RUN):
        now_ns += PACE_NS
        monitor.ingest(frame.payload, now_ns)
        monitor.tick(now_ns + 1)
        if now_ns > 4 * SECOND:
            monitor.evaluate_now()
    monitor.evaluate_now()
    monitor.evaluate_now()

    assert reported(monitor) == IN_ORDER


def test_evaluation_waits_a_moment_for_the_hellos_of_all_ranks():
    monitor = new_monitor()
    first_three = [payload for payloads in PAYLOADS[:3] for payload in payloads]
    feed(monitor, first_three, pace_ns=1)
    monitor.tick(2 * SECOND)
    assert reported(monitor) == []

    for rank in range(3):
        monitor.ingest(wire.encode(make_beat(rank, seq=10**6, mono_ns=10**15)), 3 * SECOND)
    monitor.tick(4 * SECOND)
    while monitor.behind:
        monitor.tick(4 * SECOND)
    assert ("opened", "straggler", "rank 1") in [event[:3] for event in reported(monitor)]


def snapshot(payloads, steps=wire.MAX_SNAP_STEPS):
    """The snapshot of a rank that has published these, for a viewer that attaches."""
    messages = [wire.decode(payload) for payload in payloads]
    done = [step for message in messages if isinstance(message, wire.Steps) for step in message.steps]
    return wire.encode(
        make_snap(messages[0].rank, messages[-1].seq, done[-steps:], hello=messages[0], beat=messages[-1])
    )


def test_a_rank_that_joins_late_completes_the_evaluation_and_opens_no_new_alert():
    payloads = by_rank(Scenario(WORLD, steps=200, faults=(SLOW,), seed=3))
    middle = len(payloads[0]) * 3 // 4
    monitor = new_monitor()
    early = [payload for turn in zip(*(rank[:middle] for rank in payloads[:3]), strict=True) for payload in turn]
    now_ns = feed(monitor, early)
    alone = monitor.book.open["straggler", "rank 1"]
    assert (alone.finding.ranks, alone.finding.phase, alone.finding.cost) == ((1,), "forward", None)

    monitor.ingest(snapshot(payloads[3][:middle]), now_ns)
    feed(monitor, [payload for turn in zip(*(rank[middle:] for rank in payloads), strict=True) for payload in turn],
         start_ns=now_ns)  # fmt: skip
    monitor.evaluate_now()

    whole = monitor.book.open["straggler", "rank 1"]
    assert whole.since == alone.since
    assert whole.finding.cost == pytest.approx(0.2, abs=0.06)
    assert open_stragglers(monitor) == {"rank 1": "forward"}


@pytest.mark.parametrize("reason", ["exit", "failed"])
def test_after_a_rank_has_ended_the_others_are_evaluated_without_it(reason):
    run = Scenario(WORLD, steps=260, faults=(Fault((1,), "forward", 0.3, onset=180),), seed=3)
    monitor = new_monitor()
    now_ns = 0
    for frame in frames(run):
        now_ns += PACE_NS
        message = wire.decode(frame.payload)
        if message.rank == 3 and message.seq >= 41:
            monitor.ingest(wire.encode(wire.Bye(rank=3, seq=41, reason=reason, text="", mono_ns=now_ns)), now_ns)
        else:
            monitor.ingest(frame.payload, now_ns)
    monitor.evaluate_now()
    alert = monitor.book.open["straggler", "rank 1"]

    assert open_stragglers(monitor) == {"rank 1": "forward"}
    assert 180 <= alert.since.step <= 200
    assert alert.finding.cost is None


def test_a_rank_that_ends_with_the_run_does_not_take_its_alert_along():
    monitor = new_monitor()
    now_ns = feed(monitor, [frame.payload for frame in frames(RUN)])
    for rank in range(WORLD):
        monitor.ingest(wire.encode(wire.Bye(rank=rank, seq=10**4, reason="exit", text="", mono_ns=now_ns)), now_ns)
    monitor.tick(now_ns + 600 * SECOND)

    assert open_stragglers(monitor) == {"rank 1": "forward"}


def test_a_restart_is_another_run_that_begins_with_nothing():
    before = received(RUN)
    known = dict(before.book.open)
    healthy = received(Scenario(WORLD, steps=150, seed=4))

    assert "straggler" in {rule for rule, _ in known}
    assert reported(healthy) == []
    assert dict(before.book.open) == known
    assert reported(received(RUN)) == IN_ORDER, "a second watch of the same run finds what the first one found"


def test_a_healthy_run_has_nothing_to_tell():
    for world in (1, 2, 8):
        assert reported(received(Scenario(world, steps=200, seed=world))) == []


@pytest.mark.parametrize("warmup", [10, 40])
def test_warm_up_steps_are_never_evaluated(warmup):
    limits = limits_from({"judge": {"warmup-steps": warmup}}, "test")
    compiling = Fault((1,), "forward", 5.0, onset=0, burst=(warmup, 10**6))
    monitor = received(Scenario(WORLD, steps=150, faults=(compiling,), seed=5), limits=limits)

    assert reported(monitor) == []


def test_the_first_step_after_warming_up_is_evaluated():
    late = Fault((1,), "forward", 5.0, onset=0, burst=(35, 10**6))
    monitor = received(Scenario(WORLD, steps=60, faults=(late,), seed=5))

    assert ("opened", "straggler", "rank 1", (1,), "forward", 30) in reported(monitor)


@pytest.mark.parametrize("steps", [200, wire.MAX_SNAP_STEPS + 100])
def test_a_viewer_that_attaches_late_finds_open_what_one_that_was_there_finds_open(steps):
    run = Scenario(WORLD, steps=steps, faults=(SLOW,), seed=6)
    there, late = received(run), new_monitor()
    for payloads in by_rank(run):
        late.ingest(snapshot(payloads), SECOND)
    late.evaluate_now()

    def found(monitor):
        return {key: (alert.finding.ranks, alert.finding.phase) for key, alert in monitor.book.open.items()}

    assert found(late) == found(there)
    assert found(late)["straggler", "rank 1"] == ((1,), "forward")
    if steps <= wire.MAX_SNAP_STEPS:
        since = {key: alert.since.step for key, alert in there.book.open.items()}
        assert {key: alert.since.step for key, alert in late.book.open.items()} == since


def test_a_gap_that_no_ring_bridges_is_not_evaluated_and_what_follows_is():
    run = Scenario(WORLD, steps=1500, noise=0.01, faults=(Fault((1,), "data", 0.3, onset=1400),), seed=7)
    payloads = by_rank(run, flush_steps=50)
    monitor = new_monitor()
    now_ns = feed(monitor, [payload for rank in payloads for payload in rank[:5]])
    for rank in payloads:
        monitor.ingest(snapshot(rank), now_ns)
    monitor.evaluate_now()

    assert open_stragglers(monitor) == {"rank 1": "data"}
    assert monitor.book.open["straggler", "rank 1"].since.step >= 1400


@pytest.mark.parametrize(("world", "ahead"), [(1, 10**7), (2, 2**61), (4, 10**7), (4, 2**61)])
def test_only_steps_that_are_still_kept_are_evaluated(world, ahead, monkeypatch):
    evaluation_steps = []
    gather = engine.gather
    monkeypatch.setattr(
        engine, "gather", lambda *args, **named: evaluation_steps.append(named["upto"]) or gather(*args, **named)
    )
    monitor = new_monitor(world)
    for rank in range(world):
        late = {"backward": 26} if rank == 1 else {"sync": 12}
        steps = [make_step(ahead + number, end_ns=number, **late) for number in range(wire.MAX_SNAP_STEPS)]
        monitor.ingest(wire.encode(make_snap(rank, 5, steps, beat=make_beat(rank, 5, step=ahead))), 1)
    monitor.evaluate_now()

    assert min(evaluation_steps) >= ahead - 2 * wire.MAX_SNAP_STEPS
    assert len(evaluation_steps) < wire.MAX_SNAP_STEPS
    assert open_stragglers(monitor) == ({"rank 1": "backward"} if world > 1 else {})


def test_the_time_of_an_alert_is_by_the_clock_of_the_ranks():
    monitor = new_monitor()
    unix_ns = 1_700_000_000 * SECOND
    for rank in range(WORLD):
        monitor.ingest(wire.encode(make_hello(rank, 1, mono_ns=0, unix_ns=unix_ns)), 1)
        monitor.ingest(wire.encode(make_beat(rank, 2)), 1)
        for number, payload in enumerate(PAYLOADS[rank][1:]):
            message = wire.decode(payload)
            if isinstance(message, wire.Steps):
                monitor.ingest(wire.encode(msgspec.structs.replace(message, seq=3 + number)), 1)
    monitor.evaluate_now()
    since = monitor.book.open["straggler", "rank 1"].since
    ends = {
        step.index: step.end_ns
        for payload in PAYLOADS[0]
        if isinstance(message := wire.decode(payload), wire.Steps)
        for step in message.steps
    }

    assert since.unix_ns == unix_ns + ends[since.step]


def test_a_run_of_which_nothing_is_heard_is_not_evaluated():
    monitor = new_monitor()
    monitor.evaluate_now()
    monitor.tick(600 * SECOND)
    monitor.evaluate_now()

    assert reported(monitor) == []
    assert not monitor.book.open


def test_a_long_history_is_evaluated_in_portions_and_comes_to_the_same():
    at_once, in_portions = new_monitor(), new_monitor()
    for monitor in (at_once, in_portions):
        for payload in (payload for payloads in PAYLOADS for payload in payloads):
            monitor.state.ingest(payload, SECOND)
    at_once.evaluate_now()

    in_portions.tick(5 * SECOND)
    assert in_portions.behind
    portions = 1
    while in_portions.behind:
        in_portions.tick(5 * SECOND)
        portions += 1
    assert portions > 2
    assert reported(in_portions) == reported(at_once)


def test_a_callback_runs_between_rules():
    turns = []
    monitor = new_monitor()
    monitor.between_rules(lambda: turns.append(len(monitor.book.open)))
    for rank in by_rank(Scenario(WORLD, steps=60, noise=0.01, seed=7), flush_steps=60):
        for payload in rank:
            monitor.ingest(payload, 1)
    monitor.evaluate_now()
    assert len(turns) >= len(DETECTORS)


@pytest.mark.parametrize(
    ("world", "step_ms", "stride"),
    [(8, 100, 5), (256, 100, 5), (512, 100, 20), (1024, 100, 40), (8192, 100, 40), (1024, 5000, 5), (1024, 1, 120)],
)
def test_evaluations_are_further_apart_the_more_ranks_there_are_up_to_a_maximum(world, step_ms, stride):
    rule_steps, found = engine.evaluation_steps(world, DEFAULTS.judge, step_ms * 1e6)
    assert found == stride
    assert found < rule_steps, "no step is passed over"


def test_gradual_rules_are_evaluated_less_often_with_many_ranks(monkeypatch):
    asked = []
    rules = [
        Detector(rule, lambda _, rule=rule: asked.append(rule) or [], by_step=False, gradual=rule == "memory")
        for rule in ("memory", "rank-lost")
    ]
    monkeypatch.setattr(engine, "BY_TIME", rules)
    for world, times in ((engine.MANY_RANKS, 12), (engine.MANY_RANKS + 1, 3)):
        monitor = Monitor(RunState("0", "train", world))
        monitor.ingest(wire.encode(make_hello(0, 1)), 1)
        asked.clear()
        for second in range(5, 17):
            monitor.tick(second * SECOND)
        assert (asked.count("memory"), asked.count("rank-lost")) == (times, 12)
        monitor.evaluate_now()
        assert (asked.count("memory"), asked.count("rank-lost")) == (times + 1, 13), "at the end nothing is left out"


def test_the_rules_that_are_asked_less_often_outlive_the_time_between():
    for detector in DETECTORS:
        if detector.gradual:
            assert not detector.by_step
            assert detector.close_delay(DEFAULTS) > 2 * EvaluationLimits.GRADUAL_NS
