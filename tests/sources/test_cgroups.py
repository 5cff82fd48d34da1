"""OOM kills are read from the cgroup of a process."""

import os

import pytest

from ddpwatch.sources.processes import events_file, oom_kills


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
