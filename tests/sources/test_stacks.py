"""Stacks are requested only from ranks that others wait for."""

from __future__ import annotations

import signal
import time
from contextlib import closing, contextmanager

import msgspec
import pytest
import zmq

from ddpwatch import rundir, wire
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.sources import live
from ddpwatch.sources.live import ASKED_AT_ONCE, Live
from tests.builders.fake_rank import FakeRun, make_run_file, make_stack
from tests.sources.following import GIVE_UP_S, follow, make_state
from tests.sources.victims import belonging_to, victim_process

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
