"""What the passive agent adds to a step on the training thread, and to each collective that the script calls."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.pairs import added, alone, block, installed, row, small_model, train

PAIRS = 60
STEPS = 150
BUDGET_US = 40.0
POINTS = 6
"""Collectives in a step."""
POINT_BUDGET_US = 4.0


def main() -> None:
    """Blocks with and without the agent, then with and without its hooks of collectives, in turn."""
    alone()
    model, optimizer, batch = small_model()

    def step() -> None:
        train(model, optimizer, batch)

    block(step, 500)
    with_it, without = [], []
    for _ in range(PAIRS):
        with installed(model, step):
            with_it.append(block(step, STEPS))
        without.append(block(step, STEPS))
    for name, cost_us, noise_us, base_us in added(with_it, without):
        row(
            f"training thread, passive, {name} of a {base_us:.0f} us step",
            f"+{cost_us:.1f} us",
            f"{BUDGET_US:.0f} us",
            cost_us <= BUDGET_US,
            f"noise {noise_us:.1f} us",
        )

    value = torch.ones(1)

    def step_with_points() -> None:
        step()
        for _ in range(POINTS):
            dist.all_reduce(value)

    with_it.clear()
    without.clear()
    for _ in range(PAIRS):
        with installed(model, step_with_points):
            with_it.append(block(step_with_points, STEPS))
        with installed(model, step_with_points) as agent:
            agent._collectives.remove()
            without.append(block(step_with_points, STEPS))
    for name, cost_us, noise_us, base_us in added(with_it, without):
        row(
            f"each of {POINTS} extra sync points, {name} of a {base_us:.0f} us step",
            f"+{cost_us / POINTS:.1f} us",
            f"{POINT_BUDGET_US:.0f} us",
            cost_us / POINTS <= POINT_BUDGET_US,
            f"noise {noise_us / POINTS:.1f} us",
        )


main()
