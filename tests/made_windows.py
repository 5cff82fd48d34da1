"""Windows of which the truth is known, and what a digest makes of them."""

from __future__ import annotations

import numpy as np
from fake_rank import MS

from ddpwatch.core.digest import Digest
from ddpwatch.core.ring import COLUMN
from ddpwatch.core.window import Window
from ddpwatch.wire import PHASES


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
"""Ten milliseconds longer in backward: the others wait so long, and 2 ms are the wire's. A step has 40 ms."""


def digest_of(*windows, ranks=4):
    digest = Digest(range(ranks))
    for each in windows:
        digest.take(each)
    return digest
