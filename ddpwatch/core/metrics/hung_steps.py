"""Steps in which the job stood still: far longer than the others, mostly because one rank was stuck for a while.

Long steps are sorted by length as they come. Which of them were standstills is known when the usual step is.

Whether the job stands still: one rank is stuck, the others wait for it, and no step ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.limits import HungStepLimits
from ddpwatch.core.metrics.histogram import bins
from ddpwatch.core.metrics.timeline import NOT_KNOWN
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.metrics.figures import Figures
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.core.state.step_store import IntArray

    FloatArray = NDArray[np.float64]

NOBODY: Final = -1
"""In place of a rank: none was it alone."""


@dataclass(frozen=True)
class Standstill:
    """All such steps of a run, or those for which some of the ranks are to blame."""

    steps: int
    lost_s: float
    """What they took longer than the usual step, together."""
    longest_step: int
    longest_s: float
    rank: int | None
    """For whom the job stood still in the longest of them; None = for nobody alone."""
    straggler_cost_ns: float
    """What these ranks cost the job in these steps; 0 where that cannot be told."""
    beyond_ns: FloatArray
    """By phase, what it took these ranks longer than the middle one."""


@dataclass
class _Long:
    """Steps of about one length that one rank, or nobody, is to blame for."""

    steps: int = 0
    total_ns: float = 0.0
    longest_ns: float = -1.0
    longest_step: int = -1
    straggler_cost_ns: float = 0.0
    beyond_ns: FloatArray = field(default_factory=lambda: np.zeros(len(PHASES)))


class Standstills:
    """Takes steps, each once, and tells which of them stood still."""

    def __init__(self) -> None:
        """Begin with none."""
        self._long: dict[tuple[int, int], _Long] = {}
        """By the bin of their length, to one per cent, and by whose fault it was: of any run these are not many."""

    def take(
        self,
        indices: IntArray,
        step_ns: FloatArray,
        guilty: IntArray,
        costs: tuple[FloatArray, FloatArray] | None = None,
    ) -> None:
        """Some more steps: how long they took, and who was to blame for each. `costs` = what that one has imposed in
        each of them, and (phase, step) what each phase took it longer than the middle rank.
        """
        long = np.flatnonzero(step_ns > HungStepLimits.EXTRA_NS)
        for place, length in zip(long.tolist(), bins(step_ns[long]).tolist(), strict=True):
            kept = self._long.setdefault((length, int(guilty[place])), _Long())
            kept.steps += 1
            kept.total_ns += float(step_ns[place])
            if step_ns[place] > kept.longest_ns:
                kept.longest_ns, kept.longest_step = float(step_ns[place]), int(indices[place])
            if costs is not None and guilty[place] != NOBODY:
                kept.straggler_cost_ns += float(costs[0][place])
                kept.beyond_ns += costs[1][:, place]

    def found(self, baseline_ns: float | None, ranks: Collection[int] | None = None) -> Standstill | None:
        """Those that are far above the usual step; of these ranks only. None = there are none."""
        if baseline_ns is None:
            return None
        far_ns = max(HungStepLimits.FACTOR * baseline_ns, baseline_ns + HungStepLimits.EXTRA_NS)
        far = {
            key: long
            for key, long in self._long.items()
            if long.longest_ns > far_ns and (ranks is None or key[1] in ranks)
        }
        if not far:
            return None
        (_, guilty), longest = max(far.items(), key=lambda item: item[1].longest_ns)
        steps = sum(long.steps for long in far.values())
        return Standstill(
            steps=steps,
            lost_s=(sum(long.total_ns for long in far.values()) - steps * baseline_ns) / 1e9,
            longest_step=longest.longest_step,
            longest_s=longest.longest_ns / 1e9,
            rank=None if guilty == NOBODY else guilty,
            straggler_cost_ns=sum(long.straggler_cost_ns for long in far.values()),
            beyond_ns=np.sum([long.beyond_ns for long in far.values()], axis=0),
        )


def guilty_of(ranks: Sequence[int], excess: NDArray[np.uint8]) -> IntArray:
    """For whom each step took so long, by what the timeline knows of it: (rank, step), in per cent of the step."""
    if len(ranks) < 2:
        return np.full(excess.shape[1], NOBODY, dtype=np.int64)
    known = np.where(excess == NOT_KNOWN, 0, excess)
    guilty: IntArray = np.asarray(ranks, dtype=np.int64)[known.argmax(axis=0)]
    return np.where(known.max(axis=0) >= HungStepLimits.CAUSE_PERCENT, guilty, NOBODY)


ASKED_RANKS: Final = 16
"""Ranks go in step: a few of them tell it for all."""


def standstill_s(state: RunState, figures: Figures | None) -> float | None:
    """For how long no step has ended; None = not for long, or it cannot be told, or the run is over."""
    if figures is None or state.run_condition() not in {"live", "silent"}:
        return None
    ages_s = (_age_s(rank, state.now_ns) for rank in state.ranks.values())
    known_s = list(islice((age_s for age_s in ages_s if age_s is not None), ASKED_RANKS))
    least_s = max(HungStepLimits.MIN_S, HungStepLimits.MIN_STEPS * figures.step_ns / 1e9)
    age_s = min(known_s, default=0.0)
    return age_s if least_s <= age_s < HungStepLimits.MAX_S else None


def _age_s(rank: RankState, now_ns: int) -> float | None:
    """How long ago its last step ended, by its own clock up to its last beat and by ours since."""
    beat, last_received_ns, newest = rank.beat, rank.last_received_ns, rank.steps.newest
    if beat is None or last_received_ns is None or rank.bye is not None or newest < 0 or not rank.steps.has(newest):
        return None
    end_ns = int(rank.steps.column("end_ns", np.array([newest]))[0])
    return (max(beat.mono_ns - end_ns, 0) + max(now_ns - last_received_ns, 0)) / 1e9
