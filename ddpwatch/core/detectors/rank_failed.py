"""Ranks that an exception has ended: the first by name, those that only followed it together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.detectors.context import Detector
from ddpwatch.core.detectors.log_findings import with_log_findings
from ddpwatch.core.diagnosis.early_exit import END_OF_DATA, left_before, word_to_come
from ddpwatch.core.diagnosis.exits import advice_on, is_interrupt, is_timeout, names_of
from ddpwatch.core.limits import RankFailedLimits, UnevenBatchLimits
from ddpwatch.core.units import plural, ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext
    from ddpwatch.core.diagnosis.early_exit import LeftBehind
    from ddpwatch.core.diagnosis.exits import End
    from ddpwatch.core.diagnosis.timeouts import GivingUp
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState

RULE: Final = rules.RANK_FAILED
MESSAGE_CHARS: Final = 300
ADVICE: Final = "Read its whole traceback in the launcher's log."
PEER_ADVICE: Final = (
    "Read its whole traceback in the launcher's log. It complains of its connection to another rank: look for one that "
    "ended earlier or does not arrive, and at the network between them."
)
INTERRUPT_ADVICE: Final = "Somebody pressed Ctrl-C, or sent SIGINT to the launcher; no rank is to blame."
GAVE_UP: Final = "gave up"
MAX_HOSTS: Final = 3
"""Of more, none is named."""
_CAUSES: Final = {"failed": "failed", "lost": "was lost", "silent": "fell silent"}


def rank_failed(context: DetectorContext) -> list[Finding]:
    """A rank was ended by an exception that nothing in the script has caught. The others fail or hang without it.

    The rank tells so itself in its last message, with the exception and the last lines of its traceback. Ranks that
    failed after another was gone, above all with a broken connection, are taken for its consequence.
    """
    left_behind = [rank.rank for rank in context.left_behind.failed]
    first = [end for end in context.endings.first if end.how == "failed" and end.rank.rank not in left_behind]
    interrupted = [end for end in first if is_interrupt(end)]
    first = [end for end in first if not is_interrupt(end)]
    complaining = [end for end in first if end.complains_of_peer]
    gave_up = any(is_timeout(_text(end)) for end in complaining)
    left = left_before(context.state, max((end.at_ns for end in complaining), default=0))
    # Where somebody has left, who complains later has lost that one, too, and not who complained first.
    behind = [end for end, cause in context.endings.later if left and not gave_up and cause in complaining]
    behind = [end for end in behind if end.how == "failed" and end.complains_of_peer]
    complaining += behind
    together = len(complaining) > 1 or bool(complaining and left)
    if gave_up or together:
        first = [end for end in first if not end.complains_of_peer]
    findings = [_finding(context.state, end) for end in first[: RankFailedLimits.MAX_SEPARATE]]
    if len(first) > RankFailedLimits.MAX_SEPARATE:
        findings.append(_more(first[RankFailedLimits.MAX_SEPARATE :]))
    if gave_up:
        findings.append(_gave_up(complaining, context.gave_up))
    elif together:
        findings.append(_unordered(context.state, complaining, left))
    if left_behind:
        findings.append(_left_behind(context.left_behind))
    followed = [(end, cause) for end, cause in context.endings.later if end.how == "failed"]
    too = [end for end, cause in followed if is_interrupt(end) and cause in interrupted]
    too += behind
    if interrupted:
        findings.append(_interrupted([*interrupted, *filter(is_interrupt, too)]))
    later = [end for end, _ in followed if end.rank.rank not in left_behind and end not in too]
    if later:
        causes = context.endings.causes(frozenset({"failed"}))
        no_heartbeat_since_ns = context.limits.rank_lost.silent_s * 1e9
        # When a silent rank dies at last, who waited for it is no longer known to have followed it, and has one alert.
        waited = (
            not gave_up
            and _waited_in_vain(later)
            and all(_had_no_heartbeat(end, later, no_heartbeat_since_ns) for end in causes)
        )
        findings.append(_consequence(later, causes, GAVE_UP if waited else "after"))
    return with_log_findings(context.state, RULE, findings)


def _finding(state: RunState, end: End) -> Finding:
    rank, text = end.rank, _text(end)
    detail = ""
    if not text and rank.exit_code:
        detail = f"exit code {rank.exit_code}"
        text = f"its exit code {rank.exit_code}, without an exception: sys.exit"
    reported = text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS - 1] + "…"
    context: dict[str, float | int | str] = {"text": text, "host": rank.host, "pid": rank.pid}
    if rank.step is not None:
        context["step"] = rank.step
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject=f"rank {rank.rank}",
        message=f"rank {rank.rank} was ended by {reported or 'an exception'}",
        advice=PEER_ADVICE if end.complains_of_peer else ADVICE,
        ranks=(rank.rank,),
        detail=detail,
        evidence=context,
        lasting=_patience_ns(state, ()) if end.complains_of_peer else 0.0,
    )


def _patience_ns(state: RunState, left: Sequence[RankState]) -> float:
    """How long a complaint waits for the word of the one that it is about: that one ends later than its connections."""
    if word_to_come(state, left):
        return UnevenBatchLimits.EXIT_CODE_NS
    return RankFailedLimits.CAUSE_DELAY_NS if not left and state.run_condition() == "live" else 0.0


def _interrupted(ends: Sequence[End]) -> Finding:
    """One cause, though each of them tells it: the keyboard, or a launcher that passes it on, reaches all."""
    ranks = _ranks(ends)
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject="interrupted",
        message=f"{ranks_text(ranks)} {'was' if len(ranks) == 1 else 'were'} interrupted from the keyboard (SIGINT)",
        advice=INTERRUPT_ADVICE,
        ranks=ranks,
        evidence={"ranks": len(ranks), "text": _text(ends[0])},
    )


def _more(ends: Sequence[End]) -> Finding:
    ranks = _ranks(ends)
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject="more",
        message=f"{plural(len(ranks), 'more rank')} ended by an exception: {ranks_text(ranks)}",
        advice=ADVICE,
        ranks=ranks,
        evidence={"ranks": len(ranks)},
    )


def _unordered(state: RunState, ends: Sequence[End], left: Sequence[RankState]) -> Finding:
    """Ranks that complain of one another, or of others that have left: none of them was clearly first."""
    ranks = _ranks(ends)
    their = "its connection" if len(ranks) == 1 else "their connections"
    message = f"{ranks_text(ranks)} lost {their} and failed, too close together to tell which was first"
    advice = "No other rank is gone, so it may be the network between them; the launcher's log has all tracebacks."
    # Not yet for long enough to be called lost, and perhaps the first to go.
    silent = [rank for rank in state.ranks.values() if state.condition(rank) == "silent"]
    if silent:
        who = f"{ranks_text(rank.rank for rank in silent)}{_on_hosts(state, silent)}"
        message = f"{ranks_text(ranks)} lost {their} and failed, and {who} "
        message += f"{'has' if len(silent) == 1 else 'have'} fallen silent, too"
        advice = f"Look at {ranks_text(rank.rank for rank in silent)} first, and whether "
        advice += f"{'its host answers' if len(silent) == 1 else 'their hosts answer'}."
    gone = tuple(rank.rank for rank in left)
    if left:
        how = " with exit code 0" if all(rank.exit_code == 0 for rank in left) else ""
        message = f"{ranks_text(ranks)} lost {their} and failed after {ranks_text(gone)} had ended{how}"
        advice = f"Find out why {ranks_text(gone)} ended before the others: the data, or the script (sys.exit)."
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        # The same alert as when its exit code is known, which comes later.
        subject=f"rank {gone[0]}" if len(gone) == 1 else "connections",
        message=message,
        advice=advice,
        ranks=gone or tuple(rank.rank for rank in silent) or ranks,
        evidence={"ranks": len(ranks), "text": _text(ends[0])},
        lasting=_patience_ns(state, left),
    )


def _on_hosts(state: RunState, ranks: Sequence[RankState]) -> str:
    hosts = sorted({rank.host for rank in ranks if rank.host})
    return f" ({', '.join(hosts)})" if state.spans_hosts and 0 < len(hosts) <= MAX_HOSTS else ""


def _gave_up(ends: Sequence[End], gave_up: GivingUp | None) -> Finding:
    """Ranks that have waited for the timeout of their process group: for whom, the rule `timeout` says."""
    waited = [end for end in ends if is_timeout(_text(end))]
    others = [end for end in ends if end not in waited]
    advice = "`timeout` tells what is known of whom they waited for."
    if gave_up is not None and gave_up.split is not None:
        advice = "They were in different operations, which `timeout` tells."
    elif gave_up is not None and gave_up.culprits:
        advice = "Look at the rank that they waited for, which `timeout` names, not at them."
    then = f"; {ranks_text(_ranks(others))} lost the connection to them" if others else ""
    return Finding(
        rule=RULE,
        severity=Severity.INFO,
        subject=GAVE_UP,
        message=f"{ranks_text(_ranks(waited))} gave up waiting in a collective and failed{then}",
        advice=advice,
        ranks=_ranks(ends),
        evidence={"ranks": len(ends), "text": _text(waited[0])},
    )


def _left_behind(reported: LeftBehind) -> Finding:
    """Ranks that failed because others had left them at the end of their data, which `uneven-batch` tells."""
    ranks = tuple(rank.rank for rank in reported.failed)
    many = len(reported.left) > 1
    where = f" at the end of {'their' if many else 'its'} data" if reported.at_end else " before the others"
    return Finding(
        rule=RULE,
        severity=Severity.INFO,
        subject=END_OF_DATA,
        message=f"{ranks_text(ranks)} failed after {ranks_text(rank.rank for rank in reported.left)} had ended{where}, "
        f"because of {'them' if many else 'it'}: connection lost",
        advice=f"`uneven-batch` says what to do about the data of {ranks_text(rank.rank for rank in reported.left)}.",
        ranks=ranks,
        evidence={"first_rank": reported.left[0].rank, "ranks": len(ranks), "text": _last_words(reported.failed[0])},
    )


def _had_no_heartbeat(cause: End, ends: Sequence[End], no_heartbeat_since_ns: float) -> bool:
    """Whether nothing had been heard of it when these ended, although its process was there."""
    if cause.how == "silent":
        return True
    gone_ns = cause.rank.gone_ns or 0
    return gone_ns - (cause.rank.last_received_ns or gone_ns) > no_heartbeat_since_ns and gone_ns > min(
        end.at_ns for end in ends
    )


def _waited_in_vain(ends: Sequence[End]) -> bool:
    return all(is_timeout(_text(end)) for end in ends)


def _consequence(ends: Sequence[End], causes: Sequence[End], subject: str) -> Finding:
    ranks = _ranks(ends)
    certain = len(causes) == 1 and not causes[0].aborted
    because = ": connection lost" if all(end.complains_of_peer for end in ends) else ""
    if _waited_in_vain(ends):
        because = ": they waited in vain" if len(ends) > 1 else ": it waited in vain"
    because = f", because of it{because}" if because and certain else because
    how = "aborted" if causes[0].aborted else _CAUSES[causes[0].how]
    how = how.replace("was ", "were ", 1) if len(causes) > 1 else how
    return Finding(
        rule=RULE,
        severity=Severity.INFO,
        subject=subject,
        message=f"{ranks_text(ranks)} failed after {names_of(causes)} {how}{because}",
        advice=advice_on(causes),
        ranks=ranks,
        evidence={"first_rank": causes[0].rank.rank, "ranks": len(ranks), "text": _text(ends[0])},
    )


def _ranks(ends: Sequence[End]) -> tuple[int, ...]:
    return tuple(sorted(end.rank.rank for end in ends))


def _text(end: End) -> str:
    return _last_words(end.rank)


def _last_words(rank: RankState) -> str:
    return rank.bye.text if rank.bye is not None else ""


RANK_FAILED: Final = Detector(RULE, rank_failed, by_step=False)
