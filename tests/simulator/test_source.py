"""A simulated run looks like a live one to a late viewer: no gap, no loss, and its faults are found."""

import numpy as np
import pytest

from ddpwatch import wire
from ddpwatch.cli.demo import MAX_SIMULATED
from ddpwatch.core.limits import EvaluationLimits, Limits
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.simulator.scenario import Fault, Segment
from ddpwatch.simulator.source import MAX_BEHIND_NS, MAX_RANKS, SimulatedSource
from ddpwatch.simulator.workload import SimulatedRun
from ddpwatch.sources.frames import Frame, Tick
from tests.builders.fake_rank import steps_of

SYNC = wire.PHASES.index("sync")
SECOND_NS = 1_000_000_000


class Clock:
    """A clock that advances when sleep is called."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_ns = int(now_s * 1e9)
        self.slept = 0

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.now_ns += int(seconds * 1e9) + 1


def simulated(world_size: int, clock: Clock, **options) -> SimulatedSource:
    return SimulatedSource(world_size, clock=clock, sleep=clock.sleep, unix=lambda: clock.now_ns + 10**18, **options)


def frames_for(source: SimulatedSource, clock: Clock, seconds: float) -> list[Frame]:
    """Frames and ticks within this time."""
    until_ns = clock.now_ns + int(seconds * 1e9)
    items = []
    while clock.now_ns < until_ns:
        items.append(source.poll())
    return [item for item in items if isinstance(item, Frame)]


def state_of(source: SimulatedSource, frames: list[Frame]) -> RunState:
    state = RunState(source.run.id, source.run.name, source.run.world_size)
    for frame in frames:
        state.ingest(frame.payload, frame.received_ns)
    return state


def test_the_history_of_all_ranks_comes_first():
    clock = Clock()
    source = simulated(12, clock)
    frames = [source.poll() for _ in range(12)]

    assert clock.slept == 0
    assert all(frame.topic.startswith(wire.SNAP_PREFIX) for frame in frames)
    snaps = [wire.decode(frame.payload) for frame in frames]
    assert [snap.rank for snap in snaps] == list(range(12))
    assert {len(snap.steps) for snap in snaps} == {300}
    assert max(snap.steps[-1].end_ns for snap in snaps) <= clock.now_ns
    assert [snap.hello.host for snap in snaps] == ["node-0"] * 8 + ["node-1"] * 4
    assert {snap.hello.backend for snap in snaps} == {"nccl"}


def test_steps_continue_without_a_gap_over_chunks_and_segments():
    clock = Clock()
    source = simulated(5, clock)
    frames = frames_for(source, clock, 100.0)
    state = state_of(source, frames)

    assert state.bad == state.unknown == sum(rank.lost for rank in state.ranks.values()) == 0
    reported = {rank: [] for rank in range(5)}
    for message in map(wire.decode, (frame.payload for frame in frames)):
        if isinstance(message, wire.Snap | wire.Steps | wire.Beat):
            reported[message.rank] += steps_of(message)
    for steps in reported.values():
        assert [step.index for step in steps] == list(range(steps[0].index, steps[0].index + len(steps)))
        ends_ns = np.array([step.end_ns for step in steps])
        assert (np.diff(ends_ns) == [step.step_ns for step in steps[1:]]).all()
        assert len(steps) > 800
    # From one all-reduce to the next all ranks take the same time, also where one chunk ends and the next begins.
    shortest = min(map(len, reported.values()))
    left_ns = np.array([[step.end_ns - step.optimizer_ns for step in steps[:shortest]] for steps in reported.values()])
    assert np.ptp(left_ns, axis=0).max() < 1000  # nanoseconds, from rounding


def test_ranks_publish_four_times_a_second_and_are_alive():
    clock = Clock()
    source = simulated(20, clock)
    frames_for(source, clock, 1.0)
    frames = frames_for(source, clock, 10.0)
    beats = [message for message in map(wire.decode, (frame.payload for frame in frames)) if type(message) is wire.Beat]

    for rank in range(20):
        own = [beat for beat in beats if beat.rank == rank]
        assert len(own) == pytest.approx(40, abs=1)
        assert len({beat.cpu_percent for beat in own}) > 5
        assert len({beat.phase for beat in own}) > 2
    assert state_of(source, frames).unix_ns == pytest.approx(clock.now_ns + 10**18, abs=SECOND_NS)


def test_its_faults_are_found_with_their_cost():
    clock = Clock()
    source = simulated(24, clock, speed=8.0)
    seldom = Limits(judge=EvaluationLimits(stride_steps=25))  # often enough, and a fifth of the work
    monitor = Monitor(RunState(source.run.id, source.run.name, 24), seldom)
    until_ns = clock.now_ns + 30 * SECOND_NS
    found = []
    while clock.now_ns < until_ns and len(found) < 7:
        item = source.poll()
        if isinstance(item, Frame):
            monitor.ingest(item.payload, item.received_ns)
        else:
            monitor.tick(item.now_ns)
        found += [
            (event.kind, event.alert.finding.ranks, event.alert.finding.phase)
            for event in monitor.book.drain()
            if event.alert.finding.rule == "straggler" and event.kind != "changed"
        ]

    host = tuple(range(8, 16))
    stragglers = [((8,), "data"), ((16,), "backward"), (host, "backward"), ((8,), "data")]
    assert [(ranks, phase) for kind, ranks, phase in found if kind == "opened"] == stragglers
    assert [(ranks, phase) for kind, ranks, phase in found if kind == "closed"] == stragglers[:3]
    assert monitor.state.unix_ns > 10**18


def test_a_tick_comes_when_nothing_is_due_and_polling_without_a_timeout_never_sleeps():
    clock = Clock()
    source = simulated(1, clock, schedule=[Segment(100)])
    while isinstance(source.poll(0), Frame):
        pass
    slept = clock.slept

    assert source.poll(0) == Tick(clock.now_ns)
    assert clock.slept == slept
    before_ns = clock.now_ns
    assert isinstance(source.poll(5), Tick)
    assert clock.now_ns - before_ns == pytest.approx(5e6, abs=10)


def test_speed_plays_more_steps_in_the_same_time():
    counts = []
    for speed in (1.0, 5.0):
        clock = Clock()
        source = simulated(3, clock, speed=speed)
        state = state_of(source, frames_for(source, clock, 4.0))
        counts.append(state.step)
    first = SimulatedRun(3, now_ns=0, unix_ns=0)
    begun = wire.decode(first.snap(0, first.due_ns)).beat.step

    assert counts[1] - begun == pytest.approx(5 * (counts[0] - begun), rel=0.1)


def test_the_run_pauses_while_it_is_not_polled():
    clock = Clock()
    source = simulated(4, clock)
    state = state_of(source, frames_for(source, clock, 2.0))
    before = state.step
    clock.now_ns += 3600 * SECOND_NS
    frames = frames_for(source, clock, 0.5)
    for frame in frames:
        state.ingest(frame.payload, frame.received_ns)

    assert len(frames) < 100
    assert state.step - before < 2 * MAX_BEHIND_NS / 0.1e9
    assert sum(rank.lost for rank in state.ranks.values()) == 0


@pytest.mark.parametrize("slow_s", [0.02, 0.5, 5.0])
def test_a_slow_viewer_sees_a_run_that_lags_and_no_silent_rank(slow_s):
    clock = Clock()
    source = simulated(64, clock)
    state = RunState(source.run.id, source.run.name, 64)
    walls_ns = []
    for _ in range(1500):
        item = source.poll()
        if isinstance(item, Frame):
            state.ingest(item.payload, item.received_ns)
            clock.now_ns += int(slow_s * SECOND_NS)
        else:
            state.tick(item.now_ns)
        walls_ns.append(state.unix_ns)
        received = {state.condition(rank) for rank in state.ranks.values()}
        assert received <= {"ok", "missing"}

    assert walls_ns[64:] == sorted(walls_ns[64:])


def test_memory_stays_flat():
    run = SimulatedRun(64, now_ns=0, unix_ns=0, step_ms=10.0)
    for _ in range(100):
        run.next_messages()
    few = len(run._generator._chunks)
    for _ in range(2000):
        run.next_messages()

    assert len(run._generator._chunks) <= few + 1


def test_buckets_are_published_only_while_they_are_wanted():
    clock = Clock()
    source = simulated(2, clock)
    kinds = []
    for wanted in (False, True, False):
        source.want_buckets(wanted)
        source.close()  # what was under way
        frames = frames_for(source, clock, 2.0)
        kinds.append({frame.topic for frame in frames} & {b"bucket"})
    assert kinds == [set(), {b"bucket"}, set()]


def test_a_snapshot_in_the_middle_joins_the_stream():
    slow = Fault((3,), "backward", 0.3, onset=0)
    run = SimulatedRun(16, now_ns=5 * SECOND_NS, unix_ns=0, schedule=[Segment(50, (slow,))])
    for _ in range(100):
        run.next_messages()
    state = RunState("00", "late", 16)
    for rank in range(16):
        state.ingest(run.snap(rank, run.due_ns), run.due_ns)
    for _ in range(64):
        for _, _, payload in run.next_messages():
            state.ingest(payload, run.due_ns)

    for rank in state.ranks.values():
        indices = rank.steps.indices()
        assert len(indices) > 300
        assert (np.diff(indices) == 1).all()
        assert rank.lost == rank.bad == 0


@pytest.mark.parametrize(("world_size", "speed"), [(0, 1.0), (8193, 1.0), (4, 0.0), (4, float("nan"))])
def test_invalid_world_sizes_and_speeds_are_refused(world_size, speed):
    with pytest.raises(ValueError, match="simulated run"):
        SimulatedSource(world_size, speed=speed)


def test_the_demo_offers_as_many_ranks_as_can_be_simulated():
    assert MAX_SIMULATED == MAX_RANKS
