"""Live figures over the latest aligned steps: own work, wait, wire, all-reduce share, overlap and bandwidth.

In synchronous training all step times are equal, and only own work shows the straggler. Ranks synchronize twice in a
step, before the forward pass and after backward; at each sync point the `sync` of the last rank to arrive is wire, the
rest is wait. Without all ranks the two cannot be separated and are None.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from ddpwatch.core.limits import WindowLimits
from ddpwatch.core.metrics.aggregate import Aggregate
from ddpwatch.core.metrics.window import PAUSE_COLUMNS, WINDOW_STEPS, gather, medians, ranks_to_compare
from ddpwatch.core.state.step_store import TIMES

if TYPE_CHECKING:
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.wire import Bucket


class RankFigures(msgspec.Struct, frozen=True, gc=False):
    """Medians of one rank over the window, in nanoseconds."""

    rank: int
    step_ns: float
    self_ns: float
    """Own work: the step without `sync`."""
    data_ns: float
    forward_ns: float
    backward_ns: float
    sync_ns: float
    optimizer_ns: float
    other_ns: float
    wait_ns: float | None
    """Part of `sync` spent waiting for slower ranks; None = not known, a rank is missing."""
    straggler_cost_share: float | None
    """Fraction of the job's time that it would save if this rank were as fast as the next-slowest; None = not known."""
    batch: int | None
    """Largest micro-batch; None = not known."""


MEASURED: Final = (*TIMES, "batch", "busy_ns", "comm_bytes", *PAUSE_COLUMNS)
"""Columns that figures are computed from."""


@dataclass(frozen=True)
class Figures:
    """Figures of the job over its latest aligned steps."""

    first_step: int
    last_step: int
    steps: int
    """Number of steps in the window."""
    complete: bool
    """Whether the window holds all ranks; if not, figures that compare or add up ranks are None."""
    step_ns: float
    """Median over steps of the mean over ranks."""
    samples_per_s: float | None
    """Median over steps."""
    effective_batch: int | None
    """Samples of all ranks in one step, including accumulation."""
    share: float
    """All-reduce share: mean sync over mean step."""
    wire_share: float | None
    wait_share: float | None
    """`wire_share + wait_share == share`."""
    overlap: float | None
    """Fraction of the gradient all-reduce hidden behind computation; None = not timed."""
    bus_bytes_s: float | None
    """Bus bandwidth of the gradient all-reduce as in nccl-tests; None = not timed, or ranks are missing."""
    ranks: dict[int, RankFigures]
    aggregate: Aggregate = field(compare=False, repr=False)
    """The sums over these steps."""


def measure(state: RunState, upto: int | None = None, *, since: int = 0) -> Figures | None:
    """Figures over the last steps that all ranks hold, or held at step `upto`; None if there are none. After a change
    at step `since`, only later steps count if there are enough.
    """
    ranks = ranks_to_compare(state)
    newest = min((rank.steps.newest for rank in ranks), default=-1)
    last = newest if upto is None else min(upto, newest)
    steps = min(WINDOW_STEPS, max(WindowLimits.MIN_STEPS, last - since + 1))
    window = gather(state, ranks, upto=last, steps=steps, columns=MEASURED)
    return figures_of(window) if len(window) else None


def figures_of(window: Window) -> Figures:
    """Figures of a window that holds at least one step."""
    complete = window.complete
    samples, samples_per_s = _throughput(window) if complete else (None, None)
    aggregate = Aggregate.of(window)
    shares = aggregate.sync_shares()
    return Figures(
        first_step=int(window.indices[0]),
        last_step=int(window.indices[-1]),
        steps=len(window),
        complete=complete,
        step_ns=aggregate.step_ns() or 0.0,
        samples_per_s=samples_per_s,
        effective_batch=samples,
        share=shares.total or 0.0,
        wire_share=shares.wire,
        wait_share=shares.wait,
        overlap=_overlap(window),
        bus_bytes_s=_bus_bytes_s(window) if complete else None,
        ranks=_per_rank(window, aggregate),
        aggregate=aggregate,
    )


def _throughput(window: Window) -> tuple[int | None, float | None]:
    """Median samples in a step and per second, over the steps whose samples every rank reported."""
    reported = np.isfinite(window.samples)
    if not reported.any():
        return None, None
    return int(np.median(window.samples[reported])), float(np.median(window.samples_per_s[reported]))


def _overlap(window: Window) -> float | None:
    """Only the gradient all-reduce can overlap, so other `sync` does not count."""
    busy_ns = window.column("busy_ns").astype(np.float64)
    known = busy_ns > 0
    if not known.any():
        return None
    exposed_ns = window.after_backward_ns
    return float(np.clip(1.0 - exposed_ns[known].sum() / busy_ns[known].sum(), 0.0, 1.0))


def _bus_bytes_s(window: Window) -> float | None:
    """Bandwidth of the fastest rank: the last to arrive waits for no other, so its time is the network's."""
    busy_ns = window.column("busy_ns").astype(np.float64)
    sent = window.column("comm_bytes")
    known = (busy_ns > 0) & (sent > 0)
    n = len(window.ranks)
    if n < 2 or not known.any():
        return None
    fastest = np.where(known, sent / np.maximum(busy_ns, 1.0), 0.0).max(axis=0)
    return float(np.median(fastest[known.any(axis=0)])) * 1e9 * 2 * (n - 1) / n


def _per_rank(window: Window, aggregate: Aggregate) -> dict[int, RankFigures]:
    complete = window.complete
    step_ns, self_ns = medians(window.step_ns).tolist(), medians(window.self_ns).tolist()
    phases_ns = medians(window.phases_ns).T.tolist()
    unproven = [None] * len(window.ranks)
    wait_ns = medians(window.wait_ns).tolist() if complete else unproven
    batches = [int(batch) or None for batch in medians(window.column("batch")).tolist()]
    costs = list(aggregate.straggler_costs().values()) if complete else unproven
    columns = (window.ranks, step_ns, self_ns, *phases_ns, wait_ns, costs, batches)
    # Positional arguments: with thousands of ranks, keywords would cost more than the figures.
    return {row[0]: RankFigures(*row) for row in zip(*columns, strict=True)}


@dataclass(frozen=True)
class Timing:
    """Timing of one gradient bucket."""

    bucket: Bucket
    took_ns: int | None
    """From ready to done, including queueing and waiting for other ranks; None = its end was not observed."""
    hidden: float | None
    """Fraction of that time in which the rank was still computing."""
    gb_per_s: float | None


def backward_ns_of(rank: RankState, step: int) -> int | None:
    """When the rank's backward pass ended; None = not known, or the step held several."""
    if not rank.steps.has(step):
        return None
    at = np.array([step], dtype=np.int64)
    return int(rank.steps.column("backward_ns", at)[0]) if rank.steps.column("backwards", at)[0] == 1 else None


def timings_of(buckets: list[Bucket], backward_ns: int | None, world_size: int) -> list[Timing]:
    """Timings of the buckets of one backward pass, in the order of their indices."""
    ends = Counter(bucket.done_ns for bucket in buckets)
    found = []
    for bucket in sorted(buckets, key=lambda bucket: bucket.index):
        # The agent reports the end of backward for buckets whose end it did not observe: real ends differ.
        seen = bucket.done_ns > bucket.ready_ns and ends[bucket.done_ns] == 1
        took_ns = bucket.done_ns - bucket.ready_ns if seen else None
        hidden = gb_per_s = None
        if took_ns and backward_ns is not None:
            hidden = max(0, min(bucket.done_ns, backward_ns) - bucket.ready_ns) / took_ns
        if took_ns and world_size > 1:
            # Bytes per nanosecond are GB per second. The factor is the bus bandwidth of nccl-tests.
            gb_per_s = bucket.bytes * 2 * (world_size - 1) / world_size / took_ns
        found.append(Timing(bucket, took_ns, hidden, gb_per_s))
    return found
