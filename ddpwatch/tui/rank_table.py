"""The rank table as a virtual widget: a repaint costs as much for eight thousand ranks as for eight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual.binding import Binding, BindingType
from textual.geometry import Region, Size, clamp
from textual.message import Message

from ddpwatch.tui.widgets import SCROLLBAR_COLUMNS, Canvas, cursor_keys
from ddpwatch.view.cells import Cell, Level
from ddpwatch.view.columns import Ordering
from ddpwatch.view.ranks.table import arrange, rank_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual import events
    from textual.strip import Strip

    from ddpwatch.view.cells import Line
    from ddpwatch.view.columns import Layout
    from ddpwatch.view.ranks.columns import Row
    from ddpwatch.view.run_view import RunView

# Size of the heading, in rows, and of the left margin, in terminal cells.
HEADING_ROWS: Final = 1
GUTTER_COLUMNS: Final = 1


class RankTable(Canvas, can_focus=True, inherit_bindings=False):
    """One row per rank, with a cursor that stays on its rank when the order changes."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"ranktable--cursor"}
    BINDINGS: ClassVar[list[BindingType]] = [
        *cursor_keys("move(-1)", "move(1)", "page(-1)", "page(1)", "edge(0)", "edge(-1)"),
        Binding("enter", "open", "the rank's page", show=False),
    ]

    class Opened(Message):
        """Asks for a rank's own page."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.cursor_rank: int | None = None
        self.ordering = Ordering()
        self._rows: Sequence[Row] = ()
        self._fitted: Layout[Row] | None = None
        self._reveals = False
        """Whether the next drawing scrolls to the cursor."""
        self._hangs = False
        """Whether the first row is one that the others wait for."""
        self._painted: dict[int, Line] = {}
        """By line of the screen, what was drawn last."""

    @property
    def titles(self) -> tuple[str, ...]:
        """The columns that are shown and can be sorted by."""
        return self._fitted.titles if self._fitted else ()

    def take_over(self, other: RankTable | None) -> None:
        """Take the order and the cursor of another table, and scroll to it."""
        if other is not None and other is not self:
            self.ordering, self.cursor_rank, self._reveals = other.ordering, other.cursor_rank, True

    def paint(self, run_view: RunView) -> None:
        """Draw the ranks of a run view, and repaint the lines that changed."""
        self._run_view, self._drawn_for = run_view, None
        if not (self.size.width and self.size.height):
            return
        self._drawn_for = self.size
        self._rows = arrange(run_view.rows, run_view.urgent, self.ordering)
        scrolls = len(self._rows) + HEADING_ROWS > self.size.height
        columns = self.size.width - GUTTER_COLUMNS - (SCROLLBAR_COLUMNS if scrolls else 0)
        totals = run_view.totals
        self._fitted = rank_layout((), columns, show_host=totals.hosts > 1, steady=totals.extent)
        lost = bool(self._rows) and not any(map(self._has_cursor, self._rows))
        if self._rows and (self.ordering.follow_worst or lost):
            self.cursor_rank = self._rows[0].state.rank
            self.scroll_to(y=0, animate=False, immediate=True)
        hangs = bool(self._rows) and self._rows[0].waited_for
        if hangs and not self._hangs:
            # It has just come to the top, to be seen.
            self.scroll_to(y=0, animate=False, immediate=True)
        self._hangs = hangs
        size = Size(self.size.width, len(self._rows) + HEADING_ROWS)
        if self.virtual_size != size:
            self.virtual_size = size
        if self._reveals:
            self._reveals = False
            self._show_row(self._cursor_row())
        self._repaint()

    def render_line(self, y: int) -> Strip:
        """One line of the screen: the heading, or a rank."""
        line = self._painted.get(y)
        if line is None:
            line = self._painted[y] = self._line(y)
        row = self._row_at(y)
        focused = self.has_focus and row is not None and self._has_cursor(row)
        return self._strip(y, line, component="ranktable--cursor" if focused else "")

    def _redraw(self) -> None:
        if self._run_view is not None:
            self._painted.clear()
            self.paint(self._run_view)

    def on_focus(self) -> None:
        """Highlight the cursor."""
        self.refresh()

    def on_blur(self) -> None:
        """Stop highlighting the cursor."""
        self.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """All lines move."""
        super().watch_scroll_y(old_value, new_value)
        self._painted.clear()

    def on_click(self, event: events.Click) -> None:
        """A click moves the cursor to a rank, a second one opens it; titles have actions of their own."""
        row = self._row_at(event.y)
        if row is not None and event.chain > 1:
            self.post_message(self.Opened(row.state.rank))
        elif row is not None:
            self._go(event.y - HEADING_ROWS + round(self.scroll_offset.y))

    def action_move(self, by: int) -> None:
        """Move the cursor up or down."""
        self._go(self._cursor_row() + by)

    def action_page(self, by: int) -> None:
        """Move the cursor by pages."""
        self._go(self._cursor_row() + by * max(1, self.size.height - HEADING_ROWS - 1))

    def action_edge(self, row: int) -> None:
        """Move the cursor to the first or the last rank."""
        self._go(row if row >= 0 else len(self._rows) - 1)

    def action_open(self) -> None:
        """Open the page of the rank under the cursor, which may come from another table if this was not drawn yet."""
        if (self._rows or self._drawn_for is None) and self.cursor_rank is not None:
            self.post_message(self.Opened(self.cursor_rank))

    def _go(self, row: int) -> None:
        if not self._rows:
            return
        row = clamp(row, 0, len(self._rows) - 1)
        self.ordering = self.ordering.unfollowed()
        self.cursor_rank = self._rows[row].state.rank
        self._show_row(row)
        self._repaint()

    def _show_row(self, row: int) -> None:
        """Scroll to a row."""
        visible = self.size.height - HEADING_ROWS
        top = round(self.scroll_offset.y)
        wanted = row if row < top else max(top, row - visible + 1)
        if wanted != top:
            # With force: a table that was never shown has no scrollbar yet.
            self.scroll_to(y=wanted, animate=False, immediate=True, force=True)

    def _cursor_row(self) -> int:
        return next((place for place, row in enumerate(self._rows) if self._has_cursor(row)), 0)

    def _has_cursor(self, row: Row) -> bool:
        return row.state.rank == self.cursor_rank

    def _row_at(self, y: int) -> Row | None:
        row = y - HEADING_ROWS + round(self.scroll_offset.y)
        return self._rows[row] if y >= HEADING_ROWS and 0 <= row < len(self._rows) else None

    def _line(self, y: int) -> Line:
        if self._fitted is None:
            return []
        if y < HEADING_ROWS:
            titles = self._fitted.heading(self.ordering.marked, backwards=self.ordering.backwards)
            return [Cell(" " * GUTTER_COLUMNS), *titles]
        row = self._row_at(y)
        if row is None:
            no_match = y == HEADING_ROWS and not self._rows and self.ordering.wanted
            return [Cell("  no rank matches the filter; esc clears it", Level.WARN)] if no_match else []
        # The mark shows the cursor without colors.
        return [Cell("▌" if self._has_cursor(row) else " ", Level.TITLE), *self._fitted.line(row)]

    def _repaint(self) -> None:
        for y in range(self.size.height):
            line = self._line(y)
            if self._painted.get(y) != line:
                self._painted[y] = line
                self.refresh(Region(0, y, self.size.width, 1))
