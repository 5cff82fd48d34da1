"""Verdict on a recorded run in one sentence: how it ended badly, what slowed it down, or that it was healthy."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.diagnosis.exits import how_ended, why_failed
from ddpwatch.core.diagnosis.outcome import alert_of_bad_end
from ddpwatch.core.limits import DEFAULTS, Limits, VerdictLimits
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.units import count, percent, plural, wire_and_waiting
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.cells import Level
from ddpwatch.view.outcome_text import OOM_KILLED, UNREPORTED, bad_ranks_text, hung_text, root_cause_text
from ddpwatch.view.run_view import no_recorded_steps_reason, too_few

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.core.diagnosis.exits import End
    from ddpwatch.core.diagnosis.outcome import Outcome
    from ddpwatch.core.metrics.aggregate import Cost, RunAggregate
    from ddpwatch.core.metrics.hung_steps import HungSteps
    from ddpwatch.core.state.run import RunState

MAX_NAMED: Final = 3
"""Max. number of further ranks, or of first failures, that are named."""
WHY_CHARS: Final = 240
"""Max. length of an alert's message within the verdict, in characters."""
OTHER: Final = "other"
"""Name of the time outside of the named phases."""
NEVER: Final = 2**62
"""Step number that no run reaches."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a run."""

    level: Level
    text: str
    besides: tuple[str, ...] = ()
    """Further sentences."""


def verdict(
    state: RunState, outcome: Outcome, aggregate: RunAggregate, alerts: Sequence[Alert], limits: Limits = DEFAULTS
) -> Verdict:
    """The worst proven finding about the run. `alerts` are all of it, open and closed."""
    found = _sentences(outcome, aggregate, alerts, limits)
    if not aggregate.steps:
        found.append((Level.WARN, f"Inconclusive: {no_recorded_steps_reason(state)}."))
    kept_from = kept_steps_from(aggregate, alerts)
    if not found:
        where = "" if kept_from is None else f" from step {count(kept_from)} on, where the recording begins"
        found.append((Level.OK, f"Healthy{where}: no problem was found."))
    (level, text), *others = found
    besides = [other for _, other in others[:MAX_NAMED]]
    if kept_from is not None and (earlier := sum(_is_before(alert, kept_from) for alert in alerts)):
        are = "is" if earlier == 1 else "are"
        besides.append(f"{plural(earlier, 'alert')} from before step {count(kept_from)} {are} listed below.")
    if outcome.live:
        besides.append("The run was still going when the recording ended.")
    return Verdict(level, text, tuple(besides))


def before_it(number: int, alerts: Sequence[Alert], other: str = "") -> str:
    """Sentence on the bad end of an earlier attempt, from its alerts; empty = it did not end badly.

    `other` is the name of its run, if that differs.
    """
    alert = alert_of_bad_end(alerts)
    if alert is None:
        return ""
    whose = f" (run {sanitize(other, NAME_CHARS)})" if other else ""
    return f"Earlier attempt {number}{whose} ended badly: {_ended(sanitize(alert.finding.message, WHY_CHARS))}"


def kept_steps_from(aggregate: RunAggregate, alerts: Sequence[Alert]) -> int | None:
    """First step in the recording, if earlier ones are missing and matter; None = it counts as the whole run."""
    first, last = aggregate.first_step, aggregate.last_step
    if first is None or last is None or first <= 1:
        return None
    is_whole = last - first + 1 >= VerdictLimits.WHOLE_RUN_SHARE * last
    return None if is_whole and not any(_is_before(alert, first) for alert in alerts) else first


def of_what(aggregate: RunAggregate, alerts: Sequence[Alert]) -> str:
    """What shares of the recorded time refer to, as text."""
    kept_from = kept_steps_from(aggregate, alerts)
    return "the whole run" if kept_from is None else f"steps {count(kept_from)} to {count(aggregate.last_step or 0)}"


def blamed(aggregate: RunAggregate, alerts: Sequence[Alert], limits: Limits = DEFAULTS) -> list[Cost]:
    """Ranks and hosts that are named as slow, the costliest first; a host if no single rank of it explains its cost.

    If most ranks were slow, only those with an outstanding cost are named.
    """
    ranks, min_share = aggregate.costs(), limits.straggler.share
    named = _slow_at_times(aggregate, alerts, limits)
    if _is_everybody(named, aggregate):
        named = [cost for cost in named if cost.share >= _outstanding_share(cost, ranks, min_share)]
    worst_of_host: dict[str, float] = {}
    for cost in ranks:
        host = aggregate.hosts[aggregate.ranks.index(int(cost.subject))]
        worst_of_host[host] = max(worst_of_host.get(host, 0.0), cost.share)
    for cost in aggregate.host_costs():
        max_one_rank = VerdictLimits.ONE_RANK_SHARE * cost.share
        if cost.share >= min_share and worst_of_host.get(str(cost.subject), 0.0) < max_one_rank:
            named.append(cost)
    return sorted(named, key=lambda cost: -cost.share)


def _slow_at_times(aggregate: RunAggregate, alerts: Sequence[Alert], limits: Limits) -> list[Cost]:
    """Ranks whose alerts explain their cost, or with an outstanding cost, the costliest first."""
    ranks = aggregate.costs()
    found = []
    for cost in ranks:
        own_alerts = _alerts_of(cost, alerts)
        min_share = limits.straggler.share
        if own_alerts and _is_explained(cost, own_alerts, aggregate):
            min_share = VerdictLimits.WITH_ALERT_SHARE
        elif not cost.mainly_hung:
            # Odd steps add up for every rank; a hung step does not happen by chance.
            min_share = _outstanding_share(cost, ranks, min_share)
        if cost.share >= min_share:
            found.append(cost)
    return found


def _is_everybody(named: Sequence[Cost], aggregate: RunAggregate) -> bool:
    return len(named) >= VerdictLimits.MIN_EVERYBODY and 2 * len(named) > len(aggregate.ranks)


def _outstanding_share(cost: Cost, ranks: Sequence[Cost], min_share: float) -> float:
    """Min. cost of a rank without an alert to be named: on a busy machine ranks are late in turn, and costs add up."""
    others = [other.share for other in ranks if other is not cost]
    return max(min_share, VerdictLimits.OUTSTANDING_FACTOR * median(others)) if others else min_share


def cost_name(cost: Cost) -> str:
    """Name of the rank or host."""
    return f"rank {cost.subject}" if isinstance(cost.subject, int) else f"host {sanitize(cost.subject, NAME_CHARS)}"


def phases_text(cost: Cost) -> str:
    """Phases in which it was slow or hung, as in `data and backward`; empty = unknown."""
    return " and ".join(cost.phases)


def when_text(cost: Cost, alerts: Sequence[Alert], aggregate: RunAggregate) -> str:
    """Steps in which it was slow or hung; empty = unknown."""
    slow = "" if cost.mainly_hung else _slow_when(cost, alerts, aggregate)
    return ", ".join(filter(None, (slow, hung_text(cost.hung) if cost.hung else "")))


def _slow_when(cost: Cost, alerts: Sequence[Alert], aggregate: RunAggregate) -> str:
    """Steps in which its alerts were true; empty = it has none.

    A finding outlasts the last slow step, and an alert may stay open to the end: the end is taken from the steps.
    """
    begin = aggregate.first_step or 0
    found = [alert for alert in _alerts_of(cost, alerts) if _until(alert) >= begin]
    if not found:
        return ""
    if not _is_explained(cost, found, aggregate):
        return "at times"
    found = _main_alert(cost, found, aggregate)
    first = max(min(map(_from, found)), begin)
    now_and_then = "at times " if len(found) > 1 or any(alert.recurred for alert in found) else ""
    slow_until = aggregate.slow_until(cost.subject, first) if isinstance(cost.subject, int) else None
    if slow_until is None and any(alert.closed is None for alert in found):
        return f"{now_and_then}from step {count(first)} on"
    reported = max(map(_until, found))
    if slow_until is None or reported <= slow_until[0] or all(alert.finding.ended for alert in found):
        slow_until = reported, True
    last, exactly = slow_until
    return f"{now_and_then}in steps {count(first)} to {'' if exactly else 'about '}{count(last)}"


def _alerts_of(cost: Cost, alerts: Sequence[Alert]) -> list[Alert]:
    """Straggler alerts on this rank or host."""
    stragglers = [alert for alert in alerts if alert.finding.rule == rules.STRAGGLER]
    return [alert for alert in stragglers if cost.subject in (*alert.finding.ranks, alert.finding.subject)]


def _main_alert(cost: Cost, found: list[Alert], aggregate: RunAggregate) -> list[Alert]:
    """The alert that explains nearly all of the cost that these explain, if there is one; else all of them.

    Hiccups long after a short episode would otherwise extend it to the whole run.
    """
    if not isinstance(rank := cost.subject, int):
        return found
    nearly_all = VerdictLimits.ONE_ALERT_SHARE * _fraction_explained(rank, found, aggregate)
    return next(([alert] for alert in found if _fraction_explained(rank, [alert], aggregate) >= nearly_all), found)


def _fraction_explained(rank: int, found: Sequence[Alert], aggregate: RunAggregate) -> float:
    """Fraction of a rank's cost that falls into the steps of these alerts."""
    return aggregate.fraction_within(rank, [(_from(alert), _until(alert)) for alert in found])


def _is_explained(cost: Cost, found: Sequence[Alert], aggregate: RunAggregate) -> bool:
    """Whether these alerts explain most of a rank's cost: the odd steps of a long run may cost more than an episode."""
    if not isinstance(cost.subject, int):
        return True
    return _fraction_explained(cost.subject, found, aggregate) >= VerdictLimits.EXPLAINED_SHARE


def _from(alert: Alert) -> int:
    step = alert.finding.from_step
    return step if step is not None else alert.since.step or 0


def _until(alert: Alert) -> int:
    """Last step of the finding; `NEVER` for an open alert without one."""
    step = alert.finding.upto_step
    if step is not None:
        return step
    return NEVER if alert.closed is None else alert.last.step or 0


def _is_before(alert: Alert, first: int) -> bool:
    """Whether the finding ended before that step; False if it has no step."""
    has_step = alert.finding.upto_step is not None or alert.last.step is not None
    return has_step and _until(alert) < first


def _sentences(
    outcome: Outcome, aggregate: RunAggregate, alerts: Sequence[Alert], limits: Limits
) -> list[tuple[Level, str]]:
    """Sentences of the verdict with their levels, the worst first."""
    found = []
    if outcome.bad:
        found.append((Level.BAD, f"Ended badly: {_ended(bad_end_text(outcome))}"))
    if outcome.stuck_on is not None:
        found.append((Level.BAD, f"Hung at the end: {_ended(outcome.stuck_on.finding.message)}"))
    if aggregate.steps and too_few(aggregate, limits):
        found.append((Level.WARN, f"Inconclusive: too few steps ({count(aggregate.steps)} measured)."))
    else:
        found += [(Level.WARN, text) for text in _slowed_down(aggregate, alerts, limits)]
    reported = {rules.STRAGGLER, rules.COMM_SHARE, *rules.STOPPING}
    for severity in (Severity.CRITICAL, Severity.WARNING):
        for alert in alerts:
            if alert.finding.severity is severity and alert.finding.rule not in reported:
                reported.add(alert.finding.rule)
                found.append(
                    (MARKS[severity].level, f"Worth a look, {alert.finding.rule}: {_ended(alert.finding.message)}")
                )
    return found


def bad_end_text(outcome: Outcome) -> str:
    """How the run ended badly, or the hang it is in, as part of a sentence; empty = neither.

    The root cause; else the first failures, the alert that reports the end, or, if the recording ends before the order
    of failures is known, the ranks.
    """
    alert = outcome.reported_by
    how = root_cause_text(outcome) or _first_failures(outcome.exits.first)
    how = how or (sanitize(alert.finding.message, WHY_CHARS) if alert is not None else bad_ranks_text(outcome))
    return how.removesuffix(".")


def _first_failures(first: Sequence[End]) -> str:
    texts = [_end_text(end) for end in first[:MAX_NAMED]]
    if len(first) > MAX_NAMED:
        texts.append(f"and {plural(len(first) - MAX_NAMED, 'more rank')}")
    return "; ".join(texts)


def _end_text(end: End) -> str:
    rank = end.rank
    if end.how == "failed":
        return f"rank {rank.rank} failed with {sanitize(why_failed(rank), WHY_CHARS).rstrip('.')}"
    if end.how == "lost":
        if rank.oom_kills:
            return f"rank {rank.rank} {OOM_KILLED}"
        if end.code is not None:
            return f"rank {rank.rank} {how_ended(end.code)} {UNREPORTED}"
        return f"rank {rank.rank} exited {UNREPORTED}, most likely killed"
    return f"rank {rank.rank} stopped sending heartbeats"


def _slowed_down(aggregate: RunAggregate, alerts: Sequence[Alert], limits: Limits) -> list[str]:
    """Sentences on what cost time, the costliest first: ranks and hosts, hung steps, and the network."""
    costs, slow = blamed(aggregate, alerts, limits), _slow_at_times(aggregate, alerts, limits)
    lost = min(sum(cost.share for cost in costs), 1.0)
    found = [(lost, _held_back(costs, lost, alerts, aggregate))] if costs else []
    if not costs and _is_everybody(slow, aggregate):
        found.append((0.0, _everybody(slow, alerts, aggregate)))
    hung = aggregate.hung_steps()
    if hung and hung.share >= limits.straggler.share and not any(cost.hung for cost in costs):
        found.append((hung.share, _hung_sentence(hung, alerts, aggregate)))
    share, wire, wait = aggregate.shares()
    if share is not None and wire is not None and wait is not None and share > limits.comm_share.share:
        if wire >= wait and len(aggregate.ranks) > 1:
            found.append((wire, _network(share, wire)))
        elif not found and len(aggregate.ranks) > 1:
            how = "mostly waiting for different ranks in turn"
            found.append((0.0, f"{percent(share)} of the time was exposed communication, {how}."))
    return [text for _, text in sorted(found, key=lambda each: -each[0])]


def _hung_sentence(hung: HungSteps, alerts: Sequence[Alert], aggregate: RunAggregate) -> str:
    """Sentence on hung steps that no single rank caused."""
    alone = ", not because of a single rank" if len(aggregate.ranks) > 1 else ""
    return f"The job {hung_text(hung)}{alone}: {percent(hung.share)} of {_whose_time(alerts, aggregate)} lost."


def _network(share: float, wire: float) -> str:
    on_wire, waiting = wire_and_waiting(share, wire)
    parts = f"{on_wire}% wire and {waiting}% waiting for slower ranks"
    return f"The network slowed the job down: {percent(share)} of the time was exposed communication, {parts}."


def _everybody(slow: Sequence[Cost], alerts: Sequence[Alert], aggregate: RunAggregate) -> str:
    together = percent(min(sum(cost.share for cost in slow), 1.0))
    ranks = f"{count(len(slow))} of {count(len(aggregate.ranks))} ranks"
    if len(slow) == len(aggregate.ranks):
        ranks = f"all {count(len(slow))} ranks"
    most = f"{cost_name(slow[0])} most, {percent(slow[0].share)}"
    lost = f"{together} of {_whose_time(alerts, aggregate)} lost in total"
    return f"No rank in particular was slow: {ranks} were slow at times, {lost}, {most}."


def _held_back(costs: Sequence[Cost], lost: float, alerts: Sequence[Alert], aggregate: RunAggregate) -> str:
    """Sentence on slow ranks and hosts, which states that shares are of all steps, not of those beside them."""
    if len(costs) == 1:
        cost = costs[0]
        share = f"{percent(cost.share)} of {_whose_time(alerts, aggregate)}"
        if cost.mainly_hung and cost.hung:
            name = f"{cost_name(cost)}{_stuck_text(cost)}"
            return f"The job {hung_text(cost.hung)}, waiting for {name}, which cost {share} in total."
        how = _how_text(cost, _slow_when(cost, alerts, aggregate))
        name = cost_name(cost)
        return f"{name[0].upper()}{name[1:]} slowed the job down: {how}, {share} lost."
    each = [f"{cost_name(cost)} {_how_text(cost)}, {percent(cost.share)}" for cost in costs[:MAX_NAMED]]
    more = f"; {len(costs) - MAX_NAMED} more" if len(costs) > MAX_NAMED else ""
    kinds = {isinstance(cost.subject, int) for cost in costs}
    names = f"{len(costs)} {'ranks' if kinds == {True} else 'hosts' if kinds == {False} else 'ranks and hosts'}"
    whose_time = _whose_time(alerts, aggregate)
    return f"{names} slowed the job down, {percent(lost)} of {whose_time} lost: {'; '.join(each)}{more}."


def _whose_time(alerts: Sequence[Alert], aggregate: RunAggregate) -> str:
    what = of_what(aggregate, alerts)
    return f"{what}'s time" if kept_steps_from(aggregate, alerts) is None else f"the time of {what}"


def _how_text(cost: Cost, when: str = "") -> str:
    slow = "" if cost.mainly_hung else " ".join(filter(None, ("slow", _in_phases(cost), when)))
    return ", ".join(filter(None, (slow, hung_text(cost.hung) if cost.hung else "")))


def _in_phases(cost: Cost) -> str:
    return f"in {phases_text(cost)}" if cost.phases else ""


def _stuck_text(cost: Cost) -> str:
    """Phase in which it was hung; empty if that was outside of the named phases."""
    return f" ({_in_phases(cost)})" if cost.phases and cost.phases != (OTHER,) else ""


def _ended(text: str) -> str:
    return text if text.endswith((".", "…", "!", "?")) else f"{text}."
