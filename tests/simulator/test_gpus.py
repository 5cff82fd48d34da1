"""GPUs of a simulated run: reported once a second, the same every time, and consistent with the steps."""

from __future__ import annotations

import pytest

from ddpwatch import wire
from ddpwatch.core.limits import EvaluationLimits, Limits
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.simulator.scenario import Fault, Segment
from ddpwatch.simulator.workload import SimulatedRun

SECOND_NS = 1_000_000_000


def played(fault: Fault, seconds: float, world_size: int = 8):
    """The messages of that many seconds, in which the fault lasts, snapshots first."""
    run = SimulatedRun(world_size, now_ns=100 * SECOND_NS, unix_ns=0, schedule=[Segment(500, (fault,))])
    until_ns = run.due_ns + int(seconds * 1e9)
    reported = [run.snap(rank, run.due_ns) for rank in range(world_size)]
    while run.due_ns < until_ns:
        reported += [payload for _, _, payload in run.next_messages()]
    return reported


def gpus_of(reported, rank):
    messages = [wire.decode(payload) for payload in reported]
    return [one.gpus for one in messages if isinstance(one, wire.Beat) and one.gpus and one.rank == rank]


def test_each_rank_reports_its_gpu_once_a_second_and_the_same_every_time():
    reported = played(Fault((3,), "backward", 0.25, onset=0), 10.0)

    for rank in range(8):
        readings = gpus_of(reported, rank)
        assert len(readings) == pytest.approx(10, abs=2)
        assert {gpu.device for reading in readings for gpu in reading.gpus} == {f"cuda:{rank}"}
    assert reported == played(Fault((3,), "backward", 0.25, onset=0), 10.0)


def test_a_rank_slow_to_compute_is_hot_and_the_others_are_at_full_load_while_they_wait():
    reported = played(Fault((3,), "backward", 0.25, onset=0), 4.0)
    slow, other = gpus_of(reported, 3)[-1].gpus[0], gpus_of(reported, 4)[-1].gpus[0]

    assert "hw_thermal_slowdown" in slow.throttle
    assert slow.sm_mhz < 0.85 * other.sm_mhz
    assert slow.temperature_c > 80 > other.temperature_c
    assert other.util_percent > 93
    assert other.throttle == []


def test_a_rank_that_waits_for_data_has_a_gpu_with_less_to_do():
    reported = played(Fault((3,), "data", 0.6, onset=0), 4.0)
    late, other = gpus_of(reported, 3)[-1].gpus[0], gpus_of(reported, 4)[-1].gpus[0]

    assert late.util_percent < 75 < other.util_percent
    assert late.throttle == []


def test_a_snapshot_brings_the_curves_and_the_throttled_gpu_is_found():
    run = SimulatedRun(8, now_ns=0, unix_ns=0, schedule=[Segment(500, (Fault((3,), "backward", 0.25, onset=0),))])
    monitor = Monitor(RunState("00", "made-up", 8))
    until_ns = run.due_ns + 14 * SECOND_NS
    for rank in range(8):
        monitor.ingest(run.snap(rank, run.due_ns), run.due_ns)
    while run.due_ns < until_ns:
        now_ns = run.due_ns
        for _, _, payload in run.next_messages():
            monitor.ingest(payload, now_ns)
    monitor.evaluate_now()
    found = {key: alert.finding for key, alert in monitor.book.open.items()}

    assert len(monitor.state.ranks[0].gpus.histories["cuda:0"].curve("util_percent")) > 25
    assert "cuda:3 throttled: GPU clock 1500/1980 MHz" in found["gpu-throttle", "rank 3 · cuda:3"].message
    assert "GPU clock 1500/1980 MHz, hardware thermal slowdown" in found["straggler", "rank 3"].message


def test_a_host_that_becomes_hot_has_one_alert():
    hot = tuple(Fault(tuple(range(8, 16)), phase, 0.12, onset=0) for phase in ("forward", "backward"))
    run = SimulatedRun(24, now_ns=0, unix_ns=0, schedule=[Segment(200), Segment(500, hot)], history_steps=150)
    monitor = Monitor(RunState("00", "made-up", 24), Limits(judge=EvaluationLimits(stride_steps=50)))
    until_ns = run.due_ns + 30 * SECOND_NS
    while run.due_ns < until_ns:
        now_ns = run.due_ns
        for _, _, payload in run.next_messages():
            monitor.ingest(payload, now_ns)
    reported = [event.alert.key for event in monitor.book.drain() if event.alert.finding.rule == "gpu-throttle"]

    assert reported == [("gpu-throttle", "host node-1")]
