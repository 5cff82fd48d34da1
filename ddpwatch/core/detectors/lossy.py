"""Lost messages, dropped records, unreadable frames and implausible steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.limits import LossyLimits
from ddpwatch.core.units import plural, ranks_text

if TYPE_CHECKING:
    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState

RULE: Final = rules.LOSSY
ADVICE: Final = (
    "Metrics have gaps. Lost messages: check the network between rank and viewer, and the viewer's load. Dropped "
    "records: the agent's thread is starved of CPU, so leave it a core."
)
UNREADABLE_ADVICE: Final = (
    "Check that agents and viewer have the same version of ddpwatch, and that no other program writes to its sockets."
)
OFF_ADVICE: Final = "Training continues without monitoring. Please report the reason: it is a bug in ddpwatch."


@dataclass(frozen=True)
class _Losses:
    rank: int
    lost: int
    dropped: int
    bad: int
    implausible: bool
    off: str | None
    """Why its agent switched itself off; None = it did not."""

    @property
    def slight(self) -> bool:
        others = self.dropped or self.bad or self.implausible or self.off is not None
        return self.lost < LossyLimits.FEW_MESSAGES and not others

    @property
    def words(self) -> str:
        parts = [
            plural(self.lost, "message") + " lost" if self.lost else "",
            plural(self.dropped, "record") + " dropped by the agent" if self.dropped else "",
            plural(self.bad, "unreadable or invalid record") if self.bad else "",
            "its step times are implausible beside the others and are excluded" if self.implausible else "",
            f"its agent disabled itself{f' ({self.off})' if self.off else ''}" if self.off is not None else "",
        ]
        return ", ".join(filter(None, parts))


def lossy(context: DetectorContext) -> list[Finding]:
    """Measurements were lost, or are implausible, so that metrics have gaps.

    Counts, over the whole run, messages missing from a rank's numbered stream, records that its agent overwrote,
    unreadable frames, and implausible steps. An agent with an internal error disables itself and leaves the training
    alone; that is reported here, too.
    """
    state = context.state
    implausible = {*context.window.implausible, *context.out_of_step}
    ranks = (
        rank
        for rank in state.ranks.values()
        if rank.sequence.lost > 0 or rank.bad or rank.bye is not None or rank.dropped or rank.rank in implausible
    )
    affected = [losses for rank in ranks if (losses := _losses(rank, implausible)).words]
    many = len(affected) > LossyLimits.MAX_SEPARATE
    return ([_together(affected)] if many else [_alone(losses) for losses in affected]) + _unassigned(state)


def _losses(rank: RankState, implausible: set[int]) -> _Losses:
    off = rank.bye.text if rank.bye is not None and rank.agent_off else None
    return _Losses(rank.rank, max(rank.lost, 0), rank.dropped, rank.bad, rank.rank in implausible, off)


def _alone(losses: _Losses) -> Finding:
    evidence: Evidence = {
        "lost_messages": losses.lost,
        "dropped_records": losses.dropped,
        "unusable_records": losses.bad,
        "disbelieved": int(losses.implausible),
    }
    if losses.off is not None:
        evidence["off_reason"] = losses.off
    name = f"rank {losses.rank}"
    return _finding([losses], name, f"{name}: {losses.words}", evidence)


def _together(affected: list[_Losses]) -> Finding:
    off = [losses.off for losses in affected if losses.off is not None]
    lost, dropped, bad = (sum(getattr(losses, kind) for losses in affected) for kind in ("lost", "dropped", "bad"))
    implausible = sum(losses.implausible for losses in affected)
    parts = [
        _Losses(-1, lost, dropped, bad, implausible=False, off=None).words,
        f"{plural(implausible, 'rank')} with implausible steps" if implausible else "",
        f"{plural(len(off), 'agent')} disabled" if off else "",
    ]
    names = ranks_text(losses.rank for losses in affected)
    evidence: Evidence = {
        "lost_messages": lost,
        "dropped_records": dropped,
        "unusable_records": bad,
        "disbelieved_ranks": implausible,
        "agents_off": len(off),
    }
    return _finding(affected, "ranks", f"{names}: {', '.join(filter(None, parts))}", evidence)


def _finding(affected: list[_Losses], subject: str, message: str, evidence: Evidence) -> Finding:
    severity = Severity.INFO if all(losses.slight for losses in affected) else Severity.WARNING
    advice = ADVICE if any(losses.lost or losses.dropped for losses in affected) else UNREADABLE_ADVICE
    if any(losses.off is not None for losses in affected):
        advice = OFF_ADVICE
    ranks = tuple(losses.rank for losses in affected)
    return Finding(RULE, severity, subject, message, advice, ranks, evidence=evidence)


def _unassigned(state: RunState) -> list[Finding]:
    if not state.bad_unassigned:
        return []
    why = f"; last reason: {state.bad_reason}" if state.bad_reason else ""
    message = f"{plural(state.bad_unassigned, 'unreadable frame')} of unknown origin{why}"
    evidence: Evidence = {"unreadable_frames": state.bad_unassigned, "last_reason": state.bad_reason}
    return [Finding(RULE, Severity.WARNING, "unassigned", message, UNREADABLE_ADVICE, evidence=evidence)]
