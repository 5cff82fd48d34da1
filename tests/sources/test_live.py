"""Frames from real ZeroMQ sockets, joined with history, buckets and stacks that ranks send on request."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from ddpwatch import rundir, wire
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.sources import live
from ddpwatch.sources.frames import Frame, Tick
from ddpwatch.sources.live import ASKED_AT_ONCE, GATHERED_PART, UNHURRIED_MS, VIEWER_STALL_NS, Live
from tests.builders.fake_rank import MS, FakeRun, make_beat, make_run_file, make_stack, make_step
from tests.sources.following import GIVE_UP_S, follow, make_state
from tests.sources.victims import belonging_to, victim_process


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


BUCKETS = wire.Buckets(rank=1, seq=7, step=3, buckets=[wire.Bucket(index=0, bytes=1, ready_ns=MS, done_ns=2 * MS)])


class Listening:
    """Subscriptions at a fake rank."""

    def __init__(self, rank):
        self.wanted = threading.Event()
        self.unwanted = threading.Event()
        plain = rank._subscription

        def subscription(socket, message):
            if message[1:] == b"bucket":
                (self.wanted if message[:1] == b"\x01" else self.unwanted).set()
            plain(socket, message)

        rank._subscription = subscription


def test_buckets_are_subscribed_only_while_wanted(run_dir):
    with FakeRun(run_dir, 2) as run:
        listening = [Listening(rank) for rank in run.ranks]
        source, state = Live(run.file), make_state(run.file)
        try:
            follow(source, state, lambda: all(rank.snapped for rank in state.ranks.values()))
            assert not any(received.wanted.is_set() for received in listening)

            source.want_buckets(True)
            source.want_buckets(True)
            assert all(received.wanted.wait(30) for received in listening)
            run.ranks[1].send_raw(b"bucket", wire.encode(BUCKETS))
            follow(source, state, lambda: state.ranks[1].buckets is not None)

            # One subscription, however often it was requested.
            source.want_buckets(False)
            assert all(received.unwanted.wait(30) for received in listening)
        finally:
            source.close()

    assert state.ranks[1].buckets == BUCKETS
    assert state.ranks[0].buckets is None


SLEEPS = ("nap", "/srv/job/train.py", 88)
WAITS = wire.Collective("0", 66, "all_reduce", "[9] Float", False, 36)


class Asked:
    """Subscriptions under `stack/` at a fake rank: all topics in order, and the current ones."""

    def __init__(self, rank):
        self.topics, self.left = [], set()
        plain = rank._subscription

        def subscription(socket, message):
            topic = message[1:]
            if topic.startswith((wire.STACK_PREFIX, wire.STACKS_PREFIX)):
                if message[:1] == b"\x01":
                    self.topics.append(topic)
                    self.left.add(topic)
                else:
                    self.left.discard(topic)
            plain(socket, message)

        rank._subscription = subscription


@pytest.fixture
def two_ranks(run_dir):
    """A run of two ranks, their subscriptions, and a source that has received both."""
    with FakeRun(run_dir, 2) as run:
        asked = [Asked(rank) for rank in run.ranks]
        state = make_state(run.file)
        with closing(Live(run.file)) as source:
            follow(source, state, lambda: all(rank.snapped for rank in state.ranks.values()))
            yield run, asked, source, state


def test_stacks_come_only_from_the_wanted_ranks(two_ranks):
    run, asked, source, state = two_ranks
    assert [each.topics for each in asked] == [[], []]

    source.want_stacks(frozenset({1}))
    source.want_stacks(frozenset({1}))
    follow(source, state, lambda: asked[1].topics)
    (topic,) = asked[1].topics
    assert topic.startswith(wire.STACK_PREFIX)
    assert len(topic) <= wire.MAX_TOPIC_BYTES
    run.ranks[1].send_raw(topic, wire.encode(make_stack(1, SLEEPS)))
    follow(source, state, lambda: state.ranks[1].stack is not None)
    assert state.ranks[1].stack == make_stack(1, SLEEPS)

    source.want_stacks(frozenset({0}))
    follow(source, state, lambda: asked[0].topics and not asked[1].left)
    assert asked[1].topics == [topic], "asked once, however often it was wanted"
    assert len(asked[0].topics) == 1
    assert asked[0].topics != [topic], "rank 0 was asked for itself only"
    assert (state.bad, state.ranks[0].stack) == (0, None)


def test_subscriptions_end_when_no_rank_is_wanted(two_ranks):
    run, asked, source, state = two_ranks
    source.want_stacks(frozenset({0, 1}))
    follow(source, state, lambda: all(each.left for each in asked))
    source.want_stacks(frozenset())
    follow(source, state, lambda: not any(each.left for each in asked))
    run.train(0, 1)
    follow(source, state, lambda: all(rank.steps.newest == 0 for rank in state.ranks.values()))

    assert [rank.lost for rank in state.ranks.values()] == [0, 0], "the other topics are followed as before"


def test_an_unknown_rank_is_ignored(two_ranks):
    _, asked, source, state = two_ranks
    source.want_stacks(frozenset({1, 7}))
    follow(source, state, lambda: asked[1].topics)

    assert asked[0].topics == []


def test_a_malformed_stack_is_counted_and_the_next_is_read(two_ranks):
    run, asked, source, state = two_ranks
    source.want_stacks(frozenset({1}))
    follow(source, state, lambda: asked[1].topics)
    (topic,) = asked[1].topics
    run.ranks[1].send_raw(topic)
    run.ranks[1].send_raw(topic, wire.encode(make_stack(1, SLEEPS)), b"more")
    run.ranks[1].send_raw(topic, wire.encode(make_stack(1, SLEEPS)))
    follow(source, state, lambda: state.ranks[1].stack is not None)

    assert state.bad == 2


def test_a_rank_wanted_before_it_registers_is_subscribed_later(run_dir, monkeypatch):
    monkeypatch.setattr(live, "CHECK_NS", 20_000_000)
    with FakeRun(run_dir, 2) as run:
        asked = Asked(run.ranks[1])
        early = msgspec.structs.replace(run.file, endpoints=run.file.endpoints[:1])
        rundir.write(run_dir, early)
        state = make_state(early)
        with closing(Live(early)) as source:
            source.want_stacks(frozenset({1}))
            rundir.write(run_dir, run.file)
            follow(source, state, lambda: asked.topics)


def test_a_displayed_rank_is_subscribed_until_it_is_hidden(run_dir):
    with FakeRun(run_dir, 2) as run, closing(RunFollower(run.file)) as follower:
        asked = [Asked(rank) for rank in run.ranks]
        deadline_s = time.monotonic() + GIVE_UP_S

        def advance(until):
            while not until():
                assert time.monotonic() < deadline_s, "it never happened"
                follower.advance(20)

        follower.request_stacks(frozenset({0}))
        advance(lambda: asked[0].left)
        follower.request_stacks(frozenset())
        advance(lambda: not asked[0].left)

        assert asked[1].topics == []


@contextmanager
def many_ranks(run_dir, world):
    """A run of many ranks that never answer, all on one socket."""
    rundir.ensure_base(run_dir)
    file = make_run_file(run_dir, world)
    (run_dir / file.id).mkdir(mode=0o700)
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # reports the same subscription of every connection
        for endpoint in file.endpoints:
            socket.bind(endpoint.address)
        yield file, socket


def test_ranks_beyond_the_first_batch_are_subscribed_later(run_dir):
    world = ASKED_AT_ONCE + 9
    with many_ranks(run_dir, world) as (file, socket), closing(Live(file)) as source:
        assert len(source._connected) == ASKED_AT_ONCE
        state, histories = make_state(file), []

        def all_asked():
            while socket.poll(0):
                message = socket.recv()
                if message.startswith(b"\x01" + wire.SNAP_PREFIX):
                    histories.append(message)
            return len(histories) >= world

        follow(source, state, all_asked)

    assert len(histories) == world
    assert source.refused == {}


@pytest.mark.parametrize(("number", "asks"), [(signal.SIGABRT, True), (signal.SIGKILL, False)])
def test_an_abort_requests_all_stacks_for_a_moment(run_dir, monkeypatch, number, asks):
    """The launcher ends the others before their goodbyes. A kill needs no stacks."""
    monkeypatch.setattr(live, "CHECK_NS", 100_000_000)
    monkeypatch.setattr(live, "GRACE_NS", 100_000_000)
    with victim_process() as victim, FakeRun(run_dir, 2) as run:
        asked = [Asked(rank) for rank in run.ranks]
        file = belonging_to(run.file, victim, 1)
        state = make_state(file)
        with closing(Live(file)) as source:
            follow(source, state, lambda: all(rank.snapped for rank in state.ranks.values()))
            victim.send_signal(number)
            if asks:
                follow(source, state, lambda: asked[0].topics)
                (topic,) = asked[0].topics
                run.ranks[0].send_raw(topic, wire.encode(make_stack(0, SLEEPS, collectives=[WAITS])))
                follow(source, state, lambda: state.ranks[0].stack is not None)
                follow(source, state, lambda: not asked[0].left)
            follow(source, state, lambda: state.ranks[1].gone_ns is not None)

    assert len(asked[0].topics) == asks
    assert (state.bad, state.ranks[1].exit_code) == (0, -number)
    assert (state.ranks[0].collectives_ns is not None) == asks
