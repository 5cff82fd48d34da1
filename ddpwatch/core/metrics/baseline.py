"""How the job did over its whole life, in blocks of steps: what it is compared with when it becomes slower."""

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


@dataclass(frozen=True)
class Block:
    """The job over some steps that followed each other."""

    last_step: int
    work_ns: float
    """Own work of the faster ranks: neither a slow rank nor a slow half of them moves it."""
    wire_ns: float
    step_ns: float
    comm_bytes: float
    """Gradient bytes a step; 0 = not known."""
    samples: float
    """Samples of a rank in a step; 0 = not known."""
    steps: int

    def is_comparable(self, other: Block) -> bool:
        """Whether the two can be compared: the same amount of work."""
        return (self.comm_bytes, self.samples) == (other.comm_bytes, other.samples)


@dataclass(frozen=True)
class Steady:
    """What was usual, and how far single blocks were from it."""

    value: float
    spread: float


class History:
    """Blocks in order, at most `MAX_BLOCKS`: when they are full, every second one is forgotten."""

    def __init__(self) -> None:
        """Begin with none."""
        self.blocks: list[Block] = []

    def add(self, window: Window) -> None:
        """Take the steps of a whole block."""
        self.blocks.append(block_of(window))
        if len(self.blocks) > MAX_BLOCKS:
            # The latest one stays: the next one is compared with its neighbour.
            del self.blocks[-3::-2]

    def steady(self, name: str, like: Block, least_s: float) -> Steady | None:
        """The usual value of one figure in earlier blocks with as many samples and bytes; None if they are too few.

        They must span `least_s`, too. The usual is what the better half of the blocks had, so that a job that was slow
        for a while is still compared with its good times.
        """
        is_comparable = [block for block in self.blocks if block.is_comparable(like)]
        if len(is_comparable) < BaselineLimits.MIN_BLOCKS:
            return None
        span_steps = is_comparable[-1].last_step - is_comparable[0].last_step + BaselineLimits.BLOCK_STEPS
        if span_steps * float(np.median([block.step_ns for block in is_comparable])) < least_s * 1e9:
            return None
        values = np.sort([getattr(block, name) for block in is_comparable])
        better = values[: max(BaselineLimits.MIN_BLOCKS, (len(values) + 1) // 2)]
        middle = float(np.median(better))
        return Steady(middle, MAD_TO_SIGMA * float(np.median(np.abs(better - middle))))


def open_delay_steps(lasting_s: float, block: Block) -> float:
    """How many steps that is, at the pace of the block."""
    return lasting_s * 1e9 / max(block.step_ns, 1.0)


def block_of(window: Window) -> Block:
    """One block from a window that holds at least one step."""
    # The lower quartile: of two ranks the faster one, which a median would mix with the slower.
    asked = sampled_ranks(window.self_ns)
    faster_ns = np.sort(asked, axis=0)[(len(asked) - 1) // 4]
    return Block(
        last_step=int(window.indices[-1]),
        work_ns=float(np.median(faster_ns)),
        wire_ns=float(np.median(window.wire_ns)),
        step_ns=float(np.median(window.job_step_ns)),
        comm_bytes=float(np.median(sampled_ranks(window.column("comm_bytes")))),
        samples=float(np.median(sampled_ranks(window.column("samples")))),
        steps=len(window),
    )
