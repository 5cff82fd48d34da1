"""Summary screen of a run that has ended: outcome, figures, straggler costs, and alerts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.alerts.severity import most_urgent_first
from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.limits import ScalingLimits, StragglerLimits, VerdictLimits
from ddpwatch.core.metrics.scaling import waited_for
from ddpwatch.core.model_kinds import sync_name
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize
from ddpwatch.core.units import UNPROVEN, count, duration_text, ms, percent, plural, wire_and_waiting
from ddpwatch.recording.damage_report import damage_sentence
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.alerts.page import all_alerts
from ddpwatch.view.allreduce import share_mark
from ddpwatch.view.cells import Cell, Level, fit, pad
from ddpwatch.view.layout import bar, capped, facts, heading, paragraph
from ddpwatch.view.outcome_text import ending_lines, lost_text
from ddpwatch.view.run_view import no_figures_reason
from ddpwatch.view.scaling import scaling_doubt, scaling_sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.core.diagnosis.outcome import Outcome
    from ddpwatch.core.metrics.aggregate import Aggregate
    from ddpwatch.core.metrics.live_metrics import Figures
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

# Max. numbers of alerts and of straggler costs shown.
WORST_SHOWN: Final = 6
COSTLY_SHOWN: Final = 5
# Widths in terminal cells: bars of costs, which are shown from three times this width on, and names.
_BAR_COLUMNS: Final = 20
_RULE_COLUMNS: Final = 16
_NEXT: Final = (
    ("1-6", "screens, with the last state of the run"),
    ("r", "choose another run"),
    ("q", "quit; if the job restarts before that, the dashboard attaches to it automatically"),
)
_NEXT_OF_REPLAY: Final = (_NEXT[0], ("home", "go to the first step or alert"), ("q", "quit"))
NEWER_SHOWN: Final = 3
"""Max. number of newer runs named."""


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
    """Summary of at most `rows` lines, with the keys at the bottom.

    `how` is a sentence of the front end on the end; `newer` are runs that have started since; `runs` = there are other
    runs to choose.
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
    """Note on runs that have started since."""
    if not newer:
        return []
    names = ", ".join(sanitize(name, NAME_CHARS) for name in newer[:NEWER_SHOWN])
    more = f" and {len(newer) - NEWER_SHOWN} more" if len(newer) > NEWER_SHOWN else ""
    what = "Another run has" if len(newer) == 1 else "Other runs have"
    lead = [Cell("● ", Level.OK)]
    return [
        *paragraph(f"{what} started since: {names}{more}. Press r to choose it.", columns, Level.STRONG, lead=lead),
        [],
    ]


def _figures(run_view: RunView, outcome: Outcome, duration_s: float) -> list[tuple[str, str]]:
    state, aggregate = run_view.state, run_view.aggregate
    pairs = [
        ("ran for", duration_text(duration_s) if duration_s > 0 else UNPROVEN),
        ("steps", UNPROVEN if state.step is None else count(state.step)),
    ]
    if run_view.figures is None:
        return [*pairs, ("figures", f"{UNPROVEN} unknown: {no_figures_reason(state, ended=True)}")]
    # If ranks were missing all the time, there are only the last steps of the others.
    pairs += _of_all_steps(run_view, aggregate) if aggregate.steps else _of_last_steps(run_view, run_view.figures)
    if scaling := run_view.whole_scaling if aggregate.steps else run_view.scaling:
        pairs.append(("scaling", scaling_sentence(scaling)))
        if doubt := scaling_doubt(scaling):
            pairs.append(("", f"▲ {doubt}"))
    if lost := lost_text(run_view, outcome.hang):
        pairs.append(("lost", lost))
    return pairs


def _of_all_steps(run_view: RunView, aggregate: Aggregate) -> list[tuple[str, str]]:
    share, wire_share, _ = aggregate.shares()
    limit = run_view.limits.comm_share.share
    mark = f"▲ over {percent(limit)}" if (share or 0.0) > limit else ""
    step = f"{ms(aggregate.step_ns())} ms, median of {_extent(run_view, aggregate)}"
    return [("step", step), *_rates(run_view, aggregate.samples_per_s, share or 0.0, wire_share, mark)]


def _of_last_steps(run_view: RunView, figures: Figures) -> list[tuple[str, str]]:
    step = f"{ms(figures.step_ns)} ms, median of the last {count(figures.steps)} steps"
    rates = _rates(run_view, figures.samples_per_s, figures.share, figures.wire_share, share_mark(run_view))
    return [("step", step), *rates]


def _rates(
    run_view: RunView, samples_per_s: float | None, share: float, wire_share: float | None, mark: str
) -> list[tuple[str, str]]:
    """Throughput and all-reduce share, as far as there are any."""
    world_size = run_view.state.world_size
    pairs = []
    if samples_per_s is not None:
        each = f", {count(samples_per_s / world_size)} per rank" if world_size > 1 else ""
        pairs.append(("throughput", f"{count(samples_per_s)} samples/s{each}"))
    if world_size > 1:
        split = "; wire and waiting are unknown: no data from some ranks"
        if wire_share is not None:
            split = " = wire {}% + waiting {}%".format(*wire_and_waiting(share, wire_share))
        pairs.append((sync_name(run_view.state), f"{percent(share)} of the step{split}{f' · {mark}' if mark else ''}"))
    return pairs


def _extent(run_view: RunView, aggregate: Aggregate) -> str:
    """The part of the run that the aggregate covers; first steps and those with a pause are never part of it."""
    whole = run_view.state.step or 0
    if aggregate.steps >= VerdictLimits.WHOLE_RUN_SHARE * whole:
        return "the whole run"
    if run_view.read < 1:
        return f"the last {count(aggregate.steps)} steps; reading the others, {percent(run_view.read)}"
    return f"the {count(aggregate.steps)} steps that were {'recorded' if run_view.replayed else 'seen'}"


def _costs(run_view: RunView, columns: int) -> list[Line]:
    """Straggler costs: over all steps that were seen, and during alerts that are closed."""
    if run_view.state.world_size < 2:
        return []
    lines = [heading("straggler cost", columns, "fraction of the job's time")]
    costs = [*_overall(run_view, run_view.aggregate), *_during_alerts(run_view)]
    for cost in costs[:COSTLY_SHOWN]:
        filled = f"  {bar(cost.share, _BAR_COLUMNS)}" if columns >= 3 * _BAR_COLUMNS else ""
        lead = [Cell(pad(f"  {cost.name}", _RULE_COLUMNS), Level.STRONG), Cell(f"{percent(cost.share):>5}")]
        lines += paragraph(cost.when, columns, Level.DIM, lead=[*lead, Cell(f"{filled}  ", Level.WARN)])
    if (more := len(costs) - COSTLY_SHOWN) > 0:
        lines.append([Cell(f"  … {count(more)} more", Level.DIM)])
    if not costs:
        lines += paragraph(_no_costs_text(run_view), columns, Level.DIM, lead=[Cell("  ")])
    return lines


def _no_costs_text(run_view: RunView) -> str:
    aggregate = run_view.aggregate
    if run_view.figures is None:
        return f"{UNPROVEN} unknown: {no_figures_reason(run_view.state, ended=True)}"
    if not aggregate.steps:
        return f"{UNPROVEN} unknown: no data from some ranks"
    together = sum(aggregate.straggler_costs().values())
    if together < StragglerLimits.MIN_COST_SHARE:
        return "none"
    return f"no rank stands out: different ranks were late in turn, {percent(together)} in total"


class _Cost(NamedTuple):
    share: float
    name: str
    when: str


def _overall(run_view: RunView, aggregate: Aggregate) -> list[_Cost]:
    """Straggler costs of blamed ranks over all steps, the costliest first."""
    when = f"of {_extent(run_view, aggregate)}"
    shares, blamed = aggregate.straggler_costs(), _blamed(run_view)
    costs = [_Cost(share, f"rank {rank}", when) for rank, share in shares.items() if rank in blamed]
    costs = [cost for cost in costs if cost.share >= StragglerLimits.MIN_COST_SHARE]
    return sorted(costs, key=lambda cost: -cost.share)


def _blamed(run_view: RunView) -> set[int]:
    """Ranks that most of the waiting was for, or that an alert named. On a busy machine others are late in turn."""
    costs = run_view.aggregate.straggler_costs()
    mostly = waited_for(costs) if sum(costs.values()) >= ScalingLimits.MIN_WAIT_SHARE else ()
    named = (alert.finding.ranks for alert in all_alerts(run_view) if alert.finding.rule == rules.STRAGGLER)
    return {*mostly, *(rank for ranks in named for rank in ranks)}


def _during_alerts(run_view: RunView) -> list[_Cost]:
    """Costs of stragglers during their closed alerts, the costliest first."""
    costs = []
    for alert in (alert.at_worst for alert in all_alerts(run_view)):
        finding, closed = alert.finding, alert.closed
        cost_much = (finding.cost or 0.0) >= StragglerLimits.MIN_COST_SHARE
        if finding.rule == rules.STRAGGLER and closed is not None and cost_much:
            when = f"in {sanitize(finding.phase or 'its own work', NOTE_CHARS)}, {_span(alert)}"
            costs.append(_Cost(finding.cost or 0.0, sanitize(finding.subject, NAME_CHARS), when))
    return sorted(costs, key=lambda cost: -cost.share)


def _alerts(run_view: RunView, columns: int) -> list[Line]:
    """Number of alerts by severity, and the worst ones at their worst: by severity, then by cost."""
    alerts = [alert.at_worst for alert in all_alerts(run_view)]
    if not alerts:
        hurt = run_view.damage is not None and run_view.damage.alerts
        return [heading("alerts", columns), [Cell(f"  none {'that could be read ' * hurt}in the whole run", Level.DIM)]]
    # Exits of ranks are shown above.
    reported = [alert for alert in alerts if alert.finding.rule not in rules.EXITS or alert.closed is not None]
    if not reported:
        return [heading("alerts", columns), [Cell("  none besides how it ended, shown above", Level.DIM)]]
    totals = {severity: sum(alert.finding.severity is severity for alert in reported) for severity in Severity}
    note = ", ".join(_count_text(severity, totals[severity]) for severity in reversed(Severity) if totals[severity])
    lines = [heading("alerts", columns, note if len(reported) == len(alerts) else f"{note}, besides how it ended")]
    worst = sorted(
        most_urgent_first(reported), key=lambda alert: (-alert.finding.severity, -(alert.finding.cost or 0.0))
    )
    for alert in worst[:WORST_SHOWN]:
        lines += _alert(alert, columns)
    if (more := len(worst) - WORST_SHOWN) > 0:
        lines.append([Cell(f"  … {plural(more, 'more alert')}, on the alerts screen", Level.DIM)])
    return lines


def _alert(alert: Alert, columns: int) -> list[Line]:
    mark, level, _ = MARKS[alert.finding.severity]
    when = _span(alert)
    if alert.seen is not None:
        when += f", not seen since step {count(alert.seen.step or 0)}"
    lead = [Cell(f"{mark} ", level), Cell(f"{alert.finding.rule:<{_RULE_COLUMNS - 2}}", Level.STRONG)]
    return paragraph(f"{sanitize(alert.finding.message, NOTE_CHARS)} ({when})", columns, lead=lead)


def _span(alert: Alert) -> str:
    """Steps of the finding, or those in which the alert was open."""
    finding = alert.finding
    if finding.from_step is not None and finding.upto_step is not None and alert.closed is not None:
        return f"steps {count(finding.from_step)} to {count(finding.upto_step)}"
    if alert.since.step is None:
        return "from the start"
    if alert.closed is None or alert.closed.step is None:
        return f"since step {count(alert.since.step)}"
    return f"steps {count(alert.since.step)} to {count(alert.closed.step)}"


def _count_text(severity: Severity, number: int) -> str:
    return f"{number} {severity.word}{'s' if severity is Severity.WARNING and number != 1 else ''}"
