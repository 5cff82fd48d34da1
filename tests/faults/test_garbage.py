"""Garbage sent to a training rank: its parameters stay the same, its memory bounded, and it can still be watched.

`benchmarks/fuzz.py` does the same a million times, beside a training whose steps are timed.
"""

import contextlib
import itertools
import random
import socket as sockets
import time

import psutil
import torch

from benchmarks import garbage
from benchmarks.fuzz import hello_for
from ddpwatch.agent import request_limits as subscriptions
from tests.builders.training import Net, train_step
from tests.builders.watched_training import Training
from tests.faults.viewer import Viewer, find_run

FRAMES = 1000
STRANGERS = 60
TCP = {"DDPWATCH_BIND": "tcp", "DDPWATCH_HOST": "127.0.0.1"}


def parameters_of(model) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def trains_and_compares(stop):
    """Compare its parameters with those after the same number of unwatched steps."""
    training = Training()
    training.steps_until(stop)
    assert training.agent.active
    training.agent.close()
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(training.taken):
        train_step(model, optimizer, torch.ones(4, 8), torch.zeros(4, dtype=torch.long))
    print("same" if parameters_of(model) == parameters_of(training.model) else "different")


def trains_with_little_room(stop):
    """Reaching the real limit of topics would take a while on a busy machine."""
    subscriptions.MAX_HELD_BYTES = 1 << 13
    Training().steps_until(stop)


def intrude(path):
    connection = sockets.socket(sockets.AF_UNIX)
    connection.settimeout(30)
    connection.connect(path)
    garbage.shake_hands(connection)
    return connection


def send_garbage(path, count, seed):
    """Send a number of frames, by as many connections as it takes, slowly enough that all are read."""
    frames = garbage.from_viewers(random.Random(seed))
    opened = []
    sent = 0
    while sent < count:
        opened.append(intrude(path))
        with contextlib.suppress(OSError):
            while sent < count:
                part = list(itertools.islice(frames, 20))
                opened[-1].sendall(b"".join(part))
                sent += len(part)
                time.sleep(0.01)
    return opened


def shake_hands(port, hello, seed):
    """None of them waits: when there are too many, the port is closed."""
    chance = random.Random(seed)
    strangers = []
    for _ in range(STRANGERS):
        strangers.append(sockets.socket())
        strangers[-1].setblocking(False)
        strangers[-1].connect_ex(("127.0.0.1", port))
        with contextlib.suppress(OSError):
            for message in garbage.from_strangers(chance, hello):
                strangers[-1].send(message)
    return strangers


def test_garbage_of_viewers_and_strangers_changes_no_parameter_and_fills_no_memory(start, run_dir, tmp_path):
    child = start(trains_and_compares, tmp_path / "stop", env=TCP)
    run = find_run(run_dir)
    (endpoint,) = run.endpoints
    process = psutil.Process(child.pid)
    with Viewer(endpoint.address) as viewer:
        viewer.read(viewer.trained(2))
        before_bytes = process.memory_info().rss
        hello = hello_for(endpoint.server_key, run.viewer_secret_key)
        opened = shake_hands(int(endpoint.tcp_address.rpartition(":")[2]), hello, seed=1)
        opened += send_garbage(endpoint.address.removeprefix("ipc://"), FRAMES, seed=2)
        with Viewer(endpoint.address) as newcomer:
            newcomer.read(newcomer.trained(2))
    grown_bytes = process.memory_info().rss - before_bytes
    (tmp_path / "stop").touch()

    assert child.wait() == 0
    assert child.output() == "same\n"
    assert grown_bytes < 20 << 20
    for connection in opened:
        connection.close()


def test_a_viewer_that_collects_topics_is_disconnected_and_the_others_come_back(start, run_dir, tmp_path):
    start(trains_with_little_room, tmp_path / "never")
    address = find_run(run_dir).endpoints[0].address
    with Viewer(address) as witness:
        witness.read(witness.trained(2))
        first = witness.snap
        chance = random.Random(3)
        flood = b"".join(garbage.frame(b"\x01" + chance.randbytes(60)) for _ in range(1000))
        with intrude(address.removeprefix("ipc://")) as hostile, contextlib.suppress(OSError):
            hostile.sendall(flood)
            # Until the rank ends it; what it had published meanwhile comes first.
            while hostile.recv(1 << 16):
                pass
        with Viewer(address) as newcomer:
            newcomer.read(newcomer.trained(2))
        witness.read(lambda witness: witness.snap is not first)

    assert [note.kind for note in newcomer.snap.notes] == ["flooded"]


def test_topics_count_once_until_they_are_unsubscribed(monkeypatch):
    monkeypatch.setattr(subscriptions, "MAX_MESSAGES", 1 << 30)
    held = subscriptions.Subscriptions()
    topics = [b"snap/%d" % number + bytes(50) for number in range(subscriptions.MAX_HELD_BYTES // 60)]
    for topic in topics:
        held.note(b"\x01" + topic)
        held.note(b"\x01" + topic)
        held.note(b"\x01beat")
        held.note(b"\x07" + topic * 2)
    assert not held.flooded
    for topic in topics[: len(topics) // 2]:
        held.note(b"\x00" + topic)
        held.note(b"\x00" + topic)
    held.note(b"\x01" + bytes(subscriptions.MAX_HELD_BYTES // 2))
    assert not held.flooded
    held.note(b"\x01" + bytes(subscriptions.MAX_HELD_BYTES // 3))
    assert held.flooded


def test_one_round_of_answers_is_given_per_flush_and_none_to_a_topic_that_was_unsubscribed():
    held = subscriptions.Subscriptions()
    per_round = subscriptions.MAX_ANSWERS
    topics = [b"snap/%d" % number for number in range(3 * per_round)]
    for topic in topics:
        held.note(b"\x01" + topic)
    held.note(b"\x00" + topics[1])
    held.note(b"\x01other")

    assert held.due() == [topics[0], *topics[2 : per_round + 1]]
    assert held.due() == []
    held.flushed()
    assert held.due() == topics[per_round + 1 : 2 * per_round + 1]
    held.reset()
    held.flushed()
    assert held.due() == [], "the viewers that asked are gone"


def test_an_idle_flush_does_not_use_up_the_round_of_answers():
    held = subscriptions.Subscriptions()
    assert held.due() == []
    held.note(b"\x01stack/1")
    assert held.due() == [b"stack/1"]
    held.note(b"\x01stack/1")
    assert held.due() == []
    held.flushed()
    assert held.due() == [b"stack/1"], "a viewer that reconnects asks again"


def test_more_messages_in_a_minute_than_viewers_send_are_a_flood(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(subscriptions, "monotonic", lambda: now_s)
    held = subscriptions.Subscriptions()
    for _ in range(3):
        for _ in range(subscriptions.MAX_MESSAGES):
            held.note(b"\x07")
        assert not held.flooded
        now_s += subscriptions.WINDOW_S
    for _ in range(subscriptions.MAX_MESSAGES + 1):
        held.note(b"\x07")
    assert held.flooded
    held.reset()
    assert not held.flooded


def test_a_rank_that_is_flooded_again_and_again_backs_off_exponentially_until_there_was_calm():
    backoff = subscriptions.FloodBackoff()
    now_s, pauses_s = 1000.0, []
    for _ in range(5):
        assert backoff.is_over(now_s)
        began_s = now_s
        backoff.begin(now_s)
        while not backoff.is_over(now_s):
            now_s += 0.5
        pauses_s.append(now_s - began_s)
    assert pauses_s == [1, 4, 16, 64, 64]
    now_s += subscriptions.CALM_S
    backoff.begin(now_s)
    assert not backoff.is_over(now_s + subscriptions.BACKOFF_S / 2)
    assert backoff.is_over(now_s + subscriptions.BACKOFF_S)


def test_garbage_is_varied_and_the_same_every_time():
    first, again = (list(itertools.islice(garbage.from_viewers(random.Random(4)), 3000)) for _ in range(2))
    assert first == again
    assert len(set(first)) > 2000
    assert {frame[0] & garbage.COMMAND for frame in first} == {0, garbage.COMMAND}
