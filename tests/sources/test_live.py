"""Frames from real ZeroMQ sockets, joined with the history that the ranks send on request."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest

from ddpwatch import rundir, wire
from ddpwatch.sources import live
from ddpwatch.sources.frames import Frame, Tick
from ddpwatch.sources.live import GATHERED_PART, UNHURRIED_MS, VIEWER_STALL_NS, Live
from tests.builders.fake_rank import FakeRun, make_beat, make_run_file, make_step
from tests.sources.following import GIVE_UP_S, follow, make_state


@pytest.fixture
def attach():
    """Attach to a run file; every source is closed at the end."""
    sources = []

    def attach_to(run_file):
        sources.append(Live(run_file))
        return sources[-1]

    yield attach_to
    for source in sources:
        source.close()


def test_a_late_viewer_gets_history_and_then_the_stream(run_dir, attach):
    with FakeRun(run_dir, 2) as run:
        run.train(0, 40)
        source, state = attach(run.file), make_state(run.file)
        follow(source, state, lambda: all(rank.snapped for rank in state.ranks.values()))
        assert list(range(40)) == state.ranks[1].steps.indices().tolist()

        run.train(40, 10)
        follow(source, state, lambda: all(rank.steps.newest == 49 for rank in state.ranks.values()))

    assert list(range(50)) == state.ranks[0].steps.indices().tolist()
    assert [rank.lost for rank in state.ranks.values()] == [0, 0]
    assert state.bad == 0


def test_messages_that_never_arrive_are_counted_on_their_rank(run_dir, attach):
    with FakeRun(run_dir, 2) as run:
        source, state = attach(run.file), make_state(run.file)
        follow(source, state, lambda: all(rank.snapped for rank in state.ranks.values()))

        run.ranks[1].lose(7)
        run.train(0, 1)
        follow(source, state, lambda: state.ranks[1].steps.newest == 0)

    assert [rank.lost for rank in state.ranks.values()] == [0, 7]


def test_a_second_viewer_gets_its_own_history(run_dir, attach):
    with FakeRun(run_dir, 1) as run:
        run.train(0, 5)
        for _ in range(2):
            source, state = attach(run.file), make_state(run.file)
            follow(source, state, lambda state=state: state.ranks[0].snapped)
            assert state.ranks[0].steps.indices().tolist() == [0, 1, 2, 3, 4]


READABLE = wire.encode(make_beat(0, seq=0))


@pytest.mark.parametrize(
    "parts",
    [(b"step", b"garbage"), (b"step",), (b"beat", READABLE, b"more"), (b"beat" + b"x" * 100, READABLE)],
    ids=["unreadable", "one part", "three parts", "long topic"],
)
def test_a_malformed_frame_is_counted_and_the_stream_goes_on(run_dir, attach, parts):
    with FakeRun(run_dir, 1) as run:
        source, state = attach(run.file), make_state(run.file)
        follow(source, state, lambda: state.ranks[0].snapped)

        run.ranks[0].send_raw(*parts)
        run.train(0, 1)
        follow(source, state, lambda: state.ranks[0].steps.newest == 0)

    assert (state.bad, state.ranks[0].lost) == (1, 0)


def test_a_message_without_its_second_part_does_not_swallow_the_next(run_dir, attach):
    with FakeRun(run_dir, 1) as run:
        source, state = attach(run.file), make_state(run.file)
        follow(source, state, lambda: state.ranks[0].snapped)

        for step in range(3):
            run.ranks[0].send_raw(b"beat")
            run.train(step, 1)
        follow(source, state, lambda: state.ranks[0].steps.newest == 2)

    assert (state.bad, state.ranks[0].lost) == (3, 0)


def test_an_oversized_frame_is_not_read(run_dir, attach):
    """ZeroMQ closes the connection for good: the rank is silent, and the others continue."""
    with FakeRun(run_dir, 2) as run:
        source, state = attach(run.file), make_state(run.file)
        follow(source, state, lambda: all(rank.snapped for rank in state.ranks.values()))

        run.ranks[0].send_raw(b"step", b"x" * (wire.MAX_FRAME_BYTES + 1))
        follow(source, state, lambda: state.condition(state.ranks[0]) == "silent")
        run.train(0, 1)
        follow(source, state, lambda: state.ranks[1].steps.newest == 0)

    assert state.bad == 0
    assert state.ranks[0].steps.newest == -1


def test_silence_yields_ticks_with_rising_time(run_dir, attach):
    (run_dir / "ab12cd34ab12cd34").mkdir()
    source = attach(make_run_file(run_dir, 1))
    word, first, second = source.poll(1), source.poll(1), source.poll(1)

    assert isinstance(wire.decode(word.payload), wire.Held), "on the process, which can be seen from here"
    assert isinstance(first, Tick)
    assert second.now_ns > first.now_ns


def test_a_stall_of_the_viewer_is_reported_before_the_frames(run_dir, attach):
    with FakeRun(run_dir, 1) as run:
        source = attach(run.file)
        while not isinstance(source.poll(), Frame):
            pass
        time.sleep(VIEWER_STALL_NS / 1e9 + 0.3)
        tick, frame = source.poll(), source.poll()

    assert isinstance(tick, Tick)
    assert tick.viewer_stall_ns > VIEWER_STALL_NS
    assert isinstance(frame, Frame)
    assert frame.received_ns <= tick.now_ns


def test_a_stall_between_frames_is_reported_too(run_dir, attach, monkeypatch):
    with FakeRun(run_dir, 1) as run:
        source = attach(run.file)
        while not isinstance(source.poll(), Frame):
            pass
        run.ranks[0].finish(make_step(0))
        run.ranks[0].finish(make_step(1))
        time.sleep(0.3)
        before = source.poll()
        monkeypatch.setattr(source, "_looked_ns", before.received_ns - 2 * VIEWER_STALL_NS)
        assert source.poll_ready(8) == []
        tick, frame = source.poll(), source.poll()

    assert tick.viewer_stall_ns > VIEWER_STALL_NS
    assert isinstance(frame, Frame)


def test_frames_after_a_stall_follow_its_tick(run_dir, attach, monkeypatch):
    source = attach(make_run_file(run_dir, 1))
    came_ns = source._looked_ns + 1
    before = [Frame(b"beat", b"%d" % place, came_ns) for place in range(2)]
    after = [Frame(b"beat", b"%d" % place, came_ns + 2 * VIEWER_STALL_NS) for place in range(2, 5)]
    to_read = [before, [*after]]
    monkeypatch.setattr(source, "_read", lambda _most: to_read.pop(0))

    assert source.poll_ready(8) == before
    assert source.poll_ready(8) == []
    tick, first = source.poll(), source.poll()
    assert isinstance(tick, Tick)
    assert tick.viewer_stall_ns > VIEWER_STALL_NS
    assert [first, *source.poll_ready(8)] == after


def test_frames_of_many_ranks_are_gathered_and_read_together(run_dir, attach, monkeypatch):
    monkeypatch.setattr(live, "GATHERED_RANKS", 0)
    with FakeRun(run_dir, 1, rank0={"beats": False, "answers": False}) as run:
        source = attach(run.file)
        assert run.ranks[0].followed.wait(GIVE_UP_S)
        while isinstance(source.poll(1), Frame):
            pass
        waited_ms = []

        def gather(timeout_ms):
            waited_ms.append(timeout_ms)
            for index in range(3):
                run.ranks[0].finish(make_step(index))
            assert source._poller.poll(GIVE_UP_S * 1000), "nothing came"

        monkeypatch.setattr(source, "_ends", SimpleNamespace(sockets=[0], poll=gather))
        came = [source.poll(UNHURRIED_MS)]
        deadline_s = time.monotonic() + GIVE_UP_S
        while len(came) < 3 and time.monotonic() < deadline_s:
            came += source.poll_ready(8)

    assert waited_ms == [int(UNHURRIED_MS * GATHERED_PART)]
    assert [wire.decode(frame.payload).steps[0].index for frame in came] == [0, 1, 2]


def test_frames_are_yielded_as_they_were_sent(run_dir, attach):
    with FakeRun(run_dir, 1, rank0={"beats": False, "answers": False}) as run:
        source = attach(run.file)
        assert run.ranks[0].followed.wait(GIVE_UP_S)
        run.train(0, 1)
        # Synthetic frames about the process may be among them.
        items = iter(source.poll, None)
        frame = next(item for item in items if isinstance(item, Frame) and item.topic == b"step")

    assert wire.Steps(rank=0, seq=1, steps=[make_step(0)]) == wire.decode(frame.payload)


def test_addresses_that_cannot_be_used_are_named_and_do_not_stop_the_others(run_dir, attach):
    with FakeRun(run_dir, 3) as run:
        good, plain_tcp, too_long = run.file.endpoints
        endpoints = [
            good,
            msgspec.structs.replace(plain_tcp, address="tcp://127.0.0.1:1"),
            msgspec.structs.replace(too_long, address="ipc:///" + "x" * 150),
        ]
        source = attach(msgspec.structs.replace(run.file, endpoints=endpoints))
        state = make_state(run.file)
        follow(source, state, lambda: state.ranks[0].snapped)

    assert {1, 2} == set(source.refused)
    assert "TCP" in source.refused[1]
    assert [state.condition(rank) for rank in state.ranks.values()] == ["ok", "missing", "missing"]


def test_a_viewer_cannot_send():
    """The only socket is a SUB: ZeroMQ itself refuses to send on it."""
    import zmq

    endpoint_free = rundir.RunFile(
        schema=1, id="ab12cd34", name="x", job="", attempt=0, world_size=1, started_unix_s=0, endpoints=[]
    )
    source = Live(endpoint_free)
    try:
        with pytest.raises(zmq.ZMQError):
            source._socket.send(wire.encode(make_beat()))
    finally:
        source.close()


def test_a_late_rank_is_received_with_its_history(run_dir, attach, monkeypatch):
    monkeypatch.setattr(live, "CHECK_NS", 20_000_000)
    with FakeRun(run_dir, 2) as run:
        run.train(0, 40)
        early = msgspec.structs.replace(run.file, endpoints=run.file.endpoints[:1])
        rundir.write(run_dir, early)
        source, state = attach(early), make_state(early)
        follow(source, state, lambda: state.ranks[0].snapped)
        assert state.condition(state.ranks[1]) == "missing"

        rundir.write(run_dir, run.file)
        follow(source, state, lambda: state.ranks[1].snapped)

    assert source.known == source.here == {0, 1}
    assert list(range(40)) == state.ranks[1].steps.indices().tolist()
