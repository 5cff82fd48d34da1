"""Gradient buckets are on the wire only while a viewer subscribes."""

from __future__ import annotations

import threading

from ddpwatch import wire
from ddpwatch.sources.live import Live
from tests.builders.fake_rank import MS, FakeRun
from tests.sources.following import follow, make_state

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
