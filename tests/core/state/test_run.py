"""The state after messages that arrive duplicated, late, hostile, or not at all."""

from __future__ import annotations

import random

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.limits import LivenessLimits
from ddpwatch.core.state.rank import MAX_CHECKSUMS, MAX_LOADERS, MAX_NOTES, Place
from ddpwatch.core.state.run import MAX_EXPECTED, RunState
from ddpwatch.errors import WireError
from tests.builders.fake_rank import MS, make_beat, make_group, make_hello, make_snap, make_stack, make_step

HOSTILE = "\x1b[31mred\u202e\nname"


def make_state(world=2):
    return RunState("ab12cd34", "train", world, [Place(rank, "node-a", 100 + rank) for rank in range(world)])


def make_note(seq, text="note", rank=0, **changed):
    return wire.Note(**{"rank": rank, "seq": seq, "kind": "kind", "text": text, "step": 0, "mono_ns": seq, **changed})


def make_bye(seq=9, rank=0, reason="closed"):
    return wire.Bye(rank=rank, seq=seq, reason=reason, text="", mono_ns=seq)


def make_steps(seq, *indices, rank=0):
    return wire.Steps(rank=rank, seq=seq, steps=[make_step(index) for index in indices])


def conditions(state):
    return [state.condition(rank) for rank in state.ranks.values()]


def test_a_rank_without_any_message_is_missing():
    state = make_state()
    state.apply(make_beat(0), now_ns=1)

    assert conditions(state) == ["ok", "missing"]
    assert state.run_condition() == "live"


def test_a_run_without_any_message_is_waiting():
    assert make_state().run_condition() == "waiting"


def test_missing_heartbeats_make_a_rank_silent():
    state = make_state(1)
    state.apply(make_beat(0), now_ns=1)

    state.tick(LivenessLimits.NO_HEARTBEAT_NS)
    assert conditions(state) == ["ok"]
    state.tick(LivenessLimits.NO_HEARTBEAT_NS + 1)
    assert conditions(state) == ["silent"]
    assert state.run_condition() == "silent"

    state.apply(make_beat(0, seq=2), now_ns=LivenessLimits.NO_HEARTBEAT_NS + 2)
    assert conditions(state) == ["ok"]


def test_a_stall_of_the_viewer_does_not_make_ranks_silent():
    state = make_state(2)
    state.apply(make_beat(0), now_ns=1)
    state.apply(make_beat(1), now_ns=2 * LivenessLimits.NO_HEARTBEAT_NS)
    assert conditions(state) == ["silent", "ok"]

    looks_again_ns = 30 * LivenessLimits.NO_HEARTBEAT_NS
    state.tick(looks_again_ns, viewer_stall_ns=looks_again_ns - 2 * LivenessLimits.NO_HEARTBEAT_NS - 1)
    assert conditions(state) == ["silent", "ok"], "rank 0 was silent before"
    state.tick(looks_again_ns + LivenessLimits.NO_HEARTBEAT_NS)
    assert conditions(state) == ["silent", "silent"]


def test_steps_without_heartbeats_do_not_keep_a_rank_alive():
    state = make_state(1)
    state.apply(make_beat(0, seq=1), now_ns=0)
    state.apply(make_steps(2, 1), now_ns=LivenessLimits.NO_HEARTBEAT_NS)

    assert conditions(state) == ["silent"]


def test_a_pause_and_an_end_have_their_names():
    state = make_state()
    state.apply(make_beat(0, pause="checkpoint"), now_ns=1)
    state.apply(make_bye(rank=1), now_ns=1)

    assert conditions(state) == ["paused", "ended"]

    state.apply(make_bye(rank=0), now_ns=1)
    assert state.run_condition() == "ended"


def test_time_does_not_run_backwards():
    state = make_state()
    state.tick(10)
    state.tick(5)

    assert state.now_ns == 10


def test_a_snapshot_and_the_stream_are_joined_without_doubles():
    state = make_state()
    state.apply(make_steps(4, 3, 4), now_ns=1)
    state.apply(make_snap(0, seq=5, steps=[make_step(index) for index in range(5)]), now_ns=1)
    state.apply(make_steps(5, 3, 4), now_ns=1)
    state.apply(make_steps(6, 5), now_ns=1)
    rank = state.ranks[0]

    assert rank.steps.indices().tolist() == [0, 1, 2, 3, 4, 5]
    assert rank.snapped
    assert rank.lost == 0


def test_live_messages_that_a_snapshot_covers_are_dropped():
    state = make_state()
    state.apply(make_snap(0, seq=5), now_ns=1)
    state.apply(make_note(5), now_ns=1)
    state.apply(make_note(6), now_ns=1)

    assert [note.seq for note in state.ranks[0].notes.values()] == [6]


def test_a_gap_after_the_snapshot_is_a_loss():
    state = make_state()
    state.apply(make_snap(0, seq=5), now_ns=1)
    state.apply(make_beat(0, seq=9), now_ns=1)

    assert state.ranks[0].lost == 3
    assert state.ranks[1].lost == 0


def test_buckets_are_outside_the_numbered_stream():
    """Another viewer's subscription must not look like a loss, or like a duplicate, here."""
    state = make_state()
    state.apply(make_beat(0, seq=5), now_ns=1)
    state.apply(wire.Buckets(rank=0, seq=5, step=1, buckets=[]), now_ns=1)
    state.apply(make_note(6), now_ns=1)

    assert state.ranks[0].lost == 0
    assert len(state.ranks[0].notes) == 1


def test_a_late_heartbeat_does_not_set_figures_back():
    state = make_state()
    state.apply(make_beat(0, seq=2, step=8), now_ns=1)
    state.apply(make_beat(0, seq=1, step=7), now_ns=2)

    assert state.ranks[0].beat.step == 8


def test_the_step_is_the_furthest_known():
    state = make_state()
    assert state.step is None
    state.apply(make_beat(0, seq=1, step=7), now_ns=1)
    assert state.step == 7
    state.apply(make_steps(2, 7, 8), now_ns=1)
    assert state.step == 9


def test_the_hello_replaces_what_the_run_file_said():
    state = make_state()
    state.apply(make_hello(0, host="node-b", pid=7), now_ns=1)

    assert (state.ranks[0].host, state.ranks[0].pid) == ("node-b", 7)


def test_a_note_in_the_snapshot_and_in_the_stream_is_one_note():
    state = make_state()
    note = make_note(6)
    state.apply(make_note(3, mono_ns=6), now_ns=1)
    state.apply(make_snap(0, seq=7, notes=[note]), now_ns=1)

    assert len(state.ranks[0].notes) == 1


def test_what_is_kept_is_bounded():
    state = make_state()
    for seq in range(300):
        state.apply(make_note(3 * seq, text=f"note {seq}"), now_ns=1)
        state.apply(
            wire.Loader(rank=0, seq=3 * seq + 1, step=seq, epoch=0, sampler="Sequential", distributed=False), now_ns=1
        )
        state.apply(wire.Checksum(rank=0, seq=3 * seq + 2, step=seq, parameter="w", offset=0, crc=1), now_ns=1)
    rank = state.ranks[0]

    assert (len(rank.notes), len(rank.loaders), len(rank.checksums)) == (MAX_NOTES, MAX_LOADERS, MAX_CHECKSUMS)
    assert "note 299" in {note.text for note in rank.notes.values()}
    assert max(loader.step for loader in rank.loaders.values()) == 299


def test_a_rank_beyond_the_world_is_refused():
    state = make_state(2)
    state.apply(make_beat(2), now_ns=1)

    assert list(state.ranks) == [0, 1]
    assert state.bad_unassigned == 1


def test_a_rank_that_was_not_listed_is_let_in_if_the_world_has_room():
    state = RunState("ab12cd34", "train", 4, [Place(2, "node-a", 1)])
    state.apply(make_beat(1), now_ns=1)

    assert conditions(state) == ["missing", "ok", "missing", "missing"]


def test_a_world_that_claims_to_be_huge_costs_nothing():
    state = RunState("ab12cd34", "train", 2**20 - 1)
    state.apply(make_beat(2**19), now_ns=1)

    assert len(state.ranks) <= MAX_EXPECTED + 1


def test_an_impossible_step_is_counted_and_dropped():
    """Its sum would not fit the arrays' integers."""
    state = make_state()
    step = make_step(1, forward_ns=2**62, backward_ns=2**62)
    state.apply(wire.Steps(rank=0, seq=1, steps=[step, make_step(2)]), now_ns=1)

    assert state.ranks[0].steps.indices().tolist() == [2]
    assert state.ranks[0].bad == 1


def test_hostile_text_is_sanitized_in_every_message():
    state = RunState("ab12cd34", HOSTILE, 1, [Place(0, HOSTILE, 1)])
    hello = make_hello(
        0, host=HOSTILE, model=HOSTILE, backend=HOSTILE, run_name=HOSTILE, device=HOSTILE, ddp={HOSTILE: HOSTILE}
    )
    group = wire.Group(name=HOSTILE, size=1, enqueued=1)
    loader = wire.Loader(rank=0, seq=4, step=0, epoch=0, sampler=HOSTILE, distributed=False)
    state.apply(make_snap(0, seq=1, hello=hello, notes=[make_note(1, HOSTILE)], loaders=[loader]), now_ns=1)
    state.apply(make_beat(0, seq=2, pause=HOSTILE, groups=[group]), now_ns=1)
    state.apply(make_note(3, HOSTILE, kind=HOSTILE), now_ns=1)
    state.apply(loader, now_ns=1)
    state.apply(wire.Checksum(rank=0, seq=5, step=0, parameter=HOSTILE, offset=0, crc=1), now_ns=1)
    state.apply(wire.Bye(rank=0, seq=6, reason=HOSTILE, text=HOSTILE, mono_ns=1), now_ns=1)
    rank = state.ranks[0]
    everything = [rank.hello, rank.beat, rank.bye, *rank.notes.values(), *rank.loaders.values()]
    everything += [*rank.checksums.values(), rank.host, state.name]
    text = msgspec.json.encode(everything).decode()

    assert "redname" not in text
    assert text.count("red name") >= 12
    assert "\\u001b" not in text
    assert "\u202e" not in text
    assert "\\n" not in text


TEXT_FIELDS = [
    (message, field.name)
    for message in (make_hello(0), make_beat(0, seq=2))
    for field in msgspec.structs.fields(message)
    if isinstance(getattr(message, field.name), str)
]


@pytest.mark.parametrize(("message", "name"), TEXT_FIELDS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_text_field_of_a_description_and_a_heartbeat_is_sanitized(message, name):
    state = RunState("ab12cd34", "train", 1)
    state.apply(msgspec.structs.replace(message, **{name: HOSTILE}), now_ns=1)
    kept = getattr(state.ranks[0].hello or state.ranks[0].beat, name)

    assert kept.isprintable()
    assert "red name" in kept


def test_bad_frames_are_counted_against_the_rank_they_name():
    state = make_state()
    state.apply(make_hello(1), now_ns=1)
    state.ingest(msgspec.msgpack.encode({"t": "beat", "rank": 1, "seq": -5}), now_ns=2)
    state.ingest(b"\xc1nonsense", now_ns=3)

    assert state.ranks[1].bad == 1
    assert state.bad_unassigned == 1
    assert state.bad == 2
    assert state.now_ns == 3


def test_a_newer_wire_version_is_refused_with_its_reason():
    state = make_state()
    state.ingest(wire.encode(make_hello(0, wire_version=wire.WIRE_VERSION + 1)), now_ns=1)

    assert state.ranks[0].hello is None
    assert "upgrade the viewer" in state.bad_reason


def test_unknown_kinds_are_counted_apart():
    state = make_state()
    state.ingest(msgspec.msgpack.encode({"t": "from-the-future", "rank": 0, "seq": 1}), now_ns=1)

    assert (state.unknown, state.bad) == (1, 0)


def fuzz_frames(count):
    """Random bytes, and real frames with bytes flipped, cut, doubled or glued."""
    chance = random.Random(20)
    seeds = [
        wire.encode(message)
        for message in (
            make_hello(1, ddp={"static_graph": "False"}),
            make_beat(1, groups=[wire.Group(name="0", size=2, enqueued=4)]),
            make_steps(3, 1, 2, 3),
            make_note(4),
            make_bye(),
            make_snap(1, seq=8, steps=[make_step(index) for index in range(3)], notes=[make_note(2)]),
            wire.Buckets(rank=0, seq=1, step=1, buckets=[wire.Bucket(index=0, bytes=1, ready_ns=MS, done_ns=MS)]),
            make_beat(1, seq=9, groups=[make_group(42, 9, timeout_ns=60, members="0-3", error="TIMEOUT")]),
            make_stack(0, ("f", "f.py", 1), collectives=[wire.Collective("0", 1, "barrier", "", True)]),
        )
    ]
    for _ in range(count):
        frame = bytearray(chance.choice(seeds))
        match chance.randrange(5):
            case 0:
                frame = bytearray(chance.randbytes(chance.randrange(64)))
            case 1:
                del frame[chance.randrange(len(frame)) :]
            case 2:
                frame += chance.choice(seeds)
            case _:
                for _ in range(chance.randrange(1, 6)):
                    frame[chance.randrange(len(frame))] = chance.randrange(256)
        yield bytes(frame)


def test_a_hundred_thousand_broken_frames_raise_nothing_and_are_all_accounted_for():
    state = make_state()
    refused = 0
    for frame in fuzz_frames(100_000):
        try:
            message = wire.decode(frame)
        except WireError:
            refused += 1
        else:
            refused += message.rank >= state.world_size
        state.ingest(frame, now_ns=1)
    impossible_steps = state.bad + state.unknown - refused

    assert 50_000 < refused < 100_000
    assert 0 <= impossible_steps < 100_000
    assert state.bad > 0
    assert state.unknown > 0


@pytest.mark.parametrize("topic", [wire.Hello, wire.Steps, wire.Beat, wire.Note, wire.Loader, wire.Checksum, wire.Bye])
def test_every_kind_of_live_message_is_counted_in_the_stream(topic):
    """A kind that was not counted would show up as a loss."""
    messages = {
        wire.Hello: make_hello(0, seq=2),
        wire.Steps: make_steps(2, 1),
        wire.Beat: make_beat(0, seq=2),
        wire.Note: make_note(2),
        wire.Loader: wire.Loader(rank=0, seq=2, step=0, epoch=0, sampler="s", distributed=True),
        wire.Checksum: wire.Checksum(rank=0, seq=2, step=0, parameter="w", offset=0, crc=1),
        wire.Bye: make_bye(2),
    }
    state = make_state()
    state.apply(make_beat(0, seq=1), now_ns=1)
    state.apply(messages[topic], now_ns=1)
    state.apply(make_beat(0, seq=3), now_ns=1)

    assert state.ranks[0].lost == 0


def make_buckets(step, rank=0, count=3, seq=7):
    return wire.Buckets(
        rank=rank,
        seq=seq,
        step=step,
        buckets=[
            wire.Bucket(index=index, bytes=1 << 20, ready_ns=index * MS, done_ns=(index + 2) * MS)
            for index in range(count)
        ],
    )


def test_the_latest_buckets_of_each_rank_are_kept():
    state = RunState("x", "train", 2)
    assert state.ranks[0].buckets is None

    for message in (make_buckets(3), make_buckets(4, count=5), make_buckets(9, rank=1)):
        state.ingest(wire.encode(message), 1)

    assert state.ranks[0].buckets == make_buckets(4, count=5)
    assert state.ranks[1].buckets.step == 9


def test_those_of_an_older_step_change_nothing_and_a_second_pass_of_a_step_counts():
    state = RunState("x", "train", 1)
    for message in (make_buckets(4), make_buckets(3), make_buckets(4, count=2)):
        state.apply(message, 1)

    assert state.ranks[0].buckets == make_buckets(4, count=2)


def test_they_stand_outside_the_numbered_stream_and_are_no_sign_of_a_loss():
    state = RunState("x", "train", 1)
    state.apply(make_snap(0, seq=5, steps=[make_step(0)]), 1)
    state.apply(make_buckets(1, seq=50), 1)

    assert state.ranks[0].lost == 0
    assert state.bad == 0


@pytest.mark.parametrize("field", ["bytes", "ready_ns", "index"])
def test_numbers_that_cannot_be_are_refused_and_counted(field):
    state = RunState("x", "train", 1)
    raw = {"index": 0, "bytes": 1, "ready_ns": 1, "done_ns": 1, field: -1}
    payload = wire.encode({"t": "buckets", "rank": 0, "seq": 1, "step": 1, "buckets": [list(raw.values())]})
    state.ingest(payload, 1)

    assert state.ranks[0].buckets is None
    assert state.ranks[0].bad == 1
