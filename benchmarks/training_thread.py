"""What the passive agent adds to a step on the training thread: one small model, one bucket."""

from __future__ import annotations

from benchmarks.pairs import added, alone, block, installed, row, small_model, train

PAIRS = 60
STEPS = 150
BUDGET_US = 50.0


def main() -> None:
    """Blocks with and without the agent, in turn."""
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


main()
