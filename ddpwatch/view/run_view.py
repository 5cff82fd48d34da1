"""What is to be drawn: a run at one of its steps, worked out once and handed to everything that draws.

What is said of all ranks together. Walks them once, when a picture is worked out, so that drawing does not.

What a person should know besides the figures and the alerts: who has not come, and notes of the ranks.

Why there are no figures of a run, in words: it has no step, or none that counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from ddpwatch.core.alerts.hangs import last_common_step
from ddpwatch.core.alerts.model import Moment
from ddpwatch.core.alerts.staleness import with_staleness
from ddpwatch.core.logs.log_state import LogState
from ddpwatch.core.metrics.hung_steps import standstill_s
from ddpwatch.core.metrics.scaling import scaling_of, scaling_of_all
from ddpwatch.core.metrics.tally import Tally
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.metrics.window import ENOUGH_STEPS
from ddpwatch.core.units import count, plural, ranks_text
from ddpwatch.view.alerts.format import most_urgent_first, stale_last
from ddpwatch.view.cells import Cell, Level, columns_of
from ddpwatch.view.gpus.usage import gpu_rows, gpu_totals
from ddpwatch.view.ranks.columns import Row, attention, rows_of, worst_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.alerts.model import Alert, Finding
    from ddpwatch.core.limits import Limits
    from ddpwatch.core.logs.log_state import LogSnapshot
    from ddpwatch.core.metrics.aggregate import Digest
    from ddpwatch.core.metrics.figures import Figures
    from ddpwatch.core.metrics.scaling import Profile, Scaling
    from ddpwatch.core.monitor import Monitor
    from ddpwatch.core.state.run import RunCondition, RunState
    from ddpwatch.recording.health import Damage
    from ddpwatch.view.gpus.usage import GpuTotals


@dataclass(frozen=True)
class Extent:
    """How much room the longest entries of the rank table take, and the step that fills a bar."""

    rank_columns: int
    host_columns: int
    full_ns: float
    has_gpus: bool = False
    """Whether GPUs are read: they have columns then."""


@dataclass(frozen=True)
class Totals:
    """All ranks in a few numbers."""

    hosts: int
    step: int | None
    """The furthest step that a rank is in."""
    running_s: float | None
    """For how long the run has been going, or had at the step that is looked back at, by the ranks' own clocks; None =
    they do not tell.
    """
    beats: int
    """Ranks that have told of their CPU and memory."""
    cpu_percent: float
    """The mean of them."""
    most_cpu_percent: float
    rss_bytes: int
    gpus: GpuTotals | None
    """None = no rank tells of a GPU."""
    extent: Extent


def extent_of(rows: Sequence[Row]) -> Extent:
    """For a table of these ranks."""
    return Extent(
        rank_columns=len(str(max((row.state.rank for row in rows), default=0))),
        host_columns=max((columns_of(host) for host in {row.state.host for row in rows}), default=0),
        full_ns=max((row.figures.step_ns for row in rows if row.figures), default=1.0),
        has_gpus=any(row.state.gpus.latest is not None and row.state.gpus.latest.gpus for row in rows),
    )


def totals_of(state: RunState, rows: Sequence[Row], at: int | None = None, *, of_now: bool = True) -> Totals:
    """Of this run, whose ranks are these; `at` is the step that is looked back at, `of_now` = the figures of the ranks
    are.
    """
    beats = [row.state.beat for row in rows if row.state.beat is not None]
    extent = extent_of(rows)
    cpu_percent = [beat.cpu_percent for beat in beats]
    return Totals(
        hosts=max(1, len({row.state.host for row in rows if row.state.host})),
        step=state.step,
        running_s=_running_s(state, rows, at),
        beats=len(beats),
        cpu_percent=sum(cpu_percent) / max(len(beats), 1),
        most_cpu_percent=max(cpu_percent, default=0.0),
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


NO_LOGS: Final = LogState().snapshot()
HINDSIGHT_STEPS: Final = 5
"""So close to the latest step there is no difference worth a word."""


@dataclass(frozen=True)
class RunView:
    """A run at one step. Holds the watch itself, which goes on while the picture is drawn: of what is in it, drawings
    take values, and walk through nothing that may change meanwhile.
    """

    monitor: Monitor
    timeline: Timeline
    figures: Figures | None
    """None = no step yet that all ranks have finished."""
    rows: tuple[Row, ...]
    """All ranks, in their order."""
    urgent: tuple[Row, ...]
    """All ranks, those that need a look first."""
    totals: Totals
    condition: RunCondition
    alerts: tuple[Alert, ...]
    """Those that were open at that step, most urgent first; stale ones come last."""
    closed: tuple[Alert, ...]
    """Those that are over, oldest first."""
    at: int | None
    """The step that is looked back at; None = the latest."""
    now: Moment
    """When it was worked out."""
    past: bool = False
    """Whether that step is so long past that what is of now does not belong to it."""
    evaluated: bool = True
    """Whether all steps that were there have been judged."""
    paused: bool = False
    """Whether it stands still while the run goes on."""
    simulated: bool = False
    """Made up, which every screen must say."""
    replayed: bool = False
    """Recorded, and not of now: every screen must say that, too."""
    worst: dict[int, Finding] = field(default_factory=dict)
    """By rank, the most urgent finding that names it, of alerts that are not stale."""
    logs: LogSnapshot = NO_LOGS
    """What the watched log files say."""
    standstill_s: float | None = None
    """For how long no rank has finished a step, where that is longer than steps take; None = they come."""
    scaling: Scaling | None = None
    """Against a run of one process, over the steps of the figures; None = there is none to compare with, or nothing can
    be said.
    """
    whole_scaling: Scaling | None = None
    """The same over all steps that were seen."""
    tally: Tally = field(default_factory=Tally)
    """All steps that were seen; at the end of a replay, all that were recorded."""
    read: float = 1.0
    """At the end of a replay, how much of the recording was read for that, from 0 to 1."""
    damage: Damage | None = None
    """What could not be read of the recording; None = nothing so far, or there is none."""
    by_steps: bool = False
    """Whether one stands still in a replay, which is gone through by the steps that all ranks have finished."""

    @property
    def state(self) -> RunState:
        """The run."""
        return self.monitor.state

    @property
    def limits(self) -> Limits:
        """What it is judged by."""
        return self.monitor.limits

    @property
    def last_step(self) -> int | None:
        """The last step of the figures and charts; None = there is none."""
        return self.figures.last_step if self.figures else None

    @property
    def fresh(self) -> tuple[Alert, ...]:
        """The open alerts that are not stale."""
        return tuple(alert for alert in self.alerts if not alert.stale)

    @property
    def too_early(self) -> bool:
        """Whether there are too few steps yet for any rule to judge."""
        return self.last_step is None or self.last_step < self.limits.judge.warmup_steps + ENOUGH_STEPS

    @property
    def hindsight(self) -> str:
        """Where what is shown is not of the step that is looked back at: of which one it is. Empty = it is."""
        if self.at is None or not self.past:
            return ""
        return f"{self.newest}, not of step {count(self.at)}"

    @property
    def newest(self) -> str:
        """Of which step that is which is always of now."""
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
    """The run now, or as it was at step `at`: figures over the steps up to there, alerts that were open then.

    What a rank says of this very moment (its state, CPU and memory) is always of now; looking back, of the now in which
    the picture was worked out, for as long as it is looked at. `baseline` is what scaling is told against. Of thousands
    of ranks it takes a while: `between` is called now and then.
    """
    state = monitor.state
    now = Moment(state.step, state.now_ns, state.unix_ns)
    figures = monitor.figures(at)
    between()
    alerts = alerts_at(monitor, at)
    worst = worst_of(alert for alert in alerts if not alert.stale)
    then = at is not None and (_is_past(at, now.step) or (at < (now.step or 0) - 1 and _stands(state, figures)))
    rows = rows_of(state, figures, worst, then=then, frozen=at is not None)
    between()
    return RunView(
        monitor=monitor,
        timeline=timeline,
        figures=figures,
        rows=rows,
        urgent=tuple(sorted(rows, key=attention)),
        totals=totals_of(state, rows, at, of_now=not then),
        condition=state.run_condition(),
        alerts=tuple(alerts),
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
        standstill_s=standstill_s(state, figures) if at is None else None,
        scaling=scaling_of(baseline, figures, state.world_size),
        whole_scaling=scaling_of_all(baseline, timeline.tally, state.world_size),
        tally=timeline.tally,
    )


def picture_now(monitor: Monitor, baseline: Profile | None = None, timeline: Timeline | None = None) -> RunView:
    """The run now, for a front end that looks once. One that looks again passes the same timeline each time, so that
    only the steps since are added to it.
    """
    timeline = Timeline() if timeline is None else timeline
    timeline.follow(monitor.state)
    return run_view(monitor, timeline, baseline=baseline)


def refreshed_view(before: RunView) -> RunView | None:
    """A picture of now a moment later, without a walk over what all ranks have told: their rows and figures stay, the
    rest is as it is now. None = the rows would contradict it, since somebody else is accused meanwhile, or was.
    """
    monitor, state = before.monitor, before.state
    alerts = alerts_at(monitor, None)
    worst = worst_of(alert for alert in alerts if not alert.stale)
    if _accused(worst) != _accused(before.worst):
        return None
    passed_s = (state.now_ns - before.now.now_ns) / 1e9
    running_s = before.totals.running_s
    now = Moment(state.step, state.now_ns, state.unix_ns)
    return replace(
        before,
        totals=replace(before.totals, step=now.step, running_s=None if running_s is None else running_s + passed_s),
        condition=state.run_condition(),
        alerts=tuple(alerts),
        closed=tuple(monitor.book.closed) if monitor.caught_up else (),
        now=now,
        worst=worst,
        logs=state.logs.snapshot(),
        standstill_s=standstill_s(state, before.figures),
    )


def _accused(worst: dict[int, Finding]) -> dict[int, tuple[str, str | None]]:
    return {rank: (finding.rule, finding.phase) for rank, finding in worst.items()}


def alerts_at(monitor: Monitor, step: int | None) -> list[Alert]:
    """The alerts that were open at a step, as they read then, or that are now; most urgent first, stale ones last. None
    before the first verdict on now.
    """
    book = monitor.book
    if not monitor.caught_up:
        # Of a history that is still being judged: what they say was true once, and may be over.
        return []
    if step is None:
        return stale_last(most_urgent_first(book.open.values()))
    return stale_last(most_urgent_first(with_staleness(monitor.state, monitor.limits, book.at(step), step)))


def _is_past(at: int, step: int | None) -> bool:
    return (step or 0) - 1 - at > HINDSIGHT_STEPS


def _stands(state: RunState, figures: Figures | None) -> bool:
    """Whether now is long after the last step, however few there were since."""
    return standstill_s(state, figures) is not None


MAX_NOTES: Final = 8
"""Most notes shown, the newest."""
MAX_REASONS: Final = 3
"""Most reasons told why ranks are not heard."""


def remarks(state: RunState) -> list[Cell]:
    """One cell a remark, without a mark in front. Ranks that say the same share one. What was lost is an alert."""
    return [*_not_come(state), *_unreachable(state), *_notes(state), *_unknown_kinds(state)]


def _not_come(state: RunState) -> list[Cell]:
    """Ranks that have not even told where they listen."""
    ranks = [rank.rank for rank in state.ranks.values() if not rank.pid and state.condition(rank) == "missing"]
    if not ranks or len(ranks) == state.world_size:
        return []
    verb = "has" if len(ranks) == 1 else "have"
    return [Cell(f"{ranks_text(ranks)} {verb} not come: does every rank call ddpwatch.agent.install?", Level.WARN)]


def _unreachable(state: RunState) -> list[Cell]:
    """Ranks that were never heard, by the reason that is known for it."""
    by_reason: dict[str, list[int]] = {}
    for rank, why in sorted(state.unreachable.items()):
        if rank in state.ranks and state.condition(state.ranks[rank]) == "missing":
            by_reason.setdefault(why, []).append(rank)
    reported = list(by_reason.items())[:MAX_REASONS]
    cells = [
        Cell(f"nothing is heard of {ranks_text(ranks)}: {'it' if len(ranks) == 1 else 'each'} {why}", Level.WARN)
        for why, ranks in reported
    ]
    more = sum(map(len, by_reason.values())) - sum(len(ranks) for _, ranks in reported)
    return [*cells, Cell(f"nor of {plural(more, 'more rank')}", Level.WARN)] if more else cells


def _notes(state: RunState) -> list[Cell]:
    speakers: dict[str, list[int]] = {}
    for rank in state.ranks.values():
        for note in sorted(rank.notes.values(), key=lambda note: note.mono_ns):
            speakers.setdefault(note.text, []).append(rank.rank)
    cells = [Cell(f"{ranks_text(ranks)}: {text}", Level.WARN) for text, ranks in speakers.items()]
    return cells[-MAX_NOTES:]


def _unknown_kinds(state: RunState) -> list[Cell]:
    if not state.unknown:
        return []
    return [Cell(f"{plural(state.unknown, 'message')} of a kind this version does not know: upgrade it", Level.DIM)]


def no_figures_reason(state: RunState, *, ended: bool = False) -> str:
    """Of a run without figures, as part of a sentence; `ended` = no more steps will come."""
    if last_common_step(state) == 0:
        return "only the first step, which is not measured"
    return f"no step {'' if ended else 'yet '}that all ranks have finished"


def no_recorded_steps_reason(state: RunState) -> str:
    """Of a recording without measured steps, as part of a sentence."""
    done = last_common_step(state)
    if done < 0:
        return "no step that all ranks have finished is in the recording"
    if not done:
        return "only the first step is in the recording, which is not measured"
    return "none of the steps in the recording could be measured"


def too_few(digest: Digest, limits: Limits) -> bool:
    """Whether no rule that goes by steps has judged these, because they are too few or the first of their run."""
    enough = limits.judge.warmup_steps + ENOUGH_STEPS
    return digest.steps < ENOUGH_STEPS or (digest.last_step or 0) < enough
