"""The screens of the dashboard, one class each: which drawings they hold and how these share the room.

The lines around the screens, and the summary: what they take from the dashboard and what from the picture.
"""

from __future__ import annotations

from datetime import datetime, timezone, tzinfo
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.css.scalar import Scalar
from textual.geometry import Size, clamp
from textual.widget import Widget

from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.tui.keys import SUMMARY, TABS, keys_of
from ddpwatch.tui.rank_table import HEADING_ROWS, RankTable
from ddpwatch.tui.widgets import Field, Painted
from ddpwatch.view import overview
from ddpwatch.view.alerts.page import alert_detail, alert_list, all_alerts
from ddpwatch.view.alerts.panel import alert_panel, alert_rows, hang_lines
from ddpwatch.view.allreduce import bucket_lines, share_lines
from ddpwatch.view.cells import Cell, Level, fit
from ddpwatch.view.charts.chart import SOLID, Band, chart
from ddpwatch.view.charts.heatmap import heat_legend, heat_map
from ddpwatch.view.charts.phase_bar import legend
from ddpwatch.view.header import header_line, key_line, recording_mark, tab_line
from ddpwatch.view.logs import log_lines
from ddpwatch.view.ranks.detail import rank_page
from ddpwatch.view.summary import summary_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual import events
    from textual.app import ComposeResult

    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.tui.app import Dashboard
    from ddpwatch.tui.widgets import Draw
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

WIDE_COLUMNS: Final = 100
TALL_ROWS: Final = 30
"""From here on there is room for cards and a heat map."""
URGENT_ROWS: Final = 4
FIGURES_ROWS: Final = 4
CARD_ROWS: Final = 5
LEGEND_ROWS: Final = 1
BELOW_MIN_ROWS: Final = 9
HEAT_EXTRA_ROWS: Final = 4
"""A border, the legend, and the line that says what was folded."""
CHART_MIN_ROWS: Final = 9
SHARE_TEXT_ROWS: Final = 4
BOX_COLUMNS: Final = 4
BOX_ROWS: Final = 2
ASKED_RANKS: Final = 64
"""If none of so many has timed its buckets, none has."""
WHOLE: Final = 100_000
"""More lines than any page has: it is not cut, it scrolls."""


def local_zone() -> tzinfo:
    """Where the person sits: alerts are told in their time."""
    return datetime.now(tz=timezone.utc).astimezone().tzinfo or timezone.utc


class Pane(Vertical):
    """One screen. Paints what is in it."""

    _run_view: RunView | None = None
    _shared: Size | None = None
    """The room that was shared out last."""

    def on_resize(self, _event: events.Resize) -> None:
        """Share the new room out at once, and not when the next steps come."""
        if self._run_view is not None and self.room != self._shared:
            self.paint(self._run_view)

    def paint(self, run_view: RunView) -> None:
        """Draw the run."""
        self._run_view, self._shared = run_view, self.room
        self.share_out(run_view)
        for painted in self.query(Painted):
            painted.paint(run_view)
        for table in self.query(RankTable):
            table.paint(run_view)

    @property
    def room(self) -> Size:
        """What there is for this screen, also before it is shown."""
        return self.parent.size if isinstance(self.parent, Widget) else self.size

    def share_out(self, run_view: RunView) -> None:
        """Share the room out, if it depends on the run."""

    def chosen(self) -> Widget | None:
        """What the keys go to."""
        return next((widget for widget in self.query("*") if widget.can_focus and widget.display), None)


def _legend(run_view: RunView, columns: int, _rows: int) -> list[Line]:
    """What the bars of the table are made of."""
    return [fit([Cell(" "), *legend(split=run_view.figures is None or run_view.figures.complete)], columns)]


def step_chart(run_view: RunView, columns: int, rows: int) -> list[Line]:
    """How long the steps took, over the time that the heat map shows."""
    steps = run_view.timeline.steps()
    times_ms = run_view.timeline.series("step_ns", steps) / 1e6
    band = Band("step", times_ms, Level.DIM, SOLID)
    return chart([band], steps, columns, rows, unit="ms", how="max", cursor=run_view.at)


def _heat(run_view: RunView, columns: int, rows: int) -> list[Line]:
    timeline = run_view.timeline
    steps = timeline.steps(run_view.last_step)
    # Not where there are more hosts than lines: of thousands of ranks the list would take longer than the map.
    hosts = [row.state.host for row in run_view.rows] if run_view.totals.hosts <= rows else None
    lines = heat_map(timeline.excess(steps), timeline.ranks, steps, columns, rows - 1, hosts=hosts)
    return [*lines, heat_legend(columns)][:rows]


CARDS: Final = (
    ("step", overview.step_card),
    ("throughput", overview.throughput_card),
    ("all-reduce", overview.allreduce_card),
    ("devices", overview.device_card),
)


def _card(card: Callable[[RunView, int], list[Line]], run_view: RunView, columns: int, _rows: int) -> list[Line]:
    return [fit(line, columns) for line in card(run_view, columns)]


class Overview(Pane):
    """One glance: how fast, what share is all-reduce and why, who is slow, what is wrong."""

    def compose(self) -> ComposeResult:
        """A hang above all; cards on top where there is room for them, else lines."""
        yield Painted(lambda run_view, columns, _rows: hang_lines(run_view, columns), id="hang", classes="fixed box")
        yield Painted(
            lambda run_view, columns, _rows: overview.compact(run_view, columns), id="figures", classes="fixed"
        )
        with Horizontal(id="cards"):
            for title, card in CARDS:
                yield Painted(partial(_card, card), title=title, id=f"card-{title.lower()}", classes="box card")
        yield Painted(alert_panel, id="urgent", classes="fixed box", title="alerts")
        yield RankTable(id="overview-table")
        yield Painted(_legend, classes="legend fixed")
        with Horizontal(id="below"):
            with Vertical(id="history"):
                yield Painted(_heat, title="ranks × time", id="heat", classes="box fixed", of_figures=True)
                yield Painted(step_chart, title="step time", id="steps", classes="box fixed", of_figures=True)
                yield Painted(share_lines, title="all-reduce share", id="shares", classes="box fixed")
            yield Painted(alert_panel, title="alerts", id="wrong", classes="box fixed")

    def share_out(self, run_view: RunView) -> None:
        """Large: cards, table, heat map and alerts. Small: lines, alerts, table."""
        columns, rows = self.room
        rows -= self._share_hang(run_view, columns)
        large = columns >= WIDE_COLUMNS and rows >= TALL_ROWS - 3
        self.query_one("#figures").display = not large
        self.query_one("#cards").display = large
        self.query_one("#card-devices").border_title = overview.device_title(run_view)
        self.query_one("#urgent").display = not large
        self.query_one("#below").display = large
        table = self.query_one(RankTable)
        if large:
            room = rows - CARD_ROWS - LEGEND_ROWS
            wanted = len(run_view.rows) + HEADING_ROWS
            set_height(table, min(wanted, room // 2))
            self._share_history(room - min(wanted, room // 2), len(run_view.rows))
        else:
            set_height(table, None)
            # What few ranks leave free is for the alerts.
            spare = rows - FIGURES_ROWS - BOX_ROWS - HEADING_ROWS - len(run_view.rows) - LEGEND_ROWS
            wanted = alert_rows(run_view, max(columns - BOX_COLUMNS, 1), max(spare, URGENT_ROWS))
            set_height(self.query_one("#urgent"), wanted + BOX_ROWS)

    def _share_hang(self, run_view: RunView, columns: int) -> int:
        """How many rows a hang takes; none as long as there is none."""
        hang = self.query_one("#hang")
        lines = hang_lines(run_view, max(columns - BOX_COLUMNS, 1))
        hang.display = bool(lines)
        hang.border_title = "the job hangs"
        if not lines:
            return 0
        set_height(hang, len(lines) + BOX_ROWS)
        return len(lines) + BOX_ROWS

    def _share_history(self, rows: int, ranks: int) -> None:
        """The heat map first; where it leaves enough, the step time over the same steps."""
        wanted = min(ranks, rows - HEAT_EXTRA_ROWS) + HEAT_EXTRA_ROWS
        if ranks > rows // 2:
            wanted = rows if rows < CHART_MIN_ROWS * 2 else rows - CHART_MIN_ROWS
        spare = rows - wanted
        self.query_one("#steps").display = spare >= CHART_MIN_ROWS
        self.query_one("#shares").display = spare >= 2 * CHART_MIN_ROWS + SHARE_TEXT_ROWS
        set_height(self.query_one("#heat"), wanted if spare >= CHART_MIN_ROWS else None)


def set_height(widget: Widget, rows: int | None) -> None:
    """So many rows, or all that is left; only if that is new, because it costs a layout."""
    height = Scalar.parse("1fr" if rows is None else str(rows))
    if widget.styles.height != height:
        widget.styles.height = height


class Ranks(Pane):
    """All ranks, and how they did over time."""

    def compose(self) -> ComposeResult:
        """The table, and below it the heat map where there is room."""
        yield RankTable(id="ranks-table")
        yield Painted(_legend, classes="legend fixed")
        yield Painted(_heat, title="ranks × time", id="ranks-heat", classes="box fixed", of_figures=True)
        yield Painted(step_chart, title="step time", id="ranks-steps", classes="box fixed", of_figures=True)

    def share_out(self, run_view: RunView) -> None:
        """The heat map takes what the table does not need, and a third at most where there are many ranks. What both
        leave, if it is enough, shows the step time.
        """
        rows = self.room.height
        heat = self.query_one("#ranks-heat")
        heat.display = rows >= TALL_ROWS - 3
        wanted = len(run_view.rows) + HEADING_ROWS
        spare = rows - wanted - LEGEND_ROWS
        most = len(run_view.rows) + HEAT_EXTRA_ROWS if spare > 0 else rows // 3
        heat_rows = min(max(spare, BELOW_MIN_ROWS), max(most, BELOW_MIN_ROWS))
        left = heat.display and spare - heat_rows >= CHART_MIN_ROWS
        self.query_one("#ranks-steps").display = left
        set_height(heat, heat_rows)
        set_height(self.query_one(RankTable), wanted if left else None)


class AllReduce(Pane):
    """The share over time, and the buckets."""

    def compose(self) -> ComposeResult:
        """Both in a box."""
        yield Painted(share_lines, title="all-reduce share of the step", id="share", classes="box fixed")
        yield Painted(bucket_lines, title="gradient buckets", id="buckets", classes="box fixed")

    def share_out(self, run_view: RunView) -> None:
        """The buckets take half if there are any, and no more than their few words if not."""
        timed = any(row.state.buckets is not None for row in run_view.urgent[:ASKED_RANKS])
        few_words = len(bucket_lines(run_view, max(self.room.width - BOX_COLUMNS, 1), WHOLE)) + BOX_ROWS
        set_height(self.query_one("#buckets"), self.room.height // 2 if timed else few_words)


class Listed(Painted):
    """A drawing that is too long to be drawn whole: only what is in sight is drawn, from number `first` on."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "move(-10)", "page up", show=False),
        Binding("pagedown", "move(10)", "page down", show=False),
        Binding("home,g", "move(-1000000)", "first", show=False),
    ]

    def __init__(self, draw: Draw, **settings: Any) -> None:
        """Begin at the top."""
        super().__init__(draw, focus=True, **settings)
        self.first = 0


class AlertList(Listed):
    """Alerts, one of them selected."""

    def __init__(self, **settings: Any) -> None:
        """Begin with the most urgent one."""
        super().__init__(self._lines_from, **settings)
        self.selected = 0

    def alert(self, run_view: RunView) -> Alert | None:
        """The one that is selected."""
        alerts = all_alerts(run_view)
        return alerts[min(self.selected, len(alerts) - 1)] if alerts else None

    def _lines_from(self, run_view: RunView, columns: int, rows: int) -> list[Line]:
        self.selected = clamp(self.selected, 0, max(0, len(all_alerts(run_view)) - 1))
        # One line is the heading, and one may say how many more there are.
        self.first = clamp(self.first, max(0, self.selected - rows + 3), self.selected)
        return alert_list(run_view, columns, rows, selected=self.selected, first=self.first, zone=local_zone())

    def action_move(self, by: int) -> None:
        """Select another one."""
        self.selected = max(0, self.selected + by)
        pane = self.parent
        if self._run_view is not None and isinstance(pane, Pane):
            pane.paint(self._run_view)


class Alerts(Pane):
    """All alerts, and everything about one."""

    def compose(self) -> ComposeResult:
        """The list, and what is selected in it."""
        yield AlertList(title="alerts", id="alert-list", classes="box fixed")
        yield Painted(self._detail, title="what it is and what to do", id="alert-detail", classes="box", focus=True)

    def _detail(self, run_view: RunView, columns: int, _rows: int) -> list[Line]:
        alert = self.query_one(AlertList).alert(run_view)
        return [] if alert is None else alert_detail(alert, columns, zone=local_zone())


class RankPage(Pane):
    """Everything about one rank."""

    def __init__(self, **settings: Any) -> None:
        """Rank 0, until another is asked for."""
        super().__init__(**settings)
        self.rank = 0

    def compose(self) -> ComposeResult:
        """One page."""
        yield Painted(self._page, id="rank-page", classes="box", focus=True)

    def _page(self, run_view: RunView, columns: int, _rows: int) -> list[Line]:
        return rank_page(run_view, self.rank, columns, WHOLE)


class Logs(Pane):
    """The watched log files."""

    def compose(self) -> ComposeResult:
        """One page, the latest lines at its end."""
        yield Painted(log_lines, title="logs", id="log-lines", classes="box fixed")


def header(app: Dashboard, run_view: RunView, columns: int) -> Line:
    """The first line: which run, and how it does."""
    recorded = app.feed.recorder is not None
    return header_line(run_view, columns, recording_mark(app.feed.not_recorded) if recorded else ())


def tabs(app: Dashboard, columns: int) -> Line:
    """The second: the screens, and what is filtered."""
    shown = [*TABS, *([(SUMMARY, SUMMARY)] if app.end_shown else [])]
    line = tab_line(shown, app.where, columns)
    wanted = app.screen_stack[0].query_one("#filter", Field).value if app.tables() else ""
    if wanted:
        line = [*line, Cell(f"  only {sanitize(wanted, NAME_CHARS)} · esc shows all", Level.WARN, "leave")]
    return fit(line, columns)


def keys(app: Dashboard, run_view: RunView, columns: int) -> Line:
    """The last one: what can be pressed here."""
    listed = keys_of(
        app.where,
        paused=run_view.paused,
        gpus=run_view.totals.gpus is not None,
        replayed=run_view.replayed,
        ended=app.end_shown,
        runs=app.feed.choosable,
    )
    return key_line(listed, columns, app.feed.not_recorded)


def summary(app: Dashboard, run_view: RunView, columns: int) -> list[Line]:
    """The page of a run that is over."""
    return summary_lines(
        run_view,
        columns,
        WHOLE,
        duration_s=run_view.totals.running_s or 0.0,
        newer=[run.name or run.id for run in app.feed.newer],
        runs=app.feed.choosable,
    )
