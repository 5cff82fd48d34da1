"""Gradient buckets: the latest of each rank is kept, and nothing else depends on them."""

from __future__ import annotations

import pytest

from ddpwatch import wire
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import MS, make_snap, make_step


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
