"""A relay: one port through which viewers with its ticket, and no others, receive a run."""

from __future__ import annotations

import os
import secrets
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import closing

import msgspec
import pytest
import zmq

from ddpwatch import encryption, rundir, wire
from ddpwatch.core.diagnosis.exits import endings
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.core.state.run import RunState
from ddpwatch.errors import AccessRefused, NoSuchRun, UsageError
from ddpwatch.outputs.relay import Relay
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.sources import live, relay_topics
from ddpwatch.sources.connections import PROBE_S, probe
from ddpwatch.sources.frames import Frame
from ddpwatch.sources.live import Live
from tests.builders.fake_rank import MS, FakeRank, FakeRun, make_beat, make_hello, make_run_file, make_stack, make_step
from tests.builders.relay_thread import RelayThread, relayed
from tests.sources.following import follow, make_state

GIVE_UP_S = 30


class Subscribed:
    """Current subscriptions at a fake rank, and every history that was requested."""

    def __init__(self, rank):
        self.now, self.snaps = set(), []
        plain = rank._subscription

        def subscription(socket, message):
            topic = message[1:]
            if message[:1] == b"\x01":
                self.now.add(topic)
                if topic.startswith(wire.SNAP_PREFIX):
                    self.snaps.append(topic)
            else:
                self.now.discard(topic)
            plain(socket, message)

        rank._subscription = subscription

    def stacks(self):
        return {topic for topic in self.now if topic.startswith(wire.STACK_PREFIX)}


@pytest.fixture
def run(run_dir):
    """Two ranks that have trained forty steps."""
    with FakeRun(run_dir, 2) as run:
        run.train(0, 40)
        yield run


@pytest.fixture
def relay(run):
    with relayed(run.file) as relay:
        yield relay


def wait_until(condition):
    deadline_s = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.005)


def all_snapped(state):
    return lambda: all(rank.snapped for rank in state.ranks.values())


def advance(follower, until):
    deadline_s = time.monotonic() + GIVE_UP_S
    while not until():
        assert time.monotonic() < deadline_s, "it never happened"
        follower.advance(20)


# the same run


def test_a_late_viewer_gets_history_and_stream_without_a_gap(run, relay):
    state = make_state(relay.ticket)
    with closing(Live(relay.ticket)) as source:
        follow(source, state, all_snapped(state))
        assert list(range(40)) == state.ranks[1].steps.indices().tolist()
        run.train(40, 10)
        follow(source, state, lambda: all(rank.steps.newest == 49 for rank in state.ranks.values()))

    assert list(range(50)) == state.ranks[0].steps.indices().tolist()
    assert [rank.lost for rank in state.ranks.values()] == [0, 0]
    assert (state.bad, state.unknown, source.refused) == (0, 0, {})


@pytest.mark.parametrize("columns", [len(wire.STEP_COLUMNS) - 1, len(wire.STEP_COLUMNS) + 1])
def test_steps_of_a_rank_with_another_version_of_the_agent_pass_a_relay(run, relay, columns):
    state = make_state(relay.ticket)
    with closing(Live(relay.ticket)) as source:
        follow(source, state, all_snapped(state))
        row = next(wire.unpack_steps(wire.pack_steps([make_step(40)])))
        table = struct.pack(f"<{columns}q", *[*row, 99][:columns])
        beat = make_beat(0, run.ranks[0].seq + 1, table=table, table_columns=columns)
        run.ranks[0].send_raw(b"beat", wire.encode(beat))
        follow(source, state, lambda: state.ranks[0].steps.newest == 40)

    assert state.ranks[0].steps.latest(1).tolist() == [list(row)]
    assert state.bad == 0


def test_the_viewer_connects_only_to_the_relay(run, relay):
    """Even on the ranks' own host, so that it works through a tunnel too."""
    state = make_state(relay.ticket)
    with closing(Live(relay.ticket)) as source:
        follow(source, state, all_snapped(state))
        assert list(source._ranks_at) == [relay.ticket.relay.tcp_address]


def test_a_viewer_leaves_and_the_other_still_receives(run, relay):
    first, second = make_state(relay.ticket), make_state(relay.ticket)
    with closing(Live(relay.ticket)) as stays:
        with closing(Live(relay.ticket)) as leaves:
            leaves.want_buckets(True)
            stays.want_buckets(True)
            follow(leaves, first, all_snapped(first))
            follow(stays, second, all_snapped(second))
        run.train(40, 10)
        follow(stays, second, lambda: all(rank.steps.newest == 49 for rank in second.ranks.values()))
        buckets = wire.Buckets(rank=1, seq=7, step=3, buckets=[wire.Bucket(0, 1, MS, 2 * MS)])

        def reported():
            run.ranks[1].send_raw(b"bucket", wire.encode(buckets))
            return second.ranks[1].buckets is not None

        follow(stays, second, reported)
    assert [rank.lost for rank in second.ranks.values()] == [0, 0]


def test_each_viewer_gets_its_own_history_and_leaves_no_subscription(run, relay):
    asked = [Subscribed(rank) for rank in run.ranks]
    for _ in range(2):
        state = make_state(relay.ticket)
        with closing(Live(relay.ticket)) as source:
            source.want_buckets(True)
            follow(source, state, all_snapped(state))
            follow(source, state, lambda: all(b"bucket" in each.now for each in asked))
    assert [len(set(each.snaps)) for each in asked] == [2, 2]
    wait_until(lambda: not any(each.now - set(wire.LIVE_TOPICS) for each in asked))


def test_only_the_selected_rank_is_subscribed_for_its_stack(run, relay):
    asked = [Subscribed(rank) for rank in run.ranks]
    state = make_state(relay.ticket)
    with closing(Live(relay.ticket)) as source:
        follow(source, state, all_snapped(state))
        source.want_stacks(frozenset({1}))
        follow(source, state, asked[1].stacks)
        (topic,) = asked[1].stacks()
        run.ranks[1].send_raw(topic, wire.encode(make_stack(1, ("nap", "/srv/train.py", 88))))
        follow(source, state, lambda: state.ranks[1].stack is not None)
        assert not asked[0].stacks()
        source.want_stacks(frozenset())
        follow(source, state, lambda: not asked[1].stacks())


def test_histories_are_requested_block_by_block(run_dir, monkeypatch):
    monkeypatch.setattr(relay_topics, "BLOCK_RANKS", 2)
    with FakeRun(run_dir, 5) as run:
        asked = [Subscribed(rank) for rank in run.ranks]
        with relayed(run.file) as relay, closing(Live(relay.ticket)) as source:
            state = make_state(relay.ticket)
            follow(source, state, all_snapped(state))
    blocks = [{topic.rpartition(b"/")[2] for topic in each.snaps} for each in asked]
    assert all(len(each.snaps) == 1 for each in asked)
    assert blocks[0] == blocks[1] != blocks[4]


def test_a_busy_viewer_requests_the_next_histories_too(run_dir, monkeypatch):
    monkeypatch.setattr(relay_topics, "BLOCK_RANKS", 2)
    monkeypatch.setattr(live, "ASKED_AT_ONCE", 2)
    with FakeRun(run_dir, 5) as run, relayed(run.file) as relay, closing(Live(relay.ticket)) as source:
        state = make_state(relay.ticket)
        receive, again = source._receive, Frame(b"beat", wire.encode(make_beat()), 1)
        source._receive = lambda: receive() or again._replace(received_ns=time.monotonic_ns())
        follow(source, state, all_snapped(state))


def test_malformed_frames_stop_at_the_relay_and_later_ones_pass(run, relay):
    state = make_state(relay.ticket)
    with closing(Live(relay.ticket)) as source:
        follow(source, state, all_snapped(state))
        run.ranks[0].send_raw(b"event")
        run.train(40, 1)
        run.ranks[0].send_raw(b"event", b"\x80", b"beat")
        run.train(41, 1)
        run.ranks[0].send_raw(b"hello, you", b"\x80")
        run.ranks[0].send_raw(b"beat", b"\xffgarbage")
        run.ranks[0].send_raw(b"beat", wire.encode(make_beat(999)))
        run.train(42, 1)
        follow(source, state, lambda: all(rank.steps.newest == 42 for rank in state.ranks.values()))
    assert (state.ranks[0].steps.indices() == range(43)).all()


def test_other_topics_are_not_subscriptions():
    for topic in (b"", b"snap/", b"snap/ab", b"stack/ab/", b"stack/ab/12345678", b"snap/xy/1", b"stack/" + b"a" * 80):
        assert relay_topics.read(topic) is None
    assert relay_topics.read(relay_topics.of_rank(b"stacks/ab", 17)) == ("stack", 17)
    assert relay_topics.read(relay_topics.of_block(b"snap/ab", 130)) == ("snap", 2)


def test_a_reconnecting_viewer_gets_its_history_again(run, relay):
    """As a reconnecting socket: the same subscription, while the relay may still have the old one."""
    topic = wire.SNAP_PREFIX + secrets.token_hex(8).encode() + b"/0"
    point = relay.ticket.relay

    def fetched(context):
        socket = context.socket(zmq.SUB)
        kept.append(socket)
        socket.subscribe(topic)
        encryption.connect(socket, point.tcp_address, point.server_key, relay.ticket.viewer_secret_key)
        for _ in run.ranks:
            assert socket.poll(GIVE_UP_S * 1000)
            assert socket.recv_multipart()[0] == topic

    kept = []
    context = zmq.Context()
    try:
        fetched(context)
        fetched(context)
    finally:
        context.destroy(linger=0)


def test_a_late_rank_is_relayed_and_added_to_the_ticket(run_dir):
    with FakeRun(run_dir, 2) as run:
        whole = run.file
        rundir.write(run_dir, msgspec.structs.replace(whole, endpoints=whole.endpoints[:1]))
        with relayed(msgspec.structs.replace(whole, endpoints=whole.endpoints[:1])) as relay:
            assert [each.rank for each in relay.ticket.endpoints] == [0]
            rundir.write(run_dir, whole)
            wait_until(lambda: len(relay.tickets) > 1)
            state = make_state(relay.ticket)
            with closing(Live(relay.ticket)) as source:
                follow(source, state, all_snapped(state))


# access


def test_the_ticket_holds_keys_of_the_relay_and_none_of_the_run(run_dir):
    public_key, secret_key = encryption.new_keys()
    file = make_run_file(run_dir, 1, viewer_secret_key=secret_key)
    endpoints = [msgspec.structs.replace(file.endpoints[0], tcp_address="tcp://10.0.0.1:7", server_key=public_key)]
    with relayed(msgspec.structs.replace(file, endpoints=endpoints)) as relay:
        written = msgspec.json.encode(relay.ticket).decode()
    assert secret_key not in written
    assert public_key not in written
    assert "10.0.0.1" not in written


def test_a_stranger_is_refused_counted_and_gets_no_data(run, relay):
    ticket = relay.ticket
    began_s = time.monotonic()
    with pytest.raises(
        AccessRefused, match="does not accept the key; get a new ticket from the host of `ddpwatch relay`"
    ):
        probe(msgspec.structs.replace(ticket, viewer_secret_key=encryption.new_keys()[1]))
    with pytest.raises(AccessRefused, match="its key is not in the ticket"):
        probe(msgspec.structs.replace(ticket, viewer_secret_key=""))
    other = msgspec.structs.replace(ticket.relay, server_key=encryption.new_keys()[0])
    with pytest.raises(AccessRefused, match="another key"):
        probe(msgspec.structs.replace(ticket, relay=other))
    assert time.monotonic() - began_s < 2 * PROBE_S, "none of it waited until its time was up"
    wait_until(lambda: relay.refused == 1)
    probe(ticket)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.subscribe(b"")
        socket.connect(ticket.relay.tcp_address)
        passed = relay.passed
        wait_until(lambda: relay.passed > passed + 20)
        assert not socket.poll(0)


def test_the_ticket_of_another_relay_is_refused(run, relay):
    with relayed(run.file) as other:
        with pytest.raises(AccessRefused):
            probe(msgspec.structs.replace(relay.ticket, viewer_secret_key=other.ticket.viewer_secret_key))
        probe(other.ticket)


def test_a_closed_relay_is_reported(run):
    with relayed(run.file) as relay:
        ticket = relay.ticket
    with pytest.raises(NoSuchRun, match=r"the relay of run .* does not answer at tcp://127.0.0.1:"):
        probe(ticket, timeout_s=0.3)


def test_the_ticket_has_the_address_of_the_tunnel(run):
    with relayed(run.file, advertise="localhost:7001") as relay:
        assert relay.ticket.relay.tcp_address == "tcp://localhost:7001"
    with relayed(run.file, bind="0.0.0.0:0") as relay:
        assert "0.0.0.0" not in relay.ticket.relay.tcp_address


def test_a_relay_is_not_relayed(run, relay):
    with pytest.raises(UsageError, match="already the ticket of a relay"):
        Relay(relay.ticket, "127.0.0.1:0", None, lambda: None)


# ends


def test_a_rank_killed_behind_a_relay_is_lost_with_its_exit_code_for_late_viewers_too(run_dir):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with FakeRun(run_dir, 2) as run:
            endpoint = make_run_file(run_dir, 2, pid=child.pid).endpoints[1]
            file = msgspec.structs.replace(run.file, endpoints=[run.file.endpoints[0], endpoint])
            with relayed(file) as relay:
                # As read on a host without any of the ranks.
                away = [msgspec.structs.replace(each, node="elsewhere") for each in relay.ticket.endpoints]
                ticket = msgspec.structs.replace(relay.ticket, endpoints=away)
                state, later = make_state(ticket), make_state(ticket)
                with closing(Live(ticket)) as source:
                    follow(source, state, all_snapped(state))
                    child.send_signal(signal.SIGKILL)
                    follow(source, state, lambda: state.ranks[1].gone_ns is not None)
                with closing(Live(ticket)) as source:
                    follow(source, later, lambda: later.ranks[1].gone_ns is not None)
    finally:
        child.kill()
        child.wait()
    assert state.ranks[1].exit_code in {-signal.SIGKILL, None}  # None: this kernel does not report it
    assert later.ranks[1].exit_code == state.ranks[1].exit_code
    assert (state.ranks[1].ended_ns is None, later.ranks[1].ended_ns) == (state.ranks[1].exit_code is None, None)
    assert state.ranks[0].gone_ns is None


def test_a_silent_rank_behind_a_relay_is_lost_and_the_others_are_not(run, relay):
    limits = msgspec.structs.replace(DEFAULTS, rank_lost=msgspec.structs.replace(DEFAULTS.rank_lost, silent_s=2.1))
    with closing(RunFollower(relay.ticket, limits)) as follower:
        advance(follower, lambda: follower.answered)
        run.ranks[1]._beats = False
        alerts = []

        def reported():
            alerts.extend(event for event in follower.drain() if event.alert.finding.rule == "rank-lost")
            return alerts

        advance(follower, reported)
    finding = alerts[0].alert.finding
    assert finding.ranks == (1,)
    assert "rank 1 (node-a" in finding.message


def test_a_dead_relay_is_reported_and_no_rank_is_blamed(run):
    limits = msgspec.structs.replace(DEFAULTS, rank_lost=msgspec.structs.replace(DEFAULTS.rank_lost, silent_s=2.1))
    relay = RelayThread(run.file)
    try:
        with closing(RunFollower(relay.ticket, limits)) as follower:
            state = follower.monitor.state
            advance(follower, lambda: follower.answered and state.relay is not None)
            relay.stop()
            alerts = []

            def reported():
                alerts.extend(follower.drain())
                return alerts and state.now_ns - state.relay_ns > 4e9

            advance(follower, reported)
            assert [(each.alert.finding.rule, each.alert.finding.subject) for each in alerts] == [
                ("rank-lost", "relay")
            ]
            assert alerts[0].alert.finding.ranks == ()
            assert "the relay on " in alerts[0].alert.finding.message
            assert not follower.ended
    finally:
        relay.stop()


def test_a_frame_of_a_rank_is_a_heartbeat_of_its_relay():
    """After a stall its own heartbeat comes after frames of the ranks."""
    second = 1_000_000_000
    state = RunState("ab12cd34", "train", 1)
    state.apply(wire.Relay(rank=0, seq=0, host="login"), second)
    state.apply(make_beat(0, 1), second)
    state.tick(9 * second)
    assert state.relay_lost
    state.apply(make_beat(0, 2), 9 * second)
    assert not state.relay_lost


def test_a_stalled_viewer_does_not_report_silent_ranks(run, relay):
    """The first frames that it reads then are of one or two ranks; the relay's heartbeat comes after them."""
    limits = msgspec.structs.replace(DEFAULTS, rank_lost=msgspec.structs.replace(DEFAULTS.rank_lost, silent_s=2.1))
    with closing(RunFollower(relay.ticket, limits)) as follower:
        state = follower.monitor.state
        advance(follower, lambda: follower.answered and state.relay is not None)
        time.sleep(3)
        # Nothing is read at first, and then one frame: the receiving thread has only just resumed.
        follower.advance(0)
        for _ in range(2):
            follower.monitor.evaluate_now()
            assert {state.condition(rank) for rank in state.ranks.values()} == {"ok"}
            assert not state.relay_lost
            assert not [rule for rule, _ in follower.monitor.book.open if rule == "rank-lost"]
            follower.advance(0)


def test_a_rank_that_was_silent_before_the_relay_fell_silent_stays_lost():
    """The relay explains only silence that began with its own."""
    second = 1_000_000_000
    state = RunState("ab12cd34", "train", 3)
    for rank in range(3):
        state.apply(make_beat(rank, 1), second)
    for moment in range(2, 11):
        for rank in range(2):
            state.apply(make_beat(rank, moment), moment * second)
        state.apply(wire.Relay(rank=0, seq=0, host="login"), moment * second)
    state.tick(20 * second)
    assert [end.rank.rank for end in endings(state, 5.0).first] == [2]
    assert endings(state, 5.0).later == ()


def test_the_relay_ends_with_the_run_and_so_do_its_viewers(run, relay):
    with closing(RunFollower(relay.ticket)) as follower:
        advance(follower, lambda: follower.answered)
        for rank in run.ranks:
            rank.say_bye()
        advance(follower, lambda: follower.ended)
        assert follower.said_goodbye
    wait_until(lambda: relay.ended == "all ranks have exited")


def test_a_remote_viewer_learns_of_exits_from_the_relay(run_dir):
    """It cannot observe them, and would wait for a message forever."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        file = make_run_file(run_dir, 1, pid=child.pid)
        (run_dir / file.id).mkdir(mode=0o700)
        rank = FakeRank(file.endpoints[0].address, 0, hello=make_hello(world_size=1))
        rundir.write(run_dir, file)
        try:
            with relayed(file) as relay:
                away = [msgspec.structs.replace(each, node="elsewhere") for each in relay.ticket.endpoints]
                with closing(RunFollower(msgspec.structs.replace(relay.ticket, endpoints=away))) as follower:
                    advance(follower, lambda: follower.answered)
                    child.kill()
                    advance(follower, lambda: follower.ended)
                    assert not follower.said_goodbye
        finally:
            rank.stop()
    finally:
        child.kill()
        child.wait()
    assert relay.ended == "its processes are gone"


def test_a_stopped_viewer_costs_a_bounded_queue_and_blocks_no_other(run_dir, monkeypatch):
    monkeypatch.setattr("ddpwatch.outputs.relay.MIN_QUEUE", 16)
    monkeypatch.setattr("ddpwatch.outputs.relay.SEND_QUEUE", 1)
    with FakeRun(run_dir, 1) as run, relayed(run.file) as relay:
        context = zmq.Context()
        try:
            stuck = context.socket(zmq.SUB)
            stuck.setsockopt(zmq.RCVHWM, 1)
            stuck.subscribe(b"event")
            point = relay.ticket.relay
            encryption.connect(stuck, point.tcp_address, point.server_key, relay.ticket.viewer_secret_key)
            state = make_state(relay.ticket)
            with closing(Live(relay.ticket)) as source:
                follow(source, state, all_snapped(state))
                # It is connected once it has something to read.
                wait_until(lambda: run.ranks[0].send_raw(b"event", b"?") or stuck.poll(0))
                before_bytes = _rss_bytes()
                for _ in range(100):  # 100 MB
                    run.ranks[0].send_raw(b"event", b"?" * 1_000_000)
                    follow(source, state, lambda passed=relay.passed: relay.passed > passed)
                run.ranks[0].finish(make_step(0))
                follow(source, state, lambda: state.ranks[0].steps.newest == 0)
                grown_bytes = _rss_bytes() - before_bytes
        finally:
            context.destroy(linger=0)
    assert grown_bytes < 60_000_000


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_no_thread_is_left(run):
    before = threading.active_count()
    with relayed(run.file):
        pass
    assert threading.active_count() == before
