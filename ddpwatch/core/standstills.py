"""Steps in which the job stood still: far longer than the others, mostly because one rank was stuck for a while.

Long steps are sorted by length as they come. Which of them were standstills is known when the usual step is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.spread import bins
from ddpwatch.core.timeline import NOT_KNOWN
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.ring import IntArray

    FloatArray = NDArray[np.float64]

FAR_TIMES: Final = 4.0
"""So many times the median is far above it …"""
FAR_NS: Final = 1e9
"""… if it is at least so much longer: of short steps every scheduler makes long ones."""
GUILTY_PERCENT: Final = 50
"""The rank whose own work made up so much more of the step than the middle rank's is the one that stood still."""
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
    imposed_ns: float
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
    imposed_ns: float = 0.0
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
        long = np.flatnonzero(step_ns > FAR_NS)
        for place, length in zip(long.tolist(), bins(step_ns[long]).tolist(), strict=True):
            kept = self._long.setdefault((length, int(guilty[place])), _Long())
            kept.steps += 1
            kept.total_ns += float(step_ns[place])
            if step_ns[place] > kept.longest_ns:
                kept.longest_ns, kept.longest_step = float(step_ns[place]), int(indices[place])
            if costs is not None and guilty[place] != NOBODY:
                kept.imposed_ns += float(costs[0][place])
                kept.beyond_ns += costs[1][:, place]

    def found(self, usual_ns: float | None, ranks: Collection[int] | None = None) -> Standstill | None:
        """Those that are far above the usual step; of these ranks only. None = there are none."""
        if usual_ns is None:
            return None
        far_ns = max(FAR_TIMES * usual_ns, usual_ns + FAR_NS)
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
            lost_s=(sum(long.total_ns for long in far.values()) - steps * usual_ns) / 1e9,
            longest_step=longest.longest_step,
            longest_s=longest.longest_ns / 1e9,
            rank=None if guilty == NOBODY else guilty,
            imposed_ns=sum(long.imposed_ns for long in far.values()),
            beyond_ns=np.sum([long.beyond_ns for long in far.values()], axis=0),
        )


def guilty_of(ranks: Sequence[int], excess: NDArray[np.uint8]) -> IntArray:
    """For whom each step took so long, by what the timeline knows of it: (rank, step), in per cent of the step."""
    if len(ranks) < 2:
        return np.full(excess.shape[1], NOBODY, dtype=np.int64)
    known = np.where(excess == NOT_KNOWN, 0, excess)
    guilty: IntArray = np.asarray(ranks, dtype=np.int64)[known.argmax(axis=0)]
    return np.where(known.max(axis=0) >= GUILTY_PERCENT, guilty, NOBODY)
