"""Hangs as alerts report them: which alerts are about one, whether it is over, and how long it lasted.

The step that a hang ended in is in no figure, so its length is the longest wait that the ranks themselves reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.limits import HungStepLimits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.core.alerts.model import Alert, Finding
    from ddpwatch.core.state.run import RunState

WAITING: Final = "waiting"
"""Key of the evidence that names the waiting ranks."""
WAITED: Final = "waiting_s"
"""Key of the evidence for the longest wait, in seconds."""
SPECIFIC_FIRST: Final = (rules.UNEVEN_BATCH, rules.DESYNC, rules.STALL, rules.TIMEOUT)
"""Rules about hangs that go on, the most specific first."""


@dataclass(frozen=True)
class Hang:
    """A wait that no step has ended since."""

    seconds: float
    """The longest wait of a rank."""
    ranks: tuple[int, ...]
    """Ranks that were waited for, or called a different collective; empty = none can be blamed."""


def is_hang(finding: Finding) -> bool:
    """Whether ranks are waiting now. A rank whose data has ended may keep others waiting, too."""
    return finding.rule in rules.WAITING and WAITING in finding.evidence


def is_suspect(finding: Finding) -> bool:
    """Whether the ranks that it names are, or were, the ones that others wait for."""
    return finding.rule in rules.STUCK or is_hang(finding)


def last_common_step(state: RunState) -> int:
    """The last step that all ranks have finished, ended ones included, ranks without a message not; -1 = none."""
    return min((rank.steps.newest for rank in state.ranks.values() if rank.last_received_ns is not None), default=-1)


def has_progressed(state: RunState, alert: Alert) -> bool:
    """Whether all ranks have finished a step since ranks were last found waiting."""
    return is_hang(alert.finding) and last_common_step(state) > (-1 if alert.last.step is None else alert.last.step)


def is_over(state: RunState, alert: Alert) -> bool:
    """Whether the run has come out of the hang of an alert: it went on, or has ended well."""
    return is_hang(alert.finding) and (has_progressed(state, alert) or _ended_well(state))


def goes_on(state: RunState, alert: Alert) -> bool:
    """Whether an open alert is about a wait that the run has not come out of."""
    return alert.closed is None and is_suspect(alert.finding) and not (alert.stale or is_over(state, alert))


def current_hang(state: RunState, alerts: Iterable[Alert]) -> Alert | None:
    """The most specific alert on the hang that the run is in; None = it is in none, or has ended."""
    found = [alert for alert in alerts if is_hang(alert.finding) and goes_on(state, alert)]
    if not found or state.run_condition() == "ended":
        return None
    return min(found, key=lambda alert: SPECIFIC_FIRST.index(alert.finding.rule))


def _ended_well(state: RunState) -> bool:
    """Whether every rank has said goodbye, and how its training ended is known."""
    ended = [rank for rank in state.ranks.values() if state.condition(rank) == "ended" and not rank.agent_off]
    return len(ended) == max(len(state.ranks), state.world_size)


def last_hang(state: RunState, alerts: Iterable[Alert]) -> Hang | None:
    """The hang in which the run ended, or is; None = no wait worth an alert followed its last step."""
    front = last_common_step(state)
    found = [
        Hang(waited_s(alert.finding), alert.finding.ranks)
        for alert in alerts
        if waited_s(alert.finding) > 0
        and front <= (-1 if alert.since.step is None else alert.since.step)
        and not is_over(state, alert)
    ]
    # Of two alerts about one wait, the one that names a rank.
    return max(found, key=lambda hang: (round(hang.seconds), bool(hang.ranks)), default=None)


def waited_s(finding: Finding) -> float:
    """The longest wait that ranks reported, in seconds; 0 = none, or not a number, as a recording may hold anything."""
    reported = finding.evidence.get(WAITED) if finding.rule in rules.WAITING else None
    return float(reported) if isinstance(reported, (int, float)) and 0 < reported < HungStepLimits.MAX_S else 0.0
