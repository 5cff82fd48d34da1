"""What `comm="buckets"` adds for each gradient bucket."""

from __future__ import annotations

import ddpwatch.agent
from benchmarks.pairs import added, alone, block, installed, row, small_model, train

PAIRS = 40
STEPS = 100
LAYERS = 16
BUDGET_US = 25.0


def main() -> None:
    """Two equal models, one with the timing hook and one without; both are watched, so only the hook differs."""
    alone()
    cap = {"bucket_cap_mb": 0.02}
    timed = small_model(LAYERS, **cap)
    plain = small_model(LAYERS, **cap)
    agent = installed(timed[0], lambda: train(*timed), comm="buckets")
    block(lambda: train(*timed), 50)
    buckets = len(timed[0].reducer._get_zeros_like_grad_buckets())
    # From here on the hook cannot be taken back; the second model joins without one.
    agent._wants_buckets = False
    ddpwatch.agent.install(plain[0])
    block(lambda: train(*plain), 50)
    with_it, without = [], []
    for _ in range(PAIRS):
        with_it.append(block(lambda: train(*timed), STEPS))
        without.append(block(lambda: train(*plain), STEPS))
    for name, cost_us, noise_us, _ in added(with_it, without):
        row(
            f'comm="buckets", {name}, each of {buckets} buckets',
            f"+{cost_us / buckets:.1f} us",
            f"{BUDGET_US:.0f} us",
            cost_us / buckets <= BUDGET_US,
            f"noise {noise_us / buckets:.1f} us",
        )


main()
