"""How many cores a process may use, by its affinity and the quotas of its control groups."""

from __future__ import annotations

import os

import pytest

from ddpwatch.agent.resource_limits import usable_cores

QUOTA, PERIOD = "cpu/x/cpu.cfs_quota_us", "cpu/x/cpu.cfs_period_us"
ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {}, ALL),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, ALL),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": f"{ALL * 100_000 - 1} 100000\n"}, ALL),
        ("0::/\n", {"cpu.max": "nonsense\n"}, ALL),
        ("0::/\n", {"cpu.max": "1 0\n"}, ALL),
        (
            "3:cpu,cpuacct:/x\n2:memory:/y\n",
            {QUOTA: "70000", PERIOD: "100000"},
            1,
        ),
        ("3:cpu:/x\n", {QUOTA: "-1", PERIOD: "100000"}, ALL),
        (None, {}, ALL),
    ],
)
def test_cores_are_the_smaller_of_affinity_and_quota_rounded_up(tmp_path, own, files, cores):
    if own is not None:
        (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)

    assert usable_cores(tmp_path / "cgroup", tmp_path / "own") == cores
