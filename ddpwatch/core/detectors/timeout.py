"""A process group's timeout: about to fire, or fired."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddpwatch.core.alerts import Finding, Severity
from ddpwatch.core.arrivals import HERE, Meeting, Standing, roots, the_few
from ddpwatch.core.detectors.detector import Detector
from ddpwatch.core.detectors.logs import told_by_logs
from ddpwatch.core.detectors.stall import doing, facts, operation
from ddpwatch.core.endings import is_timeout
from ddpwatch.core.numbers import duration, ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.evidence import Evidence
    from ddpwatch.core.rank import RankState
    from ddpwatch.core.state import RunState

RULE: Final = "timeout"
SOON_ADVICE: Final = (
    "When it fires, torch ends the job and most likely names a rank that merely waited. Save what can be saved; a "
    "longer timeout is init_process_group(timeout=...)."
)
FIRED_ADVICE: Final = (
    "The rank that complains was waiting. Look at the one that had not joined: its last step, its log, its host."
)
UNSEEN_ADVICE: Final = (
    "The ranks that complain were waiting. Look for one that does not: its last step, its log, its host."
)


def timeout(evidence: Evidence) -> list[Finding]:
    """The timeout of a process group has fired, or is about to: torch ends a job whose collective does not complete.

    Told is who had joined the fewest operations when that happened, and not who complained first: that one has merely
    waited longest.
    """
    return [*_soon(evidence), *_fired(evidence.state), *told_by_logs(evidence.state, RULE)]


def _soon(evidence: Evidence) -> list[Finding]:
    limits = evidence.limits.timeout
    began = {meeting.name: meeting for meeting in evidence.stuck}
    findings = []
    for held in evidence.meetings:
        meeting = began.get(held.name, held)
        left_ns = meeting.left_ns
        if left_ns is None or not meeting.waiting:
            continue
        timeout_ns = max(standing.group.timeout_ns for standing in meeting.waiting)
        if left_ns < min(limits.soon_s * 1e9, limits.soon_part * timeout_ns):
            follows = meeting.crossed or meeting.name not in began
            others = [root for root in began.values() if root.name != meeting.name]
            findings.append(_near(evidence, meeting, left_ns, others if follows else []))
    return findings


def _near(evidence: Evidence, meeting: Meeting, left_ns: float, elsewhere: Sequence[Meeting]) -> Finding:
    """The finding for one group. Ranks that are missing in it because they wait elsewhere are not where it began."""
    left = f"in {duration(left_ns / 1e9)}" if left_ns > 0 else "at any moment"
    trained = any(standing.rank.steps.newest >= evidence.limits.judge.warmup_steps for standing in meeting.waiting)
    missing = () if elsewhere else tuple(standing.rank.rank for standing in meeting.missing)
    if elsewhere:
        why = f"and its ranks wait for {', '.join(operation(root) for root in elsewhere)}"
    elif missing:
        why = f"{ranks_text(missing)} not having joined it"
    else:
        why = "although all ranks have joined it"
    return Finding(
        rule=RULE,
        # In the first steps ranks compile and start late, and most likely come.
        severity=Severity.CRITICAL if trained else Severity.WARNING,
        subject=f"group {meeting.name}",
        message=f"torch ends the job {left} unless {operation(meeting)} completes, {why}",
        advice=SOON_ADVICE,
        ranks=missing,
        evidence=facts(evidence, meeting),
    )


def _fired(state: RunState) -> list[Finding]:
    complaining = [rank for rank in state.ranks.values() if _complains(rank)]
    if not complaining:
        return []
    began = _began(state)
    crossed = any(meeting.crossed for meeting in began)
    culprits = the_few(began) if crossed else [each for root in began for each in root.missing]
    names = ranks_text(rank.rank for rank in complaining)
    if culprits:
        who = ranks_text(standing.rank.rank for standing in culprits)
        # Who gave up may itself be missing in another group, where the rest waits for it.
        itself = any(standing.rank in complaining for standing in culprits)
        where = f"what the others waited for in group {began[0].name}" if itself else "it"
        message = f"{names} gave up waiting in a collective; {who} had not joined {where}. "
        message += "; ".join(doing(state, standing) for standing in culprits[:3])
    elif began:
        message = f"{names} gave up waiting in a collective; the ranks waited for each other in different groups"
    else:
        message = f"{names} gave up waiting in a collective; who had not joined it was not seen{_still_there(state)}"
    return [
        Finding(
            rule=RULE,
            severity=Severity.CRITICAL,
            subject="fired",
            message=message,
            advice=FIRED_ADVICE if culprits else UNSEEN_ADVICE,
            ranks=tuple(standing.rank.rank for standing in culprits),
            evidence={"complaining": names, "culprits": len(culprits)},
        )
    ]


def _still_there(state: RunState) -> str:
    """The few that have not given up: most likely one of them was waited for."""
    left = [rank.rank for rank in state.ranks.values() if state.condition(rank) in HERE]
    if not left or 2 * len(left) >= len(state.ranks):
        return ""
    return f", but {ranks_text(left)} {'has' if len(left) == 1 else 'have'} not given up"


def _complains(rank: RankState) -> bool:
    if rank.beat is not None and any(group.error == "TIMEOUT" for group in rank.beat.groups):
        return True
    return rank.bye is not None and rank.bye.reason == "failed" and is_timeout(rank.bye.text)


def _began(state: RunState) -> list[Meeting]:
    """The groups where it began, by the last that was heard of each rank.

    Whoever gives up has left its operation by then. So every rank is taken to have waited wherever it was ahead of
    another: that operation cannot have completed.
    """
    by_name: dict[str, list[Standing]] = {}
    for rank in state.ranks.values():
        if rank.beat is not None:
            for group in rank.beat.groups:
                by_name.setdefault(group.name, []).append(Standing(rank, group, 0))
    held = []
    for name, standings in by_name.items():
        front = max(standing.group.enqueued for standing in standings)
        ahead = (replace(each, age_ns=int(each.group.enqueued == front)) for each in standings)
        meeting = Meeting(name, tuple(ahead))
        if meeting.missing:
            held.append(meeting)
    return roots(held, held, lambda standing: standing.age_ns > 0) if held else []


TIMEOUT: Final = Detector(RULE, timeout, by_step=False)
