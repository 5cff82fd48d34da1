"""Ranks that join different operations under the same sequence number, or wait for each other crosswise."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.detectors.context import names_of, ranks_of
from ddpwatch.core.detectors.log_findings import with_log_findings
from ddpwatch.core.detectors.stall import deadline_text, doing, facts, operation
from ddpwatch.core.diagnosis.arrivals import minority_of
from ddpwatch.core.diagnosis.early_exit import left_the_loop
from ddpwatch.core.diagnosis.exits import place_of
from ddpwatch.core.diagnosis.stacks import top_of_stack
from ddpwatch.core.units import duration_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.diagnosis.arrivals import GroupMember, SyncPoint
    from ddpwatch.core.diagnosis.exits import End
    from ddpwatch.core.diagnosis.mismatch import OpMismatch

RULE: Final = rules.DESYNC
ADVICE: Final = (
    "The ranks have taken different code paths: look for a branch on the rank or on the data around a collective, for "
    "data that has ended on some ranks, and for parameters that only some ranks use (find_unused_parameters)."
)


def desync(context: DetectorContext) -> list[Finding]:
    """Ranks have called different collectives, and wait for each other until the timeout fires.

    Compares the operation, sizes and types that each rank has in flight under the same sequence number, and ranks that
    wait for each other in different process groups. Names the minority; without a majority, all ranks. Also compares
    the last collectives of ranks that lost their connections: gloo aborts a process that receives more than it expects,
    and that process may not be the root cause. A mismatch that has timed out is reported by `timeout`.
    """
    if context.gave_up is not None and context.gave_up.split is not None:
        return with_log_findings(context.state, RULE, [])
    mismatch = context.mismatch
    crossed = [sync_point for sync_point in context.stuck if sync_point.crossed]
    findings = [
        _mismatch(context, sync_point)
        for sync_point in context.stuck
        if not sync_point.missing
        and len(sync_point.op_groups) > 1
        and _all_reported(context, sync_point)
        and not left_the_loop(sync_point)
    ]
    if crossed:
        findings.append(_crossed(context, crossed))
    if mismatch is not None and len(mismatch.op_groups) > 1:
        findings.append(_broken(mismatch))
    return with_log_findings(context.state, RULE, findings)


def _all_reported(context: DetectorContext, sync_point: SyncPoint) -> bool:
    """Whether every rank has reported its operation, or had time to: before that the majority may look like the
    minority.
    """
    reported = len(sync_point.waiting) == len(sync_point.members) and all(each.signature for each in sync_point.waiting)
    return reported or sync_point.waiting[0].age_ns > context.limits.desync.REPORT_DELAY_NS


def _mismatch(context: DetectorContext, sync_point: SyncPoint) -> Finding:
    blamed = sync_point.minority or [member for op_group in sync_point.op_groups for member in op_group]
    seq = (sync_point.op_groups[0][0].group.completed or 0) + 1
    label = f"{names_of(sync_point.minority) if sync_point.minority else 'the ranks'} called "
    label += f"{'a different collective' if len(sync_point.minority) == 1 else 'different collectives'} at #{seq}"
    finding = _waiting(context, sync_point, f"group {sync_point.name}", label, op_groups_text(sync_point), blamed)
    return replace(finding, detail=top_of_stack(sync_point.op_groups[1][0].rank.stack))


def _crossed(context: DetectorContext, cycle: Sequence[SyncPoint]) -> Finding:
    op_groups = " vs ".join(f"{operation(sync_point)} on {names_of(sync_point.waiting)}" for sync_point in cycle)
    minority = minority_of(cycle)
    members = minority or [member for sync_point in cycle for member in sync_point.waiting]
    by_rank = {member.rank.rank: member for member in members}
    label = "the ranks wait for each other in different process groups"
    if minority:
        wait = "waits" if len(minority) == 1 else "wait"
        label = f"{names_of(minority)} {wait} in a different process group than the others"
    longest = max(cycle, key=lambda sync_point: sync_point.waiting[0].age_ns)
    blamed = [by_rank[rank] for rank in sorted(by_rank)]
    finding = _waiting(context, longest, "crossed groups", label, op_groups, blamed)
    return replace(finding, detail=top_of_stack(blamed[0].rank.stack))


def _waiting(
    context: DetectorContext,
    sync_point: SyncPoint,
    subject: str,
    label: str,
    op_groups: str,
    blamed: Sequence[GroupMember],
) -> Finding:
    # With the duration of the wait: a viewer that attaches late opens the alert late.
    waited = duration_text(sync_point.waiting[0].age_ns / 1e9)
    doings = "; ".join(doing(context.state, member) for member in blamed[:3])
    message = f"{label}: {op_groups}; they have waited for {waited}{deadline_text(context)}. {doings}"
    evidence = facts(context, sync_point) | {"camps": op_groups, "doing": doings}
    ranks, urgent = ranks_of(blamed), context.urgent
    return Finding(RULE, Severity.CRITICAL, subject, message, ADVICE, ranks, urgent=urgent, evidence=evidence)


def _broken(mismatch: OpMismatch) -> Finding:
    """Operations the ranks were in when one was aborted, or their connections broke."""
    odd = mismatch.minority
    blamed = odd or [end for op_group in mismatch.op_groups for end in op_group]
    op_groups = " vs ".join(
        f"{op.op} #{op.seq} {op.shape} on {names_of(op_group)}"
        for op, op_group in zip(mismatch.ops, mismatch.op_groups, strict=True)
    )
    places = "; ".join(
        f"rank {op_group[0].rank.rank} was at {place}"
        for op_group in mismatch.op_groups[:3]
        if (place := place_of(op_group[0]))
    )
    label = f"{names_of(odd) if odd else 'the ranks'} {different_collective(odd)}"
    unsure = "" if odd else "; which of them is wrong is unknown"
    if mismatch.unseen:
        unsure += f"; how {names_of(mismatch.unseen)} ended was not observed"
    message = f"{label} when the connections broke: {op_groups}{unsure}{f'. {places}' if places else ''}"
    aborted = names_of(mismatch.aborted) if mismatch.aborted else ""
    evidence: Evidence = {"camps": op_groups, "places": places, "aborted": aborted}
    return Finding(RULE, Severity.CRITICAL, "broken", message, ADVICE, ranks_of(blamed), evidence=evidence)


def different_collective(minority: Sequence[End | GroupMember]) -> str:
    """What the minority did, or all ranks if there is none: `was in a different collective`."""
    return "was in a different collective" if len(minority) == 1 else "were in different collectives"


def op_groups_text(sync_point: SyncPoint) -> str:
    """Operations and their ranks: `all_reduce [8] Float on ranks 0, 2 vs broadcast [8] Float on rank 1`."""
    return " vs ".join(
        f"{op_group[0].group.op} {op_group[0].group.shape}".strip() + f" on {names_of(op_group)}"
        for op_group in sync_point.op_groups
    )
