"""Recordings of real gloo ranks, evaluated again: their alerts never change.

`tests/recordings/make.py` has made them and writes the golden files anew where a rule has changed on purpose.
"""

from __future__ import annotations

import json

import pytest

from ddpwatch import wire
from ddpwatch.core.metrics.live_metrics import measure
from ddpwatch.wire import decode
from tests.recordings.make import (
    HANGS,
    HERE,
    MAX_BYTES,
    REPORTED,
    RUNS,
    SLOW_RANK,
    WORLD,
    events_of,
    monitor_of,
    read,
    reported_in,
)


@pytest.fixture(scope="module", params=RUNS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def recording(name):
    return read(HERE / f"{name}.msgpack.gz")


def test_a_recording_leads_to_the_recorded_alerts(name, recording):
    golden = json.loads((HERE / f"{name}.golden.json").read_text())

    assert events_of(recording) == golden


def test_the_slow_rank_of_a_real_run_is_found_in_its_phase():
    events = [event for event in events_of(read(HERE / "slow-backward.msgpack.gz")) if event["rule"] == "straggler"]

    assert {(event["subject"], event["phase"]) for event in events} == {(f"rank {SLOW_RANK}", "backward")}
    assert [event["kind"] for event in events if event["kind"] != "changed"] == ["opened"]


def test_in_a_healthy_real_run_no_rank_is_blamed():
    monitor = monitor_of(read(HERE / "healthy.msgpack.gz"))
    events = [event.alert.finding for event in monitor.book.drain()]

    assert not [finding for finding in events if finding.rule in {"straggler", "rank-lost", "rank-failed", "lossy"}]
    assert not [finding for finding in events if finding.ranks]


def test_nothing_is_lost_in_a_recording_and_all_ranks_are_in_it_to_the_end(recording):
    state = monitor_of(recording).state

    assert (state.bad, state.unknown) == (0, 0)
    assert [rank.lost for rank in state.ranks.values()] == [0] * WORLD
    # All have exited, or all still hang.
    assert [state.condition(rank) for rank in state.ranks.values()] in (["ended"] * WORLD, ["ok"] * WORLD)
    assert measure(state).complete


def test_a_recording_ingested_at_once_finds_the_same_stragglers(recording):
    def blamed(frames):
        events = [event for event in events_of(frames) if event["rule"] == "straggler"]
        return {(event["subject"], event["phase"]) for event in events}

    assert blamed([frame._replace(received_ns=1) for frame in recording]) == blamed(recording)


def hellos_of(frames):
    messages = [decode(frame.payload) for frame in frames if frame.payload]
    reported = [message.hello for message in messages if isinstance(message, wire.Snap)]
    return reported + [message for message in messages if isinstance(message, wire.Hello)]


def test_a_recording_holds_nothing_about_the_machine(recording):
    hellos = hellos_of(recording)

    assert {hello.host for hello in hellos} == {"node-a"}
    assert {hello.pid for hello in hellos} == {1000 + rank for rank in range(WORLD)}
    assert len({hello.run_id for hello in hellos}) == 1
    assert not [frame for frame in recording if b"/tmp" in frame.payload or b"/home" in frame.payload]


def test_a_recording_is_small_and_its_times_run_forward(name, recording):
    times = [frame.received_ns for frame in recording]

    assert (HERE / f"{name}.msgpack.gz").stat().st_size < MAX_BYTES
    assert times == sorted(times)
    assert times[0] == 0


# Runs that hang or fail, three ranks each, from `tests/recordings/make_hangs.py`.

HUNG = {"abort", "data", "kill", "lock", "mismatch", "raise", "save", "side-group", "skip", "sleep", "stop"}
HUNG_WORLD = 3
HUNG_BYTES = 60_000


def test_there_is_a_recording_of_every_way_to_hang():
    kept = {path.name.partition(".")[0] for path in HANGS.glob("*.msgpack.gz")}

    assert kept == set(json.loads(REPORTED.read_text())) == HUNG
    assert all(path.stat().st_size < HUNG_BYTES for path in HANGS.glob("*.msgpack.gz"))


@pytest.mark.parametrize("kind", sorted(HUNG))
def test_a_recorded_hang_leads_to_the_same_alerts(kind):
    reported = reported_in(read(HANGS / f"{kind}.msgpack.gz"), HUNG_WORLD)

    assert reported == json.loads(REPORTED.read_text())[kind]
    assert {tuple(ranks) for _, ranks in reported} == {(0,) if kind == "save" else (HUNG_WORLD - 1,)}


@pytest.mark.parametrize("kind", sorted(HUNG))
def test_a_recorded_hang_holds_nothing_about_the_machine(kind):
    frames = read(HANGS / f"{kind}.msgpack.gz")

    assert {hello.host for hello in hellos_of(frames)} == {"node-a"}
    assert not [frame for frame in frames if b"/tmp" in frame.payload or b"/home" in frame.payload]
