"""Widgets that show drawings of a run and repaint only the lines that changed, and a field to type in."""

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

    from ddpwatch.view.cells import Level, Line
    from ddpwatch.view.run_view import RunView

    Draw: TypeAlias = Callable[[RunView, int, int], list[Line]]

SCROLLBAR_COLUMNS: Final = 1
"""Width of a scrollbar, in terminal cells."""
_CURSOR_KEYS: Final = ("up,k", "down,j", "pageup", "pagedown", "home,g", "end,G")


def cursor_keys(*actions: str) -> list[BindingType]:
    """Bindings of up, down, page up, page down, home and end, in this order."""
    return [Binding(key, action, show=False) for key, action in zip(_CURSOR_KEYS, actions, strict=True)]


def strip_of(line: Line, styles: Mapping[Level, Style], base: Style, columns: int) -> Strip:
    """The line as a Textual strip of exactly that width. Nothing in its text is markup."""
    segments = []
    for text, level, action in line:
        style = base + styles[level]
        if action:
            style += Style(meta={"@click": f"app.{action}"})
        segments.append(Segment(text, style))
    return Strip(segments).adjust_cell_length(columns, base)


def _same_figures(before: RunView | None, run_view: RunView) -> bool:
    return before is not None and run_view.figures is before.figures is not None and run_view.at == before.at


class Canvas(ScrollView, can_focus=False, inherit_bindings=False):
    """Base of widgets that draw a run view for their size, and draw again when the size changes."""

    ALLOW_SELECT = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._run_view: RunView | None = None
        self._drawn_for: Size | None = None
        """The size of the last drawing; None = there is none of this run view."""
        self._strips: dict[tuple[int, bool], tuple[Line, Strip]] = {}
        """By line of the screen, what was last rendered there: Textual asks for each line several times."""
        self._strips_for: tuple[int, str] | None = None

    def paint(self, run_view: RunView) -> None:
        """Draw a run view, and repaint the lines that changed."""
        raise NotImplementedError

    def _redraw(self) -> None:
        """Draw the same run view for another size."""
        raise NotImplementedError

    def _strip(self, y: int, line: Line, *, component: str = "") -> Strip:
        """A line of the screen in the widget's own style, or in that of a component class."""
        columns, theme = self.size.width, self.app.theme
        if self._strips_for != (columns, theme):
            self._strips.clear()
            self._strips_for = columns, theme
        kept = self._strips.get((y, bool(component)))
        if kept is not None and kept[0] == line:
            return kept[1]
        base = self.get_component_rich_style(component) if component else self.rich_style
        strip = strip_of(line, styles_of(self.app.theme_variables), base, columns)
        self._strips[y, bool(component)] = line, strip
        return strip

    def notify_style_update(self) -> None:
        """Render all lines again in the new style."""
        super().notify_style_update()
        self._strips.clear()

    def on_resize(self, _event: events.Resize) -> None:
        """Draw for the new size."""
        self._draw_for_size()

    def _size_updated(self, size: Size, virtual_size: Size, container_size: Size, layout: bool = True) -> bool:
        """Draw between the layout and the frame that shows it. A widget that comes into view was painted while it had
        no size, and its resize event comes after that frame, which would show its old lines.
        """
        changed = super()._size_updated(size, virtual_size, container_size, layout)
        self._draw_for_size()
        return changed

    def _draw_for_size(self) -> None:
        if self.size and self.size != self._drawn_for:
            self._redraw()
            self.refresh()


class Painted(Canvas, inherit_bindings=False):
    """Shows the result of a pure drawing function. A drawing that is taller than the widget scrolls."""

    # Left and right go through time, and are not among these.
    BINDINGS: ClassVar[list[BindingType]] = cursor_keys(
        "scroll_up", "scroll_down", "page_up", "page_down", "scroll_home", "scroll_end"
    )

    def __init__(
        self, draw: Draw, *, title: str = "", focus: bool = False, of_figures: bool = False, **settings: Any
    ) -> None:
        """Show `draw(run_view, columns, rows)`; with `focus`, keys scroll it. `of_figures` = it depends only on the
        figures and the timeline, and is not drawn again as long as these are the same.
        """
        super().__init__(**settings)
        self.border_title = title
        self.can_focus = focus
        self._draw = draw
        self._of_figures = of_figures
        self._lines: list[Line] = []

    def paint(self, run_view: RunView) -> None:
        """Draw a run view, and repaint the lines that changed."""
        before, self._run_view = self._run_view, run_view
        if not (self._of_figures and self._drawn_for == self.size and _same_figures(before, run_view)):
            self._paint()

    def clear(self) -> None:
        """Show nothing until the next run view."""
        self._run_view = None
        self._show(lambda _columns, _rows: [])

    def render_line(self, y: int) -> Strip:
        """One line of the screen."""
        row = y + round(self.scroll_offset.y)
        return self._strip(y, self._lines[row] if row < len(self._lines) else [])

    def _paint(self) -> None:
        self._drawn_for = None
        if self._run_view is not None and self.size.width and self.size.height:
            self._show(partial(self._draw, self._run_view))

    def _redraw(self) -> None:
        self._lines = []
        self._paint()

    def _show(self, draw: Callable[[int, int], list[Line]]) -> None:
        self._drawn_for = self.size
        columns, rows = self.size
        lines = draw(columns, rows)
        if len(lines) > rows:
            lines = draw(max(columns - SCROLLBAR_COLUMNS, 1), rows)
        before, self._lines = self._lines, lines
        if self.virtual_size != (size := Size(columns, max(len(lines), 1))):
            self.virtual_size = size
        top = round(self.scroll_offset.y)
        for y in range(rows):
            if before[y + top : y + top + 1] != lines[y + top : y + top + 1]:
                self.refresh(Region(0, y, columns, 1))


class Plain(Painted):
    """Shows a drawing that needs no run: `draw(columns, rows)`."""

    def __init__(self, draw: Callable[[int, int], list[Line]], **settings: Any) -> None:
        super().__init__(lambda _run_view, columns, rows: draw(columns, rows), **settings)
        self._plain = draw

    def repaint(self) -> None:
        """Draw again."""
        self._paint()

    def _paint(self) -> None:
        self._drawn_for = None
        if self.size.width and self.size.height:
            self._show(self._plain)


OPEN: Final = "open"


class Field(Input):
    """A field to type in, hidden until it is opened. It takes each key at once: keys that arrive in one burst with
    those that open or submit it must neither get lost nor be taken for commands.
    """

    def __init__(self, submitted: Callable[[str], None], *, placeholder: str, name: str) -> None:
        """Call `submitted` with the text when Enter is pressed; the empty field shows the `placeholder`."""
        super().__init__(placeholder=placeholder, id=name)
        self._submitted = submitted

    @property
    def is_open(self) -> bool:
        """Whether it is visible."""
        return self.has_class(OPEN)

    def open(self) -> None:
        """Become visible, and take the focus from the next key on."""
        self.add_class(OPEN)
        self.screen.set_focus(self)

    def close(self) -> None:
        """Hide; the caller sets the focus."""
        self.remove_class(OPEN)

    async def put(self, event: events.Key) -> bool:
        """Type a key if it is a printable character; whether it is."""
        if event.is_printable:
            await self._on_key(event)
        return event.is_printable

    async def action_submit(self) -> None:
        """Hand over the text."""
        self._submitted(self.value)
