"""Steady growth of a rank's memory, on its host or on a nearly full GPU, by medians of thirds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.limits import MemoryLimits
from ddpwatch.core.units import duration_text, percent, ranks_text, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.wire import Gpu

RULE: Final = rules.MEMORY
ADVICE: Final = (
    "Look for objects kept from step to step: lists of losses without .item(), caches, logged tensors. DataLoader "
    "workers also copy lists of Python objects (copy-on-write): keep these in an array."
)
GPU_ADVICE: Final = (
    "Look for tensors kept from step to step (losses without .detach(), outputs in lists) and for growing inputs, or "
    "use a smaller batch."
)
UNUSED_ADVICE: Final = (
    "The memory that torch reserves is fragmented: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and keep "
    "input sizes constant."
)


@dataclass(frozen=True)
class _Growth:
    rank: int
    first_bytes: float
    last_bytes: float
    watched_s: float
    bytes_per_hour: float
    gpu: Gpu | None = None
    """The GPU whose memory grows; None = memory of the host."""

    @property
    def rate(self) -> Evidence:
        return {"bytes_per_hour": round(self.bytes_per_hour), "watched_s": round(self.watched_s, 1)}


def memory(context: DetectorContext) -> list[Finding]:
    """Memory of a rank keeps growing, on its host or on a GPU that is nearly full, until the rank runs out of memory.

    Compares the medians of the first, second and last third of the observed time: growth must continue throughout, so
    that data loaded once does not count. Memory of a GPU is reported only when it is nearly full.
    """
    limits = context.limits.memory
    state = context.state
    watched = [rank for rank in state.ranks.values() if state.condition(rank) != "ended"]
    grown = [growth for rank in watched if (growth := _growth(rank, limits)) is not None]
    full = [
        growth
        for rank in watched
        for gpu in rank.gpus.now(state.now_ns)
        if (growth := _gpu_growth(rank, gpu, limits)) is not None
    ]
    findings = [_finding(grown)] if len(grown) > limits.MAX_SEPARATE else [_finding([growth]) for growth in grown]
    if len(full) > limits.MAX_SEPARATE:
        return [*findings, _gpu_finding(full, limits)]
    return [*findings, *(_gpu_finding([growth], limits) for growth in full)]


def _growth(rank: RankState, limits: MemoryLimits) -> _Growth | None:
    span = rank.rss_history.span
    if span is None or (watched_s := (span[1][0] - span[0][0]) / 1e9) < limits.least_s:
        return None
    at_ns, used = rank.rss_history.spread(limits.MAX_SAMPLES)
    # Cheap bound first: the medians cannot be further apart, and nearly every rank ends here.
    if len(used) < limits.MIN_SAMPLES or max(used) - min(used) < limits.growth_bytes:
        return None
    growth = _steady_growth(rank.rank, at_ns, used, watched_s, limits.growth_bytes)
    enough = growth is not None and growth.last_bytes - growth.first_bytes >= limits.growth_share * growth.first_bytes
    return growth if enough else None


def _gpu_growth(rank: RankState, gpu: Gpu, limits: MemoryLimits) -> _Growth | None:
    if not gpu.total_bytes or not gpu.used_bytes or gpu.used_bytes < limits.gpu_part * gpu.total_bytes:
        return None
    history = rank.gpus.histories.get(gpu.device)
    if history is None:
        return None
    used, at_ns = history.curve("used_bytes"), history.times_ns()
    known = np.flatnonzero(~np.isnan(used))
    places = known[:: max(len(known) // limits.MAX_SAMPLES, 1)]
    if len(places) < limits.MIN_SAMPLES:
        return None
    watched_s = float(at_ns[places[-1]] - at_ns[places[0]]) / 1e9
    if watched_s < limits.gpu_least_s:
        return None
    times_ns, sizes = at_ns[places].tolist(), used[places].tolist()
    growth = _steady_growth(rank.rank, times_ns, sizes, watched_s, limits.gpu_growth_bytes)
    return replace(growth, gpu=gpu) if growth else None


def _steady_growth(
    rank: int, at_ns: Sequence[int], used: Sequence[float], watched_s: float, min_bytes: int
) -> _Growth | None:
    """Growth between the medians of the first and the last third; None = too little, or it has come to an end."""
    third = len(used) // 3
    first, middle, last = median(used[:third]), median(used[third:-third]), median(used[-third:])
    more = last - first
    latest = median(used[-max(len(used) // 10, 3) :])
    in_each_half = min(middle - first, last - middle) >= MemoryLimits.MIN_HALF_SHARE * more
    if more < min_bytes or not in_each_half or latest < last:
        return None
    between_s = (median(at_ns[-third:]) - median(at_ns[:third])) / 1e9
    return _Growth(rank, first, last, watched_s, more / max(between_s, 1.0) * 3600)


def _finding(grown: list[_Growth]) -> Finding:
    worst = max(grown, key=lambda growth: growth.bytes_per_hour)
    ranks = tuple(growth.rank for growth in grown)
    label = ranks_text(ranks)
    subject, most = (label, "") if len(grown) == 1 else ("ranks", f", fastest on rank {worst.rank}")
    message = f"{label}: host memory keeps growing{most}: {size_text(worst.first_bytes)} to "
    message += f"{size_text(worst.last_bytes)} in {duration_text(worst.watched_s)} · "
    message += f"{size_text(worst.bytes_per_hour)} per hour"
    sizes: Evidence = {"first_bytes": round(worst.first_bytes), "last_bytes": round(worst.last_bytes)}
    return Finding(RULE, Severity.WARNING, subject, message, ADVICE, ranks, evidence=sizes | worst.rate)


def _gpu_finding(full: Sequence[_Growth], limits: MemoryLimits) -> Finding:
    worst = max(full, key=lambda growth: growth.last_bytes)
    gpu = worst.gpu
    assert gpu is not None
    used, total = gpu.used_bytes or 0, max(gpu.total_bytes or 0, 1)
    reserved, allocated = gpu.reserved_bytes or 0, gpu.allocated_bytes or 0
    unused = gpu.allocated_bytes is not None and reserved - allocated >= limits.gpu_unused_part * total
    ranks = tuple(sorted({growth.rank for growth in full}))
    subject = f"rank {worst.rank} · {gpu.device}" if len(full) == 1 else "GPUs"
    label = subject if len(full) == 1 else f"{len(full)} GPUs ({ranks_text(ranks)})"
    hint = f" · torch reserves {size_text(reserved)} and uses {size_text(allocated)} of it" if unused else ""
    message = f"{label}: {percent(used / total)} of GPU memory in use and growing by "
    message += f"{size_text(worst.bytes_per_hour)} per hour{hint}"
    advice = UNUSED_ADVICE if unused else GPU_ADVICE
    sizes: Evidence = {"used_bytes": used, "total_bytes": total}
    sizes |= {"reserved_bytes": reserved, "allocated_bytes": allocated}
    return Finding(RULE, Severity.WARNING, subject, message, advice, ranks, evidence=sizes | worst.rate)
