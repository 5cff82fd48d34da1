"""How far `ddpwatch compare` is to be trusted: made-up runs of the same thing, and of one that is 5 % slower.

The speed of a real job walks about by itself. Runs that walk far do differ, and are told so; the last rows show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.pairs import row
from ddpwatch.core.comparison import compare
from ddpwatch.core.ledger import Ledger
from ddpwatch.core.ring import COLUMN, COLUMNS
from ddpwatch.core.window import Window
from ddpwatch.sources.synthetic import Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

PAIRS = 60
STEPS = 200
BUDGET = 0.95
WALKS = ((0.0, "steady"), (0.0005, "walking 0.05 % a step"), (0.002, "walking 0.2 % a step"))
JUDGED = 0.001
"""Walks beyond this make runs differ for real: nothing is asked of them."""


def ledger(seed: int, drift: float, step_ms: float = 100.0) -> Ledger:
    """A run of two ranks."""
    phases_ns = Scenario(2, steps=STEPS, seed=seed, drift=drift, step_ms=step_ms).phases_ns()
    table = np.zeros((2, len(COLUMNS), STEPS), dtype=np.int64)
    table[:, COLUMN["data_ns"] : COLUMN["data_ns"] + phases_ns.shape[1]] = phases_ns
    table[:, COLUMN["samples"]] = 32
    return Ledger([Window((0, 1), ("a", "a"), np.arange(20, 20 + STEPS), table, 2)])


def verdicts(drift: float, step_ms: float) -> Iterator[str]:
    """Of each pair, what is said of its steps."""
    for seed in range(PAIRS):
        found = compare(ledger(2 * seed, drift), ledger(2 * seed + 1, drift, step_ms))
        assert found is not None
        yield found.steps.verdict


def main() -> None:
    """The part of the pairs in which the truth is told."""
    for drift, words in WALKS:
        for step_ms, truth, what in ((100.0, "inside noise", "equal runs"), (105.0, "slower", "a run 5 % slower")):
            right = sum(verdict == truth for verdict in verdicts(drift, step_ms)) / PAIRS
            judged = drift < JUDGED
            budget = f">={BUDGET:.0%}" if judged else "-"
            row(f"compare: {what}, {words}", f"{right:.0%} {truth}", budget, right >= BUDGET or not judged)


main()
