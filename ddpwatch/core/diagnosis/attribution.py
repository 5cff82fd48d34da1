"""Measured cause of a straggler in its slow steps: a pause with a name, the clocks of its GPU, or CPU starvation."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.limits import StragglerLimits
from ddpwatch.core.metrics.window import PAUSES, sampled_ranks
from ddpwatch.core.state.gpu import clock_text, clocks_between, evenly_sampled, slowed
from ddpwatch.core.units import percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext
    from ddpwatch.core.diagnosis.straggler_stats import Suspect
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.gpu import Clock
    from ddpwatch.core.state.rank import RankState

ON_GPU: Final = frozenset({"forward", "backward", "optimizer"})
"""Phases that a slow GPU makes longer."""
CLOCKS_ADVICE: Final = (
    "Its low GPU clock is the likely cause: see gpu-throttle and `nvidia-smi -q -d PERFORMANCE` on its host, and "
    "exclude the host until it is fixed."
)
CORES_ADVICE: Final = (
    "Its host has more runnable threads than CPU cores: use fewer DataLoader workers, a small OMP_NUM_THREADS, "
    "dedicated cores per rank (taskset, --cpus-per-task), and stop other jobs on the host."
)
GC_ADVICE: Final = (
    "Call gc.freeze() once after loading, gc.disable() before the loop, and gc.collect() every few hundred steps on "
    "all ranks at the same step: then no rank waits for another rank's collection."
)
SAVE_ADVICE: Final = (
    "All ranks wait while it saves: save less often, or write in the background "
    "(torch.distributed.checkpoint.async_save, or copy to the CPU and save in a thread), first to a local disk."
)
EVALUATION_ADVICE: Final = (
    "All ranks wait while it evaluates: split the evaluation over the ranks with a DistributedSampler, or evaluate "
    "less often."
)
PAUSE_ADVICE: Final = {"gc_ns": GC_ADVICE, "save_ns": SAVE_ADVICE, "eval_ns": EVALUATION_ADVICE}
"""By column of steps."""


@dataclass(frozen=True)
class SlowCause:
    """A measured cause, in words."""

    kind: str
    """`pause`, `clocks` or `cores`."""
    text: str
    advice: str
    is_activity: bool = False
    """Whether the text names what the rank does in this time."""


def slow_cause(
    context: DetectorContext, window: Window, suspect: Suspect, slow: Sequence[Suspect], phase: str
) -> SlowCause | None:
    """The cause for one of the slow ranks in its slow phase; None = not known."""
    if (pause := _pause(window, suspect)) is not None:
        return pause
    rows = {one.row for one in slow}
    ranks = context.state.ranks
    mine = ranks[window.ranks[suspect.row]]
    others = evenly_sampled([ranks[rank] for row, rank in enumerate(window.ranks) if row not in rows])
    if phase in ON_GPU and (clocks := _clocks(context, window, mine, others)):
        return SlowCause("clocks", clocks, CLOCKS_ADVICE)
    if cores := _cores(window, suspect, mine, others):
        return SlowCause("cores", cores, CORES_ADVICE)
    return None


def _pause(window: Window, suspect: Suspect) -> SlowCause | None:
    """The named pause that makes up most of the rank's excess over the others, if one does."""
    others = sampled_ranks(np.delete(np.arange(len(window.ranks)), suspect.row))
    for column, name in PAUSES.items():
        pause_ns = window.pause_ns(column)[:, suspect.hit]
        more_ns = float(np.median(pause_ns[suspect.row] - np.median(pause_ns[others], axis=0)))
        if more_ns >= StragglerLimits.CAUSE_SHARE * suspect.excess_ns:
            return SlowCause("pause", name, PAUSE_ADVICE[column], is_activity=True)
    return None


def _clocks(context: DetectorContext, window: Window, mine: RankState, others: Sequence[RankState]) -> str:
    """The clocks of the rank's GPU in these steps, if they explain it; else empty."""
    if mine.gpus.latest is None:
        return ""
    found = slowed(
        _clocks_meanwhile(mine, window),
        [clock for other in others for clock in _clocks_meanwhile(other, window)],
        context.limits.gpu_throttle.clock_part,
    )
    return clock_text(*found) if found is not None else ""


def _clocks_meanwhile(rank: RankState, window: Window) -> list[Clock]:
    return clocks_between(rank, *_span_ns(rank, window, 0, -1))


def _cores(window: Window, suspect: Suspect, mine: RankState, others: Sequence[RankState]) -> str:
    """CPU starvation of the rank while it was slow, if that explains it; else empty."""
    hits = suspect.hit.nonzero()[0]
    first, last = max(0, int(hits[0]) - 1), int(hits[-1])
    waited = mine.cpu_starvation.share(*_span_ns(mine, window, first, last))
    if waited is None:
        return ""
    known = [other.cpu_starvation.share(*_span_ns(other, window, first, last)) for other in others]
    others_share = median([share for share in known if share is not None] or [0.0])
    lost_ns = suspect.excess_ns * len(hits) / (last - first)
    if (waited - others_share) * window.median_step_ns < StragglerLimits.CAUSE_SHARE * lost_ns:
        return ""
    return f"CPU starvation: {percent(waited)} of the time without a core, {percent(others_share)} on the others"


def _span_ns(rank: RankState, window: Window, first: int, last: int) -> tuple[int, int]:
    """From the end of one step to that of another, by the rank's own clock, as all that it reports."""
    first_ns, last_ns = rank.steps.column("end_ns", window.indices[[first, last]]).tolist()
    return first_ns, last_ns
