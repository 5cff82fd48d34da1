"""Share of the step that most ranks wait for their DataLoaders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.diagnosis.data_loading import first_batches, loading_advice
from ddpwatch.core.limits import DataBoundLimits
from ddpwatch.core.metrics.window import medians
from ddpwatch.core.units import percent, ranks_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.core.detectors.context import DetectorContext
    from ddpwatch.core.metrics.window import Window

RULE: Final = rules.DATA_BOUND
ADVICE: Final = (
    "Prefetch more: higher num_workers and prefetch_factor, persistent_workers=True, pin_memory=True with non_blocking "
    "copies; then faster storage, fewer small files, or cheaper transforms."
)


def data_bound(context: DetectorContext) -> list[Finding]:
    """Most ranks spend much of their step waiting for their DataLoaders: data loading limits throughput.

    Compares the median wait for data of each rank with its median step. A single rank that waits for data is reported
    as a straggler. Where epochs are short, the first batches of each count as well. The advice follows from the
    DataLoader's settings and the CPU use of its workers.
    """
    limits = context.limits.data_bound
    window = context.window.last(limits.window_steps)
    if not len(window) or not window.ranks or not context.has_majority:
        return []
    data_ns = medians(window.column("data_ns"))
    step_ns = medians(window.step_ns)
    shares = data_ns / np.maximum(step_ns, 1.0)
    of_first_batches = _first_batch_shares(context, window)
    shares = np.maximum(shares, of_first_batches)
    late = np.flatnonzero(shares > limits.share)
    if len(late) <= limits.ranks_share * len(window.ranks):
        return []
    share = float(np.median(shares[late]))
    all_late = len(late) == len(window.ranks)
    ranks = () if all_late else tuple(window.ranks[row] for row in late)
    label = "all ranks wait" if all_late else f"{ranks_text(ranks)} wait"
    if all_late and len(window.ranks) == 1:
        label = f"rank {window.ranks[0]} waits"
    what = ", mostly for the first batch of each epoch" if of_first_batches[late].all() else ""
    return [
        Finding(
            rule=RULE,
            severity=Severity.WARNING,
            subject="job",
            message=f"{label} for data: {percent(share)} of the step{what}",
            advice=loading_advice(context.state, window, int(late[0])) or ADVICE,
            ranks=ranks,
            phase="data",
            # Ranks are in lockstep: the job would save what the median rank waits, late or not.
            cost=float(np.median(shares)),
            evidence={
                "data_percent": round(share * 100, 2),
                "data_ms": round(float(np.median(data_ns[late])) / 1e6, 3),
                "step_ms": round(float(np.median(step_ns[late])) / 1e6, 3),
                "late_ranks": len(late),
                "ranks": len(window.ranks),
                "steps": len(window),
            },
        )
    ]


def _first_batch_shares(context: DetectorContext, window: Window) -> NDArray[np.float64]:
    """By rank, waiting for data as a fraction of the whole time, if most of it is for first batches; else 0."""
    totals = window.column("data_ns").sum(axis=1) / np.maximum(window.step_ns.sum(axis=1), 1.0)
    for row in range(len(window.ranks)):
        first = first_batches(context.state, window, row)
        if first is None or first.share < DataBoundLimits.FIRST_BATCH_SHARE:
            totals[row] = 0.0
    shares: NDArray[np.float64] = totals
    return shares
