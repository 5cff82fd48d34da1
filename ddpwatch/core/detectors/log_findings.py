"""Verdicts of the watched logs as findings, merged with those of the rules."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.diagnosis.early_exit import END_OF_DATA
from ddpwatch.core.limits import EvaluationLimits
from ddpwatch.core.logs.diagnose_failures import UNEXPLAINED_EXIT
from ddpwatch.core.state.run import ALIVE
from ddpwatch.core.units import ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpwatch.core.detectors.context import Evidence
    from ddpwatch.core.logs.verdict import Verdict
    from ddpwatch.core.state.run import RunState

FAILURES: Final = frozenset(
    {"exception", "ddp-error", "cuda-oom", "host-oom", "cuda-error", "gpu-fault", "crash", "killed", "signal", "exit"}
)
"""Causes that end one rank."""
RULES: Final = {
    **dict.fromkeys(FAILURES, rules.RANK_FAILED),
    **dict.fromkeys(("peer-died", "aborted", "terminated", "store-gone", "scheduler", "interrupted"), rules.RANK_LOST),
    UNEXPLAINED_EXIT: rules.RANK_LOST,
    "mismatch": rules.DESYNC,
}
"""The rule of each cause; all others are waits that timed out: `timeout`."""
SURVIVED: Final = frozenset({"exception", "ddp-error", "cuda-oom"})
"""Causes that a script may catch, print and survive."""
SUBJECT: Final = "logs"
HOW_IT_ENDED: Final = frozenset({"crash", "killed", "signal", "exit"})
"""Causes that carry no more information than an exit code."""
ADVICE: Final = "See the log lines on the logs screen or with `ddpwatch postmortem`."


def _log_finding(state: RunState, rule: str) -> Finding | None:
    """The verdict of the logs, if its cause belongs to this rule."""
    verdict = state.logs.verdict
    if verdict is None or rule != RULES.get(verdict.cause, rules.TIMEOUT) or _is_survived(state, verdict):
        return None
    evidence: Evidence = {"cause": verdict.cause, "certain": int(verdict.certain)}
    if verdict.victims:
        evidence["victims"] = ranks_text(verdict.victims)
    for number, line in enumerate(verdict.evidence[:3], 1):
        evidence[f"line_{number}"] = f"{line.source}:{line.line} {line.text}"
    severity = Severity.CRITICAL if verdict.certain else Severity.WARNING
    ranks = tuple(rank for rank in verdict.culprits if rank in state.ranks)
    delay_ns = EvaluationLimits.LOG_DELAY_NS if state.run_condition() == "live" else 0.0
    return Finding(rule, severity, SUBJECT, verdict.text, ADVICE, ranks, evidence=evidence, lasting=delay_ns)


def _is_survived(state: RunState, verdict: Verdict) -> bool:
    """Whether the logged exception had no effect: the ranks that may have raised it are alive."""
    if verdict.certain or verdict.cause not in SURVIVED:
        return False
    ranks = [state.ranks[rank] for rank in verdict.culprits if rank in state.ranks] or state.ranks.values()
    return all(state.condition(rank) in ALIVE for rank in ranks)


def with_log_findings(state: RunState, rule: str, findings: list[Finding]) -> list[Finding]:
    """Findings of a rule plus that of the logs; merged where both name the same ranks, or the logs name none."""
    reported = _log_finding(state, rule)
    if reported is None:
        return findings
    for place, each in enumerate(findings):
        if set(reported.ranks) <= set(each.ranks) and each.severity >= reported.severity:
            return [*findings[:place], _with_lines(each, reported), *findings[place + 1 :]]
    return [*findings, reported]


def without_duplicates(found: Mapping[str, list[Finding]]) -> dict[str, list[Finding]]:
    """Findings of all rules, with that of the logs merged into the one about the same end, whichever rule has it.

    Only where the logs blame no rank, or know no more than how it ended: for an abort the logs say `desync` and the
    ranks may say `rank-lost`, for a kill `rank-failed` and `rank-lost`.
    """
    every = [each for findings in found.values() for each in findings]
    reported = next((each for each in every if each.subject == SUBJECT), None)
    same = [each for each in every if reported is not None and _is_the_same_end(each, reported)]
    if reported is None or not same:
        return dict(found)
    best = max(same, key=lambda each: (each.severity, bool(each.ranks)))
    return {
        rule: [_with_lines(each, reported) if each is best else each for each in findings if each is not reported]
        for rule, findings in found.items()
    }


def _is_the_same_end(finding: Finding, reported: Finding) -> bool:
    if finding.subject == SUBJECT or finding.severity < reported.severity or not finding.proven:
        return False
    if reported.ranks:
        ended = finding.rule in rules.EXITS and set(reported.ranks) <= set(finding.ranks)
        return ended and reported.evidence["cause"] in HOW_IT_ENDED
    # `uneven-batch` stops a job only where the data of a rank has ended.
    return finding.rule in rules.STOPPING or finding.subject == END_OF_DATA


def _with_lines(finding: Finding, reported: Finding) -> Finding:
    return replace(finding, evidence=finding.evidence | {"logs": reported.message} | reported.evidence)
