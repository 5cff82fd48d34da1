"""The screen of GPUs, or of CPU and memory where none is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual.binding import Binding, BindingType
from textual.geometry import clamp

from ddpwatch.tui.rank_table import RankTable
from ddpwatch.tui.screens import BOX_COLUMNS, BOX_ROWS, Listed, Pane, set_height
from ddpwatch.tui.widgets import Painted
from ddpwatch.view.columns import Ordering
from ddpwatch.view.gpus.columns import SORT_KEYS
from ddpwatch.view.gpus.detail import gpu_curves, gpu_detail
from ddpwatch.view.gpus.host_usage import device_table
from ddpwatch.view.gpus.table import gpu_map, gpu_page, gpu_table, key_of, table_top
from ddpwatch.view.layout import capped

if TYPE_CHECKING:
    from textual import events
    from textual.app import ComposeResult

    from ddpwatch.view.cells import Line
    from ddpwatch.view.gpus.table import GpuKey, GpuPage
    from ddpwatch.view.gpus.usage import GpuRow
    from ddpwatch.view.run_view import RunView

MIN_DETAIL_ROWS: Final = 6
"""In fewer the details of one GPU would say next to nothing."""
DETAIL_ROWS: Final = 18
"""In so many they say all, with curves."""
ROOMY_ROWS: Final = 24


class DeviceList(Listed):
    """All GPUs with one of them chosen; where none is read, hosts and ranks with their CPU and memory."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *Listed.BINDINGS,
        Binding("end,G", "move(1000000)", "last", show=False),
        Binding("enter", "open", "the rank's page", show=False),
    ]

    def __init__(self, **settings: Any) -> None:
        """Begin with the first host."""
        super().__init__(self._lines_from, **settings)
        self._ordering = Ordering()
        self.chosen_gpu: GpuKey | None = None
        self._moved = False
        """Whether somebody has chosen a GPU. Until then it is the first one, whichever that is by now."""
        self._page: tuple[RunView, GpuPage] | None = None
        self._shown_for: tuple[GpuKey | None, int] | None = None
        """Which GPU was chosen, and in how many rows, when it was last brought into sight."""

    @property
    def ordering(self) -> Ordering:
        """How the person wants to see the GPUs."""
        return self._ordering

    @ordering.setter
    def ordering(self, ordering: Ordering) -> None:
        # Who sorts wants to see what comes first.
        self._ordering, self.chosen_gpu, self._moved, self.first = ordering, None, False, 0

    @property
    def titles(self) -> tuple[str, ...]:
        """What can be sorted by."""
        return tuple(SORT_KEYS)

    def gpu(self, run_view: RunView) -> GpuRow | None:
        """The one that is chosen."""
        if run_view.totals.gpus is None:
            return None
        page = self.page(run_view)
        return page.entries[page.line_of(self.chosen_gpu)].gpu

    def page(self, run_view: RunView) -> GpuPage:
        """All its lines, worked out once for each picture."""
        # The picture itself is kept, not its id: that of a picture which is gone may be another one's by now.
        if self._page is None or self._page[0] is not run_view or self._page[1].ordering != self.ordering:
            self._page = run_view, gpu_page(run_view, self.ordering)
        return self._page[1]

    def _lines_from(self, run_view: RunView, columns: int, rows: int) -> list[Line]:
        if run_view.totals.gpus is None:
            return device_table(run_view, columns, rows, first=self.first)
        page = self.page(run_view)
        if page.by_host and not self._moved:
            # A host that an alert is about has come to the top to be seen.
            self.chosen_gpu, self.first = None, 0
        line = page.line_of(self.chosen_gpu)
        entry = page.entries[line].gpu
        self.chosen_gpu = key_of(entry) if entry is not None else None
        room = rows - table_top(run_view, rows)
        # Sorted by a figure, GPUs change places with every reading: who looks at the top of the list stays there.
        if page.by_host or self._shown_for != (self.chosen_gpu, room):
            # One line may say how many more there are; a host's line stays with its first GPU.
            most_first = line - 1 if line == 1 else line
            self.first = clamp(self.first, max(0, line - room + 2), most_first)
            self._shown_for = self.chosen_gpu, room
        return gpu_table(run_view, page, columns, rows, first=self.first, chosen=self.chosen_gpu)

    def action_move(self, by: int) -> None:
        """Choose another GPU, or go up or down: one line a rank, and one a host."""
        run_view = self._run_view
        if run_view is None:
            return
        if run_view.totals.gpus is None:
            last = len(run_view.rows) + run_view.totals.hosts - self.size.height + 2
            self.first = clamp(self.first + by, 0, max(0, last))
        else:
            keys = self.page(run_view).keys()
            place = keys.index(self.chosen_gpu) if self.chosen_gpu in keys else 0
            self.chosen_gpu, self._moved = keys[clamp(place + by, 0, len(keys) - 1)], True
        if isinstance(self.parent, Pane):
            self.parent.paint(run_view)

    def action_open(self) -> None:
        """Open the page of the rank whose GPU is chosen."""
        if self.chosen_gpu is not None:
            self.post_message(RankTable.Opened(self.chosen_gpu[0]))

    def on_click(self, event: events.Click) -> None:
        """A click chooses a GPU, a second one opens its rank."""
        if self._run_view is None or self._run_view.totals.gpus is None:
            return
        page = self.page(self._run_view)
        top = table_top(self._run_view, self.size.height)
        line = event.y - self.gutter.top - top + self.first
        if event.y - self.gutter.top < top or not 0 <= line < len(page.entries):
            return
        entry = page.entries[line].gpu
        if entry is not None:
            self.chosen_gpu, self._moved = key_of(entry), True
            if isinstance(self.parent, Pane):
                self.parent.paint(self._run_view)
            if event.chain > 1:
                self.action_open()


class Devices(Pane):
    """What the ranks run on."""

    def compose(self) -> ComposeResult:
        """The list, above it all of many GPUs at a glance, and below it all about the one that is chosen."""
        yield Painted(gpu_map, title="all GPUs", id="device-map", classes="box fixed")
        yield DeviceList(title="devices", id="device-list", classes="box fixed")
        yield Painted(self._detail, title="this GPU", id="device-detail", classes="box fixed")

    def share_out(self, run_view: RunView) -> None:
        """The list has what it needs; the details of one GPU have room where they do not take it from the list."""
        listed, detail = self.query_one(DeviceList), self.query_one("#device-detail")
        seen = self.query_one("#device-map")
        room = self.room
        # Worked out here for its height only; its content is drawn as everything else is.
        mapped = [] if run_view.totals.gpus is None else gpu_map(run_view, room.width - BOX_COLUMNS, room.height // 3)
        seen.display = bool(mapped)
        set_height(seen, len(mapped) + BOX_ROWS)
        listed.border_title = "devices" if run_view.totals.gpus is None else "GPUs"
        if run_view.totals.gpus is None:
            detail.display = False
            set_height(listed, None)
            return
        rows = room.height - (len(mapped) + BOX_ROWS if mapped else 0)
        gpus = len(listed.page(run_view).entries) + table_top(run_view)
        most = rows * 2 // 3
        if gpus > most and rows >= ROOMY_ROWS:
            most = max(rows - DETAIL_ROWS, rows // 2)  # it is longer than the room in any case
        wanted = min(gpus, most) + BOX_ROWS
        detail.display = rows - wanted >= MIN_DETAIL_ROWS
        # What the list does not need, or leaves where it is long, tells of one GPU.
        set_height(listed, wanted if detail.display else None)

    def _detail(self, run_view: RunView, columns: int, rows: int) -> list[Line]:
        entry = self.query_one(DeviceList).gpu(run_view)
        if entry is None:
            return []
        lines = gpu_detail(entry, columns)
        # The curves only as a whole, and what they would push out comes first.
        curves = gpu_curves(entry, columns, rows - len(lines) - 1)
        return [*lines, [], *curves] if curves else capped(lines, rows)
