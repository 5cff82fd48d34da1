"""Ranks that an exception has ended: first failures by name, secondary failures together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.detectors.context import names_of, ranks_of
from ddpwatch.core.detectors.log_findings import with_log_findings
from ddpwatch.core.diagnosis.early_exit import END_OF_DATA, exit_code_pending, left_before
from ddpwatch.core.diagnosis.exits import advice_on, is_interrupt, is_timeout
from ddpwatch.core.limits import RankFailedLimits, UnevenBatchLimits
from ddpwatch.core.units import plural, ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.diagnosis.early_exit import LeftBehind
    from ddpwatch.core.diagnosis.exits import End
    from ddpwatch.core.diagnosis.timeouts import TimedOut
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState

RULE: Final = rules.RANK_FAILED
MESSAGE_CHARS: Final = 300
"""Characters of an exception that are shown in a message."""
ADVICE: Final = "Read the full traceback in the launcher's log."
PEER_ADVICE: Final = (
    "Its connection to another rank failed: look for a rank that exited earlier or has not joined, and check the "
    "network between them. The full traceback is in the launcher's log."
)
INTERRUPT_ADVICE: Final = "Ctrl-C was pressed, or SIGINT was sent to the launcher; no rank is the root cause."
GAVE_UP: Final = "gave up"
MAX_HOSTS: Final = 3
"""With more hosts than this, none is named."""
_CAUSES: Final = {"failed": "failed", "lost": "was lost", "silent": "stopped sending heartbeats"}


def rank_failed(context: DetectorContext) -> list[Finding]:
    """An uncaught exception, or an exit code other than 0, ended a rank. The others fail or hang without it.

    The rank's last message has the exception and the last lines of its traceback. Ranks that failed after another
    exited, usually with a broken connection, are secondary failures.
    """
    left_behind = [rank.rank for rank in context.left_behind.failed]
    first = [end for end in context.endings.first if end.how == "failed" and end.rank.rank not in left_behind]
    interrupted = [end for end in first if is_interrupt(end)]
    first = [end for end in first if not is_interrupt(end)]
    complaining = [end for end in first if end.complains_of_peer]
    gave_up = any(is_timeout(_text(end.rank)) for end in complaining)
    left = left_before(context.state, max((end.at_ns for end in complaining), default=0))
    # After a rank has left, later complaints are about that rank too, and not about the first complaint.
    behind = [end for end, cause in context.endings.later if left and not gave_up and cause in complaining]
    behind = [end for end in behind if end.how == "failed" and end.complains_of_peer]
    complaining += behind
    together = len(complaining) > 1 or bool(complaining and left)
    if gave_up or together:
        first = [end for end in first if not end.complains_of_peer]
    most = RankFailedLimits.MAX_SEPARATE
    findings = [_single(context.state, end) for end in first[:most]]
    if more := first[most:]:
        message = f"{names_of(more)} raised exceptions, too ({plural(len(more), 'more rank')})"
        evidence: Evidence = {"ranks": len(more)}
        findings.append(Finding(RULE, Severity.CRITICAL, "more", message, ADVICE, ranks_of(more), evidence=evidence))
    if gave_up:
        findings.append(_gave_up(complaining, context.gave_up))
    elif together:
        findings.append(_unordered(context.state, complaining, left))
    if left_behind:
        findings.append(_left_behind(context.left_behind))
    followed = [(end, cause) for end, cause in context.endings.later if end.how == "failed"]
    also_interrupted = [end for end, cause in followed if is_interrupt(end) and cause in interrupted]
    reported = [*also_interrupted, *behind]
    if interrupted:
        findings.append(_interrupted([*interrupted, *filter(is_interrupt, reported)]))
    secondary = [end for end, _ in followed if end.rank.rank not in left_behind and end not in reported]
    if secondary:
        causes = context.endings.causes(frozenset({"failed"}))
        silent_ns = context.limits.rank_lost.silent_s * 1e9
        # One alert for ranks that timed out waiting for a silent rank, also after the silent one has died.
        silent = all(_was_silent(cause, secondary, silent_ns) for cause in causes)
        subject = GAVE_UP if not gave_up and silent and _all_timed_out(secondary) else "after"
        findings.append(_secondary(secondary, causes, subject))
    return with_log_findings(context.state, RULE, findings)


def _single(state: RunState, end: End) -> Finding:
    rank, text = end.rank, _text(end.rank)
    detail = ""
    if not text and rank.exit_code:
        detail = f"exit code {rank.exit_code}"
        text = f"exited with code {rank.exit_code}, without an exception (sys.exit)"
    shown = text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS - 1] + "…"
    evidence: Evidence = {"text": text, "host": rank.host, "pid": rank.pid}
    if rank.step is not None:
        evidence["step"] = rank.step
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject=f"rank {rank.rank}",
        message=f"rank {rank.rank} {'' if detail else 'raised '}{shown or 'an exception'}",
        advice=PEER_ADVICE if end.complains_of_peer else ADVICE,
        ranks=(rank.rank,),
        detail=detail,
        evidence=evidence,
        lasting=_open_delay_ns(state, ()) if end.complains_of_peer else 0.0,
    )


def _open_delay_ns(state: RunState, left: Sequence[RankState]) -> float:
    """Open delay of a complaint about a peer: the peer ends, or gives its exit code, after its connections."""
    if exit_code_pending(state, left):
        return UnevenBatchLimits.EXIT_CODE_NS
    return RankFailedLimits.CAUSE_DELAY_NS if not left and state.run_condition() == "live" else 0.0


def _interrupted(ends: Sequence[End]) -> Finding:
    """One finding for all ranks: a keyboard, or the launcher behind it, sends SIGINT to each."""
    was = "was" if len(ends) == 1 else "were"
    message = f"{names_of(ends)} {was} interrupted (Ctrl-C, SIGINT)"
    evidence = _facts(ends, ends[0])
    return Finding(RULE, Severity.CRITICAL, "interrupted", message, INTERRUPT_ADVICE, ranks_of(ends), evidence=evidence)


def _unordered(state: RunState, ends: Sequence[End], left: Sequence[RankState]) -> Finding:
    """Ranks that complain about each other, or about ranks that have left: none was clearly first."""
    failed = f"{names_of(ends)} lost {'its connection' if len(ends) == 1 else 'their connections'} and failed"
    # Not silent for long enough to be lost, and possibly the first failure.
    silent = [rank for rank in state.ranks.values() if state.condition(rank) == "silent"]
    names = ranks_text(rank.rank for rank in left or silent)
    if left:
        how = " with code 0" if all(rank.exit_code == 0 for rank in left) else ""
        message = f"{names} exited{how} before the others: {failed}"
        advice = f"Find out why {names} exited before the others: the end of the data, or the script (sys.exit)."
    elif silent:
        host = "its host responds" if len(silent) == 1 else "their hosts respond"
        message = f"{names}{_on_hosts(state, silent)} stopped sending heartbeats: {failed}"
        advice = f"Look at {names} first, and check whether {host}."
    else:
        message = f"{failed}, too close together to know which was first"
        advice = "No other rank is lost, so check the network between them; the launcher's log has all tracebacks."
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        # The same alert as when the exit code of the rank that left is known, which comes later.
        subject=f"rank {left[0].rank}" if len(left) == 1 else "connections",
        message=message,
        advice=advice,
        ranks=tuple(rank.rank for rank in left or silent) or ranks_of(ends),
        evidence=_facts(ends, ends[0]),
        lasting=_open_delay_ns(state, left),
    )


def _on_hosts(state: RunState, ranks: Sequence[RankState]) -> str:
    hosts = sorted({rank.host for rank in ranks if rank.host})
    return f" ({', '.join(hosts)})" if state.spans_hosts and 0 < len(hosts) <= MAX_HOSTS else ""


def _gave_up(ends: Sequence[End], gave_up: TimedOut | None) -> Finding:
    """Ranks whose wait in a collective timed out; the rule `timeout` names the rank they waited for."""
    waited = [end for end in ends if is_timeout(_text(end.rank))]
    others = [end for end in ends if end not in waited]
    advice = "See the `timeout` alert for what is known about the rank that they waited for."
    if gave_up is not None and gave_up.split is not None:
        advice = "They were in different collectives: see the `timeout` alert."
    elif gave_up is not None and gave_up.culprits:
        advice = "Look at the rank that they waited for, named by the `timeout` alert, not at these."
    its = "its connection" if len(others) == 1 else "their connections"
    then = f"; {names_of(others)} lost {its} to them" if others else ""
    message = f"{names_of(waited)} timed out in a collective and failed{then}"
    return Finding(RULE, Severity.INFO, GAVE_UP, message, advice, ranks_of(ends), evidence=_facts(ends, waited[0]))


def _left_behind(found: LeftBehind) -> Finding:
    """Ranks that failed because others had left at the end of their data, which `uneven-batch` reports."""
    failed, left = (ranks_text(rank.rank for rank in ranks) for ranks in (found.failed, found.left))
    their = "their" if len(found.left) > 1 else "its"
    where = f" at the end of {their} data" if found.at_end else " before the others"
    return Finding(
        rule=RULE,
        severity=Severity.INFO,
        subject=END_OF_DATA,
        message=f"{failed} failed because {left} exited{where}: connection lost",
        advice=f"See the `uneven-batch` alert for the data of {left}.",
        ranks=tuple(rank.rank for rank in found.failed),
        evidence={"first_rank": found.left[0].rank, "ranks": len(found.failed), "text": _text(found.failed[0])},
    )


def _was_silent(cause: End, ends: Sequence[End], silent_ns: float) -> bool:
    """Whether a rank had sent no heartbeat when these ended, although its process was still there."""
    if cause.how == "silent":
        return True
    gone_ns = cause.rank.gone_ns or 0
    no_heartbeat_ns = gone_ns - (cause.rank.last_received_ns or gone_ns)
    return no_heartbeat_ns > silent_ns and gone_ns > min(end.at_ns for end in ends)


def _all_timed_out(ends: Sequence[End]) -> bool:
    return all(is_timeout(_text(end.rank)) for end in ends)


def _secondary(ends: Sequence[End], causes: Sequence[End], subject: str) -> Finding:
    certain = len(causes) == 1 and not causes[0].aborted
    because = ": connection lost" if all(end.complains_of_peer for end in ends) else ""
    if _all_timed_out(ends):
        because = ": timed out in a collective"
    after = "because" if because and certain else "after"
    how = "aborted" if causes[0].aborted else _CAUSES[causes[0].how]
    how = how.replace("was ", "were ", 1) if len(causes) > 1 else how
    message = f"{names_of(ends)} failed {after} {names_of(causes)} {how}{because}"
    evidence: Evidence = {"first_rank": causes[0].rank.rank} | _facts(ends, ends[0])
    return Finding(RULE, Severity.INFO, subject, message, advice_on(causes), ranks_of(ends), evidence=evidence)


def _facts(ends: Sequence[End], quoted: End) -> Evidence:
    """Number of ranks, and the exception of one of them."""
    return {"ranks": len(ends), "text": _text(quoted.rank)}


def _text(rank: RankState) -> str:
    """The exception and its traceback, as in the rank's last message."""
    return rank.bye.text if rank.bye is not None else ""
