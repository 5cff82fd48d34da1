"""Baseline of a job's speed, in blocks of steps over its whole life: what the slowdown rules compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.diagnosis.straggler_stats import MAD_TO_SIGMA
from ddpwatch.core.limits import BaselineLimits
from ddpwatch.core.metrics.window import sampled_ranks

if TYPE_CHECKING:
    from ddpwatch.core.metrics.window import Window

MAX_BLOCKS: Final = 256
"""Blocks of steps that are kept of a run."""


@dataclass(frozen=True)
class Block:
    """Medians of the job over consecutive steps."""

    last_step: int
    work_ns: float
    """Work of the faster ranks: neither a straggler nor a slow half of the ranks changes it."""
    wire_ns: float
    step_ns: float
    comm_bytes: float
    """Gradient bytes per step; 0 = not known."""
    samples: float
    """Samples of a rank per step; 0 = not known."""
    steps: int

    def is_comparable(self, other: Block) -> bool:
        """Whether the two blocks did the same amount of work."""
        return (self.comm_bytes, self.samples) == (other.comm_bytes, other.samples)


@dataclass(frozen=True)
class Baseline:
    """Median and scaled MAD of a figure over blocks."""

    value: float
    spread: float


class History:
    """Blocks in order, at most `MAX_BLOCKS`: when they are full, every second one is dropped."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def add(self, window: Window) -> None:
        """Append the block of a window."""
        self.blocks.append(block_of(window))
        if len(self.blocks) > MAX_BLOCKS:
            # The latest one stays, as the next block's neighbor.
            del self.blocks[-3::-2]

    def steady(self, name: str, like: Block, least_s: float) -> Baseline | None:
        """Baseline of one figure over comparable blocks; None if they are too few or span less than `least_s` seconds.

        The better half of the blocks counts, so that a job that was slow for a while is compared with its good times.
        """
        comparable = [block for block in self.blocks if block.is_comparable(like)]
        if len(comparable) < BaselineLimits.MIN_BLOCKS:
            return None
        span_steps = comparable[-1].last_step - comparable[0].last_step + BaselineLimits.BLOCK_STEPS
        if span_steps * float(np.median([block.step_ns for block in comparable])) < least_s * 1e9:
            return None
        values = np.sort([getattr(block, name) for block in comparable])
        better = values[: max(BaselineLimits.MIN_BLOCKS, (len(values) + 1) // 2)]
        median = float(np.median(better))
        return Baseline(median, MAD_TO_SIGMA * float(np.median(np.abs(better - median))))


def open_delay_steps(open_delay_s: float, block: Block) -> float:
    """Number of steps in `open_delay_s` seconds, at the pace of the block."""
    return open_delay_s * 1e9 / max(block.step_ns, 1.0)


def block_of(window: Window) -> Block:
    """Block of a window that holds at least one step."""
    # The lower quartile: with two ranks the faster one, which a median would mix with the slower.
    self_ns = sampled_ranks(window.self_ns)
    faster_ns = np.sort(self_ns, axis=0)[(len(self_ns) - 1) // 4]
    return Block(
        last_step=int(window.indices[-1]),
        work_ns=float(np.median(faster_ns)),
        wire_ns=float(np.median(window.wire_ns)),
        step_ns=float(np.median(window.job_step_ns)),
        comm_bytes=float(np.median(sampled_ranks(window.column("comm_bytes")))),
        samples=float(np.median(sampled_ranks(window.column("samples")))),
        steps=len(window),
    )
