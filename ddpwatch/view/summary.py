"""What is left on the screen when a run has ended: how it ended, what it did, and what it was that cost time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ddpwatch.core import rules
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.alerts.severity import most_urgent_first
from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.limits import ScalingLimits, StragglerLimits
from ddpwatch.core.metrics.scaling import waited_for
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize
from ddpwatch.core.units import UNPROVEN, count, duration, ms, percent, plural, wire_and_waiting
from ddpwatch.recording.health import damage_sentence
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.alerts.page import all_alerts
from ddpwatch.view.allreduce import share_mark
from ddpwatch.view.cells import Cell, Level, fit, pad
from ddpwatch.view.layout import bar, capped, facts, heading, paragraph
from ddpwatch.view.outcome import ending_lines, lost_text
from ddpwatch.view.run_view import no_figures_reason
from ddpwatch.view.scaling import scaling_doubt, scaling_sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.core.diagnosis.outcome import Outcome
    from ddpwatch.core.metrics.aggregate import Aggregate
    from ddpwatch.core.metrics.figures import Figures
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

WORST_SHOWN: Final = 6
COSTLY_SHOWN: Final = 5
WHOLE_PART: Final = 0.9
"""So much of its steps is as good as the whole run."""
_BAR_COLUMNS: Final = 20
_RULE_COLUMNS: Final = 16
_NEXT: Final = (
    ("1-6", "still work, on the last state of the run"),
    ("r", "goes to another run, where there is one"),
    ("q", "quits; if the job is restarted before that, the dashboard attaches to it by itself"),
)
_NEXT_OF_REPLAY: Final = (_NEXT[0], ("home", "goes back to the first step or alert in it"), ("q", "quits"))
NEWER_SHOWN: Final = 3


def summary_lines(
    run_view: RunView,
    columns: int,
    rows: int,
    *,
    duration_s: float,
    how: str = "",
    newer: Sequence[str] = (),
    runs: bool = False,
) -> list[Line]:
    """The whole run on one page, at most `rows` lines. `how` is what the front end knows besides, as a sentence.
    `newer` are runs that have started since; `runs` = there is a choice of runs to go back to.
    """
    outcome = outcome_of(run_view.state, all_alerts(run_view), run_view.limits)
    lines = [*_newer(newer, columns), *ending_lines(run_view.state, outcome, columns)]
    if run_view.damage is not None:
        lines += paragraph(damage_sentence(run_view.damage), columns, Level.WARN, lead=[Cell("▲ ", Level.WARN)])
    if how:
        lines += paragraph(sanitize(how, NOTE_CHARS), columns, Level.DIM, lead=[Cell("  ")])
    lines += [[], *facts(_figures(run_view, outcome, duration_s), columns), [], *_costs(run_view, columns), []]
    lines += [*_alerts(run_view, columns), []]
    bottom: list[Line] = []
    for key, text in _NEXT_OF_REPLAY if run_view.replayed else _NEXT:
        if key == "r" and not runs:
            continue
        bottom += paragraph(text, columns, Level.DIM, lead=[Cell(f"{key:<5}", Level.KEY)])
    bottom = [fit(line, columns) for line in bottom]
    kept = capped([fit(line, columns) for line in lines], max(rows - len(bottom), 1))
    return [*kept, *bottom][: max(rows, 0)]


def _newer(newer: Sequence[str], columns: int) -> list[Line]:
    """That something else runs by now: it may be what one waits for."""
    if not newer:
        return []
    names = ", ".join(sanitize(name, NAME_CHARS) for name in newer[:NEWER_SHOWN])
    more = f" and {len(newer) - NEWER_SHOWN} more" if len(newer) > NEWER_SHOWN else ""
    what = "Another run has" if len(newer) == 1 else "Other runs have"
    lead = [Cell("● ", Level.OK)]
    return [*paragraph(f"{what} started since: {names}{more}. r goes there.", columns, Level.STRONG, lead=lead), []]


def _figures(run_view: RunView, outcome: Outcome, duration_s: float) -> list[tuple[str, str]]:
    state, aggregate = run_view.state, run_view.aggregate
    pairs = [
        ("ran for", duration(duration_s) if duration_s > 0 else UNPROVEN),
        ("steps", UNPROVEN if state.step is None else count(state.step)),
    ]
    if run_view.figures is None:
        return [*pairs, ("figures", f"{UNPROVEN} unproven: {no_figures_reason(state, ended=True)}")]
    if aggregate.steps:
        pairs += _seen(run_view, aggregate)
    else:
        pairs += _lately(run_view, run_view.figures)
    if scaling := run_view.whole_scaling if aggregate.steps else run_view.scaling:
        pairs.append(("scaling", scaling_sentence(scaling)))
        if doubt := scaling_doubt(scaling):
            pairs.append(("", f"▲ {doubt}"))
    if lost := lost_text(run_view, outcome.hang):
        pairs.append(("lost", lost))
    return pairs


def _seen(run_view: RunView, aggregate: Aggregate) -> list[tuple[str, str]]:
    """Of all steps that were seen, of which there may be fewer than the run had."""
    pairs = [("step", f"{ms(aggregate.step_ns())} ms, median of {_extent(run_view, aggregate)}")]
    if aggregate.samples_per_s is not None:
        pairs.append(("throughput", _throughput(aggregate.samples_per_s, run_view.state.world_size)))
    if run_view.state.world_size > 1:
        limit = run_view.limits.comm_share.share
        share, wire_share, _ = aggregate.shares()
        mark = f"▲ over {percent(limit)}" if (share or 0.0) > limit else ""
        pairs.append(("all-reduce", _share(share or 0.0, wire_share, mark)))
    return pairs


def _lately(run_view: RunView, figures: Figures) -> list[tuple[str, str]]:
    """Where ranks were missing all the time, there are the last steps of the others."""
    pairs = [("step", f"{ms(figures.step_ns)} ms, median of the last {count(figures.steps)}")]
    if figures.samples_per_s is not None:
        pairs.append(("throughput", _throughput(figures.samples_per_s, run_view.state.world_size)))
    if run_view.state.world_size > 1:
        pairs.append(("all-reduce", _share(figures.share, figures.wire_share, share_mark(run_view))))
    return pairs


def _extent(run_view: RunView, aggregate: Aggregate) -> str:
    """How much of the run that is; the first steps, and those with a pause, are never among them."""
    whole = run_view.state.step or 0
    if aggregate.steps >= WHOLE_PART * whole:
        return "the whole run"
    if run_view.read < 1:
        return f"the last {count(aggregate.steps)}; all others are being read, {percent(run_view.read)}"
    return f"the {count(aggregate.steps)} steps that were {'recorded' if run_view.replayed else 'seen'}"


def _throughput(samples_per_s: float, world_size: int) -> str:
    each = f", {count(samples_per_s / max(world_size, 1))} a rank" if world_size > 1 else ""
    return f"{count(samples_per_s)} samples/s{each}"


def _share(share: float, wire_share: float | None, mark: str) -> str:
    text = f"{percent(share)} of the step"
    if wire_share is None:
        text += "; wire or waiting is unproven: not all ranks were heard"
    else:
        text += " = wire {} + waiting {}".format(*wire_and_waiting(share, wire_share))
    return f"{text} · {mark}" if mark else text


def _costs(run_view: RunView, columns: int) -> list[Line]:
    """Who made the others wait: over all steps that were seen, and while an alert told so."""
    if run_view.state.world_size < 2:
        return []
    lines = [heading("who cost how much", columns, "part of the job's time")]
    aggregate = run_view.aggregate
    costs = [*_overall(run_view, aggregate), *_reported(run_view)]
    for cost in costs[:COSTLY_SHOWN]:
        filled = f"  {bar(cost.share, _BAR_COLUMNS)}" if columns >= 3 * _BAR_COLUMNS else ""
        lead = [Cell(pad(f"  {cost.subject}", _RULE_COLUMNS), Level.STRONG), Cell(f"{percent(cost.share):>5}")]
        lines += paragraph(cost.when, columns, Level.DIM, lead=[*lead, Cell(f"{filled}  ", Level.WARN)])
    if (more := len(costs) - COSTLY_SHOWN) > 0:
        lines.append([Cell(f"  … {count(more)} more", Level.DIM)])
    if not costs:
        lines += paragraph(_nobody(run_view), columns, Level.DIM, lead=[Cell("  ")])
    return lines


def _nobody(run_view: RunView) -> str:
    aggregate = run_view.aggregate
    if run_view.figures is None:
        return f"{UNPROVEN} unproven: {no_figures_reason(run_view.state, ended=True)}"
    if not aggregate.steps:
        return f"{UNPROVEN} unproven: not all ranks were heard"
    together = sum(aggregate.straggler_costs().values())
    if together < StragglerLimits.MIN_COST_SHARE:
        return "nobody"
    return f"nobody stands out: now one rank was late and now another, {percent(together)} in all"


class _Cost(NamedTuple):
    share: float
    subject: str
    when: str


def _overall(run_view: RunView, aggregate: Aggregate) -> list[_Cost]:
    """What each rank imposed on the job in all steps, the most first."""
    when = f"of {_extent(run_view, aggregate)}"
    shares, blamed = aggregate.straggler_costs(), _blamed(run_view)
    costs = [_Cost(share, f"rank {rank}", when) for rank, share in shares.items() if rank in blamed]
    costs = [cost for cost in costs if cost.share >= StragglerLimits.MIN_COST_SHARE]
    return sorted(costs, key=lambda cost: -cost.share)


def _blamed(run_view: RunView) -> set[int]:
    """Those that most of the waiting was for, and those that an alert has named. On a busy machine now one rank is late
    and now another, which is nobody's fault.
    """
    costs = run_view.aggregate.straggler_costs()
    mostly = waited_for(costs) if sum(costs.values()) >= ScalingLimits.MIN_WAIT_SHARE else ()
    named = (alert.finding.ranks for alert in all_alerts(run_view) if alert.finding.rule == rules.STRAGGLER)
    return {*mostly, *(rank for ranks in named for rank in ranks)}


def _reported(run_view: RunView) -> list[_Cost]:
    """Stragglers that were found and have gone again before the end, the most first: what they cost while they were."""
    costs = []
    for alert in (alert.at_worst for alert in all_alerts(run_view)):
        finding, closed = alert.finding, alert.closed
        cost_much = (finding.cost or 0.0) >= StragglerLimits.MIN_COST_SHARE
        if finding.rule == rules.STRAGGLER and closed is not None and cost_much:
            when = f"in {sanitize(finding.phase or 'its own work', NOTE_CHARS)}, {_span(alert)}"
            costs.append(_Cost(finding.cost or 0.0, sanitize(finding.subject, NAME_CHARS), when))
    return sorted(costs, key=lambda cost: -cost.share)


def _alerts(run_view: RunView, columns: int) -> list[Line]:
    """How many there were of each kind, and the worst, each as it was then: the most severe, then the dearest."""
    alerts = [alert.at_worst for alert in all_alerts(run_view)]
    if not alerts:
        hurt = run_view.damage is not None and run_view.damage.alerts
        return [heading("alerts", columns), [Cell(f"  none {'that could be read ' * hurt}in the whole run", Level.DIM)]]
    # How ranks have exited stands above.
    reported = [alert for alert in alerts if alert.finding.rule not in rules.EXITS or alert.closed is not None]
    if not reported:
        return [heading("alerts", columns), [Cell("  none but how it ended, which is told above", Level.DIM)]]
    totals = {severity: sum(alert.finding.severity is severity for alert in reported) for severity in Severity}
    note = ", ".join(
        f"{totals[severity]} {_words(severity, totals[severity])}"
        for severity in reversed(Severity)
        if totals[severity]
    )
    lines = [heading("alerts", columns, note if len(reported) == len(alerts) else f"{note}, besides how it ended")]
    worst = sorted(
        most_urgent_first(reported), key=lambda alert: (-alert.finding.severity, -(alert.finding.cost or 0.0))
    )
    for alert in worst[:WORST_SHOWN]:
        lines += _alert(alert, columns)
    if (more := len(worst) - WORST_SHOWN) > 0:
        lines.append([Cell(f"  … {plural(more, 'more alert')}, on the page of alerts", Level.DIM)])
    return lines


def _alert(alert: Alert, columns: int) -> list[Line]:
    mark, level, _ = MARKS[alert.finding.severity]
    when = _span(alert)
    if alert.seen is not None:
        when += f", not seen since step {count(alert.seen.step or 0)}"
    lead = [Cell(f"{mark} ", level), Cell(f"{alert.finding.rule:<{_RULE_COLUMNS - 2}}", Level.STRONG)]
    return paragraph(f"{sanitize(alert.finding.message, NOTE_CHARS)} ({when})", columns, lead=lead)


def _span(alert: Alert) -> str:
    """In which steps it was so; where that is not known, while the alert was open."""
    finding = alert.finding
    if finding.from_step is not None and finding.upto_step is not None and alert.closed is not None:
        return f"steps {count(finding.from_step)} to {count(finding.upto_step)}"
    if alert.since.step is None:
        return "from the beginning"
    if alert.closed is None or alert.closed.step is None:
        return f"since step {count(alert.since.step)}"
    return f"steps {count(alert.since.step)} to {count(alert.closed.step)}"


def _words(severity: Severity, number: int) -> str:
    return f"{severity.word}s" if severity is Severity.WARNING and number != 1 else severity.word
