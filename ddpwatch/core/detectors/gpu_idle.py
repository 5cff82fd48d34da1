"""Mean GPU utilization of ranks that train, and the phase that takes the time."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.metrics.window import medians
from ddpwatch.core.units import percent, ranks_text
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.limits import GpuIdleLimits
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState

RULE: Final = rules.GPU_IDLE
_SMALL: Final = (
    "The kernels are too small or launched too slowly: try a larger batch, torch.compile or CUDA graphs, and look for "
    ".item(), .cpu() or printed tensors in the loop."
)
WAITS: Final = {
    "data": (
        "waiting for data",
        "Prefetch more: higher num_workers and prefetch_factor; then faster storage or cheaper transforms.",
    ),
    "sync": (
        "in the all-reduce",
        "The ranks wait for the network or for each other: see comm-share and straggler.",
    ),
    "other": (
        "between phases",
        "Look for work on the CPU between phases: logging, metrics, checkpoints, copies of tensors.",
    ),
    "forward": ("in forward", _SMALL),
    "backward": ("in backward", _SMALL),
    "optimizer": ("in the optimizer", "Set fused=True or foreach=True in the optimizer."),
}


@dataclass(frozen=True)
class _Idle:
    rank: int
    util_percent: float
    phase: str
    """The longest of a step; empty = unknown."""
    share: float
    """Fraction of the step that the phase takes."""


def gpu_idle(context: DetectorContext) -> list[Finding]:
    """Low GPU utilization while the rank trains: something other than the GPU limits it.

    Mean GPU utilization of the last readings, of ranks that finish steps and do not pause, with the phase that takes
    most of the step. Reported once for the job if most ranks are affected.
    """
    state, limits = context.state, context.limits.gpu_idle
    with_gpus, idle = 0, []
    for rank in state.ranks.values():
        gpus = rank.gpus.now(state.now_ns)
        with_gpus += bool(gpus)
        if gpus and all(gpu.util_percent is not None and gpu.util_percent < 100 * limits.util_part for gpu in gpus):
            util_percent = _mean_util(rank, limits)
            if util_percent is not None and _trains(context, rank):
                idle.append((rank.rank, util_percent))
    if not idle or context.stuck:
        return []
    phases = _phases(context.window)
    found = [_Idle(rank, util_percent, *phases.get(rank, ("", 0.0))) for rank, util_percent in idle]
    most = len(found) * 2 > with_gpus > 1
    if most or len(found) > limits.MAX_SEPARATE:
        ranks = "all ranks" if most and len(found) == with_gpus else ranks_text(one.rank for one in found)
        return [_finding("job" if most else "GPUs", ranks, found)]
    return [_finding(f"rank {one.rank}", f"rank {one.rank}", [one]) for one in found]


def _mean_util(rank: RankState, limits: GpuIdleLimits) -> float | None:
    """Mean utilization in percent of its busiest GPU over the last readings; None = not low, or too few readings."""
    means = []
    for history in rank.gpus.histories.values():
        util = history.curve("util_percent")[-limits.readings :]
        if len(util) < limits.readings or np.isnan(util).any():
            return None
        means.append(float(util.mean()))
    worst = max(means, default=100.0)
    return worst if worst < 100 * limits.util_part else None


def _trains(context: DetectorContext, rank: RankState) -> bool:
    """Whether it finishes steps after warmup: in a pause, a hang or an evaluation an idle GPU is expected."""
    beat, newest = rank.beat, rank.steps.newest
    if context.state.condition(rank) != "ok" or beat is None or newest <= context.limits.judge.warmup_steps:
        return False
    ended_ns = int(rank.steps.column("end_ns", np.array([newest]))[0])
    baseline_ns = context.window.median_step_ns if len(context.window) else 0.0
    limits = context.limits.gpu_idle
    return beat.mono_ns - ended_ns <= max(limits.MAX_STEP_AGE_S * 1e9, limits.MAX_STEP_AGE_STEPS * baseline_ns)


def _phases(window: Window) -> dict[int, tuple[str, float]]:
    """By rank, the phase that takes most of the step, and its fraction."""
    if not len(window) or not window.ranks:
        return {}
    baseline_ns = medians(window.phases_ns)
    longest = baseline_ns.argmax(axis=1)
    total_ns = np.maximum(baseline_ns.sum(axis=1), 1.0)
    return {
        rank: (PHASES[int(longest[row])], float(baseline_ns[row, longest[row]] / total_ns[row]))
        for row, rank in enumerate(window.ranks)
    }


def _finding(subject: str, label: str, found: Sequence[_Idle]) -> Finding:
    util = median(one.util_percent for one in found) / 100
    named = [one for one in found if one.phase]
    phase = max((one.phase for one in named), key=lambda name: sum(one.phase == name for one in named), default="")
    where, advice = WAITS.get(phase, ("", _SMALL))
    share = median(one.share for one in named if one.phase == phase) if phase else 0.0
    message = f"{label}: GPU utilization {percent(util)}"
    message += f" · {percent(share)} of the step {where}" if phase else ""
    ranks = () if label == "all ranks" else tuple(one.rank for one in found)
    percents = {"util_percent": round(util * 100, 1), "phase_percent": round(share * 100, 1)}
    evidence: Evidence = {**percents, "idle_ranks": len(found)}
    return Finding(RULE, Severity.WARNING, subject, message, advice, ranks, phase or None, evidence=evidence)
