"""Severity of a rank and order of alerts, decided once: every output that marks, colors or sorts them reads it here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.limits import LivenessLimits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.core.alerts.model import Alert, Finding
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import Condition

COST_STEP: Final = 0.1
"""Costs are compared in steps of this fraction of the job's time, so that two of similar cost do not swap places."""
OF_CONDITION: Final[dict[Condition, Severity]] = {
    "failed": Severity.CRITICAL,
    "lost": Severity.CRITICAL,
    "missing": Severity.CRITICAL,
    "silent": Severity.WARNING,
}
"""Severity of a rank that no alert names; the other conditions have none."""


def is_long_in_phase(rank: RankState, condition: Condition) -> bool:
    """Whether a rank that trains has been in one phase for `LivenessLimits.LONG_IN_PHASE_NS`."""
    return condition == "ok" and rank.beat is not None and rank.beat.phase_ns >= LivenessLimits.LONG_IN_PHASE_NS


def rank_severity(rank: RankState, condition: Condition, finding: Finding | None) -> Severity | None:
    """Severity of a rank, to mark it: that to sort it by, and at least a warning while it is long in one phase."""
    severity = steady_severity(rank, condition, finding)
    if not is_long_in_phase(rank, condition):
        return severity
    return Severity.WARNING if severity is None else max(severity, Severity.WARNING)


def steady_severity(rank: RankState, condition: Condition, finding: Finding | None) -> Severity | None:
    """Severity of a rank, to sort it by: the worse of its condition and the most urgent finding about it.

    None = nothing is wrong. Time in a phase does not count: where phases are long, the order would change every step.
    """
    own = OF_CONDITION.get(condition)
    if condition == "ended" and rank.agent_off:
        own = Severity.WARNING
    if finding is None or own is None:
        return own if finding is None else finding.severity
    return max(own, finding.severity)


def findings_by_rank(alerts: Iterable[Alert]) -> dict[int, Finding]:
    """By rank, the finding of the most urgent open alert that names it; stale alerts do not count."""
    found: dict[int, Finding] = {}
    for alert in most_urgent_first(alert for alert in alerts if not alert.stale):
        for rank in alert.finding.ranks:
            found.setdefault(rank, alert.finding)
    return found


def most_urgent_first(alerts: Iterable[Alert]) -> list[Alert]:
    """Alerts by severity, then those that end or stop the job, then those that name ranks, then by cost and age."""

    def place(alert: Alert) -> tuple[int, bool, bool, int, int, tuple[str, str]]:
        finding = alert.finding
        cost = round((finding.cost or 0.0) / COST_STEP)
        stops = finding.rule in rules.STOPPING
        return -finding.severity, not stops, not finding.ranks, -cost, alert.since.now_ns, alert.key

    return sorted(alerts, key=place)
