"""Ranks that meet in the same operation and do not mean the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.detectors.context import Detector
from ddpwatch.core.detectors.log_findings import with_log_findings
from ddpwatch.core.detectors.stall import deadline_text, doing, facts, operation
from ddpwatch.core.diagnosis.arrivals import minority_of
from ddpwatch.core.diagnosis.early_exit import left_the_loop
from ddpwatch.core.diagnosis.exits import names_of, place_of
from ddpwatch.core.diagnosis.stacks import top_of_stack
from ddpwatch.core.limits import DesyncLimits
from ddpwatch.core.units import duration, ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext
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

    Compared are the operation, the sizes and the types that each rank has in flight under the same number. The few are
    blamed, not the many; of two, both are told and nobody is blamed. So it is with ranks that wait for each other in
    different groups, and with ranks that lost their connections: gloo aborts a process that receives more than it
    expects, and that one need not be wrong. Once they have given up waiting, it is a matter of `timeout`.
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
        and _all_reported(sync_point)
        and not left_the_loop(sync_point)
    ]
    if crossed:
        findings.append(_crossed(context, crossed))
    if mismatch is not None and len(mismatch.op_groups) > 1:
        findings.append(_broken(mismatch))
    return with_log_findings(context.state, RULE, findings)


def _all_reported(sync_point: SyncPoint) -> bool:
    """Whether every rank has said what it waits for, or had the time to: before, the many may look like the few."""
    reported = len(sync_point.waiting) == len(sync_point.members) and all(each.signature for each in sync_point.waiting)
    return reported or sync_point.waiting[0].age_ns > DesyncLimits.REPORT_DELAY_NS


def _mismatch(context: DetectorContext, sync_point: SyncPoint) -> Finding:
    op_groups = op_groups_text(sync_point)
    blamed = sync_point.minority or [member for op_group in sync_point.op_groups for member in op_group]
    seq = (sync_point.op_groups[0][0].group.completed or 0) + 1
    doings = "; ".join(doing(context.state, member) for member in blamed[:3])
    is_ = "is" if len(sync_point.minority) == 1 else "are"
    who = f"{_names(sync_point.minority)} {is_} out of line" if sync_point.minority else "the ranks disagree"
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject=f"group {sync_point.name}",
        message=f"{who} at #{seq}: {op_groups}{_waited(sync_point)}{deadline_text(context)}. {doings}",
        advice=ADVICE,
        ranks=tuple(sorted(member.rank.rank for member in blamed)),
        urgent=context.urgent,
        detail=top_of_stack(sync_point.op_groups[1][0].rank.stack),
        evidence=facts(context, sync_point) | {"camps": op_groups, "doing": doings},
    )


def _crossed(context: DetectorContext, cycle: Sequence[SyncPoint]) -> Finding:
    op_groups = " against ".join(f"{operation(sync_point)} on {_names(sync_point.waiting)}" for sync_point in cycle)
    few = minority_of(cycle)
    reported = {member.rank.rank: member for sync_point in cycle for member in sync_point.waiting}
    if few:
        reported = {member.rank.rank: member for member in few}
    doings = "; ".join(doing(context.state, reported[rank]) for rank in sorted(reported)[:3])
    who = f"{_names(few)} {'is' if len(few) == 1 else 'are'} out of line: " if few else ""
    longest = max(cycle, key=lambda sync_point: sync_point.waiting[0].age_ns)
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject="crossed groups",
        message=f"{who}the ranks wait for each other in different groups: {op_groups}{_waited(longest)}"
        f"{deadline_text(context)}. {doings}",
        advice=ADVICE,
        ranks=tuple(sorted(reported)),
        urgent=context.urgent,
        detail=top_of_stack(reported[min(reported)].rank.stack),
        evidence=facts(context, longest) | {"camps": op_groups, "doing": doings},
    )


def _waited(sync_point: SyncPoint) -> str:
    """Since when it is so: the alert is as old as the look of whoever came later."""
    return f", for {duration(sync_point.waiting[0].age_ns / 1e9)}"


def _broken(mismatch: OpMismatch) -> Finding:
    """What the ranks were in when one of them was aborted, or they lost their connections."""
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
    is_ = "was" if len(odd) == 1 else "were"
    who = f"{names_of(odd)} {is_} out of line" if odd else "the ranks were in different operations"
    unsure = "" if odd else "; which of them is wrong cannot be told"
    if mismatch.unseen:
        unsure += f"; how {names_of(mismatch.unseen)} ended was not seen"
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject="broken",
        message=f"{who} when their connections broke: {op_groups}{unsure}{f'. {places}' if places else ''}",
        advice=ADVICE,
        ranks=tuple(sorted(end.rank.rank for end in blamed)),
        evidence={
            "camps": op_groups,
            "places": places,
            "aborted": names_of(mismatch.aborted) if mismatch.aborted else "",
        },
    )


def op_groups_text(sync_point: SyncPoint) -> str:
    """Who is in what: `all_reduce [8] Float on ranks 0, 2 against broadcast [8] Float on rank 1`."""
    return " against ".join(f"{_what(op_group[0])} on {_names(op_group)}" for op_group in sync_point.op_groups)


def _what(member: GroupMember) -> str:
    return f"{member.group.op} {member.group.shape}".strip()


def _names(members: Sequence[GroupMember]) -> str:
    return ranks_text(member.rank.rank for member in members)


DESYNC: Final = Detector(RULE, desync, by_step=False)
