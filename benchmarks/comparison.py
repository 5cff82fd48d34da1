"""Error rates of `ddpwatch compare` on synthetic pairs of equal runs, and of runs of which one is slower.

The speed of a real job walks about by itself. Runs that walk far do differ, and are reported so; rows without a budget
show it. On a machine with others on it a job does not walk, but is slow for some dozens of steps now and then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.pairs import row
from ddpwatch.core.compare.bootstrap import compare
from ddpwatch.core.metrics.aggregate import StepSample
from ddpwatch.core.metrics.window import Window
from ddpwatch.core.state.step_store import COLUMN, COLUMNS
from ddpwatch.simulator.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ddpwatch.core.compare.bootstrap import Difference

PAIRS = 60
STEPS = 200
BUDGET = 0.95
WALKS = ((0.0, "steady"), (0.0005, "walking 0.05 % a step"), (0.002, "walking 0.2 % a step"))
MAX_WALK = 0.001
"""Std. deviation of the random walk, per step, from which on equal runs really differ and have no budget."""
SHARED_STEPS = 290
SHARED_MS, SHARED_SPREAD_MS = 16.4, 3.2
HELD_BUDGET = 0.85
"""Min. coverage of the 95 % intervals: 290 steps that come in alike dozens are a small sample."""
WIDE_BUDGET = 0.12
"""Max. half width of an interval, as a fraction: a wider one would cover anything."""
ALIKE = ("inside noise", "too small")
"""Verdicts on runs that do not differ."""


def sample(seed: int, drift: float, step_ms: float = 100.0) -> StepSample:
    """A run of two ranks."""
    phases_ns = Scenario(2, steps=STEPS, seed=seed, drift=drift, step_ms=step_ms).phases_ns()
    return _of_two(phases_ns)


def shared(seed: int, longer: float = 1.0) -> StepSample:
    """A run of two ranks among others: the usual step takes 19.6 ms, long ones are more and longer than short ones."""
    chance = np.random.default_rng([7, seed])
    level = chance.normal(0.0, 1.0, SHARED_STEPS)
    for step in range(1, SHARED_STEPS):
        level[step] = 0.95 * level[step - 1] + np.sqrt(1.0 - 0.95**2) * level[step]
    mixed = np.sqrt(0.3) * level + np.sqrt(0.7) * chance.normal(0.0, 1.0, SHARED_STEPS)
    step_ms = longer * (SHARED_MS + SHARED_SPREAD_MS * np.exp(0.5 * mixed))
    return _of_two(np.broadcast_to((step_ms * 1e6).astype(np.int64), (2, 1, SHARED_STEPS)))


def _of_two(phases_ns: NDArray[np.int64]) -> StepSample:
    steps = phases_ns.shape[2]
    table = np.zeros((2, len(COLUMNS), steps), dtype=np.int64)
    table[:, COLUMN["data_ns"] : COLUMN["data_ns"] + phases_ns.shape[1]] = phases_ns
    table[:, COLUMN["samples"]] = 32
    return StepSample([Window((0, 1), ("a", "a"), np.arange(20, 20 + steps), table, 2)])


def verdicts(drift: float, step_ms: float) -> Iterator[str]:
    """The verdict on the step time of each pair."""
    for seed in range(PAIRS):
        yield _steps(sample(2 * seed, drift), sample(2 * seed + 1, drift, step_ms)).verdict


def shared_rows() -> None:
    """The same of runs among others, and how often the interval holds the figure that is known."""
    baseline_ns = (SHARED_MS + SHARED_SPREAD_MS) * 1e6
    reported = {
        longer: [_steps(shared(2 * seed), shared(2 * seed + 1, longer)) for seed in range(PAIRS)]
        for longer in (1.0, 1.2)
    }
    for longer, truth, what in ((1.0, ALIKE, "equal runs"), (1.2, ("slower",), "a run 20 % slower")):
        right = sum(steps.verdict in truth for steps in reported[longer]) / PAIRS
        row(f"compare: {what}, among others", f"{right:.0%} {' or '.join(truth)}", f">={BUDGET:.0%}", right >= BUDGET)
    estimates = [each for steps in reported[1.0] for each in (steps.a, steps.b) if each is not None]
    held = float(np.mean([estimate.low <= baseline_ns <= estimate.high for estimate in estimates]))
    wide = float(np.quantile([estimate.high - estimate.low for estimate in estimates], 0.9)) / 2 / baseline_ns
    row("compare: intervals, among others", f"{held:.0%} hold", f">={HELD_BUDGET:.0%}", held >= HELD_BUDGET)
    row("compare: 9 of 10 intervals, among others", f"±{wide:.1%}", f"<={WIDE_BUDGET:.0%}", wide <= WIDE_BUDGET)


def _steps(a: StepSample, b: StepSample) -> Difference:
    found = compare(a, b)
    assert found is not None
    return found.steps


def main() -> None:
    """The fraction of pairs with the right answer."""
    for drift, words in WALKS:
        for step_ms, truth, what in ((100.0, ALIKE, "equal runs"), (105.0, ("slower",), "a run 5 % slower")):
            right = sum(verdict in truth for verdict in verdicts(drift, step_ms)) / PAIRS
            bounded = drift < MAX_WALK
            budget = f">={BUDGET:.0%}" if bounded else "-"
            row(
                f"compare: {what}, {words}",
                f"{right:.0%} {' or '.join(truth)}",
                budget,
                right >= BUDGET or not bounded,
            )
    shared_rows()


main()
