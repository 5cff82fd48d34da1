"""A whole run in one sentence: what ended it, who held it back, or that nothing is worth a change.

Whether a run that was recorded came to a bad end, in the words of its verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from ddpwatch.core import rules
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.diagnosis.exits import how_ended, why_failed
from ddpwatch.core.diagnosis.outcome import alert_of_bad_end
from ddpwatch.core.limits import DEFAULTS, Limits
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.units import count, percent, plural, wire_and_waiting
from ddpwatch.view.cells import Level
from ddpwatch.view.outcome import bad_ranks_text, hung_text, root_cause_text
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
WHY_CHARS: Final = 240
TOLD_SHARE: Final = 0.02
"""Of the whole run: what somebody who had an alert must have cost at least to be named in the verdict."""
FAR_ABOVE: Final = 3.0
"""… and what somebody who had none, as so many times what the middle one of the others cost."""
EVERYBODY: Final = 3
"""So many ranks, and more than half of them, are nobody in particular, unless one cost far more than the others."""
MAINLY_WITHIN: Final = 0.5
"""Of what a rank cost: if less falls into the steps of its alerts, they do not explain it."""
OUTSIDE: Final = "other"
"""Outside of the phases that have a name."""
NEARLY_ALL: Final = 0.8
"""Of what its alerts explain: if so much falls into the steps of one of them, that one is told."""
NEVER: Final = 2**62
"""A step that no run comes to."""
WHOLE_PART: Final = 0.9
"""So much of its steps is as good as the whole run, unless something was told of the others."""
MAINLY: Final = 0.5
"""Of what a host cost: if one of its ranks alone cost so much, it was that rank and not the host."""


@dataclass(frozen=True)
class Verdict:
    """The sentence, and what it means."""

    level: Level
    text: str
    besides: tuple[str, ...] = ()
    """What else should be known, each as a sentence."""


def verdict(
    state: RunState, outcome: Outcome, aggregate: RunAggregate, alerts: Sequence[Alert], limits: Limits = DEFAULTS
) -> Verdict:
    """The worst that can be said of the run and is proven. `alerts` are all of it, open and closed."""
    found = _sentences(outcome, aggregate, alerts, limits)
    if not aggregate.steps:
        found.append((Level.WARN, f"Unproven: {no_recorded_steps_reason(state)}."))
    kept_from = kept_steps_from(aggregate, alerts)
    if not found:
        where = "" if kept_from is None else f" in the steps that are in the recording ({count(kept_from)} on)"
        found.append((Level.OK, f"Healthy{where}: nothing worth a change was found."))
    (level, text), *others = found
    besides = [other for _, other in others[:MAX_NAMED]]
    if kept_from is not None and (earlier := sum(_is_before(alert, kept_from) for alert in alerts)):
        are = "is" if earlier == 1 else "are"
        besides.append(f"{plural(earlier, 'alert')} from before step {count(kept_from)} {are} listed below.")
    if outcome.live:
        besides.append("The recording ends while the run was still going.")
    return Verdict(level, text, tuple(besides))


def before_it(number: int, alerts: Sequence[Alert], other: str = "") -> str:
    """How the attempt of this number ended, as a sentence, if that was badly; by its alerts alone. Else nothing.
    `other` = the name of its run, where that is another one.
    """
    alert = alert_of_bad_end(alerts)
    if alert is None:
        return ""
    whose = f", of the run {sanitize(other, NAME_CHARS)}," if other else ""
    return f"Attempt {number} before it{whose} ended badly: {_ended(sanitize(alert.finding.message, WHY_CHARS))}"


def kept_steps_from(aggregate: RunAggregate, alerts: Sequence[Alert]) -> int | None:
    """The first step in the recording, where what came before it matters; None = its steps stand for the whole run."""
    first, last = aggregate.first_step, aggregate.last_step
    if first is None or last is None or first <= 1:
        return None
    is_whole = last - first + 1 >= WHOLE_PART * last
    return None if is_whole and not any(_is_before(alert, first) for alert in alerts) else first


def of_what(aggregate: RunAggregate, alerts: Sequence[Alert]) -> str:
    """What a share of the time in the recorded steps is a share of."""
    kept_from = kept_steps_from(aggregate, alerts)
    return "the whole run" if kept_from is None else f"steps {count(kept_from)} to {count(aggregate.last_step or 0)}"


def blamed(aggregate: RunAggregate, alerts: Sequence[Alert], limits: Limits = DEFAULTS) -> list[Cost]:
    """Ranks and hosts that cost enough to be named, the dearest first. A host where all of its ranks were slow. Where
    most ranks would be named, only those that stand out.
    """
    ranks = aggregate.costs()
    named = _slow_at_times(aggregate, alerts, limits)
    if _is_everybody(named, aggregate):
        least = limits.straggler.share
        named = [cost for cost in named if cost.share >= _stands_out(cost, ranks, least)]
    of_host: dict[str, float] = {}
    for cost in ranks:
        host = aggregate.hosts[aggregate.ranks.index(int(cost.subject))]
        of_host[host] = max(of_host.get(host, 0.0), cost.share)
    named += [
        cost
        for cost in aggregate.host_costs()
        if cost.share >= limits.straggler.share and of_host.get(str(cost.subject), 0.0) < MAINLY * cost.share
    ]
    return sorted(named, key=lambda cost: -cost.share)


def _slow_at_times(aggregate: RunAggregate, alerts: Sequence[Alert], limits: Limits) -> list[Cost]:
    """Ranks that an alert has named for what they cost, or that stand out without one, the dearest first."""
    ranks = aggregate.costs()
    found = []
    for cost in ranks:
        reported = _alerts_of(cost, alerts)
        least = limits.straggler.share
        if reported and _is_explained(cost, reported, aggregate):
            least = TOLD_SHARE
        elif not cost.mainly_hung:
            # Odd steps add up for everybody; one that stood still does not come by chance.
            least = _stands_out(cost, ranks, least)
        if cost.share >= least:
            found.append(cost)
    return found


def _is_everybody(named: Sequence[Cost], aggregate: RunAggregate) -> bool:
    return len(named) >= EVERYBODY and 2 * len(named) > len(aggregate.ranks)


def _stands_out(cost: Cost, ranks: Sequence[Cost], least: float) -> float:
    """What somebody must have cost whom no alert names. On a busy machine now one is late and now another: that sums up
    to much for everybody, and is nobody's fault.
    """
    others = [other.share for other in ranks if other is not cost]
    return max(least, FAR_ABOVE * median(others)) if others else least


def cost_name(cost: Cost) -> str:
    """A rank or a host by name."""
    return f"rank {cost.subject}" if isinstance(cost.subject, int) else f"host {sanitize(cost.subject, NAME_CHARS)}"


def phases_text(cost: Cost) -> str:
    """Where it was slow, or stuck: `data and backward`; empty = cannot be told."""
    return " and ".join(cost.phases)


def when_text(cost: Cost, alerts: Sequence[Alert], aggregate: RunAggregate) -> str:
    """In which of the measured steps it was slow, or stood still; empty = that cannot be told."""
    slow = "" if cost.mainly_hung else _slow_when(cost, alerts, aggregate)
    return ", ".join(filter(None, (slow, hung_text(cost.hung) if cost.hung else "")))


def _slow_when(cost: Cost, alerts: Sequence[Alert], aggregate: RunAggregate) -> str:
    """In which steps it was told to be slow; empty = it never was. An alert is found for a while after that, and open
    perhaps until the end: the steps themselves tell how long it was.
    """
    begin = aggregate.first_step or 0
    found = [alert for alert in _alerts_of(cost, alerts) if _until(alert) >= begin]
    if not found:
        return ""
    if not _is_explained(cost, found, aggregate):
        return "now and then"
    found = _dearest(cost, found, aggregate)
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
    """The alerts that say that this one was slow."""
    return [
        alert
        for alert in alerts
        if alert.finding.rule == rules.STRAGGLER
        and (cost.subject in alert.finding.ranks or alert.finding.subject == cost.subject)
    ]


def _dearest(cost: Cost, found: list[Alert], aggregate: RunAggregate) -> list[Alert]:
    """Of these alerts the one in whose steps nearly all falls that they explain, where there is one: hiccups of long
    after would make a trouble that lasted for some steps one of all the run.
    """
    if not isinstance(cost.subject, int):
        return found
    nearly_all = NEARLY_ALL * _fraction_explained(cost.subject, found, aggregate)
    return next(
        ([alert] for alert in found if _fraction_explained(cost.subject, [alert], aggregate) >= nearly_all), found
    )


def _fraction_explained(rank: int, found: Sequence[Alert], aggregate: RunAggregate) -> float:
    return aggregate.fraction_within(rank, [(_from(alert), _until(alert)) for alert in found])


def _is_explained(cost: Cost, found: Sequence[Alert], aggregate: RunAggregate) -> bool:
    """Whether most of what a rank cost falls into the steps that these alerts tell of. On a busy machine the odd steps
    of a long run may cost more than a short trouble does.
    """
    if not isinstance(cost.subject, int):
        return True
    return _fraction_explained(cost.subject, found, aggregate) >= MAINLY_WITHIN


def _from(alert: Alert) -> int:
    return _known(alert.finding.from_step, alert.since.step)


def _until(alert: Alert) -> int:
    """The last step in which it was so, as far as was told; of one that is open, perhaps later than any."""
    otherwise = alert.last.step if alert.closed is not None else NEVER
    return _known(alert.finding.upto_step, otherwise)


def _is_before(alert: Alert, first: int) -> bool:
    """Whether it was over before that step; of one that has no step at all that is not known."""
    reported = alert.finding.upto_step is not None or alert.last.step is not None
    return reported and _until(alert) < first


def _known(step: int | None, otherwise: int | None) -> int:
    return step if step is not None else otherwise or 0


def _sentences(
    outcome: Outcome, aggregate: RunAggregate, alerts: Sequence[Alert], limits: Limits
) -> list[tuple[Level, str]]:
    """All that is worth a sentence, the worst first."""
    found = []
    if outcome.bad:
        found.append((Level.BAD, f"Ended badly: {_ended(bad_end_text(outcome))}"))
    if outcome.stuck_on is not None:
        found.append((Level.BAD, f"Stuck at the end: {_ended(outcome.stuck_on.finding.message)}"))
    if aggregate.steps and too_few(aggregate, limits):
        found.append((Level.WARN, f"Unproven: too few steps to tell ({count(aggregate.steps)} measured)."))
    else:
        found += [(Level.WARN, text) for text in _slowed_down(aggregate, alerts, limits)]
    reported = {rules.STRAGGLER, rules.COMM_SHARE, *rules.STOPPING}
    for severity in (Severity.CRITICAL, Severity.WARNING):
        level = Level.BAD if severity is Severity.CRITICAL else Level.WARN
        for alert in alerts:
            if alert.finding.severity is severity and alert.finding.rule not in reported:
                reported.add(alert.finding.rule)
                found.append((level, f"Worth a look, {alert.finding.rule}: {_ended(alert.finding.message)}"))
    return found


def bad_end_text(outcome: Outcome) -> str:
    """How the run ended badly, or the hang it is in, as part of a sentence; empty = it did not.

    The root cause by the diagnosis, else the first failures; else the alert that reports it; else, where a recording
    ends before the order of the failures is known, the ranks alone.
    """
    alert = outcome.reported_by
    how = root_cause_text(outcome) or _first_failures(outcome.exits.first)
    how = how or (sanitize(alert.finding.message, WHY_CHARS) if alert is not None else bad_ranks_text(outcome))
    return how.removesuffix(".")


def _first_failures(first: Sequence[End]) -> str:
    texts = [_end_text(end) for end in first[:MAX_NAMED]]
    if len(first) > MAX_NAMED:
        texts.append(f"{plural(len(first) - MAX_NAMED, 'more rank')} likewise")
    return "; ".join(texts)


def _end_text(end: End) -> str:
    rank = end.rank
    if end.how == "failed":
        return f"rank {rank.rank} failed with {sanitize(why_failed(rank), WHY_CHARS).rstrip('.')}"
    if end.how == "lost":
        if rank.oom_kills:
            return f"rank {rank.rank} ended without a word, killed by the kernel, for its memory"
        if end.code is not None:
            return f"rank {rank.rank} {how_ended(end.code)} without a word"
        return f"rank {rank.rank} ended without a word, killed most likely"
    return f"rank {rank.rank} fell silent and was not heard again"


def _slowed_down(aggregate: RunAggregate, alerts: Sequence[Alert], limits: Limits) -> list[str]:
    """What cost time: ranks and hosts, and the network where it took more than waiting did; what cost most first."""
    costs, slow = blamed(aggregate, alerts, limits), _slow_at_times(aggregate, alerts, limits)
    lost = min(sum(cost.share for cost in costs), 1.0)
    found = [(lost, _held_back(costs, lost, alerts, aggregate))] if costs else []
    if not costs and _is_everybody(slow, aggregate):
        found.append((0.0, _nobody(slow, alerts, aggregate)))
    hung = aggregate.hung_steps()
    if hung and hung.share >= limits.straggler.share and not any(cost.hung for cost in costs):
        found.append((hung.share, _hung_sentence(hung, alerts, aggregate)))
    share, wire, wait = aggregate.shares()
    if share is not None and wire is not None and wait is not None and share > limits.comm_share.share:
        if wire >= wait and len(aggregate.ranks) > 1:
            found.append((wire, _network(share, wire)))
        elif not found and len(aggregate.ranks) > 1:
            how = "mostly waiting: now one rank was late, now another"
            found.append((0.0, f"{percent(share)} of the time went into the all-reduce, {how}."))
    return [text for _, text in sorted(found, key=lambda each: -each[0])]


def _hung_sentence(hung: HungSteps, alerts: Sequence[Alert], aggregate: RunAggregate) -> str:
    """All ranks did, or several together."""
    alone = ", for no rank alone" if len(aggregate.ranks) > 1 else ""
    return f"The job {hung_text(hung)}{alone}: {percent(hung.share)} of {_whose_time(alerts, aggregate)} lost."


def _network(share: float, wire: float) -> str:
    on_wire, waiting = wire_and_waiting(share, wire)
    parts = f"{on_wire} % on the wire and {waiting} % waiting for slower ranks"
    return f"The network held the job back: {percent(share)} of the time went into the all-reduce, {parts}."


def _nobody(slow: Sequence[Cost], alerts: Sequence[Alert], aggregate: RunAggregate) -> str:
    together = percent(min(sum(cost.share for cost in slow), 1.0))
    who = f"{count(len(slow))} of {count(len(aggregate.ranks))} ranks"
    if len(slow) == len(aggregate.ranks):
        who = f"all {count(len(slow))} ranks"
    most = f"{cost_name(slow[0])} most, {percent(slow[0].share)}"
    lost = f"{together} of {_whose_time(alerts, aggregate)} lost in all"
    return f"Nobody in particular was slow: {who} were at times, {lost}, {most}."


def _held_back(costs: Sequence[Cost], lost: float, alerts: Sequence[Alert], aggregate: RunAggregate) -> str:
    """Shares are of all its steps, which is said: beside some of them they would be read as a share of these."""
    if len(costs) == 1:
        cost = costs[0]
        share = f"{percent(cost.share)} of {_whose_time(alerts, aggregate)}"
        if cost.mainly_hung and cost.hung:
            who = f"{cost_name(cost)}{_stuck_text(cost)}"
            return f"The job {hung_text(cost.hung)}, for {who}, which cost {share} in all."
        how = _how_text(cost, _slow_when(cost, alerts, aggregate))
        return f"{_sentence(cost_name(cost))} held the job back: {how}, {share} lost."
    each = [f"{cost_name(cost)} {_how_text(cost)}, {percent(cost.share)}" for cost in costs[:MAX_NAMED]]
    more = f"; {len(costs) - MAX_NAMED} more" if len(costs) > MAX_NAMED else ""
    kinds = {isinstance(cost.subject, int) for cost in costs}
    who = f"{len(costs)} {'ranks' if kinds == {True} else 'hosts' if kinds == {False} else 'ranks and hosts'}"
    whose_time = _whose_time(alerts, aggregate)
    return f"{who} held the job back, {percent(lost)} of {whose_time} lost: {'; '.join(each)}{more}."


def _whose_time(alerts: Sequence[Alert], aggregate: RunAggregate) -> str:
    what = of_what(aggregate, alerts)
    return f"{what}'s time" if kept_steps_from(aggregate, alerts) is None else f"the time of {what}"


def _how_text(cost: Cost, when: str = "") -> str:
    """How it held the others up: it was slow, or it was stuck, or both."""
    slow = "" if cost.mainly_hung else " ".join(filter(None, ("slow", _in_phases(cost), when)))
    return ", ".join(filter(None, (slow, hung_text(cost.hung) if cost.hung else "")))


def _in_phases(cost: Cost) -> str:
    return f"in {phases_text(cost)}" if cost.phases else ""


def _stuck_text(cost: Cost) -> str:
    """In which phase it was stuck; that it was in none of them tells nothing."""
    return f" ({_in_phases(cost)})" if cost.phases and cost.phases != (OUTSIDE,) else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _ended(text: str) -> str:
    return text if text.endswith((".", "…", "!", "?")) else f"{text}."
