"""Packed step tables of many ranks lead to the same state as single steps."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state import step_store
from ddpwatch.core.state.run import RunState
from ddpwatch.core.state.state_checkpoint import CHECKPOINT_STEPS, checkpoint_messages
from ddpwatch.core.state.step_codec import read_table
from ddpwatch.core.state.step_store import COLUMN, MAX_STEP_NS, MIN_BATCH, StepRing, StepStore, put_tables
from ddpwatch.errors import BadFrame
from ddpwatch.simulator.workload import SimulatedRun
from tests.builders.fake_rank import make_beat, make_gpus, make_hello, make_snap, make_step, steps_of

RANKS = MIN_BATCH + 4
ROW = struct.Struct(f"<{len(wire.STEP_COLUMNS)}q")


def rings(count=RANKS):
    store = StepStore(count, 16)
    return [StepRing(store, row) for row in range(count)]


def seen(reported):
    return [(ring.latest(40).tolist(), ring.indices().tolist(), ring.newest) for ring in reported]


def table(*indices, **changed):
    return wire.pack_steps([make_step(index, **changed) for index in indices])


def row(index, **changed):
    """A packed step that no `wire.Step` can be."""
    values = dict.fromkeys(wire.STEP_COLUMNS, 1) | {"index": index, "flags": 0} | changed
    return ROW.pack(*[values[name] for name in wire.STEP_COLUMNS])


def test_packed_steps_are_unpacked():
    steps = [make_step(index, samples=7, fingerprint=2**62, flags=index % 2) for index in range(3)]

    assert [wire.step_of(values) for values in wire.unpack_steps(wire.pack_steps(steps))] == steps
    assert list(wire.unpack_steps(wire.pack_steps(steps) + b"left over")) == list(
        wire.unpack_steps(wire.pack_steps(steps))
    )


def packed_by(columns, *indices):
    """A table of a peer whose steps have this number of columns; unknown ones hold 99."""
    rows = [[*wire.unpack_steps(table(index))] for index in indices]
    return b"".join(struct.pack(f"<{columns}q", *[*row, *[99] * 10][:columns]) for (row,) in rows)


@pytest.mark.parametrize("columns", [len(wire.STEP_COLUMNS) + 3, len(wire.STEP_COLUMNS) + 1])
def test_columns_that_a_newer_peer_adds_are_dropped(columns):
    beat = make_beat(0, 2, table=packed_by(columns, 5, 6), table_columns=columns)

    assert steps_of(wire.decode(wire.encode(beat))) == [make_step(5), make_step(6)]


@pytest.mark.parametrize("columns", range(wire.MIN_COLUMNS, len(wire.STEP_COLUMNS)))
def test_columns_that_an_older_peer_lacks_get_their_defaults(columns):
    beat = make_beat(0, 2, table=packed_by(columns, 5, 6), table_columns=columns)
    defaults = dict(zip(wire.STEP_COLUMNS[columns:], wire.STEP_DEFAULTS[columns:], strict=True))

    assert steps_of(wire.decode(wire.encode(beat))) == [make_step(5, **defaults), make_step(6, **defaults)]


@pytest.mark.parametrize("columns", [wire.MIN_COLUMNS - 1, wire.MAX_COLUMNS + 1, 0, -1])
def test_a_table_with_an_impossible_number_of_columns_is_a_bad_frame(columns):
    with pytest.raises(BadFrame):
        wire.decode(wire.encode(make_beat(0, 2, table=b"x" * 800, table_columns=columns)))


@pytest.mark.parametrize("columns", [len(wire.STEP_COLUMNS) - 1, len(wire.STEP_COLUMNS) + 1])
def test_an_incomplete_row_of_another_version_counts_as_one_bad_step(columns):
    state = RunState("0", "x", 1)
    beat = make_beat(0, 2, table=packed_by(columns, 0, 1) + bytes(8 * columns - 1), table_columns=columns)
    for message in (make_hello(0, 1, world_size=1), beat):
        state.ingest(wire.encode(message), 1)

    assert (state.ranks[0].steps.newest, state.ranks[0].bad) == (1, 1)


def test_ranks_of_different_versions_are_ingested_in_one_batch():
    state = RunState("0", "x", RANKS)
    state.ingest_all([(wire.encode(make_hello(rank, 1, world_size=RANKS)), 1) for rank in range(RANKS)])
    beats = []
    for rank in range(RANKS):
        columns = len(wire.STEP_COLUMNS) + rank % 3 - 1
        beats.append(make_beat(rank, 2, table=packed_by(columns, 0, 1, 2), table_columns=columns))
    state.ingest_all([(wire.encode(beat), 1) for beat in beats])

    assert state.bad == 0
    assert {rank.steps.latest(9)[:, :-1].tobytes() for rank in state.ranks.values()} == {
        state.ranks[0].steps.latest(9)[:, :-1].tobytes()
    }


GROWN = """
import importlib, json, sys
import ddpwatch.wire.message_parts as structs
from ddpwatch.wire import Count

class Step(structs.Step, array_like=True, frozen=True, gc=False):
    added_ns: Count = 7

structs.Step = Step
for name in ("step_table", "messages", "codec"):
    importlib.reload(sys.modules["ddpwatch.wire." + name])
importlib.reload(sys.modules["ddpwatch.wire"])

from tests.builders.fake_rank import make_beat
from tests.recordings.make import HERE, RUNS, events_of, monitor_of, read
from ddpwatch import wire
from ddpwatch.core.state.step_store import COLUMNS
from ddpwatch.core.state.state_checkpoint import CHECKPOINT_STEPS, checkpoint_messages
from ddpwatch.core.state.run import RunState
from ddpwatch.core.state.step_codec import read_table

assert COLUMNS[-1] == "added_ns"
for name in RUNS:
    frames = read(HERE / f"{name}.msgpack.gz")
    assert events_of(frames) == json.loads((HERE / f"{name}.golden.json").read_text()), name
    state = monitor_of(frames).state
    assert state.bad == 0
    assert all((rank.steps.latest(600)[:, -1] == 7).all() for rank in state.ranks.values())

steps = [Step(**{name: index for index, name in enumerate(COLUMNS)})]
beat = make_beat(0, 1, table=wire.pack_steps(steps))
print(wire.encode(beat).hex())
tables = [payload for _, payload in checkpoint_messages(state) if payload.startswith(wire.NO_MESSAGE)]
assert next(read_table(tables[0]))[1][:, -1].tolist()[:2] == [7, 7]
print(tables[0].hex())
"""


def test_a_field_added_to_steps_keeps_recordings_readable_in_both_directions():
    """A version with one more field replays older recordings, and this version reads its tables."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, env=environment, check=False)
    assert not done.returncode, done.stderr
    beat, table = map(bytes.fromhex, done.stdout.split())

    assert steps_of(wire.decode(beat)) == [wire.step_of(range(len(wire.STEP_COLUMNS)))]
    rows = next(read_table(table))[1]
    assert rows.shape == (CHECKPOINT_STEPS, len(wire.STEP_COLUMNS))
    assert (np.diff(rows[:, COLUMN["index"]]) == 1).all()


def test_tables_of_many_ranks_are_stored_in_one_batch(monkeypatch):
    """Wrapped around the end of the ring, and with several tables of one rank."""
    alone, together = rings(), rings()
    reported = [(k % RANKS, table(*range(first, first + 5))) for first in range(0, 40, 5) for k in range(RANKS)]
    refused = [alone[k].put_table(steps) for k, steps in reported]
    monkeypatch.setattr(StepRing, "put_table", None)

    assert put_tables([(together[k], steps) for k, steps in reported]) == refused == [0] * len(reported)
    assert seen(together) == seen(alone)


IMPOSSIBLE = [
    row(3, presync_ns=2),
    row(3, data_ns=MAX_STEP_NS),
    row(3, data_ns=-1),
    row(-3),
    row(3, samples=2**62 + 1),
    row(2**63 - 1),
    b"odd",
    table(3) + b"odd",
]


@pytest.mark.parametrize("bad", IMPOSSIBLE)
def test_invalid_steps_count_against_their_rank_only(bad):
    reported = rings()
    steps = [table(0, 1, 2)] * RANKS + [table(3)] * (RANKS - 1)
    refused = put_tables([*zip([*reported, *reported[1:]], steps, strict=True), (reported[0], bad)])

    assert refused == [0] * (2 * RANKS - 1) + [1]
    assert [ring.newest for ring in reported[1:]] == [3] * (RANKS - 1)
    assert reported[0].newest == (3 if bad.startswith(table(3)) else 2)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.lists(st.tuples(st.integers(0, 30), st.integers(0, 1), st.integers(1, 2)), max_size=4),
        ),
        min_size=MIN_BATCH,
        max_size=2 * MIN_BATCH,
    )
)
def test_any_batch_of_tables_equals_tables_one_by_one(reported):
    alone, together = rings(4), rings(4)
    tables = [
        (k, wire.pack_steps([make_step(index, flags=flags, end_ns=end_ns) for index, flags, end_ns in steps]))
        for k, steps in reported
    ]

    assert put_tables([(together[k], steps) for k, steps in tables]) == [
        alone[k].put_table(steps) for k, steps in tables
    ]
    assert seen(together) == seen(alone)


def test_rings_of_several_stores_are_written_one_by_one():
    reported = [*rings(), StepRing(StepStore(1, 32))]
    put_tables([(ring, table(0, 1)) for ring in reported])

    assert [ring.newest for ring in reported] == [1] * len(reported)


def test_a_packed_step_equals_an_unpacked_one():
    states = [RunState("0", "x", 1) for _ in range(2)]
    steps = [make_step(index) for index in range(5)]
    for state, beat in zip(
        states, (make_beat(0, 2, steps=steps), make_beat(0, 2, table=wire.pack_steps(steps))), strict=True
    ):
        assert steps_of(beat) == steps
        for message in (make_hello(0, 1, world_size=1), beat):
            state.ingest(wire.encode(message), 1)

    assert seen([states[0].ranks[0].steps]) == seen([states[1].ranks[0].steps])
    assert list(checkpoint_messages(states[0])) == list(checkpoint_messages(states[1])), (
        "nor is the table kept with the beat"
    )


def test_a_sanitized_heartbeat_does_not_keep_its_steps_either():
    state = RunState("0", "x", 1)
    beat = make_beat(0, 2, pause="\x1b[31mnap", table=table(0), gpus=make_gpus())
    for message in (make_hello(0, 1, world_size=1), beat):
        state.ingest(wire.encode(message), 1)
    kept = state.ranks[0].beat

    assert (kept.pause, kept.table, kept.steps, kept.gpus) == ("nap", b"", [], None)
    assert state.ranks[0].steps.newest == 0
    assert state.ranks[0].gpus.latest is not None


def test_a_message_of_steps_between_packed_ones_keeps_its_place():
    """The first report of a step counts, in a batch as well."""
    state = RunState("0", "x", 1)
    other = wire.Steps(rank=0, seq=3, steps=[make_step(0, end_ns=2)])
    messages = [make_hello(0, 1, world_size=1), make_beat(0, 2, table=table(0, end_ns=1)), other]
    state.ingest_all([(wire.encode(message), 1) for message in messages])

    assert state.ranks[0].steps.latest(1)[0, COLUMN["end_ns"]] == 1
    assert state.ranks[0].bad == 1


def test_a_batch_of_frames_leads_to_the_same_state_and_alerts():
    run = SimulatedRun(RANKS, now_ns=0, unix_ns=10**18, history_steps=100)
    frames = [(run.snap(rank, run.due_ns), run.due_ns) for rank in range(RANKS)]
    while run.due_ns < frames[0][1] + 60_000_000_000:
        now_ns = run.due_ns
        frames += [(payload, now_ns) for _, _, payload in run.next_messages()]
    frames[5000] = b"no message", frames[5000][1]
    together, alone = (Monitor(RunState(run.run_id, run.name, RANKS)) for _ in range(2))
    ranks = [rank for first in range(0, len(frames), 333) for rank in together.ingest_all(frames[first : first + 333])]

    assert ranks == [alone.ingest(payload, now_ns) for payload, now_ns in frames]
    assert list(checkpoint_messages(together.state)) == list(checkpoint_messages(alone.state))
    events = alone.book.drain()
    assert events
    assert together.book.drain() == events
    assert together.state.bad == alone.state.bad == 1


def test_a_typical_run_takes_the_batch_path(monkeypatch):
    took = []
    quick = step_store._put_batch
    monkeypatch.setattr(step_store, "_put_batch", lambda reported: took.append(quick(reported)) or took[-1])
    run = SimulatedRun(64, now_ns=0, unix_ns=10**18, history_steps=100)
    state = RunState(run.run_id, run.name, 64)
    state.ingest_all([(run.snap(rank, 0), 0) for rank in range(64)])
    for _ in range(4):
        now_ns = run.due_ns
        state.ingest_all([(payload, now_ns) for _ in range(16) for _, _, payload in run.next_messages()])

    assert took
    assert all(took)


def test_a_snapshot_and_packed_steps_join_without_a_gap():
    state = RunState("0", "x", 1)
    snap = make_snap(0, 1, steps=[make_step(index) for index in range(3)], hello=make_hello(0, 1, world_size=1))
    state.ingest_all([(wire.encode(snap), 1), (wire.encode(make_beat(0, 2, table=table(3, 4))), 2)])

    assert state.ranks[0].steps.indices().tolist() == [0, 1, 2, 3, 4]
    assert state.ranks[0].bad == 0
