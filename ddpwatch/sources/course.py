"""The steps of a made-up run that never ends: chapters of health and of faults, in turn. Reads no clock.

They are made up in chunks by `synthetic.Scenario` and forgotten when nobody needs them any more, so hours take no more
memory than minutes. Numbers and clocks go on from one chunk to the next without a seam.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch import wire
from ddpwatch.sources.synthetic import Chapter, Fault, Scenario, chapter_at, simulated_step

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
