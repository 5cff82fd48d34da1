"""Windows of which the truth is known, and their aggregate."""

from __future__ import annotations

import numpy as np

from ddpwatch.core.metrics.aggregate import RunAggregate
from ddpwatch.core.metrics.window import Window
from ddpwatch.core.state.step_store import COLUMN, COLUMNS
from ddpwatch.wire import PHASES
from tests.builders.fake_rank import MS


def window(phases_ms, first=1, steps=50, world=None, hosts=None, samples=32):
    """All steps alike: `phases_ms` by rank, six durations each."""
    table = np.zeros((len(phases_ms), len(COLUMN), steps), dtype=np.int64)
    for row, durations in enumerate(phases_ms):
        for phase, duration_ms in zip(PHASES, durations, strict=True):
            table[row, COLUMN[f"{phase}_ns"]] = duration_ms * MS
    table[:, COLUMN["samples"]] = samples
    ranks = tuple(range(len(phases_ms)))
    hosts = hosts or ("node-a",) * len(ranks)
    return Window(ranks, hosts, np.arange(first, first + steps), table, world or len(ranks))


FAST = (1, 8, 16, 12, 2, 1)
SLOW = (1, 8, 26, 2, 2, 1)
"""Ten milliseconds longer in backward, in which the others wait; 2 ms are wire. A step takes 40 ms."""


def aggregate_of(*windows, ranks=4):
    aggregate = RunAggregate(range(ranks))
    for each in windows:
        aggregate.add(each)
    return aggregate


def window_from_phases(phases_ns, *, samples=32, first=20, world_size=None):
    """Synthetic steps as a window; `phases_ns` is (rank, phase, step)."""
    ranks, _, steps = phases_ns.shape
    table = np.zeros((ranks, len(COLUMNS), steps), dtype=np.int64)
    table[:, COLUMN["data_ns"] : COLUMN["data_ns"] + 6] = phases_ns
    table[:, COLUMN["samples"]] = samples
    indices = np.arange(first, first + steps, dtype=np.int64)
    return Window(tuple(range(ranks)), ("node-0",) * ranks, indices, table, world_size or ranks)
