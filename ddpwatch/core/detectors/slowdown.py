"""Work and wire of the whole job against their own earlier steady state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.metrics.baseline import Baseline, open_delay_steps
from ddpwatch.core.units import ms_text, percent

if TYPE_CHECKING:
    from ddpwatch.core.detectors.context import DetectorContext

RULE: Final = rules.SLOWDOWN
WORK_ADVICE: Final = (
    "Check what all ranks share: GPU clocks and temperature (`nvidia-smi -q -d PERFORMANCE`), storage, other jobs on "
    "the hosts, growing inputs such as longer sequences, and fragmented GPU memory."
)
WIRE_ADVICE: Final = "The all-reduce itself has become slower, not the work: see slow-link."


def slowdown(context: DetectorContext) -> list[Finding]:
    """The whole job is slower than earlier in this run, on all ranks alike.

    Compares own work and wire of the latest steps with the baseline of the faster half of the earlier run. Own work is
    that of the faster ranks: a slow rank or host is reported as a straggler. A slowdown must persist to be reported.
    """
    limits = context.limits.slowdown
    window, block = context.window, context.latest_block
    if block is None or not context.has_majority:
        return []
    work = context.history.steady("work_ns", block, limits.lasting_s)
    # If a rank is not watched, waiting for it looks like wire.
    wire = context.history.steady("wire_ns", block, limits.lasting_s) if window.complete else Baseline(0.0, 0.0)
    if work is None or wire is None:
        return []
    wire_ns = block.wire_ns if window.complete else 0.0
    now_ns, before_ns = block.work_ns + wire_ns, work.value + wire.value
    more_ns = now_ns - before_ns
    spread_ns = max(work.spread + wire.spread, limits.MIN_NOISE_SHARE * before_ns)
    if more_ns <= 0 or now_ns < limits.factor * before_ns:
        return []
    more_share = more_ns / max(before_ns, 1.0)
    mostly_wire = wire_ns - wire.value > more_ns / 2
    return [
        Finding(
            rule=RULE,
            severity=Severity.WARNING,
            subject="job",
            message=f"the whole job is {percent(more_share)} slower than before: {ms_text(now_ns)} vs "
            f"{ms_text(before_ns)} of work{' and wire' if window.complete else ''} per step",
            advice=WIRE_ADVICE if mostly_wire else WORK_ADVICE,
            cost=more_ns / max(block.step_ns, now_ns, 1.0),
            evidence={
                "work_ms": round(block.work_ns / 1e6, 3),
                "usual_work_ms": round(work.value / 1e6, 3),
                "wire_ms": round(wire_ns / 1e6, 3),
                "usual_wire_ms": round(wire.value / 1e6, 3),
                "spread_ms": round(spread_ns / 1e6, 3),
                "slower_percent": round(more_share * 100, 2),
                "steps": block.steps,
            },
            proven=more_ns > limits.sigmas * spread_ns,
            lasting=open_delay_steps(limits.lasting_s, block),
        )
    ]
