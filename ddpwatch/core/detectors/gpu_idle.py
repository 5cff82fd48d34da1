"""Whether GPUs have little to do while their ranks train."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core import rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.detectors.context import Detector
from ddpwatch.core.limits import GpuIdleLimits
from ddpwatch.core.metrics.window import medians
from ddpwatch.core.units import percent, ranks_text
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState

RULE: Final = rules.GPU_IDLE
_SMALL: Final = (
    "The kernels are too small or are launched too slowly: try a larger batch, torch.compile, CUDA graphs, and look "
    "for .item(), .cpu() or print of tensors in the loop."
)
WAITS: Final = {
    "data": (
        "waiting for data",
        "Let the DataLoader work ahead: more num_workers and prefetch_factor; then faster storage, cheaper transforms.",
    ),
    "sync": (
        "in the all-reduce",
        "See comm-share and straggler: the ranks wait for the network or for each other.",
    ),
    "other": (
        "between the phases",
        "Look for what the script does there on the CPU: logging, metrics, checkpoints, copies of tensors.",
    ),
    "forward": ("in forward", _SMALL),
    "backward": ("in backward", _SMALL),
    "optimizer": ("in the optimizer", "Try fused=True or foreach=True in the optimizer."),
}


@dataclass(frozen=True)
class _Idle:
    rank: int
    util_percent: float
    phase: str
    """Of a step the longest; empty = not known."""
    share: float


def gpu_idle(context: DetectorContext) -> list[Finding]:
    """The GPU of a rank has little to do while the rank trains: something else takes the time.

    Told by the mean utilisation of the last readings, of ranks that finish steps and do not pause. Named is the phase
    that takes most of the step. When most ranks are alike it is told once, for the job.
    """
    state, limits = context.state, context.limits.gpu_idle
    read, idle = 0, []
    for rank in state.ranks.values():
        gpus = rank.gpus.now(state.now_ns)
        if gpus:
            read += 1
            if all(gpu.util_percent is not None and gpu.util_percent < 100 * limits.util_part for gpu in gpus):
                util_percent = _mean_util(rank, limits)
                if util_percent is not None and _trains(context, rank):
                    idle.append((rank, util_percent))
    if not idle or context.stuck:
        return []
    phases = _phases(context.window)
    found = [_Idle(rank.rank, util_percent, *phases.get(rank.rank, ("", 0.0))) for rank, util_percent in idle]
    if len(found) * 2 > read and read > 1:
        everybody = len(found) == read
        return [_finding("job", "GPUs of all ranks" if everybody else f"GPUs of {_rank_text(found)}", found)]
    if len(found) > GpuIdleLimits.MAX_SEPARATE:
        return [_finding("GPUs", f"GPUs of {_rank_text(found)}", found)]
    return [_finding(f"rank {one.rank}", f"the GPU of rank {one.rank}", [one]) for one in found]


def _mean_util(rank: RankState, limits: GpuIdleLimits) -> float | None:
    """In per cent over the last readings of its GPUs; None = it is not low, or there are too few."""
    means = []
    for history in rank.gpus.histories.values():
        util = history.curve("util_percent")[-limits.readings :]
        if len(util) < limits.readings or np.isnan(util).any():
            return None
        means.append(float(util.mean()))
    worst = max(means, default=100.0)
    return worst if worst < 100 * limits.util_part else None


def _trains(context: DetectorContext, rank: RankState) -> bool:
    """Whether it finishes steps, has warmed up and does not pause: in a hang or an evaluation nobody is surprised."""
    beat, newest = rank.beat, rank.steps.newest
    if context.state.condition(rank) != "ok" or beat is None or newest <= context.limits.judge.warmup_steps:
        return False
    ended_ns = int(rank.steps.column("end_ns", np.array([newest]))[0])
    baseline_ns = context.window.median_step_ns if len(context.window) else 0.0
    return beat.mono_ns - ended_ns <= max(
        GpuIdleLimits.MAX_STEP_AGE_S * 1e9, GpuIdleLimits.MAX_STEP_AGE_STEPS * baseline_ns
    )


def _phases(window: Window) -> dict[int, tuple[str, float]]:
    """By rank, the phase that takes most of the step, and its share."""
    if not len(window) or not window.ranks:
        return {}
    baseline_ns = medians(window.phases_ns)
    longest = baseline_ns.argmax(axis=1)
    total_ns = np.maximum(baseline_ns.sum(axis=1), 1.0)
    return {
        rank: (PHASES[int(longest[row])], float(baseline_ns[row, longest[row]] / total_ns[row]))
        for row, rank in enumerate(window.ranks)
    }


def _rank_text(found: Sequence[_Idle]) -> str:
    return ranks_text(one.rank for one in found)


def _finding(subject: str, who: str, found: Sequence[_Idle]) -> Finding:
    util = median(one.util_percent for one in found) / 100
    named = [one for one in found if one.phase]
    phase = max((one.phase for one in named), key=lambda name: sum(one.phase == name for one in named), default="")
    where, advice = WAITS.get(phase, ("", _SMALL))
    share = median(one.share for one in named if one.phase == phase) if phase else 0.0
    works = "work" if who.startswith("GPUs") else "works"
    everybody = who.endswith("all ranks")
    return Finding(
        rule=RULE,
        severity=Severity.WARNING,
        subject=subject,
        message=f"{who} {works} {percent(util)} of the time"
        + (f": {percent(share)} of the step goes by {where}" if phase else ""),
        advice=advice,
        ranks=() if everybody else tuple(one.rank for one in found),
        phase=phase or None,
        evidence={
            "util_percent": round(util * 100, 1),
            "phase_percent": round(share * 100, 1),
            "idle_ranks": len(found),
        },
    )


GPU_IDLE: Final = Detector(RULE, gpu_idle, by_step=False, gradual=True)
