"""The screens of the dashboard: which drawings they hold, and how these share the room."""

from __future__ import annotations

from datetime import datetime, timezone, tzinfo
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual.containers import Horizontal, Vertical
from textual.css.scalar import Scalar
from textual.geometry import Size, clamp
from textual.widget import Widget

from ddpwatch.core.model_kinds import sync_name
from ddpwatch.tui.rank_table import HEADING_ROWS, RankTable
from ddpwatch.tui.widgets import Canvas, Painted, cursor_keys
from ddpwatch.view import overview
from ddpwatch.view.alerts.page import alert_detail, alert_list, all_alerts
from ddpwatch.view.alerts.panel import alert_panel, alert_rows, hang_lines
from ddpwatch.view.allreduce import bucket_lines, share_lines, sync_point_lines
from ddpwatch.view.cells import Cell, Level, fit
from ddpwatch.view.charts.chart import SOLID, Band, chart
from ddpwatch.view.charts.heatmap import heat_legend, heat_map
from ddpwatch.view.charts.phase_bar import legend

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual import events
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.tui.widgets import Draw
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

WIDE_COLUMNS: Final = 100
TALL_ROWS: Final = 30
"""From this size on there is room for cards and a heat map."""
URGENT_ROWS: Final = 4
"""Min. number of rows offered to alerts in the small layout."""
# Heights of the fixed parts of the overview, in rows.
FIGURES_ROWS: Final = 4
CARD_ROWS: Final = 5
LEGEND_ROWS: Final = 1
BELOW_MIN_ROWS: Final = 9
"""Min. height of the heat map on the ranks screen, in rows."""
HEAT_EXTRA_ROWS: Final = 4
"""Rows of the heat map besides those for ranks: border, legend, and the note on folded steps."""
CHART_MIN_ROWS: Final = 9
"""Min. height of a chart, in rows."""
SHARE_TEXT_ROWS: Final = 4
"""Rows of text above the chart of the all-reduce share."""
# What border and padding of a box take, in terminal cells and rows.
BOX_COLUMNS: Final = 4
BOX_ROWS: Final = 2
ASKED_RANKS: Final = 64
"""If none of this many ranks has timed its buckets, none has."""
WHOLE: Final = 100_000
"""More lines than any page has: a page that scrolls is not cut."""


def local_zone() -> tzinfo:
    """The user's time zone, for the times of alerts."""
    return datetime.now(tz=timezone.utc).astimezone().tzinfo or timezone.utc


class Pane(Vertical):
    """One screen: paints the widgets in it."""

    _run_view: RunView | None = None
    _shared: Size | None = None
    """The size for which the room was last shared out."""

    def on_resize(self, _event: events.Resize) -> None:
        """Share the new room out at once, without waiting for the next steps."""
        if self._run_view is not None and self.room != self._shared:
            self.paint(self._run_view)

    def paint(self, run_view: RunView) -> None:
        """Draw the run."""
        self._run_view, self._shared = run_view, self.room
        self.set_heights(run_view)
        for canvas in self.query(Canvas):
            canvas.paint(run_view)

    @property
    def room(self) -> Size:
        """The size of this screen, also before it is shown."""
        return self.parent.size if isinstance(self.parent, Widget) else self.size

    def set_heights(self, run_view: RunView) -> None:
        """Set the heights that depend on the run."""

    def focus_target(self) -> Widget | None:
        """The widget to focus."""
        return next((widget for widget in self.query("*") if widget.can_focus and widget.display), None)


def _legend(run_view: RunView, columns: int, _rows: int) -> list[Line]:
    """Legend of the bars in the rank table."""
    return [fit([Cell(" "), *legend(split=run_view.figures is None or run_view.figures.complete)], columns)]


def step_chart(run_view: RunView, columns: int, rows: int) -> list[Line]:
    """Step times over the same steps as the heat map."""
    steps = run_view.timeline.steps()
    times_ms = run_view.timeline.series("step_ns", steps) / 1e6
    band = Band("step", times_ms, Level.DIM, SOLID)
    return chart([band], steps, columns, rows, unit="ms", how="max", cursor=run_view.at)


def _heat(run_view: RunView, columns: int, rows: int) -> list[Line]:
    timeline = run_view.timeline
    steps = timeline.steps(run_view.last_step)
    # Not for more hosts than lines: for thousands of ranks the list would take longer than the map.
    hosts = [row.state.host for row in run_view.rows] if run_view.totals.hosts <= rows else None
    lines = heat_map(timeline.excess(steps), timeline.ranks, steps, columns, rows - 1, hosts=hosts)
    return [*lines, heat_legend(columns)][:rows]


CARDS: Final = (
    ("step", overview.step_card),
    ("throughput", overview.throughput_card),
    ("all-reduce", overview.allreduce_card),
    ("devices", overview.device_card),
)


def _fixed(draw: Callable[[RunView, int], list[Line]]) -> Draw:
    """A drawing whose height does not depend on the room."""
    return lambda run_view, columns, _rows: [fit(line, columns) for line in draw(run_view, columns)]


class Overview(Pane):
    """The run at a glance: speed, all-reduce share and its cause, slow ranks, alerts."""

    def compose(self) -> ComposeResult:
        """A hang on top; below it cards where there is room for them, else lines."""
        yield Painted(_fixed(hang_lines), title="the job hangs", id="hang", classes="fixed box")
        yield Painted(_fixed(overview.compact), id="figures", classes="fixed")
        with Horizontal(id="cards"):
            for title, card in CARDS:
                yield Painted(_fixed(card), title=title, id=f"card-{title}", classes="box card")
        yield Painted(alert_panel, id="urgent", classes="fixed box", title="alerts")
        yield RankTable(id="overview-table")
        yield Painted(_legend, classes="legend fixed")
        with Horizontal(id="below"):
            with Vertical(id="history"):
                yield Painted(_heat, title="ranks × time", id="heat", classes="box fixed", of_figures=True)
                yield Painted(step_chart, title="step time", id="steps", classes="box fixed", of_figures=True)
                yield Painted(share_lines, title="all-reduce share", id="shares", classes="box fixed")
            yield Painted(alert_panel, title="alerts", id="wrong", classes="box fixed")

    def set_heights(self, run_view: RunView) -> None:
        """Large: cards, table, heat map and alerts. Small: lines, alerts, table."""
        columns, rows = self.room
        rows -= self._share_hang(run_view, columns)
        large = columns >= WIDE_COLUMNS and rows >= TALL_ROWS - 3
        self.query_one("#figures").display = not large
        self.query_one("#cards").display = large
        self.query_one("#card-devices").border_title = overview.device_title(run_view)
        self.query_one("#card-all-reduce").border_title = sync_name(run_view.state)
        self.query_one("#shares").border_title = f"{sync_name(run_view.state)} share"
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
            # Alerts get the rows that few ranks leave free.
            spare = rows - FIGURES_ROWS - BOX_ROWS - HEADING_ROWS - len(run_view.rows) - LEGEND_ROWS
            wanted = alert_rows(run_view, max(columns - BOX_COLUMNS, 1), max(spare, URGENT_ROWS))
            set_height(self.query_one("#urgent"), wanted + BOX_ROWS)

    def _share_hang(self, run_view: RunView, columns: int) -> int:
        """Show a hang; how many rows it takes."""
        hang = self.query_one("#hang")
        lines = hang_lines(run_view, max(columns - BOX_COLUMNS, 1))
        hang.display = bool(lines)
        if not lines:
            return 0
        set_height(hang, len(lines) + BOX_ROWS)
        return len(lines) + BOX_ROWS

    def _share_history(self, rows: int, ranks: int) -> None:
        """The heat map first; where it leaves enough rows, the step time over the same steps."""
        wanted = min(ranks, rows - HEAT_EXTRA_ROWS) + HEAT_EXTRA_ROWS
        if ranks > rows // 2:
            wanted = rows if rows < CHART_MIN_ROWS * 2 else rows - CHART_MIN_ROWS
        spare = rows - wanted
        self.query_one("#steps").display = spare >= CHART_MIN_ROWS
        self.query_one("#shares").display = spare >= 2 * CHART_MIN_ROWS + SHARE_TEXT_ROWS
        set_height(self.query_one("#heat"), wanted if spare >= CHART_MIN_ROWS else None)


def set_height(widget: Widget, rows: int | None) -> None:
    """Set the height in rows, None = all that is left; only if it changes, because that costs a layout."""
    height = Scalar.parse("1fr" if rows is None else str(rows))
    if widget.styles.height != height:
        widget.styles.height = height


class Ranks(Pane):
    """All ranks, and their history."""

    def compose(self) -> ComposeResult:
        """The table; below it the heat map and the step time where there is room."""
        yield RankTable(id="ranks-table")
        yield Painted(_legend, classes="legend fixed")
        yield Painted(_heat, title="ranks × time", id="ranks-heat", classes="box fixed", of_figures=True)
        yield Painted(step_chart, title="step time", id="ranks-steps", classes="box fixed", of_figures=True)

    def set_heights(self, run_view: RunView) -> None:
        """The heat map takes what the table does not need, at most a third where there are many ranks; the step time
        takes what both leave, if it is enough.
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
    """The all-reduce share over time, the sync points of a step, and the gradient buckets."""

    def compose(self) -> ComposeResult:
        """Each in a box."""
        yield Painted(share_lines, title="all-reduce share of the step", id="share", classes="box fixed")
        yield Painted(sync_point_lines, title="sync points of a step", id="sync-points", classes="box fixed")
        yield Painted(bucket_lines, title="gradient buckets", id="buckets", classes="box fixed")

    def set_heights(self, run_view: RunView) -> None:
        """The buckets take half; without any, only the rows of the text that says so. Sync points take their rows, up
        to a third.
        """
        self.query_one("#share").border_title = f"{sync_name(run_view.state)} share of the step"
        points = len(sync_point_lines(run_view, max(self.room.width - BOX_COLUMNS, 1), WHOLE))
        self.query_one("#sync-points").display = bool(points)
        set_height(self.query_one("#sync-points"), min(points + BOX_ROWS, self.room.height // 3))
        timed = any(row.state.buckets is not None for row in run_view.urgent[:ASKED_RANKS])
        text_rows = len(bucket_lines(run_view, max(self.room.width - BOX_COLUMNS, 1), WHOLE)) + BOX_ROWS
        set_height(self.query_one("#buckets"), self.room.height // 2 if timed else text_rows)


class Listed(Painted):
    """A list too long to be drawn whole: draws only what is in sight, from line `first` on."""

    BINDINGS: ClassVar[list[BindingType]] = cursor_keys(
        "move(-1)", "move(1)", "move(-10)", "move(10)", f"move(-{WHOLE})", f"move({WHOLE})"
    )

    def __init__(self, draw: Draw, **settings: Any) -> None:
        super().__init__(draw, focus=True, **settings)
        self.first = 0

    def paint_pane(self) -> None:
        """Draw the screen again, of which other parts depend on what is chosen here."""
        if self._run_view is not None and isinstance(self.parent, Pane):
            self.parent.paint(self._run_view)


class AlertList(Listed):
    """Alerts, one of them selected."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(self._lines_from, **settings)
        self.selected = 0

    def alert(self, run_view: RunView) -> Alert | None:
        """The selected alert."""
        alerts = all_alerts(run_view)
        return alerts[min(self.selected, len(alerts) - 1)] if alerts else None

    def _lines_from(self, run_view: RunView, columns: int, rows: int) -> list[Line]:
        self.selected = clamp(self.selected, 0, max(0, len(all_alerts(run_view)) - 1))
        # One line is the heading, and one may count the alerts below.
        self.first = clamp(self.first, max(0, self.selected - rows + 3), self.selected)
        return alert_list(run_view, columns, rows, selected=self.selected, first=self.first, zone=local_zone())

    def action_move(self, by: int) -> None:
        """Select another one."""
        self.selected = max(0, self.selected + by)
        self.paint_pane()


class Alerts(Pane):
    """All alerts, and the details of one."""

    def compose(self) -> ComposeResult:
        """The list, and the selected alert."""
        yield AlertList(title="alerts", id="alert-list", classes="box fixed")
        yield Painted(self._detail, title="details and what to try", id="alert-detail", classes="box", focus=True)

    def _detail(self, run_view: RunView, columns: int, _rows: int) -> list[Line]:
        alert = self.query_one(AlertList).alert(run_view)
        return [] if alert is None else alert_detail(alert, columns, zone=local_zone())
