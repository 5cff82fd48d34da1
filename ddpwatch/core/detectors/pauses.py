"""Cost of garbage collections and checkpoint saves to the job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.diagnosis.attribution import PAUSE_ADVICE
from ddpwatch.core.limits import PausesLimits
from ddpwatch.core.metrics.hung_steps import without_hung_steps
from ddpwatch.core.metrics.pauses import gc_detail
from ddpwatch.core.metrics.window import PAUSES, scaled_steps
from ddpwatch.core.units import ms_text, percent, plural

if TYPE_CHECKING:
    from ddpwatch.core.detectors.context import DetectorContext
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.step_store import IntArray

RULE: Final = rules.PAUSES


def pauses(context: DetectorContext) -> list[Finding]:
    """Garbage collection costs more than 1% of the time, or checkpoint saves more than 5%.

    Each rank collects when it has made enough new objects, so ranks collect in different steps, and in each of them all
    others wait; likewise while one rank saves. The cost is how much shorter the steps would be without these pauses,
    for saves from one save to the next. A rank with most of them is named.
    """
    limits = context.limits.pauses
    window = context.window
    if not len(window) or not window.ranks or not context.has_majority:
        return []
    window = window.last(scaled_steps(limits.window_steps, context.limits.judge.least_s, window.median_step_ns))
    generation = gc_detail(window)
    found = [
        _finding(without_hung_steps(window), "gc_ns", f", {generation}" if generation else "", limits.gc_share, limits),
        _finding(_between_saves(window), "save_ns", "", limits.save_share, limits),
    ]
    return [finding for finding in found if finding is not None]


def _finding(window: Window, column: str, detail: str, share: float, limits: PausesLimits) -> Finding | None:
    name = PAUSES[column]
    pause_ns = window.pause_ns(column)
    # What remains of the slowest rank's own work without any pause.
    cost_ns: IntArray = window.self_ns.max(axis=0) - (window.self_ns - pause_ns).max(axis=0)
    hit = cost_ns > 0
    cost = float(cost_ns.sum()) / max(float(window.job_step_ns.sum()), 1.0)
    if cost <= share * limits.close_part or not hit.any():
        return None
    by_rank_ns = pause_ns[:, hit].sum(axis=1)
    row = int(by_rank_ns.argmax())
    alone = len(window.ranks) > 1 and by_rank_ns[row] >= PausesLimits.MAIN_SHARE * by_rank_ns.sum()
    where, waiting = (f" on rank {window.ranks[row]}", "; the others wait for it") if alone else ("", "")
    longest_ns = float(pause_ns.max())
    return Finding(
        rule=RULE,
        severity=Severity.WARNING,
        subject=name,
        message=f"{name}{where} costs {percent(cost)} of the time: up to {ms_text(longest_ns)}{detail}{waiting} · last "
        f"{plural(len(window), 'step')}",
        advice=PAUSE_ADVICE[column],
        ranks=(window.ranks[row],) if alone else (),
        cost=cost,
        evidence={
            "cost_percent": round(cost * 100, 2),
            "pause_percent": round(100 * float(pause_ns.sum()) / max(float(window.step_ns.sum()), 1.0), 2),
            "longest_ms": round(longest_ns / 1e6, 3),
            "paused_steps": int(np.count_nonzero(hit)),
            "steps": len(window),
        },
        opens=cost > share,
    )


def _between_saves(window: Window) -> Window:
    """The steps from the first save to the last, without the last: whole periods, so that one rare save does not count
    as the cost of every step. Empty = fewer than two saves.
    """
    saved = np.flatnonzero(window.pause_ns("save_ns").any(axis=0))
    return window.part(int(saved[0]), int(saved[-1])) if len(saved) > 1 else window.part(0, 0)
