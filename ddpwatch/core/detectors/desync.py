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
from ddpwatch.core.units import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.diagnosis.arrivals import GroupMember, SyncPoint
    from ddpwatch.core.diagnosis.mismatch import OpMismatch

RULE: Final = rules.DESYNC
ADVICE: Final = (
    "The ranks have taken different ways through the script: look for a branch on the rank or on the data around a "
    "collective, for data that has ended on some ranks, and for parameters that only some ranks use "
    "(find_unused_parameters)."
)


def desync(context: DetectorContext) -> list[Finding]:
    """Ranks have joined equally many operations of a group, but not the same one: they wait for each other for ever.

    Compared are the operation, the sizes and the types that each rank has in flight under the same number. The
    minority is blamed, not the majority; of two, both are reported and neither is blamed. So it is with ranks that wait
    for each other in different groups, and with ranks that lost their connections: gloo aborts a process that receives
    more than it expects, and that one need not be wrong. Once they have given up waiting, it is a matter of `timeout`.
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
    label = f"{_out_of_line(sync_point.minority) if sync_point.minority else 'the ranks disagree'} at #{seq}"
    finding = _waiting(context, sync_point, f"group {sync_point.name}", label, op_groups_text(sync_point), blamed)
    return replace(finding, detail=top_of_stack(sync_point.op_groups[1][0].rank.stack))


def _crossed(context: DetectorContext, cycle: Sequence[SyncPoint]) -> Finding:
    op_groups = " against ".join(f"{operation(sync_point)} on {names_of(sync_point.waiting)}" for sync_point in cycle)
    minority = minority_of(cycle)
    members = minority or [member for sync_point in cycle for member in sync_point.waiting]
    by_rank = {member.rank.rank: member for member in members}
    label = f"{f'{_out_of_line(minority)}: ' if minority else ''}the ranks wait for each other in different groups"
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
    waited = duration(sync_point.waiting[0].age_ns / 1e9)
    doings = "; ".join(doing(context.state, member) for member in blamed[:3])
    message = f"{label}: {op_groups}, for {waited}{deadline_text(context)}. {doings}"
    evidence = facts(context, sync_point) | {"camps": op_groups, "doing": doings}
    ranks, urgent = ranks_of(blamed), context.urgent
    return Finding(RULE, Severity.CRITICAL, subject, message, ADVICE, ranks, urgent=urgent, evidence=evidence)


def _out_of_line(members: Sequence[GroupMember]) -> str:
    return f"{names_of(members)} {'is' if len(members) == 1 else 'are'} out of line"


def _broken(mismatch: OpMismatch) -> Finding:
    """Operations the ranks were in when one was aborted, or their connections broke."""
    odd = mismatch.minority
    blamed = odd or [end for op_group in mismatch.op_groups for end in op_group]
    op_groups = " against ".join(
        f"{op.op} #{op.seq} {op.shape} on {names_of(op_group)}"
        for op, op_group in zip(mismatch.ops, mismatch.op_groups, strict=True)
    )
    places = "; ".join(
        f"rank {op_group[0].rank.rank} was at {place}"
        for op_group in mismatch.op_groups[:3]
        if (place := place_of(op_group[0]))
    )
    was = "was" if len(odd) == 1 else "were"
    label = f"{names_of(odd)} {was} out of line" if odd else "the ranks were in different operations"
    unsure = "" if odd else "; which of them is wrong cannot be told"
    if mismatch.unseen:
        unsure += f"; how {names_of(mismatch.unseen)} ended was not seen"
    message = f"{label} when their connections broke: {op_groups}{unsure}{f'. {places}' if places else ''}"
    aborted = names_of(mismatch.aborted) if mismatch.aborted else ""
    evidence: Evidence = {"camps": op_groups, "places": places, "aborted": aborted}
    return Finding(RULE, Severity.CRITICAL, "broken", message, ADVICE, ranks_of(blamed), evidence=evidence)


def op_groups_text(sync_point: SyncPoint) -> str:
    """Operations and their ranks: `all_reduce [8] Float on ranks 0, 2 against broadcast [8] Float on rank 1`."""
    return " against ".join(
        f"{op_group[0].group.op} {op_group[0].group.shape}".strip() + f" on {names_of(op_group)}"
        for op_group in sync_point.op_groups
    )
