"""How a run ended, computed once: well or badly, the root cause, and the ranks that failed because of it.

Every output formats an `Outcome`; none of them decides it again from the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.hang_alerts import goes_on, last_hang
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.diagnosis.early_exit import left_before
from ddpwatch.core.diagnosis.exits import endings, is_complaint, is_innocent, is_interrupt, is_timeout
from ddpwatch.core.limits import DEFAULTS, Limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.core.alerts.hang_alerts import Hang
    from ddpwatch.core.alerts.model import Alert, Finding
    from ddpwatch.core.diagnosis.exits import End, Endings
    from ddpwatch.core.state.run import Condition, RunState

EXPLAINING: Final = (rules.DESYNC, rules.UNEVEN_BATCH, rules.TIMEOUT, rules.STALL)
"""Rules that explain why ranks waited for each other, the most specific first."""

Ending: TypeAlias = Literal["going on", "well", "badly", "unknown"]
"""`going on` = a rank is training, or no heartbeat has come yet; `unknown` = the agent switched itself off before."""
Reason: TypeAlias = Literal[
    "interrupted", "signal", "no heartbeat", "left", "mismatch", "not joined", "ended first", "own end"
]
"""Why a root cause is one: `interrupted` = from the keyboard, `signal` = a launcher, a scheduler or a person ended the
ranks, `no heartbeat` = others lost their connection to a rank without a heartbeat so far, `left` = their data ended,
`mismatch` = they were in another collective, `not joined` = they did not join one, `ended first` = they said goodbye
before the others lost their connections, `own end` = an exception, a kill, a crash or silence."""


@dataclass(frozen=True)
class RootCause:
    """The ranks because of which the run ended badly."""

    ranks: tuple[int, ...]
    reason: Reason
    secondary: tuple[int, ...] = ()
    """Ranks that failed because of it."""
    end: End | None = None
    """How the first of `ranks` ended, where the reason is its own end or a signal."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended, or what it is in while it goes on."""

    ending: Ending
    live: bool
    """Whether a rank is still training."""
    bad: dict[int, Condition]
    """Ranks that failed, were lost or sent no heartbeat, each with its condition."""
    left: tuple[int, ...]
    """Ranks that said goodbye in order."""
    switched_off: tuple[int, ...]
    """Those of them whose agent switched itself off: how their training ended is not known."""
    exits: Endings
    """Bad exits in order, first and secondary failures apart."""
    root_cause: RootCause | None
    """None = not known, or the ranks because of which it ended are all that ended badly."""
    explained_by: Alert | None
    """The open alert that explains why ranks waited for each other; None = the exits explain themselves."""
    reported_by: Alert | None
    """The open alert that by itself makes the end a bad one; None = there is none, or all ranks said goodbye."""
    stuck_on: Alert | None
    """The open alert on a wait that the run has not come out of."""
    hang: Hang | None
    """How long ranks have waited since the last step, and for which; None = they did not."""


def outcome_of(state: RunState, alerts: Iterable[Alert], limits: Limits = DEFAULTS) -> Outcome:
    """Determine how a run ended. `alerts` are all of it, open and closed."""
    alerts = list(alerts)
    conditions = {rank.rank: state.condition(rank) for rank in state.ranks.values()}
    live = state.run_condition() == "live"
    exits = endings(state, limits.rank_lost.silent_s)
    bad = _bad_ranks(state, conditions, exits, live=live)
    left = tuple(rank for rank, condition in conditions.items() if condition == "ended")
    off = tuple(rank for rank in left if state.ranks[rank].agent_off)
    explained_by = _explanation(alerts)
    reported_by = None if len(left) == len(conditions) else alert_of_bad_end(alerts, over=bool(left) and not live)
    return Outcome(
        ending=(
            "badly" if bad or reported_by is not None
            else "going on" if not left or set(conditions.values()) - {"ended", "missing"}
            else "unknown" if off
            else "well"
        ),
        live=live,
        bad=bad,
        left=left,
        switched_off=off,
        exits=exits,
        root_cause=_root_cause(state, bad, exits, explained_by) if bad else None,
        explained_by=explained_by,
        reported_by=reported_by,
        stuck_on=min((alert for alert in alerts if goes_on(state, alert)), key=_urgency, default=None),
        hang=last_hang(state, alerts),
    )  # fmt: skip


def alert_of_bad_end(alerts: Iterable[Alert], *, over: bool = False) -> Alert | None:
    """The open alert that by itself reports a bad end, for runs of which nothing else is known; None = there is none.

    A short wait at the end of a recording does not count, nor does any wait once the run is `over`.
    """
    alerts = [alert for alert in alerts if alert.closed is None]
    exits = [alert for alert in alerts if alert.finding.rule in rules.EXITS]
    explained_by = _explanation(alerts)
    if explained_by is not None and (exits or (explained_by.finding.severity is Severity.CRITICAL and not over)):
        return explained_by
    return min((each for each in exits if each.finding.severity is Severity.CRITICAL), key=_urgency, default=None)


def _bad_ranks(
    state: RunState, conditions: dict[int, Condition], exits: Endings, *, live: bool
) -> dict[int, Condition]:
    """Ranks that ended badly. Silence counts once it has lasted long enough, or nothing else is left of the run."""
    silent = {end.rank.rank for end in (*exits.first, *(end for end, _ in exits.later))}
    if (state.relay is not None and state.relay.ended) or not (live or state.relay_lost):
        silent = set(conditions)
    return {
        rank: condition
        for rank, condition in conditions.items()
        if condition in {"failed", "lost"} or (condition == "silent" and rank in silent)
    }


def _root_cause(
    state: RunState, bad: dict[int, Condition], exits: Endings, explained_by: Alert | None
) -> RootCause | None:
    if explained_by is not None:
        # A rank that fails first is often one that waited: the alert knows for which.
        return _cause(explained_by.finding.ranks, _reason(explained_by.finding), bad)
    first = exits.first
    if first and (reason := _from_outside(first)):
        interrupted = (end for end, _ in exits.later if all(map(is_interrupt, (*first, end))))
        ranks = {end.rank.rank for end in (*first, *interrupted)}
        return RootCause(tuple(sorted(ranks)), reason, tuple(sorted(bad.keys() - ranks)), first[0])
    never_received = tuple(rank.rank for rank in state.ranks.values() if state.condition(rank) == "missing")
    if first and never_received and all(end.complains_of_peer for end in first):
        # A rank that ends in its first moments has not sent a heartbeat.
        return RootCause(never_received, "no heartbeat", tuple(bad))
    if left := _left_by(state, bad):
        return _cause(left, "ended first", bad)
    causes = exits.causes()
    if len(causes) == 1 and not is_innocent(causes[0]):
        return _cause((causes[0].rank.rank,), "own end", bad, causes[0])
    return None


def _cause(ranks: Sequence[int], reason: Reason, bad: dict[int, Condition], end: End | None = None) -> RootCause | None:
    """These ranks as the root cause of the other bad ends; None = there are no others."""
    secondary = tuple(sorted(bad.keys() - set(ranks)))
    return RootCause(tuple(sorted(ranks)), reason, secondary, end) if ranks and secondary else None


def _from_outside(ends: Sequence[End]) -> Reason | None:
    """How something that is not a rank ended them all; None = it did not."""
    if all(map(is_interrupt, ends)):
        return "interrupted"
    return "signal" if ends[0].signaled and len({end.code for end in ends}) == 1 else None


def _left_by(state: RunState, bad: Iterable[int]) -> list[int]:
    """Ranks that said goodbye before all bad ones lost their connections; empty = a bad one failed by itself."""
    failed = [state.ranks[rank] for rank in bad]
    texts = [rank.bye.text if rank.bye is not None else "" for rank in failed]
    if not all(is_complaint(text) and not is_timeout(text) for text in texts):
        return []
    return [rank.rank for rank in left_before(state, min(rank.bye_ns or 0 for rank in failed))]


def _reason(finding: Finding) -> Reason:
    """What the ranks did that an explaining alert names."""
    if finding.rule == rules.UNEVEN_BATCH:
        return "left"
    # The evidence lists the groups where ranks were in different operations.
    return "mismatch" if finding.rule == rules.DESYNC or "camps" in finding.evidence else "not joined"


def _explanation(alerts: Iterable[Alert]) -> Alert | None:
    """The open alert that explains the end best. A wait for a rank counts from its first seconds, as a warning."""
    found = (alert for alert in alerts if alert.closed is None and _explains(alert.finding))
    return min(found, key=lambda alert: (EXPLAINING.index(alert.finding.rule), *_urgency(alert)), default=None)


def _explains(finding: Finding) -> bool:
    if finding.rule == rules.STALL and finding.ranks:
        return finding.severity >= Severity.WARNING
    return finding.rule in EXPLAINING and finding.severity is Severity.CRITICAL


def _urgency(alert: Alert) -> tuple[int, bool]:
    """Sort key: the most severe first, of these the ones that name ranks."""
    return -alert.finding.severity, not alert.finding.ranks
