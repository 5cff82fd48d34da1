"""Timeout of a process group: about to fire, or fired."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.hang_alerts import is_hang
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.detectors.context import is_near, names_of, ranks_of
from ddpwatch.core.detectors.desync import ADVICE as DESYNC_ADVICE
from ddpwatch.core.detectors.desync import desync, different_collective, op_groups_text
from ddpwatch.core.detectors.log_findings import with_log_findings
from ddpwatch.core.detectors.stall import MAX_ACTIVITIES, doing, facts, has_trained, operation, stall
from ddpwatch.core.detectors.uneven_batch import uneven_batch
from ddpwatch.core.diagnosis.arrivals import HERE
from ddpwatch.core.units import duration_text, ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.diagnosis.arrivals import SyncPoint
    from ddpwatch.core.diagnosis.timeouts import TimedOut
    from ddpwatch.core.state.run import RunState

RULE: Final = rules.TIMEOUT
SOON_ADVICE: Final = (
    "When it fires, torch aborts the job and most likely names a rank that only waited. Save what you can; set a "
    "longer timeout with init_process_group(timeout=...)."
)
FIRED_ADVICE: Final = (
    "The ranks that report the timeout only waited. Look at the one that had not joined: its last step, its log, its "
    "host."
)
UNSEEN_ADVICE: Final = (
    "The ranks that report the timeout only waited. Look for one that does not report it: its last step, its log, its "
    "host."
)


def timeout(context: DetectorContext) -> list[Finding]:
    """The timeout of a process group has fired, or is about to: torch aborts a job whose collective does not complete.

    Names the rank that had joined the fewest collectives, and not the one that reported the timeout first, which only
    waited longest; if the ranks were in different collectives, names the minority. A timeout that is about to fire is
    reported here if no other alert on the wait shows the time left.
    """
    return with_log_findings(context.state, RULE, _fired(context) or _soon(context))


def _soon(context: DetectorContext) -> list[Finding]:
    near = [sync_point for sync_point in context.sync_points if is_near(sync_point, context.limits.timeout)]
    if not near or any(map(is_hang, [*stall(context), *desync(context), *uneven_batch(context)])):
        return []
    began = {sync_point.name: sync_point for sync_point in context.stuck}
    findings = []
    for held in near:
        sync_point = began.get(held.name, held)
        follows = sync_point.crossed or sync_point.name not in began
        others = [root for root in began.values() if root.name != sync_point.name]
        findings.append(_near(context, sync_point, sync_point.timeout_in_ns or 0, others if follows else []))
    return findings


def _near(context: DetectorContext, sync_point: SyncPoint, left_ns: float, elsewhere: Sequence[SyncPoint]) -> Finding:
    """The finding for one group; ranks that wait `elsewhere` are not blamed for missing in it."""
    left = f"in {duration_text(left_ns / 1e9)}" if left_ns > 0 else "at any moment"
    missing = () if elsewhere else sync_point.missing
    what, why = f"{operation(sync_point)} has not completed", ""
    if elsewhere:
        why = f"; its ranks wait for {', '.join(operation(root) for root in elsewhere)}"
    elif missing:
        what = f"{names_of(missing)} {'has' if len(missing) == 1 else 'have'} not joined {operation(sync_point)}"
    else:
        why = f"; all ranks{'' if sync_point.all_present else ' with a heartbeat'} have joined it"
    severity = Severity.CRITICAL if has_trained(sync_point, context) else Severity.WARNING
    message = f"{what}: torch aborts the job {left}{why}"
    ranks, evidence = tuple(member.rank.rank for member in missing), facts(context, sync_point)
    return Finding(RULE, severity, f"group {sync_point.name}", message, SOON_ADVICE, ranks, evidence=evidence)


def _fired(context: DetectorContext) -> list[Finding]:
    state, gave_up = context.state, context.gave_up
    if gave_up is None:
        return []
    if gave_up.split is not None:
        return [_disagreed(gave_up, gave_up.split)]
    culprits = gave_up.culprits
    if culprits:
        # A rank whose wait timed out may itself be missing in another group, where the rest waits for it.
        itself = any(member.rank in gave_up.ranks for member in culprits)
        where = f"what the others waited for in group {gave_up.began[0].name}" if itself else "a collective"
        received = [member for member in culprits[:MAX_ACTIVITIES] if member.rank.beat is not None]
        doings = "; ".join(doing(state, member) for member in received)
        message = f"{names_of(culprits)} had not joined {where}{'; ' if itself else ': '}{_timed_out(gave_up)}"
        message += f". {doings}" if received else ""
    elif gave_up.began:
        message = f"{_timed_out(gave_up)} in collectives: the ranks waited for each other in different process groups"
    else:
        message = f"{_timed_out(gave_up)} in a collective; which rank had not joined it was not observed"
        message += _still_there(state)
    ranks = tuple(member.rank.rank for member in culprits)
    return [_given_up(gave_up, message, FIRED_ADVICE if culprits else UNSEEN_ADVICE, ranks, {})]


def _disagreed(gave_up: TimedOut, split: SyncPoint) -> Finding:
    """The counterpart of `desync` for ranks whose wait timed out."""
    odd, op_groups = gave_up.culprits, op_groups_text(split)
    label = f"{names_of(odd) if odd else 'the ranks'} {different_collective(odd)}"
    message = f"{label} at #{split.waiting[0].waits_at}: {op_groups}; {_timed_out(gave_up)}"
    return _given_up(gave_up, message, DESYNC_ADVICE, ranks_of(odd or split.members), {"camps": op_groups})


def _timed_out(gave_up: TimedOut) -> str:
    return f"{ranks_text(rank.rank for rank in gave_up.ranks)} timed out"


def _given_up(gave_up: TimedOut, message: str, advice: str, ranks: tuple[int, ...], more: Evidence) -> Finding:
    names = ranks_text(rank.rank for rank in gave_up.ranks)
    evidence: Evidence = {"complaining": names, "culprits": len(gave_up.culprits), **more, "rests_on": gave_up.rests_on}
    return Finding(RULE, Severity.CRITICAL, "fired", message, advice, ranks, ends_wait=True, evidence=evidence)


def _still_there(state: RunState) -> str:
    """The minority that has not timed out: most likely one of them was waited for."""
    left = [rank.rank for rank in state.ranks.values() if state.condition(rank) in HERE]
    if not left or 2 * len(left) >= len(state.ranks):
        return ""
    return f", but {ranks_text(left)} {'has' if len(left) == 1 else 'have'} not timed out"
