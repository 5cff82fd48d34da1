"""Pauses with a name over the latest steps of one rank: garbage collection, checkpoint saves, evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddpwatch.core.limits import PausesLimits
from ddpwatch.core.metrics.window import PAUSES, aligned_window

if TYPE_CHECKING:
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState


@dataclass(frozen=True)
class PauseFigures:
    """One kind of pause."""

    column: str
    """Of `PAUSES`."""
    detail: str
    """`generation 2` if most of it is that; else empty."""
    share: float
    """Fraction of the time of all steps."""
    longest_ns: float
    steps: int
    """Number of steps that have it."""
    last_step: int


def pauses_of(state: RunState, rank: RankState) -> list[PauseFigures]:
    """The pauses in the steps that are kept of a rank, evaluations included; those that never happened are left out."""
    indices = rank.steps.indices()
    if not len(indices):
        return []
    window = aligned_window(state, [rank], indices)
    total_ns = max(float(window.step_ns.sum()), 1.0)
    found = []
    for column in PAUSES:
        pause_ns = window.pause_ns(column)[0]
        hit = np.flatnonzero(pause_ns)
        if not len(hit):
            continue
        found.append(
            PauseFigures(
                column,
                gc_detail(window) if column == "gc_ns" else "",
                float(pause_ns.sum()) / total_ns,
                float(pause_ns.max()),
                len(hit),
                int(indices[hit[-1]]),
            )
        )
    return found


def gc_detail(window: Window) -> str:
    """`generation 2` if most of the garbage collection is of that, the oldest; else empty."""
    full_ns, all_ns = (window.pause_ns(column).sum() for column in ("gc_full_ns", "gc_ns"))
    return "generation 2" if full_ns >= PausesLimits.MAIN_SHARE * all_ns else ""
