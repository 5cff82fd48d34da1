"""Python time of the CUDA clock per step, against CUDA calls that do nothing, beside that of the host clock.

The stand-ins are functions of C, as torch's bindings are, so that what is measured is ddpwatch's own code.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import repeat
from typing import TYPE_CHECKING

import torch

from benchmarks.pairs import added, block, row
from ddpwatch.agent.clock import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PRESYNC, SYNC, HostClock
from ddpwatch.agent.cuda_calls import CudaCalls
from ddpwatch.agent.cuda_clock import CudaClock

if TYPE_CHECKING:
    from collections.abc import Callable

PAIRS = 100
STEPS = 400
BUDGET_US = 25.0
USUAL = (DATA, OTHER, PRESYNC, FORWARD, OTHER, BACKWARD, SYNC, OTHER, OPTIMIZER, OTHER)
"""Phases that begin in a usual step; its end is one more stamp."""


class NoEvent(float):
    """An event that has completed, at the same time as any other."""


def nothing() -> CudaCalls:
    """CUDA with one device and one stream, where each call returns at once."""
    return CudaCalls(
        current_device=repeat(0).__next__,
        is_capturing=repeat(False).__next__,
        stream_id=((0, 0, 1),).__getitem__,
        current_stream=("stream",).__getitem__,
        device=nullcontext,
        new_event=lambda **_: NoEvent(),
        record=float.__eq__,  # type: ignore[arg-type]
        query=float.is_integer,
        elapsed_ms=float.__add__,
    )


def steps_of(clock: HostClock) -> Callable[[], None]:
    """One step of this clock, with the settling of an earlier one."""
    settle = clock.settle if isinstance(clock, CudaClock) else None

    def step() -> None:
        for phase in USUAL:
            clock.switch(phase)
        clock.cut(OTHER)
        if settle is not None:
            settle()

    return step


def empty() -> None:
    """The loop alone."""
    for _phase in USUAL:
        pass


def main() -> None:
    """Blocks of each clock and of an empty loop, in turn."""
    cuda = steps_of(CudaClock(torch.device("cuda", 0), nothing()))
    host = steps_of(HostClock())
    blocks = [[block(step, STEPS) for step in (cuda, host, empty)] for _ in range(PAIRS)]
    of_cuda, of_host, of_nothing = (list(column) for column in zip(*blocks, strict=True))
    host_us = {name: cost_us for name, cost_us, _, _ in added(of_host, of_nothing)}
    noise_us = {name: noise for name, _, noise, _ in added(of_nothing, of_cuda)}
    for name, cost_us, _, _ in added(of_cuda, of_nothing):
        row(
            f"CUDA clock, {name} of a step with {len(USUAL) + 1} stamps, without CUDA",
            f"+{cost_us:.1f} us",
            f"{BUDGET_US:.0f} us",
            cost_us <= BUDGET_US,
            f"noise {noise_us[name]:.2f} us; x {cost_us / host_us[name]:.1f} the host clock ({host_us[name]:.1f} us)",
        )


main()
