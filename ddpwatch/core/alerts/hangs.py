"""The time that a run stood still in a hang which it has not come out of, and whether it has come out of one.

Steps that ended late are in the figures; the step that a hang has ended never was one. How long it lasted is what the
ranks themselves told of their wait, as the alert on it has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpwatch.core import rules
from ddpwatch.core.limits import HungStepLimits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.core.alerts.model import Alert, Finding
    from ddpwatch.core.state.run import RunState

WAITING: Final = "waiting"
"""In the evidence: who waits."""
WAITED: Final = "waiting_s"
NOT_KNOWN: Final = "off"
"""How a rank says goodbye whose agent has switched itself off: its training went on."""


@dataclass(frozen=True)
class Hang:
    """Ranks have waited, and no step has ended since."""

    seconds: float
    """The longest wait of a rank."""
    ranks: tuple[int, ...]
    """Those that were waited for, or are out of line; empty = nobody can be blamed."""


def is_hang(finding: Finding) -> bool:
    """Whether it tells of ranks that wait now. One whose data has ended may keep others waiting, too."""
    return finding.rule in rules.WAITING and WAITING in finding.evidence


def is_suspect(finding: Finding) -> bool:
    """Whether the ranks that it names are, or were, those that others wait for."""
    return finding.rule in rules.STUCK or is_hang(finding)


def last_common_step(state: RunState) -> int:
    """The last step that every rank has done of which anything was heard, those that have ended among them; -1 = none.
    In a hang it stays where it is.
    """
    return min((rank.steps.newest for rank in state.ranks.values() if rank.last_received_ns is not None), default=-1)


def has_progressed(state: RunState, alert: Alert) -> bool:
    """Whether all ranks have done a step since ranks were last found waiting. Who has given up does not wait."""
    return is_hang(alert.finding) and last_common_step(state) > (-1 if alert.last.step is None else alert.last.step)


def is_over(state: RunState, alert: Alert) -> bool:
    """Whether the run has come out of the hang that an alert tells of: it went on, or has ended well."""
    return is_hang(alert.finding) and (has_progressed(state, alert) or _ended_well(state))


def _ended_well(state: RunState) -> bool:
    """Whether every rank has said goodbye by itself, and how its training ended is known."""
    ranks = state.ranks.values()
    byes = [rank.bye for rank in ranks if rank.bye is not None and state.condition(rank) == "ended"]
    return len(byes) == max(len(ranks), state.world_size) and all(bye.reason != NOT_KNOWN for bye in byes)


def last_hang(state: RunState, alerts: Iterable[Alert]) -> Hang | None:
    """The hang in which the run ended, or is now; None = its last step was followed by no wait worth an alert."""
    front = last_common_step(state)
    found = [
        Hang(waited_s(alert.finding), alert.finding.ranks)
        for alert in alerts
        if waited_s(alert.finding) > 0
        and front <= (-1 if alert.since.step is None else alert.since.step)
        and not is_over(state, alert)
    ]
    # Of one wait that two rules tell of, the word that names somebody.
    return max(found, key=lambda hang: (round(hang.seconds), bool(hang.ranks)), default=None)


def waited_s(finding: Finding) -> float:
    """How long ranks have waited, by their own word; 0 where it is not told, or cannot be: a recording may hold
    anything.
    """
    reported = finding.evidence.get(WAITED) if finding.rule in rules.WAITING else None
    return float(reported) if isinstance(reported, (int, float)) and 0 < reported < HungStepLimits.MAX_S else 0.0
