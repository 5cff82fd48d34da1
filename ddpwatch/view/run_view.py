"""Snapshot of a run at one of its steps, computed once, from which every screen is drawn.

Also: totals over all ranks, remarks on the run (missing ranks, notes of the agents), and why figures are missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from ddpwatch.core.alerts.hang_alerts import current_hang, last_common_step
from ddpwatch.core.alerts.model import Moment
from ddpwatch.core.alerts.severity import findings_by_rank, most_urgent_first
from ddpwatch.core.alerts.staleness import with_staleness
from ddpwatch.core.limits import WindowLimits
from ddpwatch.core.logs.log_state import LogState
from ddpwatch.core.metrics.aggregate import Aggregate
from ddpwatch.core.metrics.hung_steps import stalled_s
from ddpwatch.core.metrics.scaling import scaling_of
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.units import count, plural, ranks_text
from ddpwatch.view.cells import Cell, Level, columns_of
from ddpwatch.view.gpus.busy_and_waiting import gpu_rows, gpu_totals
from ddpwatch.view.ranks.columns import Row, attention, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpwatch.core.alerts.model import Alert, Finding, Severity
    from ddpwatch.core.limits import Limits
    from ddpwatch.core.logs.log_state import LogSnapshot
    from ddpwatch.core.metrics.aggregate import RunAggregate
    from ddpwatch.core.metrics.live_metrics import Figures
    from ddpwatch.core.metrics.scaling import Profile, Scaling
    from ddpwatch.core.monitor import Monitor
    from ddpwatch.core.state.run import RunCondition, RunState
    from ddpwatch.recording.damage_report import Damage
    from ddpwatch.view.gpus.busy_and_waiting import GpuTotals

NO_LOGS: Final = LogState().snapshot()
HINDSIGHT_STEPS: Final = 5
"""Looking back by at most this many steps, what is of now counts as being of that step."""
MAX_NOTES: Final = 8
"""Max. number of notes shown, the newest."""
MAX_REASONS: Final = 3
"""Max. number of reasons shown why nothing is received from ranks."""


@dataclass(frozen=True)
class Extent:
    """Widths of columns of the rank table, and the step time that fills a bar."""

    rank_columns: int
    host_columns: int
    full_ns: float
    has_gpus: bool = False
    """Whether there are columns for GPUs."""


@dataclass(frozen=True)
class Totals:
    """Totals over all ranks."""

    hosts: int
    step: int | None
    """The latest step that a rank is in."""
    running_s: float | None
    """Seconds from the start to now, or to the step looked back at, by the ranks' clocks; None = unknown."""
    beats: int
    """Number of ranks that have reported CPU and memory."""
    cpu_percent: float
    """Mean over these ranks."""
    max_cpu_percent: float
    rss_bytes: int
    gpus: GpuTotals | None
    """None = no rank reports a GPU."""
    extent: Extent


def extent_of(rows: Sequence[Row]) -> Extent:
    """Extent of a table of these ranks."""
    return Extent(
        rank_columns=len(str(max((row.state.rank for row in rows), default=0))),
        host_columns=max((columns_of(host) for host in {row.state.host for row in rows}), default=0),
        full_ns=max((row.figures.step_ns for row in rows if row.figures), default=1.0),
        has_gpus=any(row.state.gpus.latest is not None and row.state.gpus.latest.gpus for row in rows),
    )


def _totals_of(state: RunState, rows: Sequence[Row], at: int | None, *, of_now: bool) -> Totals:
    beats = [row.state.beat for row in rows if row.state.beat is not None]
    extent = extent_of(rows)
    cpu_percent = [beat.cpu_percent for beat in beats]
    return Totals(
        hosts=state.host_count,
        step=state.step,
        running_s=_running_s(state, rows, at),
        beats=len(beats),
        cpu_percent=sum(cpu_percent) / max(len(beats), 1),
        max_cpu_percent=max(cpu_percent, default=0.0),
        rss_bytes=sum(beat.rss_bytes for beat in beats),
        gpus=gpu_totals(gpu_rows(rows, of_now=of_now)) if extent.has_gpus else None,
        extent=extent,
    )


def _running_s(state: RunState, rows: Sequence[Row], at: int | None) -> float | None:
    started_ns = min(
        (row.state.hello.started_unix_ns for row in rows if row.state.hello and row.state.hello.started_unix_ns),
        default=0,
    )
    now_ns = state.unix_ns
    if at is not None and now_ns:
        ended_ns = next((ns for row in rows if (ns := row.state.finished_ns(at)) is not None), None)
        now_ns = 0 if ended_ns is None else now_ns - (state.now_ns - ended_ns)
    return (now_ns - started_ns) / 1e9 if 0 < started_ns <= now_ns else None


@dataclass(frozen=True)
class RunView:
    """Snapshot of a run at one step.

    `monitor` continues to change in another thread while the view is drawn: drawing code may read single values of it,
    but not iterate over its containers.
    """

    monitor: Monitor
    timeline: Timeline
    figures: Figures | None
    """None = no step yet that all ranks have finished."""
    rows: tuple[Row, ...]
    """All ranks, by number."""
    urgent: tuple[Row, ...]
    """All ranks, those that need attention first."""
    totals: Totals
    condition: RunCondition
    alerts: tuple[Alert, ...]
    """Alerts that were open at that step, most urgent first, stale ones last."""
    hang: Alert | None
    """The most specific of them on the hang that the run is in; None = it is in none, or at an earlier step."""
    closed: tuple[Alert, ...]
    """Closed alerts, oldest first."""
    at: int | None
    """The step looked back at; None = the latest."""
    now: Moment
    """When the view was computed."""
    past: bool = False
    """Whether `at` is so long ago that current values, such as CPU, do not belong to it."""
    evaluated: bool = True
    """Whether the rules have been evaluated for all steps."""
    paused: bool = False
    """Whether the user has paused the view while the run continues."""
    simulated: bool = False
    """Whether the run is simulated, which every screen must show."""
    replayed: bool = False
    """Whether the run is a replay, which every screen must show."""
    worst: dict[int, Finding] = field(default_factory=dict)
    """By rank, the most urgent finding that names it, of alerts that are not stale."""
    logs: LogSnapshot = NO_LOGS
    """State of the watched log files."""
    stalled_s: float | None = None
    """Seconds since the last step, if that is longer than steps take; None = not stalled."""
    scaling: Scaling | None = None
    """Scaling against the baseline over the steps of the figures; None = no baseline, or no figures."""
    whole_scaling: Scaling | None = None
    """The same over all steps that were seen."""
    aggregate: Aggregate = field(default_factory=Aggregate)
    """All steps that were seen; at the end of a replay, all that were recorded."""
    read: float = 1.0
    """At the end of a replay, the fraction of the recording that was read for that."""
    damage: Damage | None = None
    """Damage of the recording that was found so far."""
    by_steps: bool = False
    """Whether a replay is paused and stepped through by the steps that all ranks have finished."""

    @property
    def state(self) -> RunState:
        """State of the run."""
        return self.monitor.state

    @property
    def limits(self) -> Limits:
        """Thresholds of the rules."""
        return self.monitor.limits

    @property
    def last_step(self) -> int | None:
        """Last step of the figures and charts."""
        return self.figures.last_step if self.figures else None

    @property
    def fresh(self) -> tuple[Alert, ...]:
        """Open alerts that are not stale."""
        return tuple(alert for alert in self.alerts if not alert.stale)

    @property
    def too_early(self) -> bool:
        """Whether there are too few steps yet for any rule."""
        return self.last_step is None or self.last_step < self.limits.judge.warmup_steps + WindowLimits.MIN_STEPS

    @property
    def hindsight(self) -> str:
        """Note that current values are not of the step looked back at; empty = they are."""
        if self.at is None or not self.past:
            return ""
        return f"{self.newest}, not of step {count(self.at)}"

    @property
    def newest(self) -> str:
        """The step of current values, as text."""
        return f"as of step {count((self.totals.step or 0) - 1)}"


def run_view(
    monitor: Monitor,
    timeline: Timeline,
    *,
    at: int | None = None,
    paused: bool = False,
    simulated: bool = False,
    replayed: bool = False,
    baseline: Profile | None = None,
    between: Callable[[], None] = lambda: None,
) -> RunView:
    """Compute the view of the run now, or at step `at`: figures over the steps up to it, alerts that were open then.

    State, CPU and memory of the ranks are always current. `baseline` is the run that scaling is computed against. With
    thousands of ranks this takes a while; `between` is called between its parts.
    """
    state = monitor.state
    now = Moment(state.step, state.now_ns, state.unix_ns)
    figures = monitor.figures(at)
    between()
    alerts = alerts_at(monitor, at)
    worst = findings_by_rank(alerts)
    steps_since = 0 if at is None else (now.step or 0) - 1 - at
    # Also if now is long after the last step, even with few steps since.
    then = steps_since > HINDSIGHT_STEPS or (steps_since > 0 and stalled_s(state, figures) is not None)
    rows = rows_of(state, figures, worst, then=then, frozen=at is not None)
    between()
    return RunView(
        monitor=monitor,
        timeline=timeline,
        figures=figures,
        rows=rows,
        urgent=tuple(sorted(rows, key=attention)),
        totals=_totals_of(state, rows, at, of_now=not then),
        condition=state.run_condition(),
        alerts=tuple(alerts),
        hang=current_hang(state, alerts) if at is None else None,
        closed=tuple(monitor.book.closed) if monitor.caught_up else (),
        at=at,
        past=then,
        evaluated=monitor.caught_up and not monitor.behind,
        now=now,
        paused=paused,
        simulated=simulated,
        replayed=replayed,
        worst=worst,
        logs=state.logs.snapshot(),
        stalled_s=stalled_s(state, figures) if at is None else None,
        scaling=scaling_of(baseline, figures.aggregate if figures else None),
        whole_scaling=scaling_of(baseline, timeline.aggregate),
        aggregate=timeline.aggregate,
    )


def current_view(monitor: Monitor, baseline: Profile | None = None, timeline: Timeline | None = None) -> RunView:
    """Compute the view of the run now. Repeated calls pass the same timeline, to which only newer steps are added."""
    timeline = Timeline() if timeline is None else timeline
    timeline.follow(monitor.state)
    return run_view(monitor, timeline, baseline=baseline)


def refreshed_view(before: RunView) -> RunView | None:
    """Update a view without iterating over all ranks: rows and figures stay, the rest is current.

    None = the rows would contradict the alerts, because other ranks are blamed than before.
    """
    monitor, state = before.monitor, before.state
    alerts = alerts_at(monitor, None)
    worst = findings_by_rank(alerts)
    if _blamed(worst) != _blamed(before.worst):
        return None
    passed_s = (state.now_ns - before.now.now_ns) / 1e9
    running_s = before.totals.running_s
    now = Moment(state.step, state.now_ns, state.unix_ns)
    return replace(
        before,
        totals=replace(before.totals, step=now.step, running_s=None if running_s is None else running_s + passed_s),
        condition=state.run_condition(),
        alerts=tuple(alerts),
        hang=current_hang(state, alerts),
        closed=tuple(monitor.book.closed) if monitor.caught_up else (),
        now=now,
        worst=worst,
        logs=state.logs.snapshot(),
        stalled_s=stalled_s(state, before.figures),
    )


def _blamed(worst: dict[int, Finding]) -> dict[int, tuple[str, str | None, Severity]]:
    return {rank: (finding.rule, finding.phase, finding.severity) for rank, finding in worst.items()}


def alerts_at(monitor: Monitor, step: int | None) -> list[Alert]:
    """Alerts that were open at a step, with their text of then, or that are open now (None)."""
    book = monitor.book
    if not monitor.caught_up:
        # The history is still being evaluated: its alerts may be over by now.
        return []
    alerts: Iterable[Alert] = book.open.values()
    if step is not None:
        alerts = with_staleness(monitor.state, monitor.limits, book.at(step), step)
    return sorted(most_urgent_first(alerts), key=lambda alert: bool(alert.stale))


def remarks(state: RunState) -> list[Cell]:
    """What a user should know besides figures and alerts: missing ranks, and notes of the agents; one cell each."""
    cells = [*_not_come(state), *_unreachable(state), *_notes(state)]
    if state.unknown:
        unknown = f"{plural(state.unknown, 'message')} of an unknown kind: upgrade this ddpwatch"
        cells.append(Cell(unknown, Level.DIM))
    return cells


def _not_come(state: RunState) -> list[Cell]:
    """Ranks that have not registered."""
    ranks = [rank.rank for rank in state.ranks.values() if not rank.pid and state.condition(rank) == "missing"]
    if not ranks or len(ranks) == state.world_size:
        return []
    verb = "has" if len(ranks) == 1 else "have"
    return [
        Cell(f"{ranks_text(ranks)} {verb} not registered: does every rank call ddpwatch.agent.install()?", Level.WARN)
    ]


def _unreachable(state: RunState) -> list[Cell]:
    """Registered ranks of which nothing was ever received, by reason."""
    by_reason: dict[str, list[int]] = {}
    for rank, why in sorted(state.unreachable.items()):
        if rank in state.ranks and state.condition(state.ranks[rank]) == "missing":
            by_reason.setdefault(why, []).append(rank)
    reported = list(by_reason.items())[:MAX_REASONS]
    cells = [
        Cell(f"no data from {ranks_text(ranks)}: {'it' if len(ranks) == 1 else 'each'} {why}", Level.WARN)
        for why, ranks in reported
    ]
    more = sum(map(len, by_reason.values())) - sum(len(ranks) for _, ranks in reported)
    return [*cells, Cell(f"nor from {plural(more, 'more rank')}", Level.WARN)] if more else cells


def _notes(state: RunState) -> list[Cell]:
    by_text: dict[str, list[int]] = {}
    for rank in state.ranks.values():
        for note in sorted(rank.notes.values(), key=lambda note: note.mono_ns):
            by_text.setdefault(note.text, []).append(rank.rank)
    cells = [Cell(f"{ranks_text(ranks)}: {text}", Level.WARN) for text, ranks in by_text.items()]
    return cells[-MAX_NOTES:]


def no_figures_reason(state: RunState, *, ended: bool = False) -> str:
    """Why a run has no figures, as part of a sentence; `ended` = no more steps will come."""
    if last_common_step(state) == 0:
        return "only the first step, which is not measured"
    return f"no step {'' if ended else 'yet '}that all ranks have finished"


def no_recorded_steps_reason(state: RunState) -> str:
    """Why a recording has no measured steps, as part of a sentence."""
    done = last_common_step(state)
    if done < 0:
        return "no step that all ranks have finished is in the recording"
    if not done:
        return "only the first step is in the recording, which is not measured"
    return "none of the steps in the recording could be measured"


def too_few(aggregate: RunAggregate, limits: Limits) -> bool:
    """Whether no rule was evaluated on these steps, because they are too few or the first of the run."""
    enough = limits.judge.warmup_steps + WindowLimits.MIN_STEPS
    return aggregate.steps < WindowLimits.MIN_STEPS or (aggregate.last_step or 0) < enough
