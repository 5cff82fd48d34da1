"""What is to be drawn: a run at one of its steps, worked out once and handed to everything that draws."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpwatch.core.figures import measure
from ddpwatch.view.alerts import most_urgent_first
from ddpwatch.view.columns import Row, attention
from ddpwatch.view.totals import totals_of

if TYPE_CHECKING:
    from ddpwatch.core.alerts import Alert, Finding
    from ddpwatch.core.figures import Figures
    from ddpwatch.core.limits import Limits
    from ddpwatch.core.state import RunCondition, RunState
    from ddpwatch.core.timeline import Timeline
    from ddpwatch.core.watch import Watch
    from ddpwatch.view.totals import Totals


@dataclass(frozen=True)
class Picture:
    """A run at one step. Holds the watch itself, which goes on while the picture is drawn: of what is in it, drawings
    take values, and walk through nothing that may change meanwhile.
    """

    watch: Watch
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
    """Those that were open at that step, most urgent first."""
    closed: tuple[Alert, ...]
    """Those that are over, oldest first."""
    at: int | None
    """The step that is looked back at; None = the latest."""
    paused: bool = False
    """Whether it stands still while the run goes on."""
    simulated: bool = False
    """Made up, which every screen must say."""
    worst: dict[int, Finding] = field(default_factory=dict)
    """By rank, the most urgent finding that names it."""

    @property
    def state(self) -> RunState:
        """The run."""
        return self.watch.state

    @property
    def limits(self) -> Limits:
        """What it is judged by."""
        return self.watch.limits

    @property
    def last_step(self) -> int | None:
        """The last step of the figures and charts; None = there is none."""
        return self.figures.last_step if self.figures else None


def picture(
    watch: Watch, timeline: Timeline, *, at: int | None = None, paused: bool = False, simulated: bool = False
) -> Picture:
    """The run now, or as it was at step `at`: figures over the steps up to there, alerts that were open then.

    What a rank says of this very moment (its state, CPU and memory) is always of now.
    """
    state = watch.state
    figures = measure(state, at)
    alerts = alerts_at(watch, at)
    worst: dict[int, Finding] = {}
    for alert in alerts:
        for rank in alert.finding.ranks:
            worst.setdefault(rank, alert.finding)
    measured = figures.ranks if figures else {}
    rows = tuple(
        Row(
            rank,
            state.condition(rank),
            measured.get(rank.rank),
            stands_out=_is_straggler(worst.get(rank.rank)),
            finding=worst.get(rank.rank),
        )
        for rank in state.ranks.values()
    )
    return Picture(
        watch=watch,
        timeline=timeline,
        figures=figures,
        rows=rows,
        urgent=tuple(sorted(rows, key=attention)),
        totals=totals_of(state, rows),
        condition=state.run_condition(),
        alerts=tuple(alerts),
        closed=tuple(watch.book.closed),
        at=at,
        paused=paused,
        simulated=simulated,
        worst=worst,
    )


def alerts_at(watch: Watch, step: int | None) -> list[Alert]:
    """The alerts that were open at a step, or that are now; most urgent first."""
    book = watch.book
    if step is None:
        return most_urgent_first(book.open.values())
    return most_urgent_first(
        alert
        for alert in (*book.closed, *book.open.values())
        if (alert.since.step or 0) <= step and (alert.closed is None or (alert.closed.step or 0) > step)
    )


def _is_straggler(finding: Finding | None) -> bool:
    return finding is not None and finding.rule == "straggler"
