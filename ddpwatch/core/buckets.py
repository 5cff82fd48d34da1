"""The gradient buckets of one backward pass, with what can be said about each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ddpwatch.core.rank import RankState
    from ddpwatch.wire import Bucket


@dataclass(frozen=True)
class Timing:
    """One bucket."""

    bucket: Bucket
    took_ns: int | None
    """From ready to done: queueing and waiting for other ranks are in it. None = its end could not be seen."""
    hidden: float | None
    """Part of that time in which the rank was still computing."""
    gb_per_s: float | None


def backward_ns_of(rank: RankState, step: int) -> int | None:
    """When the rank's own backward pass ended; None where the step held several, or is not known."""
    if not rank.steps.has(step):
        return None
    at = np.array([step], dtype=np.int64)
    return int(rank.steps.column("backward_ns", at)[0]) if rank.steps.column("backwards", at)[0] == 1 else None


def timings_of(buckets: list[Bucket], backward_ns: int | None, world_size: int) -> list[Timing]:
    """In the order of their numbers."""
    ends = Counter(bucket.done_ns for bucket in buckets)
    found = []
    for bucket in sorted(buckets, key=lambda bucket: bucket.index):
        # The agent gives all whose end it has not seen the end of the backward pass: no two end at once by themselves.
        seen = bucket.done_ns > bucket.ready_ns and ends[bucket.done_ns] == 1
        took_ns = bucket.done_ns - bucket.ready_ns if seen else None
        hidden = gb_per_s = None
        if took_ns and backward_ns is not None:
            hidden = max(0, min(bucket.done_ns, backward_ns) - bucket.ready_ns) / took_ns
        if took_ns and world_size > 1:
            # Bytes in a nanosecond are GB in a second; each crosses a link so many times, as nccl-tests counts it.
            gb_per_s = bucket.bytes * 2 * (world_size - 1) / world_size / took_ns
        found.append(Timing(bucket, took_ns, hidden, gb_per_s))
    return found
