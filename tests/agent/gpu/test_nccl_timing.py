"""All-reduce times from torch's flight recorder, with records as the versions of torch write them."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist

from ddpwatch import wire
from ddpwatch.agent.gpu import nccl_timing as nccl_times
from ddpwatch.agent.gpu.nccl_timing import NO_GLOO, NO_RECORD, UNSAFE, NcclTimes, operations

MS = 1_000_000
UNIX = 1_700_000_000 * 1_000_000_000
"""What the wall clock shows when the rank's own clock is at zero."""


def entry(version, record, at_ms, duration_ms=None, *, retired=True, op="all_reduce", group="0", floats=1000):
    """One record with the fields that this version of torch writes."""
    reported = {
        "record_id": record, "pg_id": 0, "process_group": (group, "default_pg"), "collective_seq_id": record + 1,
        "p2p_seq_id": 0, "op_id": record + 1, "profiling_name": f"nccl:{op}", "time_created_ns": UNIX + int(at_ms * MS),
        "input_sizes": [[floats]], "input_dtypes": ["Float"], "output_sizes": [[floats]], "output_dtypes": ["Float"],
        "state": "completed" if duration_ms is not None or retired else "started",
        "time_discovered_started_ns": UNIX, "time_discovered_completed_ns": UNIX if retired else None,
        "retired": retired, "timeout_ms": 600_000, "is_p2p": False, "frames": [],
    }  # fmt: skip
    if duration_ms is not None:
        reported["duration_ms"] = duration_ms
    if version == (2, 4):
        # Its records have no frames unless they are asked for, and sizes as tuples.
        del reported["frames"]
        reported["input_sizes"] = [(floats,)]
    if version >= (2, 10):
        reported |= {"thread_id": "1", "thread_name": "pt_autograd_0"}
    return reported


def dump(version, *entries):
    reported = {"version": {(2, 4): "2.3", (2, 6): "2.4", (2, 8): "2.9"}.get(version, "2.10"), "entries": list(entries),
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
            "pg_status": {"0": {"last_enqueued_collective": len(entries)}}}  # fmt: skip
    if version >= (2, 9):
        reported["comm_lib_version"] = "2.27.5"
    else:
        reported["nccl_version"] = "2.21.5"
    return reported


def step(index, end_ms, length_ms=100):
    return wire.Step(
        index=index, end_ns=end_ms * MS, data_ns=0, forward_ns=0, backward_ns=length_ms * MS, sync_ns=0,
        optimizer_ns=0, other_ns=0,
    )  # fmt: skip


STEPS = [step(k, 100 * (k + 1)) for k in range(5)]


def take(times, version, *entries, steps=STEPS):
    return times.take(operations(dump(version, *entries), "0"), steps, UNIX)


@pytest.mark.parametrize("version", [(2, 4), (2, 6), (2, 8), (2, 9), (2, 10), (2, 13)], ids=str)
def test_the_all_reduces_of_a_step_are_summed_in_every_version(version):
    reported = take(
        NcclTimes(), version,
        entry(version, 0, 90, 1.0),
        entry(version, 1, 110, 2.5), entry(version, 2, 150, 4.0, floats=500), entry(version, 3, 160, op="broadcast"),
        entry(version, 4, 170, 9.0, group="1"), entry(version, 5, 205, 1.0),
    )  # fmt: skip

    assert reported == [wire.Comm(1, int(6.5 * MS), 6000), wire.Comm(2, 1 * MS, 4000)]


def test_a_step_waits_until_all_of_its_all_reduces_have_ended_and_is_reported_once():
    times = NcclTimes()
    first = entry((2, 13), 0, 50, 1.0)
    done, open_ = entry((2, 13), 1, 110, 2.0), entry((2, 13), 2, 150, retired=False)
    later = entry((2, 13), 3, 210, 3.0)

    assert take(times, (2, 13), first, done, open_, later) == []
    ended = entry((2, 13), 2, 150, 5.0)
    assert [comm.index for comm in take(times, (2, 13), first, done, ended, later)] == [1, 2]
    assert take(times, (2, 13), first, done, ended, later) == []


def test_a_step_is_only_reported_when_the_records_cover_it_from_its_beginning():
    # The recorder has forgotten what came before 150 ms.
    reported = take(NcclTimes(), (2, 13), entry((2, 13), 70, 150, 1.0), entry((2, 13), 71, 250, 2.0))

    assert [comm.index for comm in reported] == [2]


def test_what_was_queued_after_the_last_known_step_waits_for_its_step():
    times = NcclTimes()
    entries = entry((2, 13), 0, 10, 1.0), entry((2, 13), 1, 150, 1.0), entry((2, 13), 2, 220, 2.0)

    assert [comm.index for comm in take(times, (2, 13), *entries, steps=STEPS[:2])] == [1]
    assert [comm.index for comm in take(times, (2, 13), *entries, steps=STEPS[:3])] == [2]


def test_an_operation_without_a_duration_gives_its_step_no_time():
    times = NcclTimes()
    untimed = entry((2, 13), 1, 150)
    first, later = entry((2, 13), 0, 10, 1.0), entry((2, 13), 2, 250, 2.0)

    assert take(times, (2, 13), first, untimed, later) == [], "its duration may come a moment after its end"
    much_later = entry((2, 13), 3, 5000, 2.0)
    assert [comm.index for comm in take(times, (2, 13), first, untimed, later, much_later)] == [2]


class Group:
    """A process group that can be timed."""

    def __init__(self):
        self.timed = 0

    def _enable_collectives_timing(self):
        self.timed += 1


@pytest.fixture
def nccl(monkeypatch):
    """A job on NCCL with torch 2.13, as far as `enable` looks."""
    group = Group()
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setitem(dist.distributed_c10d._world.pg_names, group, "0")
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_CUDA_EVENT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return group


def test_it_is_enabled_for_a_group_and_then_asks_about_once_a_second(nccl, monkeypatch):
    asked = []
    now_s = [0.0]
    monkeypatch.setattr(nccl_times, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(nccl_times, "time_ns", lambda: UNIX)
    monkeypatch.setattr(nccl_times, "perf_counter_ns", lambda: 0)
    record = pickle.dumps(dump((2, 13), entry((2, 13), 0, 10, 1.0), entry((2, 13), 1, 150, 2.0)))
    times = NcclTimes(dump=lambda *wanted: asked.append(wanted) or record)

    assert times.poll(STEPS) == [], "it is not enabled"
    assert times.enable(nccl) == ""
    assert nccl.timed == 1
    assert times.poll(STEPS) == [wire.Comm(1, 2 * MS, 4000)]
    times.poll(STEPS)
    assert asked == [(True, False, False)]
    now_s[0] += 1.0
    times.poll(STEPS)
    assert len(asked) == 2


def test_a_recorder_that_takes_long_is_asked_rarely(nccl, monkeypatch):
    now_s = [0.0]
    asked = []

    def slow(*wanted):
        asked.append(now_s[0])
        now_s[0] += 0.05
        return pickle.dumps(dump((2, 13)))

    monkeypatch.setattr(nccl_times, "monotonic", lambda: now_s[0])
    times = NcclTimes(dump=slow)
    times.enable(nccl)
    for _ in range(100):
        times.poll(STEPS)
        now_s[0] += 0.25

    assert len(asked) == 3


def test_a_dump_that_fails_is_harmless(nccl):
    times = NcclTimes(dump=lambda *wanted: 1 / 0)
    times.enable(nccl)

    assert times.poll(STEPS) == []


def test_gloo_has_a_reason_why_it_is_not_timed():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        times = NcclTimes(dump=lambda *wanted: b"")
        assert times.enable(dist.group.WORLD) == NO_GLOO
        assert times.poll(STEPS) == []
    finally:
        dist.destroy_process_group()


def test_a_torch_without_nccl_says_so(nccl, monkeypatch):
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_nccl_trace", raising=False)
    assert "built with NCCL" in NcclTimes().enable(nccl)


@pytest.mark.parametrize(
    ("version", "environment", "why"),
    [
        ((2, 13), {}, ""),
        ((2, 8), {}, ""),
        ((2, 13), {"TORCH_FR_BUFFER_SIZE": "0"}, NO_RECORD),
        ((2, 13), {"TORCH_NCCL_CUDA_EVENT_CACHE": "0"}, UNSAFE),
        ((2, 7), {}, UNSAFE),
        ((2, 7), {"TORCH_NCCL_CUDA_EVENT_CACHE": "1"}, ""),
        ((2, 5), {}, NO_RECORD),
        ((2, 4), {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_CUDA_EVENT_CACHE": "1"}, UNSAFE),
    ],
)
def test_it_is_refused_where_it_is_off_or_not_safe(version, environment, why):
    assert nccl_times._hindrance(environment, version) == why


def test_torch_can_be_asked_to_time_a_group():
    assert hasattr(dist.ProcessGroup, "_enable_collectives_timing")
