"""Ranks that meet in the same operation and do not mean the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.detectors.context import Detector
from ddpwatch.core.detectors.log_findings import with_logs
from ddpwatch.core.detectors.stall import deadline_text, doing, facts, operation
from ddpwatch.core.diagnosis.arrivals import the_few
from ddpwatch.core.diagnosis.early_exit import left_the_loop
from ddpwatch.core.diagnosis.exits import names_of, place_of
from ddpwatch.core.diagnosis.stacks import top_of_stack
from ddpwatch.core.units import duration, ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import Evidence
    from ddpwatch.core.diagnosis.arrivals import Meeting, Standing
    from ddpwatch.core.diagnosis.mismatch import Break

RULE: Final = rules.DESYNC
PATIENCE_NS: Final = 3_000_000_000
"""So long it is waited for the word of every rank."""
ADVICE: Final = (
    "The ranks have taken different ways through the script: look for a branch on the rank or on the data around a "
    "collective, for data that has ended on some ranks, and for parameters that only some ranks use "
    "(find_unused_parameters)."
)


def desync(evidence: Evidence) -> list[Finding]:
    """Ranks have joined equally many operations of a group, but not the same one: they wait for each other for ever.

    Compared are the operation, the sizes and the types that each rank has in flight under the same number. The few are
    blamed, not the many; of two, both are told and nobody is blamed. So it is with ranks that wait for each other in
    different groups, and with ranks that lost their connections: gloo aborts a process that receives more than it
    expects, and that one need not be wrong. Once they have given up waiting, it is a matter of `timeout`.
    """
    if evidence.gave_up is not None and evidence.gave_up.split is not None:
        return with_logs(evidence.state, RULE, [])
    broke = evidence.broke
    crossed = [meeting for meeting in evidence.stuck if meeting.crossed]
    findings = [
        _mismatch(evidence, meeting)
        for meeting in evidence.stuck
        if not meeting.missing and len(meeting.camps) > 1 and _all_have_told(meeting) and not left_the_loop(meeting)
    ]
    if crossed:
        findings.append(_crossed(evidence, crossed))
    if broke is not None and len(broke.camps) > 1:
        findings.append(_broken(broke))
    return with_logs(evidence.state, RULE, findings)


def _all_have_told(meeting: Meeting) -> bool:
    """Whether every rank has said what it waits for, or had the time to: before, the many may look like the few."""
    told = len(meeting.waiting) == len(meeting.standings) and all(each.signature for each in meeting.waiting)
    return told or meeting.waiting[0].age_ns > PATIENCE_NS


def _mismatch(evidence: Evidence, meeting: Meeting) -> Finding:
    camps = camps_text(meeting)
    blamed = meeting.odd or [standing for camp in meeting.camps for standing in camp]
    seq = (meeting.camps[0][0].group.completed or 0) + 1
    doings = "; ".join(doing(evidence.state, standing) for standing in blamed[:3])
    is_ = "is" if len(meeting.odd) == 1 else "are"
    who = f"{_names(meeting.odd)} {is_} out of line" if meeting.odd else "the ranks disagree"
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject=f"group {meeting.name}",
        message=f"{who} at #{seq}: {camps}{_waited(meeting)}{deadline_text(evidence)}. {doings}",
        advice=ADVICE,
        ranks=tuple(sorted(standing.rank.rank for standing in blamed)),
        urgent=evidence.urgent,
        detail=top_of_stack(meeting.camps[1][0].rank.stack),
        evidence=facts(evidence, meeting) | {"camps": camps, "doing": doings},
    )


def _crossed(evidence: Evidence, circle: Sequence[Meeting]) -> Finding:
    camps = " against ".join(f"{operation(meeting)} on {_names(meeting.waiting)}" for meeting in circle)
    few = the_few(circle)
    told = {standing.rank.rank: standing for meeting in circle for standing in meeting.waiting}
    if few:
        told = {standing.rank.rank: standing for standing in few}
    doings = "; ".join(doing(evidence.state, told[rank]) for rank in sorted(told)[:3])
    who = f"{_names(few)} {'is' if len(few) == 1 else 'are'} out of line: " if few else ""
    longest = max(circle, key=lambda meeting: meeting.waiting[0].age_ns)
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject="crossed groups",
        message=f"{who}the ranks wait for each other in different groups: {camps}{_waited(longest)}"
        f"{deadline_text(evidence)}. {doings}",
        advice=ADVICE,
        ranks=tuple(sorted(told)),
        urgent=evidence.urgent,
        detail=top_of_stack(told[min(told)].rank.stack),
        evidence=facts(evidence, longest) | {"camps": camps, "doing": doings},
    )


def _waited(meeting: Meeting) -> str:
    """Since when it is so: the alert is as old as the look of whoever came later."""
    return f", for {duration(meeting.waiting[0].age_ns / 1e9)}"


def _broken(broke: Break) -> Finding:
    """What the ranks were in when one of them was aborted, or they lost their connections."""
    odd = broke.odd
    blamed = odd or [end for camp in broke.camps for end in camp]
    camps = " against ".join(
        f"{op.op} #{op.seq} {op.shape} on {names_of(camp)}" for op, camp in zip(broke.ops, broke.camps, strict=True)
    )
    places = "; ".join(
        f"rank {camp[0].rank.rank} was at {place}" for camp in broke.camps[:3] if (place := place_of(camp[0]))
    )
    is_ = "was" if len(odd) == 1 else "were"
    who = f"{names_of(odd)} {is_} out of line" if odd else "the ranks were in different operations"
    unsure = "" if odd else "; which of them is wrong cannot be told"
    if broke.unseen:
        unsure += f"; how {names_of(broke.unseen)} ended was not seen"
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject="broken",
        message=f"{who} when their connections broke: {camps}{unsure}{f'. {places}' if places else ''}",
        advice=ADVICE,
        ranks=tuple(sorted(end.rank.rank for end in blamed)),
        evidence={"camps": camps, "places": places, "aborted": names_of(broke.aborted) if broke.aborted else ""},
    )


def camps_text(meeting: Meeting) -> str:
    """Who is in what: `all_reduce [8] Float on ranks 0, 2 against broadcast [8] Float on rank 1`."""
    return " against ".join(f"{_what(camp[0])} on {_names(camp)}" for camp in meeting.camps)


def _what(standing: Standing) -> str:
    return f"{standing.group.op} {standing.group.shape}".strip()


def _names(standings: Sequence[Standing]) -> str:
    return ranks_text(standing.rank.rank for standing in standings)


DESYNC: Final = Detector(RULE, desync, by_step=False)
