"""Hung steps: whether a step, or the job, hung, by the thresholds of `HungStepLimits`.

- A *hung step* of a run has ended and took far longer than the median step: `HungStepFinder`. Reports, summaries,
  comparisons and exports count its time apart from that of slow ranks.
- A rank was *stuck* in a step, and not slow, if it cost far more there than it is slower by: `stuck_above_ns`.
- In the short window that a rule evaluates, one very long step would decide the result: `without_hung_steps`.
- The job is *stalled* if no step ends now: `stalled_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.limits import HungStepLimits
from ddpwatch.core.metrics.histogram import bins
from ddpwatch.core.metrics.window import NOT_KNOWN
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.metrics.live_metrics import Figures
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.core.state.step_store import IntArray

    FloatArray = NDArray[np.float64]

NOBODY: Final = -1
"""In place of a rank: no single rank is to blame."""
ASKED_RANKS: Final = 16
"""Ranks whose last step is looked up. Ranks go in step, so a few stand for all."""


@dataclass(frozen=True)
class HungSteps:
    """All hung steps of a run, or those that some of its ranks are to blame for."""

    steps: int
    lost_s: float
    """Seconds that they took beyond the median step, together."""
    share: float
    """The same as a fraction of the time in all steps."""
    longest_step: int
    longest_s: float
    rank: int | None
    """The rank to blame for the longest of them; None = no single one."""
    straggler_cost_ns: float
    """Straggler cost of the blamed ranks in these steps; 0 where that is not known."""
    excess_ns: FloatArray
    """By phase, the time that the blamed ranks took beyond the median rank."""


@dataclass
class _LongSteps:
    """Steps of about one length for which one rank, or nobody, is to blame."""

    steps: int = 0
    total_ns: float = 0.0
    longest_ns: float = -1.0
    longest_step: int = -1
    straggler_cost_ns: float = 0.0
    excess_ns: FloatArray = field(default_factory=lambda: np.zeros(len(PHASES)))


class HungStepFinder:
    """Collects long steps in bins by length. Which of them hung is decided when the median step is known."""

    def __init__(self) -> None:
        """Begin with none."""
        self._long: dict[tuple[int, int], _LongSteps] = {}
        """By the bin of their length, to one percent, and by the blamed rank: few keys in any run."""

    def add_window(self, window: Window) -> None:
        """Add the steps of a window, each once, with what they cost where all ranks are in it."""
        step_ns = window.job_step_ns
        if not (step_ns > HungStepLimits.EXTRA_NS).any():
            return
        blamed = blamed_ranks(window.ranks, window.excess_percent)
        costs = None
        if window.complete:
            steps, rows = np.arange(len(window)), np.searchsorted(window.ranks, blamed)
            excess_ns = window.phases_ns - np.median(window.phases_ns, axis=0)
            cost_ns = window.straggler_cost_ns[rows, steps].astype(np.float64)
            costs = cost_ns, np.where(cost_ns > 0, excess_ns[rows, :, steps].T, 0.0)
        self.add(window.indices, step_ns, blamed, costs)

    def add(
        self,
        indices: IntArray,
        step_ns: FloatArray,
        blamed: IntArray,
        costs: tuple[FloatArray, FloatArray] | None = None,
    ) -> None:
        """Add steps, each once. `costs` = the blamed rank's straggler cost in each of them, and (phase, step) what it
        took beyond the median rank.
        """
        long = np.flatnonzero(step_ns > HungStepLimits.EXTRA_NS)
        for place, length in zip(long.tolist(), bins(step_ns[long]).tolist(), strict=True):
            kept = self._long.setdefault((length, int(blamed[place])), _LongSteps())
            kept.steps += 1
            kept.total_ns += float(step_ns[place])
            if step_ns[place] > kept.longest_ns:
                kept.longest_ns, kept.longest_step = float(step_ns[place]), int(indices[place])
            if costs is not None and blamed[place] != NOBODY:
                kept.straggler_cost_ns += float(costs[0][place])
                kept.excess_ns += costs[1][:, place]

    def found(self, median_ns: float | None, total_ns: float, ranks: Collection[int] | None = None) -> HungSteps | None:
        """The hung steps of a run with this median step and this time in all steps; those that `ranks` are to blame
        for, if given. None = there are none.
        """
        if median_ns is None:
            return None
        hung_above_ns = max(HungStepLimits.FACTOR * median_ns, median_ns + HungStepLimits.EXTRA_NS)
        hung = {
            key: long
            for key, long in self._long.items()
            if long.longest_ns > hung_above_ns and (ranks is None or key[1] in ranks)
        }
        if not hung:
            return None
        (_, blamed), longest = max(hung.items(), key=lambda item: item[1].longest_ns)
        steps = sum(long.steps for long in hung.values())
        lost_ns = sum(long.total_ns for long in hung.values()) - steps * median_ns
        return HungSteps(
            steps=steps,
            lost_s=lost_ns / 1e9,
            share=lost_ns / total_ns,
            longest_step=longest.longest_step,
            longest_s=longest.longest_ns / 1e9,
            rank=None if blamed == NOBODY else blamed,
            straggler_cost_ns=sum(long.straggler_cost_ns for long in hung.values()),
            excess_ns=np.sum([long.excess_ns for long in hung.values()], axis=0),
        )


def blamed_ranks(ranks: Sequence[int], excess_percent: NDArray[np.uint8]) -> IntArray:
    """The rank to blame for the length of each step, or `NOBODY`, by (rank, step) `Window.excess_percent`."""
    if len(ranks) < 2:
        return np.full(excess_percent.shape[1], NOBODY, dtype=np.int64)
    known = np.where(excess_percent == NOT_KNOWN, 0, excess_percent)
    blamed: IntArray = np.asarray(ranks, dtype=np.int64)[known.argmax(axis=0)]
    return np.where(known.max(axis=0) >= HungStepLimits.CAUSE_PERCENT, blamed, NOBODY)


def stuck_above_ns(excess_ns: float) -> float:
    """The straggler cost of one step above which a rank that is slower by `excess_ns` was stuck in it, and not slow."""
    return max(HungStepLimits.FACTOR * excess_ns, HungStepLimits.EXTRA_NS)


def without_hung_steps(window: Window) -> Window:
    """The window without steps that take many times as long as most: those are reported as hangs."""
    return window.where(window.job_step_ns < HungStepLimits.WINDOW_FACTOR * window.median_step_ns)


def stalled_s(state: RunState, figures: Figures | None) -> float | None:
    """Seconds for which no step has ended; None = not for long, or not known, or the run is over."""
    if figures is None or state.run_condition() not in {"live", "silent"}:
        return None
    ages_s = (_last_step_age_s(rank, state.now_ns) for rank in state.ranks.values())
    known_s = list(islice((age_s for age_s in ages_s if age_s is not None), ASKED_RANKS))
    age_s = min(known_s, default=0.0)
    min_s = max(HungStepLimits.MIN_S, HungStepLimits.MIN_STEPS * figures.step_ns / 1e9)
    return age_s if min_s <= age_s < HungStepLimits.MAX_S else None


def _last_step_age_s(rank: RankState, now_ns: int) -> float | None:
    """Seconds since its last step ended, by its own clock up to its last heartbeat and by the viewer's since."""
    beat, last_received_ns, newest = rank.beat, rank.last_received_ns, rank.steps.newest
    if beat is None or last_received_ns is None or rank.bye is not None or newest < 0 or not rank.steps.has(newest):
        return None
    end_ns = int(rank.steps.column("end_ns", np.array([newest]))[0])
    return (max(beat.mono_ns - end_ns, 0) + max(now_ns - last_received_ns, 0)) / 1e9
