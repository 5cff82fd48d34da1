"""The steps of a made-up run that never ends: chapters of health and of faults, in turn. Reads no clock.

They are made up in chunks by `synthetic.Scenario` and forgotten when nobody needs them any more, so hours take no more
memory than minutes. Numbers and clocks go on from one chunk to the next without a seam.

A made-up run that never ends, told in turns as its agents would tell it. Reads no clock and knows no socket.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch import wire
from ddpwatch.simulator.gpus import EVERY_NS, MadeGpus
from ddpwatch.simulator.scenario import Chapter, Fault, Scenario, chapter_at, simulated_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    IntArray = NDArray[np.int64]

CHUNK_STEPS: Final = 50
CHUNK_CELLS: Final = 1 << 16
"""Steps of all ranks that are made up at a time: a few milliseconds of work."""
NOISE: Final = 0.015
SPIKES: Final = 0.04
"""Part of the steps in which any rank at all pauses; the more ranks, the rarer for each."""
WAVE: Final = 0.02
WAVE_STEPS: Final = 3000
"""The whole job's speed comes and goes a little."""
BATCH: Final = 32
PARAMETERS: Final = 25_557_032
BUCKETS_BEGIN: Final = 0.2
"""Part of the backward pass after which the first gradients are ready."""
ROUNDS_BEFORE: Final = 10
"""How often the story was told before anybody came."""
INTO_FIRST_FAULT: Final = 100
_BACKWARD: Final = wire.PHASES.index("backward")
_SYNC: Final = wire.PHASES.index("sync")
_OPTIMIZER: Final = wire.PHASES.index("optimizer")


def story_of(world_size: int, ranks_per_host: int) -> tuple[Chapter, ...]:
    """A rank that waits for data, one that is slow in backward and, where there are several, a slow host; with pauses.

    It begins with health.
    """
    if world_size == 1:
        return (Chapter(200),)
    late, slow = world_size // 3, 2 * world_size // 3
    story = (
        Chapter(200),
        Chapter(250, (Fault((late,), "data", 0.35, onset=0),)),
        Chapter(200),
        Chapter(250, (Fault((slow,), "backward", 0.25, onset=0),)),
    )
    hosts = world_size // ranks_per_host
    if hosts < 3:
        return story
    hot = tuple(range(hosts // 2 * ranks_per_host, (hosts // 2 + 1) * ranks_per_host))
    heat = tuple(Fault(hot, phase, size, onset=0) for phase, size in (("forward", 0.06), ("backward", 0.12)))
    return (*story, Chapter(200), Chapter(250, heat))


@dataclass(frozen=True)
class Chunk:
    """Steps of all ranks that follow each other."""

    first: int
    end: int
    """One more than the last."""
    durations_ns: IntArray
    """(rank, step, phase)"""
    ends_ns: IntArray
    """(rank, step)"""

    def steps(self, rank: int, first: int, end: int) -> list[wire.Step]:
        """Those of a rank that are in the range."""
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


class Course:
    """All steps of all ranks from the history on. It is made further as it is asked for."""

    def __init__(
        self, world_size: int, story: Sequence[Chapter], *, now_ns: int, history_steps: int, step_ms: float, seed: int
    ) -> None:
        """Let a history of so many steps end now: in the story's first fault, after many times that it was told."""
        self._world_size, self._story, self._step_ms, self._seed = world_size, tuple(story), step_ms, seed
        round_steps = sum(int(chapter.length) for chapter in self._story)
        self._chunks: deque[Chunk] = deque()
        self._base_ns = np.zeros(world_size, dtype=np.int64)
        """When each rank's last step that is made up ends."""
        into = int(self._story[0].length) + INTO_FIRST_FAULT if len(self._story) > 1 else 0
        self.begin = ROUNDS_BEFORE * max(round_steps, wire.MAX_SNAP_STEPS) // round_steps * round_steps + into
        """First step after the history."""
        self._made = self.begin - history_steps
        while self._made < self.begin:
            self._make(self.begin - self._made)
        # On a clock that has not run for as long as the history, this moment lies a little later than now.
        self.begin_ns = max(now_ns, int(self._base_ns.max()))
        """When the history has just ended on all ranks."""
        shift_ns = self.begin_ns - int(self._base_ns.max())
        self._base_ns = self._base_ns + shift_ns
        for chunk in self._chunks:
            np.add(chunk.ends_ns, shift_ns, out=chunk.ends_ns)

    def reach(self, now_ns: int) -> None:
        """Make steps until all ranks are in the middle of one."""
        while self._base_ns.min() <= now_ns:
            self._make(CHUNK_STEPS)

    def forget(self, before: int) -> None:
        """Nobody will ask for steps before this one any more."""
        while self._chunks[0].end <= before:
            self._chunks.popleft()

    def between(self, rank: int, first: int, end: int) -> list[wire.Step]:
        """A rank's steps in the range, of those that are not forgotten."""
        return [step for chunk in self._chunks for step in chunk.steps(rank, first, end)]

    def finished(self, rank: int, first: int, now_ns: int) -> list[wire.Step]:
        """A rank's steps from one on that have ended by now."""
        steps: list[wire.Step] = []
        for chunk in self._since(first):
            done = chunk.first + int(np.searchsorted(chunk.ends_ns[rank], now_ns, side="right"))
            steps += chunk.steps(rank, first, done)
            if done < chunk.end:
                break
        return steps

    def under_way(self, rank: int, index: int, now_ns: int) -> tuple[int, int]:
        """The phase that a rank is in, being in this step, and for how long it has been."""
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
        """What is wrong in a step."""
        return self._story[chapter_at(self._story, index)[0]].faults

    def _since(self, index: int) -> list[Chunk]:
        """The chunks from the one with this step on. It is one of the last."""
        chunks: list[Chunk] = []
        for chunk in reversed(self._chunks):
            if chunk.end <= index:
                break
            chunks.append(chunk)
        chunks.reverse()
        return chunks

    def _make(self, most: int) -> None:
        """Make up the next steps, at most so many and not beyond the chapter."""
        chapter, left = chapter_at(self._story, self._made)
        steps = min(most, int(left), CHUNK_STEPS, max(1, CHUNK_CELLS // self._world_size))
        wave = 1.0 + WAVE * math.sin(2 * math.pi * self._made / WAVE_STEPS)
        durations_ns = Scenario(
            self._world_size, steps=steps, step_ms=self._step_ms * wave, noise=NOISE, drift=0.0,
            spikes=SPIKES / self._world_size, faults=self._story[chapter].faults, seed=self._seed * 2**32 + self._made,
        ).phases_ns()  # fmt: skip
        # The scenario lets all ranks begin together. Here they begin where the last chunk has left them.
        sync_ns = durations_ns[:, _SYNC, 0]
        own_ns = durations_ns[:, :, 0].sum(axis=1) - sync_ns - durations_ns[:, _OPTIMIZER, 0]
        arrival_ns = self._base_ns + own_ns
        durations_ns[:, _SYNC, 0] = arrival_ns.max() - arrival_ns + sync_ns.min()
        ends_ns = self._base_ns[:, None] + durations_ns.sum(axis=1).cumsum(axis=1)
        by_step_ns = np.ascontiguousarray(durations_ns.transpose(0, 2, 1))
        self._chunks.append(Chunk(self._made, self._made + steps, by_step_ns, ends_ns))
        self._base_ns = ends_ns[:, -1].copy()
        self._made += steps


RANKS_PER_HOST: Final = 8
FLUSH_NS: Final = 250_000_000
FLUSH_MANY_NS: Final = 1_000_000_000
MANY_RANKS: Final = 256
"""Above so many ranks, agents speak up once a second."""
HELLO_NS: Final = 5_000_000_000
GROUPS: Final = 16
"""Ranks take turns in so many groups: all at once would be a burst, one by one a thousand wake-ups a second."""
BUCKETS: Final = 5
CORES: Final = 12
"""That each rank may run on."""


class Endless:
    """All ranks of the run. Whoever has it asks for a turn when it is due, and for snapshots as they are wanted."""

    def __init__(
        self,
        world_size: int,
        *,
        now_ns: int,
        unix_ns: int,
        story: Sequence[Chapter] | None = None,
        run_id: str = "51a1a7ed",
        name: str = "simulated",
        pid: int | None = None,
        step_ms: float = 100.0,
        history_steps: int = 300,
        flush_ns: int | None = None,
        seed: int = 0,
    ) -> None:
        """It is `now_ns` on the ranks' clocks and `unix_ns` on the wall, and the run has been going on for a while.

        Without a `story` it is that of `story_of`; without a `pid` each rank has one of its own; without `flush_ns`
        ranks speak up as often as real agents do in a world of this size.
        """
        self.world_size, self.run_id, self.name, self._pid = world_size, run_id, name, pid
        self.flush_ns = flush_ns or (FLUSH_NS if world_size <= MANY_RANKS else FLUSH_MANY_NS)
        self.buckets_wanted = False
        """Whether somebody looks at the buckets: then those of the latest step are told, too."""
        self._history_steps = min(history_steps, wire.MAX_SNAP_STEPS)
        self._course = Course(
            world_size, story or story_of(world_size, RANKS_PER_HOST), now_ns=now_ns,
            history_steps=self._history_steps, step_ms=step_ms, seed=seed,
        )  # fmt: skip
        self._next = [self._course.begin] * world_size
        """First step that each rank has not told yet."""
        self._seqs = [0] * world_size
        self._turns = 0
        self._groups = min(GROUPS, world_size)
        self._started_unix_ns = max(0, unix_ns - int(self._course.begin * step_ms * 1e6))
        self.set_wall(self.due_ns, unix_ns)
        self._gpus = MadeGpus(world_size, RANKS_PER_HOST, seed)
        chance = np.random.default_rng(seed)
        self._flicker: list[float] = chance.normal(0.0, 1.0, 1024).tolist()
        """What makes beats look alive."""
        self._rss_bytes: list[int] = (chance.uniform(5.5, 6.5, world_size) * (1 << 30)).astype(np.int64).tolist()

    @property
    def due_ns(self) -> int:
        """When the next turn is, on the ranks' clocks."""
        return self._course.begin_ns + self._turns * self.flush_ns // self._groups

    def set_wall(self, now_ns: int, unix_ns: int) -> None:
        """What time it is on the wall when it is `now_ns` on the ranks' clocks."""
        self._wall_ns = unix_ns - now_ns

    def turn(self) -> list[tuple[int, bytes, bytes]]:
        """What the next group of ranks publishes: rank, topic and payload, in order."""
        now_ns = self.due_ns
        lap, group = divmod(self._turns, self._groups)
        self._turns += 1
        self._course.reach(now_ns)
        reported: list[tuple[int, bytes, bytes]] = []
        for rank in range(group, self.world_size, self._groups):
            messages = self._messages(rank, lap, now_ns)
            reported += [(rank, _topic(message), wire.encode(message)) for message in messages]
        if group == 0:
            self._course.forget(min(self._next) - self._history_steps)
        return reported

    def snap(self, rank: int, now_ns: int) -> bytes:
        """The payload of a snapshot: the history up to what the rank has told so far."""
        seq, end = self._seqs[rank], self._next[rank]
        steps = self._course.between(rank, end - self._history_steps, end)
        beat, hello = self._beat(rank, seq, now_ns), self._hello(rank, seq, now_ns)
        gpus = self._read_gpus(rank, seq, steps[-1], now_ns) if steps else None
        moments = self._gpus.moments(rank, steps, self._course.faults_at)
        return wire.encode(
            wire.Snap(rank=rank, seq=seq, hello=hello, beat=beat, steps=steps, gpus=gpus, gpu_moments=moments)
        )

    def bye(self, rank: int, now_ns: int) -> bytes:
        """The payload of a goodbye."""
        return wire.encode(wire.Bye(rank=rank, seq=self._number(rank), reason="exit", text="", mono_ns=now_ns))

    def host(self, rank: int) -> str:
        """The name of the host that a rank is on."""
        return f"node-{rank // RANKS_PER_HOST}"

    def pid(self, rank: int) -> int:
        """A rank's process."""
        return 1000 + rank if self._pid is None else self._pid

    def _number(self, rank: int) -> int:
        self._seqs[rank] += 1
        return self._seqs[rank]

    def _messages(self, rank: int, lap: int, now_ns: int) -> list[wire.Message]:
        messages: list[wire.Message] = []
        if (lap + rank) % max(1, HELLO_NS // self.flush_ns) == 0:
            messages.append(self._hello(rank, self._number(rank), now_ns))
        steps = self._course.finished(rank, self._next[rank], now_ns)
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
        gpu = self._gpus.gpu(rank, self.pid(rank), step, self._course.faults_at(step.index), now_ns)
        return wire.Gpus(rank=rank, seq=seq, mono_ns=now_ns, gpus=[gpu])

    def _beat(
        self, rank: int, seq: int, now_ns: int, steps: Sequence[wire.Step] = (), gpus: wire.Gpus | None = None
    ) -> wire.Beat:
        index = self._next[rank]
        phase, phase_ns = self._course.under_way(rank, index, now_ns)
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
    """As an agent chooses it."""
    with_gpus = isinstance(message, wire.Beat) and message.gpus is not None
    return wire.TOPICS[wire.Gpus if with_gpus else type(message)]


def _buckets(rank: int, seq: int, step: wire.Step) -> wire.Buckets:
    """The gradients become ready evenly; the last bucket is done when the all-reduce is."""
    buckets = []
    for index in range(BUCKETS):
        ready = BUCKETS_BEGIN + (1 - BUCKETS_BEGIN) * index / (BUCKETS - 1)
        done = BUCKETS_BEGIN + (1 - BUCKETS_BEGIN) * (index + 1) / BUCKETS
        ready_ns, done_ns = int(ready * step.backward_ns), int(done * (step.backward_ns + step.sync_ns))
        buckets.append(wire.Bucket(index, 4 * PARAMETERS // BUCKETS, ready_ns, max(done_ns, ready_ns)))
    return wire.Buckets(rank=rank, seq=seq, step=step.index, buckets=buckets)
