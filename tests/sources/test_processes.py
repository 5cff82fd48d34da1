"""The exit of a process becomes a frame: once, after all its messages, and only on this node, with its OOM kill."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from ddpwatch import rundir, wire
from ddpwatch.sources import live
from ddpwatch.sources import processes as departures
from ddpwatch.sources.frames import Frame
from ddpwatch.sources.live import Live
from ddpwatch.sources.processes import events_file, oom_kills
from tests.builders.fake_rank import FakeRun
from tests.sources.victims import belonging_to, victim_process

GIVE_UP_S = 30


@pytest.fixture
def victim():
    with victim_process() as process:
        yield process


def messages_until(source, condition):
    """Messages until the condition on all of them holds."""
    seen = []
    deadline_s = time.monotonic() + GIVE_UP_S
    while not condition(seen):
        assert time.monotonic() < deadline_s, "it never happened"
        item = source.poll(20)
        if isinstance(item, Frame):
            seen.append(wire.decode(item.payload))
            if isinstance(seen[-1], wire.Gone):
                assert item.topic == b"gone"
    return seen


def gone(messages):
    return [message.rank for message in messages if isinstance(message, wire.Gone)]


def later(source, looks=3):
    """All messages of a few further checks."""
    until_ns = source._check_ns + looks * live.CHECK_NS
    return messages_until(source, lambda seen: source._check_ns >= until_ns)


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(live, "CHECK_NS", 50_000_000)
    monkeypatch.setattr(live, "GRACE_NS", 100_000_000)


def test_an_exit_is_reported_once(run_dir, victim, often):
    with FakeRun(run_dir, 2) as run, closing(Live(belonging_to(run.file, victim, 1))) as source:
        assert gone(later(source)) == []
        victim.kill()
        victim.wait(GIVE_UP_S)
        assert gone(messages_until(source, gone)) == [1]
        assert gone(later(source)) == []


def test_an_earlier_exit_is_reported_at_once(run_dir, victim, monkeypatch):
    monkeypatch.setattr(live, "GRACE_NS", 3600 * 10**9)
    with FakeRun(run_dir, 2, rank1={"beats": False, "answers": False}) as run:
        file = belonging_to(run.file, victim, 1)
        victim.kill()
        victim.wait(GIVE_UP_S)
        with closing(Live(file)) as source:
            assert gone(messages_until(source, gone)) == [1]


def held(messages):
    return [(message.rank, message.by) for message in messages if isinstance(message, wire.Held)]


def test_stop_and_continue_are_reported_once_each(run_dir, victim, often):
    with FakeRun(run_dir, 2) as run, closing(Live(belonging_to(run.file, victim, 1))) as source:
        assert sorted(held(later(source))) == [(0, "nothing"), (1, "nothing")], "both may run"
        victim.send_signal(signal.SIGSTOP)
        assert held(messages_until(source, held)) == [(1, "signal")]
        assert held(later(source)) == []
        victim.send_signal(signal.SIGCONT)
        assert held(messages_until(source, held)) == [(1, "nothing")]


def test_a_disk_wait_is_reported_when_seen_twice(run_dir, victim, often, monkeypatch):
    states = iter(["disk", "nothing", "disk", "disk"])
    monkeypatch.setattr(departures, "_held", lambda pid: next(states, "nothing") if pid == victim.pid else "")
    with FakeRun(run_dir, 2) as run, closing(Live(belonging_to(run.file, victim, 1))) as source:
        reported = held(messages_until(source, lambda seen: len(held(seen)) == 3))
        assert reported == [(1, "nothing"), (1, "disk"), (1, "nothing")]


def test_a_goodbye_comes_before_the_exit(run_dir, victim, often):
    """A goodbye that is unread in the socket must not be overtaken."""
    with FakeRun(run_dir, 2) as run, closing(Live(belonging_to(run.file, victim, 1))) as source:
        assert run.ranks[1].followed.wait(GIVE_UP_S)
        messages_until(source, lambda seen: {message.rank for message in seen} == {0, 1})
        run.ranks[1].say_bye()
        victim.kill()
        victim.wait(GIVE_UP_S)
        seen = messages_until(source, gone)

    goodbye = next(number for number, message in enumerate(seen) if isinstance(message, wire.Bye))
    assert goodbye < next(number for number, message in enumerate(seen) if isinstance(message, wire.Gone))


def test_processes_of_other_nodes_are_ignored(run_dir, victim, often):
    with FakeRun(run_dir, 2) as run:
        file = belonging_to(run.file, victim, 1, node="elsewhere")
        victim.kill()
        victim.wait(GIVE_UP_S)
        with closing(Live(file)) as source:
            assert gone(later(source)) == []


@pytest.mark.parametrize("still_runs", [False, True])
def test_an_earlier_orderly_exit_is_reported_as_goodbye(run_dir, victim, often, still_runs):
    with FakeRun(run_dir, 2) as run:
        mine = belonging_to(run.file, victim, 1)
        if not still_runs:
            victim.kill()
            victim.wait(GIVE_UP_S)
        Path(mine.endpoints[1].address.removeprefix("ipc://")).unlink()
        with closing(Live(mine)) as source:
            seen = later(source)

    assert gone(seen) == []
    assert [message.rank for message in seen if isinstance(message, wire.Bye)] == [1]


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (wire.encode(wire.Bye(rank=7, seq=9, reason="failed", text="ValueError: no", mono_ns=1)), ("failed", 0)),
        (b"nonsense", ("closed", 0)),
        (wire.encode(wire.Gone(rank=1, seq=0)), ("closed", 0)),
    ],
)
def test_the_goodbye_on_disk_is_used(run_dir, often, words, reported):
    with FakeRun(run_dir, 2) as run:
        rundir.leave(Path(run.file.endpoints[1].address.removeprefix("ipc://")), words)
        with closing(Live(run.file)) as source:
            (bye,) = (message for message in later(source) if isinstance(message, wire.Bye))

    assert (bye.reason, bye.seq, bye.rank) == (*reported, 1)


def test_a_removed_run_directory_is_not_an_orderly_exit(run_dir, victim, often):
    with FakeRun(run_dir, 2) as run, closing(Live(belonging_to(run.file, victim, 1))) as source:
        assert gone(later(source)) == []
        for file in (run_dir / run.file.id).iterdir():
            file.unlink()
        victim.kill()
        victim.wait(GIVE_UP_S)
        assert gone(messages_until(source, gone)) == [1]


@pytest.mark.parametrize("reaped", [True, False])
def test_an_exit_is_seen_at_once_with_its_exit_code(run_dir, victim, reaped, monkeypatch):
    """The regular check is an hour away. Kernels before 6.15 do not report the exit code of a reaped process."""
    monkeypatch.setattr(live, "CHECK_NS", 3600 * 10**9)
    with FakeRun(run_dir, 2) as run, closing(Live(belonging_to(run.file, victim, 1))) as source:
        messages_until(source, lambda seen: {message.rank for message in seen} == {0, 1})
        victim.kill()
        if reaped:
            victim.wait(GIVE_UP_S)
        (reported,) = (message for message in messages_until(source, gone) if isinstance(message, wire.Gone))

    assert reported.exit_code in ({-signal.SIGKILL, None} if reaped else {-signal.SIGKILL})
    assert reported.ago_ns >= live.GRACE_NS, "the moment is that of the end, not that of the word"


@pytest.fixture
def host(tmp_path):
    """A host with one process in one cgroup."""

    def write(cgroup, events=None):
        (tmp_path / "proc/42").mkdir(parents=True)
        (tmp_path / "proc/42/cgroup").write_bytes(cgroup)
        if events is not None:
            (tmp_path / "cgroup/job/rank").mkdir(parents=True)
            (tmp_path / "cgroup/job/rank/memory.events").write_text(events)
        return events_file(42, proc=tmp_path / "proc", cgroups=tmp_path / "cgroup")

    return write


def test_kills_are_counted(host):
    assert oom_kills(host(b"0::/job/rank\n", "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")) == 2


@pytest.mark.parametrize("cgroup", [b"", b"12:memory:/job\n1:name=systemd:/job\n", b"0::/../../etc\n", b"\xff\xfe::\n"])
def test_nothing_is_counted_without_a_cgroup(host, cgroup):
    assert oom_kills(host(cgroup)) == 0


@pytest.mark.parametrize("events", [None, "", "oom_kill\n", "oom_kill many\n"])
def test_unreadable_events_count_as_none(host, events):
    assert oom_kills(host(b"0::/job/rank\n", events)) == 0


def test_a_real_process_has_a_count():
    assert oom_kills(events_file(os.getpid())) >= 0
