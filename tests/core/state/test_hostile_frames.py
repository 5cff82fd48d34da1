"""One rank of four sends invalid data: it is named, memory stays bounded, and the others are evaluated as usual."""

from __future__ import annotations

import math
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.core.metrics.live_metrics import measure
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.rank import MAX_CHECKSUMS, MAX_LOADERS, MAX_NOTES
from ddpwatch.core.state.run import RunState
from ddpwatch.core.state.step_store import CAPACITY_STEPS, COLUMNS, MAX_STEP_NS
from ddpwatch.simulator.scenario import Fault, Scenario
from tests.builders.fake_rank import MS, make_beat
from tests.builders.scenario_frames import frames

WORLD = 4
LIAR = 3
SLOW = 1
PHASE = "forward"
ABSURD_NS = 10**15
PACE_NS = 20 * MS
change = msgspec.structs.replace


@cache
def messages_of(steps=200):
    run = Scenario(WORLD, steps=steps, noise=0.03, faults=(Fault((SLOW,), PHASE, 0.3),), seed=11)
    return [wire.decode(frame.payload) for frame in frames(run)]


def hear(lie=None, liar=LIAR, steps=200):
    """A monitor of the run in which the liar's steps go through `lie`, which yields payloads."""
    monitor = Monitor(RunState("ab12cd34", "train", WORLD))
    now_ns = 0
    for message in messages_of(steps):
        now_ns += PACE_NS
        if lie is not None and message.rank == liar and isinstance(message, wire.Steps):
            for payload in lie(message):
                monitor.ingest(payload, now_ns)
        else:
            monitor.ingest(wire.encode(message), now_ns)
    monitor.evaluate_now()
    return monitor


received = cache(hear)
"""The same, shared by tests that only read it."""


def each(**changed):
    """A lie that changes every step; a value may be a function of the step."""

    def lie(message):
        steps = [
            change(step, **{name: value(step) if callable(value) else value for name, value in changed.items()})
            for step in message.steps
        ]
        yield wire.encode(change(message, steps=steps))

    return lie


@cache
def raw(*fields):
    """A lie that no struct can hold: the raw fields of a step on the wire."""

    def lie(message):
        steps = [[step.index, step.end_ns, *fields] for step in message.steps]
        yield msgspec.msgpack.encode({"t": "steps", "rank": message.rank, "seq": message.seq, "steps": steps})

    return lie


def twice_differently(message):
    yield wire.encode(message)
    other = [change(step, end_ns=step.end_ns + 1, forward_ns=step.forward_ns * 50) for step in message.steps]
    # A number that is not taken, or it would be a duplicate and not be read at all.
    yield wire.encode(change(message, seq=10**6 + message.seq, steps=other))


def nothing_at_all(message):
    yield b""
    yield b"\xc1" * 50
    yield wire.encode(message)[:-3]


def snapshots(message):
    """The same steps repeatedly, in snapshots of the maximum size."""
    hello = next(each for each in messages_of() if isinstance(each, wire.Hello) and each.rank == message.rank)
    many = [change(step, forward_ns=ABSURD_NS, index=index) for step in message.steps[:1] for index in range(600)]
    yield wire.encode(
        wire.Snap(rank=message.rank, seq=message.seq, hello=hello, beat=make_beat(message.rank), steps=many)
    )


BELIEVED = {
    "absurd durations": each(forward_ns=ABSURD_NS),
    "absurd waiting": each(sync_ns=ABSURD_NS),
    "absurd after a while": each(forward_ns=lambda step: ABSURD_NS if step.index > 80 else step.forward_ns),
    "no time at all": each(**{f"{phase}_ns": 0 for phase in wire.PHASES}),
    "the same steps with other values": twice_differently,
    "snapshots of absurd steps": snapshots,
}
"""Lies in valid steps."""
UNUSABLE = {
    "longer than a year": each(forward_ns=MAX_STEP_NS + 1),
    "the largest number": each(forward_ns=2**62, end_ns=2**62),
    "parts larger than the whole": each(presync_ns=lambda step: step.sync_ns + 1),
    "negative durations": raw(-5, 1, 1, 1, 1, 1),
    "not a number": raw(math.nan, 1, 1, 1, 1, 1),
    "infinite": raw(1, math.inf, 1, 1, 1, 1),
    "text": raw("1", 1, 1, 1, 1, 1),
    "too large for an integer": raw(2**63, 1, 1, 1, 1, 1),
    "too few fields": raw(1, 1),
    "no msgpack": nothing_at_all,
}
"""Lies that make every step of the rank invalid."""
BEHIND = {
    "runs backwards after a while": each(index=lambda step: step.index if step.index < 41 else 40 - step.index % 41),
    "runs backwards from the beginning": each(index=lambda step: 500 - step.index),
    "stands still": each(index=5),
}
AHEAD = {
    "jumps a million ahead": each(index=lambda step: step.index + 10**6 * (step.index > 50)),
    "is a million ahead": each(index=lambda step: step.index + 10**6),
    "is as large as it may be": each(index=lambda step: 2**62 - 1000 + step.index),
}


def stragglers(monitor):
    return {
        (alert.finding.subject, alert.finding.ranks, alert.finding.phase)
        for alert in monitor.book.open.values()
        if alert.finding.rule == "straggler"
    }


def assert_bounded(monitor):
    for rank in monitor.state.ranks.values():
        assert rank.steps.store.table.shape[1:] == (CAPACITY_STEPS, len(COLUMNS))
        assert len(rank.steps.indices()) <= CAPACITY_STEPS
        assert len(rank.notes) <= MAX_NOTES
        assert len(rank.loaders) <= MAX_LOADERS
        assert len(rank.checksums) <= MAX_CHECKSUMS
    assert set(monitor.state.ranks) == set(range(WORLD))


def assert_named(monitor, liar=LIAR):
    alert = monitor.book.open["lossy", f"rank {liar}"]
    assert alert.finding.ranks == (liar,)
    assert f"rank {liar}" in alert.finding.message


HONEST = {(f"rank {SLOW}", (SLOW,), PHASE)}


def test_without_a_liar_the_slow_rank_is_found_and_nothing_is_lossy():
    monitor = received()

    assert stragglers(monitor) == HONEST
    assert not [key for key in monitor.book.open if key[0] == "lossy"]


@pytest.mark.parametrize("lie", BELIEVED.values(), ids=BELIEVED)
def test_a_rank_that_lies_about_its_steps_is_named_and_the_slow_one_is_found(lie):
    monitor = received(lie)

    assert stragglers(monitor) == HONEST
    assert_named(monitor)
    assert_bounded(monitor)
    assert measure(monitor.state) is not None


@pytest.mark.parametrize(
    "lie",
    [pytest.param(lie, id=name) for name, lie in {**UNUSABLE, **BEHIND}.items()],
)
def test_a_rank_whose_steps_cannot_be_used_is_named(lie):
    monitor = received(lie)

    assert_named(monitor)
    assert_bounded(monitor)


@pytest.mark.parametrize("lie", {**UNUSABLE, **BEHIND}.values(), ids={**UNUSABLE, **BEHIND})
def test_beside_a_rank_whose_steps_cannot_be_used_the_slow_one_is_found(lie):
    assert stragglers(received(lie)) == HONEST


@pytest.mark.parametrize("lie", AHEAD.values(), ids=AHEAD)
def test_beside_a_rank_that_counts_far_ahead_the_slow_one_is_found(lie):
    monitor = received(lie)

    assert stragglers(monitor) == HONEST
    assert_bounded(monitor)


@pytest.mark.parametrize("lie", AHEAD.values(), ids=AHEAD)
def test_a_rank_that_counts_far_ahead_is_named(lie):
    assert_named(received(lie))


def test_frames_without_a_rank_are_counted_unassigned():
    monitor = received(nothing_at_all)

    assert monitor.book.open["lossy", "unassigned"].finding.ranks == ()


@pytest.mark.parametrize("lie", [BELIEVED["absurd durations"], BELIEVED["no time at all"]], ids=["absurd", "nothing"])
def test_a_lying_first_rank_is_found_as_well_as_a_lying_last_one(lie):
    monitor = received(lie, liar=0)

    assert stragglers(monitor) == HONEST
    assert_named(monitor, liar=0)


@pytest.mark.parametrize("fields", [(-5, 1, 1, 1, 1, 1), (math.nan, 1, 1, 1, 1, 1), (1, 1, 1, math.inf, 1, 1)], ids=str)
def test_invalid_nanoseconds_make_a_bad_frame_of_the_rank(fields):
    monitor = received(raw(*fields))

    assert monitor.state.ranks[LIAR].bad == sum(
        isinstance(message, wire.Steps) and message.rank == LIAR for message in messages_of()
    )
    assert monitor.state.ranks[LIAR].steps.newest == -1
    assert monitor.state.bad_unassigned == 0


@pytest.mark.parametrize(
    "changed",
    [{"cpu_percent": -1.0}, {"cpu_percent": math.nan}, {"rss_bytes": -1}, {"phase": 6}, {"step": 1.5}],
    ids=str,
)
def test_an_invalid_heartbeat_is_a_bad_frame_of_its_rank(changed):
    state = RunState("ab12cd34", "train", WORLD)
    state.ingest(msgspec.msgpack.encode({**msgspec.to_builtins(make_beat(LIAR)), **changed}), 1)

    assert (state.ranks[LIAR].bad, state.ranks[LIAR].beat) == (1, None)


def test_a_million_steps_take_the_memory_of_six_hundred():
    monitor = hear()
    now_ns, seq, each_message = monitor.state.now_ns, 10**4, 4096
    template = messages_of()[-2].steps[0]
    for first in range(200, 200 + 10**6, each_message):
        seq += 1
        steps = [change(template, index=index, end_ns=index) for index in range(first, first + each_message)]
        monitor.ingest(wire.encode(wire.Steps(rank=LIAR, seq=seq, steps=steps)), now_ns)
    monitor.evaluate_now()

    assert monitor.state.ranks[LIAR].steps.newest >= 10**6
    assert_bounded(monitor)
    assert stragglers(monitor) == HONEST


def test_a_rank_beyond_the_world_is_refused_and_takes_no_room():
    monitor = hear()
    for rank in range(WORLD, WORLD + 500):
        monitor.ingest(wire.encode(make_beat(rank)), monitor.state.now_ns)
    monitor.evaluate_now()

    assert_bounded(monitor)
    assert monitor.state.bad_unassigned == 500
    assert stragglers(monitor) == HONEST


def test_endless_events_take_bounded_memory():
    monitor = hear()
    for number in range(3000):
        common = {"rank": LIAR, "seq": 10**4 + number, "step": number}
        event = (
            wire.Note(**common, kind="x", text="y" * 4000, mono_ns=number),
            wire.Loader(**common, epoch=number, sampler="s", distributed=True),
            wire.Checksum(**common, parameter=f"p{number}", offset=0, crc=number),
        )[number % 3]
        monitor.ingest(wire.encode(event), monitor.state.now_ns)

    assert_bounded(monitor)


values = st.one_of(
    st.integers(-1, 10), st.sampled_from([10**15, 2**55, 2**62, 2**63 - 1, -(2**63)]), st.floats(), st.text(max_size=3)
)
numbers = st.one_of(st.integers(0, 700), st.sampled_from([10**6, 2**62]), values)
some_steps = st.lists(st.lists(values, min_size=6, max_size=18).flatmap(
    lambda rest: numbers.map(lambda index: [index, 1, *rest])), max_size=20)  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2000), some_steps), max_size=15), st.booleans())
def test_whatever_one_rank_sends_nothing_raises_and_nothing_grows(sent, first):
    monitor = Monitor(RunState("ab12cd34", "train", WORLD))
    wild = [msgspec.msgpack.encode({"t": "steps", "rank": LIAR, "seq": seq, "steps": steps}) for seq, steps in sent]
    honest = [wire.encode(message) for message in messages_of(40)]
    for number, payload in enumerate(wild + honest if first else honest + wild):
        monitor.ingest(payload, number * PACE_NS)
    monitor.evaluate_now()

    assert_bounded(monitor)
    assert all(alert.finding.ranks in {(), (LIAR,)} for key, alert in monitor.book.open.items() if key[0] == "lossy")
