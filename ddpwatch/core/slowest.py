"""Which rank the others wait for, as far as the medians of the window show it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from ddpwatch.core.figures import Figures

STANDS_OUT: Final = 0.10
"""A rank is named only if its own work exceeds the median of the others by this part of it."""


@dataclass(frozen=True)
class Slowest:
    """The rank with the most own work, and where it differs from the others."""

    rank: int
    self_ns: float
    others_self_ns: float
    """Median own work of the other ranks."""
    phase: str
    """The phase with the largest excess over the others."""
    excess_ns: float


def slowest(figures: Figures) -> Slowest | None:
    """The rank that stands out; None if none does, or if ranks are missing: it could be one of those."""
    if not figures.complete or len(figures.ranks) < 2:
        return None
    worst = max(figures.ranks.values(), key=lambda rank: rank.self_ns)
    others = [rank for rank in figures.ranks.values() if rank is not worst]
    others_self_ns = median(rank.self_ns for rank in others)
    if worst.self_ns - others_self_ns < STANDS_OUT * others_self_ns:
        return None
    # Sync is absent: it is short where a rank is slow, and long where it waits.
    excess_ns = {
        phase: getattr(worst, f"{phase}_ns") - median(getattr(rank, f"{phase}_ns") for rank in others)
        for phase in PHASES
        if phase != "sync"
    }
    phase = max(excess_ns, key=lambda name: excess_ns[name])
    return Slowest(worst.rank, worst.self_ns, others_self_ns, phase, excess_ns[phase])
