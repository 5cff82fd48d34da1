"""Collectives of the script that take too much of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.metrics.hung_steps import without_hung_steps
from ddpwatch.core.metrics.sync_points import EVERY_STEP, SyncPointSums
from ddpwatch.core.metrics.window import scaled_steps
from ddpwatch.core.model_kinds import MODEL_PARALLEL, kind_of_run
from ddpwatch.core.units import ms_text, percent, plural

if TYPE_CHECKING:
    from ddpwatch.core.detectors.context import DetectorContext

RULE: Final = rules.SYNC_POINT
ADVICE: Final = (
    "Call it every 10 or 100 steps instead, or put several values into one tensor and reduce that once; with "
    "async_op=True and wait() after backward it overlaps with computation."
)
BARRIER_ADVICE: Final = "Remove the barrier from the loop: the ranks synchronize in every backward pass anyway."


def sync_point(context: DetectorContext) -> list[Finding]:
    """A collective that the script calls itself, such as an all-reduce of the loss or a barrier, takes much of a step.

    Counts the network's part only: waiting for a slow rank would otherwise happen at the next sync point, and the
    straggler rule reports it. Names the operation and the line of the script.
    """
    limits = context.limits.sync_point
    window = context.window
    if kind_of_run(context.state) in MODEL_PARALLEL:
        return []  # a collective inside of the model has the same call sites as one of the script
    if not context.state.has_sync_points or window.world_size < 2 or not len(window) or not window.complete:
        return []
    steps = scaled_steps(limits.window_steps, context.limits.judge.least_s, window.median_step_ns)
    window = without_hung_steps(window.last(steps))
    sums = SyncPointSums()
    sums.add(window)
    total_ns = float(window.job_step_ns.sum())
    findings = []
    for point in sums.figures(context.state, total_ns):
        wire = point.wire_share
        if not point.of_script or wire is None or wire <= limits.share * limits.close_part:
            continue
        wire_ns = point.mean_ns * wire / point.share
        often = "" if point.steps_share >= EVERY_STEP else f" in {percent(point.steps_share)} of the steps"
        findings.append(
            Finding(
                rule=RULE,
                severity=Severity.WARNING,
                subject=point.label,
                message=f"{point.op} at {point.place} takes {percent(wire)} of the step: {ms_text(wire_ns)}"
                f"{often} · last {plural(len(window), 'step')}",
                advice=BARRIER_ADVICE if "barrier" in point.op else ADVICE,
                phase=point.phase,
                cost=wire,
                evidence={
                    "wire_percent": round(wire * 100, 2),
                    "waiting_percent": round((point.wait_share or 0.0) * 100, 2),
                    "wire_ms": round(wire_ns / 1e6, 3),
                    "steps": len(window),
                },
                opens=wire > limits.share,
            )
        )
    return findings
