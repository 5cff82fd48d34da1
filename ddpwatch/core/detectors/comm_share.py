"""All-reduce share of the step, split into wire and waiting, with hysteresis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.detectors.uneven_work import follows_inputs
from ddpwatch.core.diagnosis.scheduler_noise import starvation
from ddpwatch.core.metrics.hung_steps import without_hung_steps
from ddpwatch.core.metrics.scaling import waited_for
from ddpwatch.core.metrics.window import scaled_steps
from ddpwatch.core.model_kinds import is_ddp, kind_of_run
from ddpwatch.core.units import percent, plural, ranks_text, wire_and_waiting

if TYPE_CHECKING:
    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.metrics.window import Window

RULE: Final = rules.COMM_SHARE
UNEVEN_ADVICE: Final = (
    "The ranks take turns waiting for each other: look for uneven work (input lengths, batch sizes) and for other load "
    "on the hosts."
)
STARVED_ADVICE: Final = (
    "The ranks wait for each other because their threads wait for CPU cores: see cpu-starvation for what to set."
)
_LESS_WIRE: Final = (
    "The all-reduce itself takes the time: try another bucket_cap_mb, gradient_as_bucket_view=True, gradient "
    "accumulation under no_sync(), a bf16 or fp16 compression hook"
)
_LESS_FSDP: Final = (
    "FSDP's collectives themselves take the time: try larger batches, gradient accumulation, a 2D mesh that shards "
    "within a host (HSDP), a mixed precision policy with bf16"
)
_LESS_COLLECTIVES: Final = "The collectives themselves take the time: try larger batches, gradient accumulation"
NETWORK: Final = ", and check which network the backend uses."
ONE_HOST: Final = "; gloo runs it on the CPU and needs free cores."
UNPROVEN_ADVICE: Final = (
    "Call install() on every rank to separate wire from waiting: the rank that the others wait for may be one that is "
    "not monitored."
)


def comm_share(context: DetectorContext) -> list[Finding]:
    """Exposed communication, the all-reduce that backward does not overlap, takes too much of the step.

    The share is the time of all ranks in communication over the time of all their steps, without hung steps. The wire
    is what even the last rank to arrive spends there; the rest is waiting for slower ranks. The two are separated only
    while all ranks are seen; waiting for larger inputs is left to uneven-work and straggler. With hysteresis: an open
    alert closes once the share is clearly below its threshold.
    """
    limits = context.limits.comm_share
    window = context.window
    if window.world_size < 2 or not len(window) or not context.has_majority:
        return []
    steps = scaled_steps(limits.window_steps, context.limits.judge.least_s, window.median_step_ns)
    window = without_hung_steps(window.last(steps))
    total_ns = max(float(window.job_step_ns.sum()), 1.0)
    share = float(window.job_sync_ns.sum()) / total_ns
    if share <= limits.share * limits.close_part:
        return []
    opens = share > limits.share
    # Between the two thresholds the share alone does not explain the alert.
    what = "all-reduce takes" if is_ddp(context.state) else "communication takes"
    takes = f"exposed {what} {percent(share)} of the step"
    takes += "" if opens else f", down from more than {percent(limits.share)}"
    if not window.complete:
        return [_without_split(window, share, takes, opens=opens)]
    wire = float(window.wire_ns.sum(dtype=np.float64)) / total_ns
    if wire <= limits.share and follows_inputs(window):
        return []
    return [_finding(context, window, share, wire, takes, opens=opens)]


def _less_wire(context: DetectorContext, window: Window) -> str:
    kind = kind_of_run(context.state)
    advice = _LESS_WIRE if is_ddp(context.state) else _LESS_FSDP if kind.startswith("fsdp") else _LESS_COLLECTIVES
    return advice + (ONE_HOST if window.one_host else NETWORK)


def _finding(
    context: DetectorContext, window: Window, share: float, wire: float, takes: str, *, opens: bool
) -> Finding:
    wait = max(share - wire, 0.0)
    on_wire = wire > wait
    shown_wire, shown_waiting = wire_and_waiting(share, wire)
    return Finding(
        rule=RULE,
        severity=Severity.WARNING,
        subject="job",
        message=f"{takes}: wire {shown_wire}%, waiting {shown_waiting}% · last {plural(len(window), 'step')}",
        advice=_less_wire(context, window) if on_wire else _waiting_advice(context, window, wait),
        cost=wire if on_wire else wait,
        evidence={
            "share_percent": round(share * 100, 2),
            "wire_percent": round(wire * 100, 2),
            "waiting_percent": round(wait * 100, 2),
            "steps": len(window),
        },
        opens=opens,
    )


def _waiting_advice(context: DetectorContext, window: Window, wait: float) -> str:
    """Names the ranks that most of the waiting is for, if there are any, and it is not CPU starvation."""
    if wait <= starvation(context.state, window):
        return STARVED_ADVICE
    cost_ns = window.straggler_cost_ns.sum(axis=1, dtype=np.float64)
    ranks = waited_for(dict(zip(window.ranks, cost_ns.tolist(), strict=True)))
    if not ranks:
        return UNEVEN_ADVICE
    whose = "its page" if len(ranks) == 1 else "their pages"
    return f"Most of the waiting is for {ranks_text(ranks)}: {whose} and the straggler alert show where the time goes."


def _without_split(window: Window, share: float, takes: str, *, opens: bool) -> Finding:
    missing = window.world_size - len(window.ranks)
    unseen = f"{missing} of {plural(window.world_size, 'rank')} cannot be compared"
    message = f"{takes}; wire and waiting are not separable while {unseen} · last {plural(len(window), 'step')}"
    evidence: Evidence = {"share_percent": round(share * 100, 2), "missing_ranks": missing, "steps": len(window)}
    return Finding(RULE, Severity.WARNING, "job", message, UNPROVEN_ADVICE, evidence=evidence, opens=opens)
