"""A made-up run that never ends, told in turns as its agents would tell it. Reads no clock and knows no socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch import wire
from ddpwatch.sources.course import BUCKETS_BEGIN, PARAMETERS, Course, story_of
from ddpwatch.sources.made_gpus import EVERY_NS, MadeGpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.sources.synthetic import Chapter

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
_SYNC: Final = wire.PHASES.index("sync")


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
        told: list[tuple[int, bytes, bytes]] = []
        for rank in range(group, self.world_size, self._groups):
            messages = self._messages(rank, lap, now_ns)
            told += [(rank, _topic(message), wire.encode(message)) for message in messages]
        if group == 0:
            self._course.forget(min(self._next) - self._history_steps)
        return told

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
