"""A synthetic run without end: steps generated in chunks by `Scenario`, published as agents would. Reads no clock.

Chunks are dropped when they are not needed, so that memory stays constant. Step numbers and clocks continue from one
chunk to the next.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch import wire
from ddpwatch.simulator.gpus import EVERY_NS, SimulatedGpus
from ddpwatch.simulator.scenario import (
    RANKS_PER_HOST,
    Fault,
    Scenario,
    Segment,
    default_schedule,
    segment_at,
    simulated_step,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    IntArray = NDArray[np.int64]

CHUNK_STEPS: Final = 50
"""Maximum number of steps that are generated at once."""
CHUNK_CELLS: Final = 1 << 16
"""Maximum number of steps times ranks that are generated at once: a few milliseconds of work."""
NOISE: Final = 0.015
"""Standard deviation of a phase's duration, as a fraction of it."""
SPIKES: Final = 0.04
"""Fraction of the steps in which any rank pauses; with more ranks it is rarer for each."""
WAVE: Final = 0.02
"""Amplitude of the slow oscillation of the whole job's speed."""
WAVE_STEPS: Final = 3000
"""Period of this oscillation."""
BATCH: Final = 32
"""Samples per rank and step."""
PARAMETERS: Final = 25_557_032
"""Parameters of the model, as in ResNet-50."""
BUCKETS: Final = 5
"""Gradient buckets of the model."""
BUCKETS_BEGIN: Final = 0.2
"""Fraction of the backward pass after which the first gradients are ready."""
ROUNDS_BEFORE: Final = 10
"""Number of repetitions of the schedule before the run is observed."""
INTO_FIRST_FAULT: Final = 100
"""Steps of the first fault that have passed when the run is observed."""
GROUPS: Final = 16
"""Ranks publish in this number of groups, in turn: neither one burst nor a thousand wakeups a second."""
CORES: Final = 12
"""CPU cores of each rank."""
_BACKWARD: Final = wire.PHASES.index("backward")
_SYNC: Final = wire.PHASES.index("sync")
_OPTIMIZER: Final = wire.PHASES.index("optimizer")


@dataclass(frozen=True)
class Chunk:
    """Consecutive steps of all ranks."""

    first: int
    end: int
    """One more than the last."""
    durations_ns: IntArray
    """(rank, step, phase)."""
    ends_ns: IntArray
    """(rank, step)."""

    def steps(self, rank: int, first: int, end: int) -> list[wire.Step]:
        """Steps of a rank within the range."""
        low, high = max(first, self.first), min(end, self.end)
        if low >= high:
            return []
        part = slice(low - self.first, high - self.first)
        rows = zip(self.ends_ns[rank, part].tolist(), self.durations_ns[rank, part].tolist(), strict=True)
        return [
            simulated_step(
                low + at, end_ns, phases_ns, BATCH,
                busy_ns=int((1 - BUCKETS_BEGIN) * phases_ns[_BACKWARD]) + phases_ns[_SYNC], comm_bytes=4 * PARAMETERS,
            )
            for at, (end_ns, phases_ns) in enumerate(rows)
        ]  # fmt: skip


class StepGenerator:
    """Steps of all ranks, generated on demand."""

    def __init__(
        self, world_size: int, schedule: Sequence[Segment], now_ns: int, history_steps: int, step_ms: float, seed: int
    ) -> None:
        """Begin with `history_steps` steps that end now, within the schedule's first fault after some repetitions."""
        self._world_size, self._schedule, self._step_ms, self._seed = world_size, tuple(schedule), step_ms, seed
        round_steps = sum(int(segment.length) for segment in self._schedule)
        self._chunks: deque[Chunk] = deque()
        self._base_ns = np.zeros(world_size, dtype=np.int64)
        """End of each rank's last generated step."""
        into = int(self._schedule[0].length) + INTO_FIRST_FAULT if len(self._schedule) > 1 else 0
        self.begin = ROUNDS_BEFORE * max(round_steps, wire.MAX_SNAP_STEPS) // round_steps * round_steps + into
        """First step after the history."""
        self._made = self.begin - history_steps
        while self._made < self.begin:
            self._make(self.begin - self._made)
        # A clock younger than the history puts this moment a little later than now.
        self.begin_ns = max(now_ns, int(self._base_ns.max()))
        """When all ranks have finished the history."""
        shift_ns = self.begin_ns - int(self._base_ns.max())
        self._base_ns = self._base_ns + shift_ns
        for chunk in self._chunks:
            np.add(chunk.ends_ns, shift_ns, out=chunk.ends_ns)

    def reach(self, now_ns: int) -> None:
        """Generate steps until all ranks are in the middle of one."""
        while self._base_ns.min() <= now_ns:
            self._make(CHUNK_STEPS)

    def forget(self, before: int) -> None:
        """Drop steps before this one."""
        while self._chunks[0].end <= before:
            self._chunks.popleft()

    def between(self, rank: int, first: int, end: int) -> list[wire.Step]:
        """Steps of a rank within the range that are not dropped."""
        return [step for chunk in self._chunks for step in chunk.steps(rank, first, end)]

    def finished(self, rank: int, first: int, now_ns: int) -> list[wire.Step]:
        """Steps of a rank from `first` on that have ended by now."""
        steps: list[wire.Step] = []
        for chunk in self._since(first):
            done = chunk.first + int(np.searchsorted(chunk.ends_ns[rank], now_ns, side="right"))
            steps += chunk.steps(rank, first, done)
            if done < chunk.end:
                break
        return steps

    def under_way(self, rank: int, index: int, now_ns: int) -> tuple[int, int]:
        """Current phase of a rank in this step, and the time since the phase began."""
        chunks = self._since(index)
        if not chunks:
            return 0, 0
        at = index - chunks[0].first
        durations_ns = chunks[0].durations_ns[rank, at].tolist()
        into_ns = max(0, now_ns - int(chunks[0].ends_ns[rank, at]) + sum(durations_ns))
        for phase, duration_ns in enumerate(durations_ns):
            if into_ns < duration_ns:
                return phase, into_ns
            into_ns -= duration_ns
        return len(durations_ns) - 1, into_ns

    def faults_at(self, index: int) -> tuple[Fault, ...]:
        """Faults in a step."""
        return self._schedule[segment_at(self._schedule, index)[0]].faults

    def _since(self, index: int) -> list[Chunk]:
        """The chunks from the one with this step on."""
        return [chunk for chunk in self._chunks if chunk.end > index]

    def _make(self, most: int) -> None:
        """Generate the next steps, at most `most` and within one segment."""
        segment, left = segment_at(self._schedule, self._made)
        steps = min(most, int(left), CHUNK_STEPS, max(1, CHUNK_CELLS // self._world_size))
        wave = 1.0 + WAVE * math.sin(2 * math.pi * self._made / WAVE_STEPS)
        scenario = Scenario(
            self._world_size, steps=steps, step_ms=self._step_ms * wave, noise=NOISE, spikes=SPIKES / self._world_size,
            drift=0.0, faults=self._schedule[segment].faults, seed=self._seed * 2**32 + self._made,
        )  # fmt: skip
        durations_ns = scenario.phases_ns()
        # A scenario starts all ranks together; here they continue where the last chunk ended.
        sync_ns = durations_ns[:, _SYNC, 0]
        own_ns = durations_ns[:, :, 0].sum(axis=1) - sync_ns - durations_ns[:, _OPTIMIZER, 0]
        arrival_ns = self._base_ns + own_ns
        durations_ns[:, _SYNC, 0] = arrival_ns.max() - arrival_ns + sync_ns.min()
        ends_ns = self._base_ns[:, None] + durations_ns.sum(axis=1).cumsum(axis=1)
        by_step_ns = np.ascontiguousarray(durations_ns.transpose(0, 2, 1))
        self._chunks.append(Chunk(self._made, self._made + steps, by_step_ns, ends_ns))
        self._base_ns = ends_ns[:, -1].copy()
        self._made += steps


class SimulatedRun:
    """All ranks of a synthetic run: messages when they are due, and snapshots on request."""

    def __init__(
        self,
        world_size: int,
        *,
        now_ns: int,
        unix_ns: int,
        schedule: Sequence[Segment] | None = None,
        run_id: str = "51a1a7ed",
        name: str = "simulated",
        pid: int | None = None,
        step_ms: float = 100.0,
        history_steps: int = 300,
        flush_ns: int | None = None,
        seed: int = 0,
    ) -> None:
        """Start at `now_ns` on the ranks' clocks and `unix_ns` on the wall clock, with a history.

        Defaults: `default_schedule`, a pid of its own for each rank, and the publishing interval of real agents.
        """
        self.world_size, self.run_id, self.name, self._pid = world_size, run_id, name, pid
        self.flush_ns = flush_ns or wire.beat_ns(world_size)
        self.buckets_wanted = False
        """Whether to publish the gradient buckets of the latest step."""
        self._history_steps = min(history_steps, wire.MAX_SNAP_STEPS)
        self._generator = StepGenerator(
            world_size, schedule or default_schedule(world_size), now_ns, self._history_steps, step_ms, seed
        )
        self._next = [self._generator.begin] * world_size
        """First unpublished step of each rank."""
        self._seqs = [0] * world_size
        self._turns = 0
        self._groups = min(GROUPS, world_size)
        self._started_unix_ns = max(0, unix_ns - int(self._generator.begin * step_ms * 1e6))
        self._wall_ns = unix_ns - self.due_ns
        """Wall clock at zero of the ranks' clocks."""
        self._gpus = SimulatedGpus(world_size, RANKS_PER_HOST, seed)
        rng = np.random.default_rng(seed)
        self._flicker: list[float] = rng.normal(0.0, 1.0, 1024).tolist()
        """Noise of CPU and memory figures."""
        self._rss_bytes: list[int] = (rng.uniform(5.5, 6.5, world_size) * (1 << 30)).astype(np.int64).tolist()

    @property
    def due_ns(self) -> int:
        """When `next_messages` is due, on the ranks' clocks."""
        return self._generator.begin_ns + self._turns * self.flush_ns // self._groups

    def next_messages(self) -> list[tuple[int, bytes, bytes]]:
        """Messages of the next group of ranks: rank, topic and payload, in order."""
        now_ns = self.due_ns
        lap, group = divmod(self._turns, self._groups)
        self._turns += 1
        self._generator.reach(now_ns)
        reported: list[tuple[int, bytes, bytes]] = []
        for rank in range(group, self.world_size, self._groups):
            messages = self._messages(rank, lap, now_ns)
            reported += [(rank, _topic(message), wire.encode(message)) for message in messages]
        if group == 0:
            self._generator.forget(min(self._next) - self._history_steps)
        return reported

    def snap(self, rank: int, now_ns: int) -> bytes:
        """Payload of a snapshot: the published history of a rank."""
        seq, end = self._seqs[rank], self._next[rank]
        steps = self._generator.between(rank, end - self._history_steps, end)
        beat, hello = self._beat(rank, seq, now_ns), self._hello(rank, seq, now_ns)
        gpus = self._read_gpus(rank, seq, steps[-1], now_ns) if steps else None
        moments = self._gpus.moments(rank, steps, self._generator.faults_at)
        return wire.encode(
            wire.Snap(rank=rank, seq=seq, hello=hello, beat=beat, steps=steps, gpus=gpus, gpu_moments=moments)
        )

    def bye(self, rank: int, now_ns: int) -> bytes:
        """Payload of an exit message."""
        return wire.encode(wire.Bye(rank=rank, seq=self._number(rank), reason="exit", text="", mono_ns=now_ns))

    def host(self, rank: int) -> str:
        """Host name of a rank."""
        return f"node-{rank // RANKS_PER_HOST}"

    def pid(self, rank: int) -> int:
        """Process id of a rank."""
        return 1000 + rank if self._pid is None else self._pid

    def _number(self, rank: int) -> int:
        self._seqs[rank] += 1
        return self._seqs[rank]

    def _messages(self, rank: int, lap: int, now_ns: int) -> list[wire.Message]:
        messages: list[wire.Message] = []
        if (lap + rank) % max(1, wire.HELLO_NS // self.flush_ns) == 0:
            messages.append(self._hello(rank, self._number(rank), now_ns))
        steps = self._generator.finished(rank, self._next[rank], now_ns)
        seq, gpus = self._number(rank), None
        if steps:
            self._next[rank] = steps[-1].index + 1
            if self.buckets_wanted:
                messages.append(_buckets(rank, seq - 1, steps[-1]))
            if (lap + rank) % max(1, EVERY_NS // self.flush_ns) == 0:
                gpus = self._read_gpus(rank, seq, steps[-1], now_ns)
        messages.append(self._beat(rank, seq, now_ns, steps, gpus))
        return messages

    def _read_gpus(self, rank: int, seq: int, step: wire.Step, now_ns: int) -> wire.Gpus:
        gpu = self._gpus.gpu(rank, self.pid(rank), step, self._generator.faults_at(step.index), now_ns)
        return wire.Gpus(rank=rank, seq=seq, mono_ns=now_ns, gpus=[gpu])

    def _beat(
        self, rank: int, seq: int, now_ns: int, steps: Sequence[wire.Step] = (), gpus: wire.Gpus | None = None
    ) -> wire.Beat:
        index = self._next[rank]
        phase, phase_ns = self._generator.under_way(rank, index, now_ns)
        flicker = self._flicker[(self._turns // self._groups + 37 * rank) % len(self._flicker)]
        return wire.Beat(
            rank=rank, seq=seq, mono_ns=now_ns, step=index, phase=phase, phase_ns=phase_ns,
            groups=[wire.Group("0", self.world_size, index * BUCKETS + (BUCKETS if phase >= _SYNC else 0))],
            cpu_percent=round(max(0.0, 104.0 + 3.0 * flicker), 1),
            rss_bytes=self._rss_bytes[rank] + int(abs(flicker) * (8 << 20)),
            agent_cpu_ns=index * 60_000, hook_ns=index * 30_000,
            table=wire.pack_steps(steps), gpus=gpus, table_columns=len(wire.STEP_COLUMNS),
        )  # fmt: skip

    def _hello(self, rank: int, seq: int, now_ns: int) -> wire.Hello:
        return wire.Hello(
            rank=rank, seq=seq, wire_version=wire.WIRE_VERSION, agent_version="simulated", run_id=self.run_id,
            run_name=self.name, attempt=0, world_size=self.world_size, local_rank=rank % RANKS_PER_HOST,
            host=self.host(rank), pid=self.pid(rank), started_unix_ns=self._started_unix_ns, mono_ns=now_ns,
            backend="nccl", device=f"cuda:{rank % RANKS_PER_HOST}", model="Simulated", kind="ddp", comm="buckets",
            python="3.11", torch="simulated",
            ddp={"bucket_cap_mb": "25", "static_graph": "False", "find_unused_parameters": "False"},
            parameters=PARAMETERS, parameter_bytes=4 * PARAMETERS, unix_ns=max(0, self._wall_ns + now_ns), cores=CORES,
        )  # fmt: skip


def _topic(message: wire.Message) -> bytes:
    """Topic that an agent would choose."""
    with_gpus = isinstance(message, wire.Beat) and message.gpus is not None
    return wire.TOPICS[wire.Gpus if with_gpus else type(message)]


def _buckets(rank: int, seq: int, step: wire.Step) -> wire.Buckets:
    """Buckets whose gradients become ready evenly; the last one ends with the all-reduce."""
    buckets = []
    for index in range(BUCKETS):
        ready = BUCKETS_BEGIN + (1 - BUCKETS_BEGIN) * index / (BUCKETS - 1)
        done = BUCKETS_BEGIN + (1 - BUCKETS_BEGIN) * (index + 1) / BUCKETS
        ready_ns, done_ns = int(ready * step.backward_ns), int(done * (step.backward_ns + step.sync_ns))
        buckets.append(wire.Bucket(index, 4 * PARAMETERS // BUCKETS, ready_ns, max(done_ns, ready_ns)))
    return wire.Buckets(rank=rank, seq=seq, step=step.index, buckets=buckets)
