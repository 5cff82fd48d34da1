"""A widget that shows the lines of a drawing, and sends to the terminal only those that have changed.

A field to type in, in the last line.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input

from ddpwatch.tui.themes import styles_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from textual import events
    from textual.widget import Widget

    from ddpwatch.view.cells import Level, Line
    from ddpwatch.view.run_view import RunView

    Draw: TypeAlias = Callable[[RunView, int, int], list[Line]]

SCROLLBAR_COLUMNS: Final = 1


def strip_of(line: Line, styles: Mapping[Level, Style], base: Style, columns: int) -> Strip:
    """The line as Textual draws it, exactly so many columns wide. Text is text: nothing in it is markup."""
    segments = []
    for text, level, action in line:
        style = base + styles[level]
        if action:
            style += Style(meta={"@click": f"app.{action}"})
        segments.append(Segment(text, style))
    return Strip(segments).adjust_cell_length(columns, base)


def _same_figures(before: RunView | None, run_view: RunView) -> bool:
    return before is not None and run_view.figures is before.figures is not None and run_view.at == before.at


class Strips:
    """The lines of a widget as Textual draws them, kept as long as they look the same: it asks for each several times.

    To be cleared when the widget's style changes.
    """

    def __init__(self, widget: Widget) -> None:
        """Of this widget."""
        self._widget = widget
        self._kept: dict[tuple[int, bool], tuple[Line, Strip]] = {}
        self._drawn_for: tuple[int, str] | None = None

    def strip(self, y: int, line: Line, *, component: str = "") -> Strip:
        """A line of the screen, in the widget's own style or in that of a part of it."""
        columns, app = self._widget.size.width, self._widget.app
        if self._drawn_for != (columns, app.theme):
            self._kept.clear()
            self._drawn_for = columns, app.theme
        kept = self._kept.get((y, bool(component)))
        if kept is not None and kept[0] == line:
            return kept[1]
        base = self._widget.get_component_rich_style(component) if component else self._widget.rich_style
        strip = strip_of(line, styles_of(app.theme_variables), base, columns)
        self._kept[y, bool(component)] = line, strip
        return strip

    def clear(self) -> None:
        """Draw all of them anew."""
        self._kept.clear()


class Painted(ScrollView, can_focus=False, inherit_bindings=False):
    """Shows what a pure function draws for the widget's size. A drawing that is taller than the widget scrolls."""

    ALLOW_SELECT = False
    # Left and right are not among them: they go through time.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_up", "up", show=False),
        Binding("down,j", "scroll_down", "down", show=False),
        Binding("pageup", "page_up", "page up", show=False),
        Binding("pagedown", "page_down", "page down", show=False),
        Binding("home,g", "scroll_home", "top", show=False),
        Binding("end,G", "scroll_end", "bottom", show=False),
    ]

    def __init__(
        self, draw: Draw, *, title: str = "", focus: bool = False, of_figures: bool = False, **settings: Any
    ) -> None:
        """Show `draw(run_view, columns, rows)`; with `focus` it can be scrolled by keys. With `of_figures` it draws
        nothing but the figures and the timeline, and need not draw again as long as they are the same.
        """
        super().__init__(**settings)
        self.border_title = title
        self.can_focus = focus
        self._draw = draw
        self._of_figures = of_figures
        self._lines: list[Line] = []
        self._strips = Strips(self)
        self._run_view: RunView | None = None
        self._drawn_for: Size | None = None
        """The size that the lines were drawn for; None = they are of an older picture, or there are none."""

    def paint(self, run_view: RunView) -> None:
        """Draw anew, and repaint the lines that look different now."""
        before, self._run_view = self._run_view, run_view
        if not (self._of_figures and self._drawn_for == self.size and _same_figures(before, run_view)):
            self._paint()

    def clear(self) -> None:
        """Show nothing until there is another picture."""
        self._run_view = None
        self._show(lambda _columns, _rows: [])

    def _paint(self) -> None:
        self._drawn_for = None
        if self._run_view is not None and self.size.width and self.size.height:
            self._show(partial(self._draw, self._run_view))

    def _size_updated(self, size: Size, virtual_size: Size, container_size: Size, layout: bool = True) -> bool:
        """Draw between the layout and the frame that shows it: what comes into view was painted while it had no size,
        and the news of its size comes after that frame, in which its old lines would be seen.
        """
        changed = super()._size_updated(size, virtual_size, container_size, layout)
        self._paint_for_size()
        return changed

    def render_line(self, y: int) -> Strip:
        """One line of the screen."""
        row = y + round(self.scroll_offset.y)
        line = self._lines[row] if row < len(self._lines) else []
        return self._strips.strip(y, line)

    def notify_style_update(self) -> None:
        """Another style is another drawing."""
        super().notify_style_update()
        self._strips.clear()

    def on_resize(self, _event: events.Resize) -> None:
        """Another size is another drawing."""
        self._paint_for_size()

    def _paint_for_size(self) -> None:
        if self.size and self.size != self._drawn_for:
            self._lines = []
            self._paint()
            self.refresh()

    def _show(self, draw: Callable[[int, int], list[Line]]) -> None:
        self._drawn_for = self.size
        columns, rows = self.size
        lines = draw(columns, rows)
        if len(lines) > rows:
            # The scrollbar takes a column.
            lines = draw(max(columns - SCROLLBAR_COLUMNS, 1), rows)
        before, self._lines = self._lines, lines
        height = max(len(lines), 1)
        if self.virtual_size != (size := Size(self.size.width, height)):
            self.virtual_size = size
        top = round(self.scroll_offset.y)
        for y in range(self.size.height):
            row = y + top
            old = before[row] if row < len(before) else None
            new = lines[row] if row < len(lines) else None
            if old != new:
                self.refresh(Region(0, y, self.size.width, 1))


class Plain(Painted):
    """Shows a drawing that needs no run."""

    def __init__(self, draw: Callable[[int, int], list[Line]], **settings: Any) -> None:
        """Show `draw(columns, rows)`."""
        super().__init__(lambda _run_view, columns, rows: draw(columns, rows), **settings)
        self._plain = draw

    def repaint(self) -> None:
        """Draw anew."""
        self._paint()

    def _paint(self) -> None:
        self._drawn_for = None
        if self.size.width and self.size.height:
            self._show(self._plain)


OPEN: Final = "open"


class Field(Input):
    """Closed until it is asked for. What is typed goes in at once, key by key, and so does what ends it: keys that come
    in one burst with those that open or end it must neither get lost nor be taken for commands.
    """

    def __init__(self, submitted: Callable[[str], None], *, asks: str, name: str) -> None:
        """Call `submitted` with the text when Enter is pressed; the empty field says what it `asks` for."""
        super().__init__(placeholder=asks, id=name)
        self._submitted = submitted

    @property
    def is_open(self) -> bool:
        """Whether it is to be seen."""
        return self.has_class(OPEN)

    def open(self) -> None:
        """Be seen, and have the keys from the very next one on."""
        self.add_class(OPEN)
        self.screen.set_focus(self)

    def close(self) -> None:
        """Be seen no longer; who has the keys then is for the caller to say."""
        self.remove_class(OPEN)

    async def put(self, event: events.Key) -> bool:
        """Put a character in; whether it is one."""
        if event.is_printable:
            await self._on_key(event)
        return event.is_printable

    async def action_submit(self) -> None:
        """Hand the text over."""
        self._submitted(self.value)
