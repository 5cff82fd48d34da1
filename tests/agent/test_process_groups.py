"""Progress in process groups: a real gloo group of one rank, and torch's flight recorder."""

from __future__ import annotations

import pickle
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddpwatch import wire
from ddpwatch.agent.process_groups import (
    LOOKUP_AFTER_NS,
    LOOKUP_AGAIN_NS,
    LOOKUP_ANYWAY_NS,
    Collectives,
    _error,
    _timeout_ns,
    entry_bytes,
)
from tests.builders.torch_features import needs_gloo_recorder
from tests.builders.training import wait_for


@contextmanager
def joined(folder, timeout_s=1800.0):
    """The job's process group, of this process alone."""
    store = dist.FileStore(str(folder / f"store-{time.monotonic_ns()}"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def settled(collectives):
    """The groups once nothing is in flight: an operation may return a moment before it counts as completed."""
    deadline_s = time.monotonic() + 30
    while True:
        groups = collectives.groups(time.perf_counter_ns())
        if all(group.completed == group.enqueued or not group.enqueued for group in groups):
            return groups
        assert time.monotonic() < deadline_s, groups


def reported(groups):
    return [(group.enqueued, group.completed) for group in groups]


def test_without_a_process_group_nothing_is_reported():
    assert not dist.is_initialized()
    assert Collectives().groups(1) == []


@needs_gloo_recorder
def test_operations_are_counted_as_they_are_joined_and_completed(tmp_path):
    collectives = Collectives()
    with joined(tmp_path):
        assert reported(collectives.groups(1)) == [(0, None)]
        for _ in range(3):
            dist.all_reduce(torch.ones(3))
        (group,) = settled(collectives)

    assert reported([group]) == [(3, 3)]
    assert (group.size, group.members) == (1, "")
    assert (group.op, group.age_ns, group.error) == ("", 0, ""), "nothing is in flight"
    assert collectives.groups(1) == []


@needs_gloo_recorder
def test_a_second_group_is_counted_by_itself(tmp_path):
    collectives = Collectives()
    with joined(tmp_path):
        side = dist.new_group([0])
        dist.all_reduce(torch.ones(3))
        assert reported(settled(collectives)) == [(1, 1), (0, None)]
        for _ in range(2):
            dist.all_reduce(torch.ones(3), group=side)
        groups = settled(collectives)

    assert reported(groups) == [(1, 1), (2, 2)]
    assert groups[0].name != groups[1].name


@needs_gloo_recorder
@pytest.mark.parametrize("before", [2, 9])
def test_a_new_group_is_not_mistaken_for_an_earlier_one_of_the_same_name(tmp_path, before):
    collectives = Collectives()
    for operations in (before, 5):
        with joined(tmp_path):
            for _ in range(operations):
                dist.all_reduce(torch.ones(1))
            assert reported(settled(collectives)) == [(operations, operations)]


@needs_gloo_recorder
def test_the_last_operations_are_reported_oldest_first(tmp_path):
    collectives = Collectives()
    with joined(tmp_path) as group:
        for count in range(wire.MAX_COLLECTIVES):
            dist.all_reduce(torch.ones(count + 1, 2))
        dist.broadcast(torch.ones(7, dtype=torch.int64), 0)
        dist.barrier()
        settled(collectives)
        # The recorder's thread marks each of them after it is counted.
        wait_for(lambda: all(each.done for each in collectives.recent()))
        recent = collectives.recent()
        name = group.group_name

    assert len(recent) == wire.MAX_COLLECTIVES
    assert [each.op for each in recent[-3:]] == ["all_reduce", "broadcast", "barrier"]
    assert [each.shape for each in recent[-3:-1]] == ["[16, 2] Float", "[7] Long"]
    assert {each.group for each in recent} == {name}
    numbers = [each.seq for each in recent]
    assert numbers == list(range(numbers[0], numbers[0] + wire.MAX_COLLECTIVES))


@needs_gloo_recorder
@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, 24), (torch.bfloat16, 12), (torch.float64, 48), (torch.uint8, 6)], ids=str
)
def test_the_size_of_an_operation_is_reported_in_bytes(tmp_path, dtype, expected):
    with joined(tmp_path):
        dist.broadcast(torch.ones(2, 3).to(dtype), 0)
        entry = Collectives()._entries()[-1]

    assert entry_bytes(entry) == expected


def test_the_timeout_and_the_health_of_a_group_are_its_own(tmp_path):
    with joined(tmp_path, timeout_s=77) as group:
        side = dist.new_group([0], timeout=timedelta(seconds=5))

        assert (_timeout_ns(group), _timeout_ns(side)) == (77 * 10**9, 5 * 10**9)
        assert (_error(group), _error(side)) == ("", "")


def test_a_group_that_is_destroyed_while_it_is_read_causes_no_error(tmp_path):
    """The agent's thread asks, and the training thread ends the group."""
    stop, errors = threading.Event(), []

    def asks():
        collectives = Collectives()
        while not stop.is_set():
            try:
                collectives.groups(1)
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=asks, daemon=True)
    thread.start()
    try:
        for _ in range(10):
            with joined(tmp_path):
                dist.all_reduce(torch.ones(1))
    finally:
        stop.set()
        thread.join(30)

    assert errors == []
    assert not thread.is_alive()


@needs_gloo_recorder
def test_what_goes_from_one_rank_to_another_is_not_counted(tmp_path, monkeypatch):
    """Point-to-point operations differ between ranks; gloo's own number counts them, too."""
    collectives = Collectives(threading.get_ident)
    with joined(tmp_path) as group:
        dist.all_reduce(torch.ones(3))
        settled(collectives)
        monkeypatch.setattr(type(group), "_get_sequence_number_for_group", lambda _group: 9)

        assert reported(settled(collectives)) == [(1, 1)]


class TurnedBack:
    """The recorder of three operations that are done, of which a slow thread of gloo has counted one; and of a fourth
    that is in flight for nine seconds, if so wanted.
    """

    def __init__(self, collectives, *, in_flight=False):
        wait_for(lambda: all(each.done for each in collectives.recent()))
        *_, self._dump = collectives._dumps  # a torch with CUDA has NCCL's recorder, too
        self._in_flight = in_flight
        self.done = True
        """Whether the second and the third are marked as done."""
        collectives._dumps = [self]

    def __call__(self, *arguments):
        reported = pickle.loads(self._dump(*arguments))
        for status in reported.get("pg_status", {}).values():
            # Not less than it was: that may have been turned back, too.
            status["last_completed_collective"] = 1
            status["last_enqueued_collective"] = 3 + self._in_flight
        entries = reported.get("entries", [])
        for entry in entries[-2:] if not self.done else ():
            entry |= {"retired": False, "state": "started"}
        if entries and self._in_flight:
            created_ns = time.time_ns() - 9 * 10**9
            entries.append(
                entries[-1]
                | {"collective_seq_id": 4, "retired": False, "state": "started", "time_created_ns": created_ns}
            )
        return pickle.dumps(reported)


@pytest.fixture
def three_done(tmp_path):
    with joined(tmp_path):
        collectives = Collectives()
        for _ in range(3):
            dist.all_reduce(torch.ones(3))
        yield collectives


@needs_gloo_recorder
def test_a_count_that_a_slow_thread_of_gloo_has_turned_back_is_not_taken_for_a_wait(three_done):
    """The recorder itself says of each operation whether it is done."""
    TurnedBack(three_done)
    (before,) = three_done.groups(1)
    (after,) = three_done.groups(1 + LOOKUP_AFTER_NS)
    (later,) = three_done.groups(2 + LOOKUP_AFTER_NS)

    assert reported([before]) == [(3, 1)]
    assert (after.age_ns, later.age_ns) == (0, 0)
    assert reported([after, later]) == [(3, 3), (3, 3)]


@needs_gloo_recorder
def test_behind_a_count_that_went_back_the_operation_in_flight_is_reported_with_its_full_age(three_done):
    """Else a rank that waits would be taken to have come just now, or not at all."""
    TurnedBack(three_done, in_flight=True)
    three_done.groups(1)
    (after,) = three_done.groups(1 + LOOKUP_AFTER_NS)
    (later,) = three_done.groups(2 + LOOKUP_AFTER_NS)

    assert reported([after, later]) == [(4, 3), (4, 3)]
    assert [(group.op, group.age_ns >= 9 * 10**9) for group in (after, later)] == [("all_reduce", True)] * 2


@needs_gloo_recorder
def test_an_operation_that_was_in_flight_when_it_was_looked_up_is_looked_up_again(three_done):
    """It may be done since, and the count turned back before a beat has seen that."""
    recorder = TurnedBack(three_done)
    recorder.done = False
    three_done.groups(1)
    (waiting,) = three_done.groups(1 + LOOKUP_AFTER_NS)
    recorder.done = True
    (still,) = three_done.groups(LOOKUP_AFTER_NS + LOOKUP_AGAIN_NS)
    (done,) = three_done.groups(1 + LOOKUP_AFTER_NS + LOOKUP_AGAIN_NS)

    assert reported([waiting, still, done]) == [(3, 1), (3, 1), (3, 3)]


@needs_gloo_recorder
def test_while_the_training_thread_stands_still_it_is_looked_up_seldom(three_done, monkeypatch):
    """To read the recorder takes tens of milliseconds, and in a hang nothing changes."""
    place = [(1, 2)]
    monkeypatch.setattr(three_done, "_place", lambda: place[0])
    recorder = TurnedBack(three_done)
    recorder.done = False
    three_done.groups(1)
    looked_up_ns = 1 + LOOKUP_AFTER_NS
    three_done.groups(looked_up_ns)
    recorder.done = True
    at_ns = [looked_up_ns + LOOKUP_AGAIN_NS, looked_up_ns + LOOKUP_ANYWAY_NS - 1, looked_up_ns + LOOKUP_ANYWAY_NS]
    assert reported([three_done.groups(now_ns)[0] for now_ns in at_ns]) == [(3, 1), (3, 1), (3, 3)]


def test_the_position_of_the_training_thread_shows_whether_it_has_moved():
    held = threading.Lock()
    held.acquire()
    began = threading.Event()

    def stands() -> None:
        began.set()
        held.acquire(timeout=30)

    thread = threading.Thread(target=stands, daemon=True)
    thread.start()
    assert began.wait(30)
    collectives = Collectives(lambda: thread.ident)
    wait_for(lambda: collectives._frame().f_code is stands.__code__)
    assert wait_for(lambda: collectives._place() == (again := collectives._place()) and again)
    held.release()
    thread.join(30)
    assert collectives._place() is None


@needs_gloo_recorder
def test_a_thread_in_a_monitored_barrier_waits_there_although_it_is_not_recorded(tmp_path, monkeypatch):
    began, go_on = threading.Event(), threading.Event()

    def wait(*_arguments, **_options):
        began.set()
        go_on.wait(30)

    with joined(tmp_path) as group:
        dist.all_reduce(torch.ones(3))
        settled(Collectives())
        monkeypatch.setattr(dist.distributed_c10d, "_check_valid_timeout", wait)
        thread = threading.Thread(target=dist.monitored_barrier, daemon=True)
        thread.start()
        assert began.wait(30)
        collectives = Collectives(lambda: thread.ident)
        collectives.groups(1)
        # As gloo does when the barrier itself has begun.
        monkeypatch.setattr(type(group), "_get_sequence_number_for_group", lambda _group: 2)
        collectives.groups(1)
        (waiting,) = collectives.groups(1 + LOOKUP_AFTER_NS)
        go_on.set()
        thread.join(30)

    assert (waiting.enqueued, waiting.completed, waiting.op) == (2, 1, "monitored_barrier")
    assert (waiting.timeout_ns, waiting.age_ns > 0) == (0, True)
