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
from ddpwatch.view.gpus.process_usage import device_table
from ddpwatch.view.gpus.table import gpu_map, gpu_page, gpu_table, key_of, table_top
from ddpwatch.view.layout import capped

if TYPE_CHECKING:
    from textual import events
    from textual.app import ComposeResult

    from ddpwatch.view.cells import Line
    from ddpwatch.view.gpus.table import GpuKey, GpuPage
    from ddpwatch.view.run_view import RunView

MIN_DETAIL_ROWS: Final = 6
"""With fewer rows the details of one GPU are left out."""
DETAIL_ROWS: Final = 18
"""Rows that the details of one GPU take with all curves."""
ROOMY_ROWS: Final = 24
"""Rows from which on a list that scrolls leaves enough for all details of one GPU."""


class DeviceList(Listed):
    """All GPUs with one of them chosen; where none is read, hosts and ranks with their CPU and memory."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *Listed.BINDINGS,
        Binding("enter", "open", "the rank's page", show=False),
    ]
    titles = tuple(SORT_KEYS)
    """The columns that can be sorted by."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(self._lines_from, **settings)
        self._ordering = Ordering()
        self.chosen_gpu: GpuKey | None = None
        self._moved = False
        """Whether the user has chosen a GPU. Until then it is the first one of the page."""
        self._page: tuple[RunView, GpuPage] | None = None
        self._shown_for: tuple[GpuKey | None, int] | None = None
        """The chosen GPU and the number of rows when the list last scrolled to it."""

    @property
    def ordering(self) -> Ordering:
        """The order of the GPUs."""
        return self._ordering

    @ordering.setter
    def ordering(self, ordering: Ordering) -> None:
        # A new order begins at the top.
        self._ordering, self.chosen_gpu, self._moved, self.first = ordering, None, False, 0

    def page(self, run_view: RunView) -> GpuPage:
        """All lines, computed once per run view and order."""
        # The run view itself is kept and not its id, which a later run view may reuse.
        if self._page is None or self._page[0] is not run_view or self._page[1].ordering != self.ordering:
            self._page = run_view, gpu_page(run_view, self.ordering)
        return self._page[1]

    def _lines_from(self, run_view: RunView, columns: int, rows: int) -> list[Line]:
        if run_view.totals.gpus is None:
            return device_table(run_view, columns, rows, first=self.first)
        page = self.page(run_view)
        if page.by_host and not self._moved:
            # A host with a new alert comes to the top, to be seen.
            self.chosen_gpu, self.first = None, 0
        line = page.line_of(self.chosen_gpu)
        entry = page.entries[line].gpu
        self.chosen_gpu = key_of(entry) if entry is not None else None
        room = rows - table_top(run_view, rows)
        # Sorted by a figure, GPUs change places with every reading: the list does not follow the chosen one.
        if page.by_host or self._shown_for != (self.chosen_gpu, room):
            # One line may count those below; a host's line stays with its first GPU.
            self.first = clamp(self.first, max(0, line - room + 2), 0 if line == 1 else line)
            self._shown_for = self.chosen_gpu, room
        return gpu_table(run_view, page, columns, rows, first=self.first, chosen=self.chosen_gpu)

    def action_move(self, by: int) -> None:
        """Choose another GPU; without GPUs, scroll the hosts and ranks."""
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
        self.paint_pane()

    def action_open(self) -> None:
        """Open the page of the rank whose GPU is chosen."""
        if self.chosen_gpu is not None:
            self.post_message(RankTable.Opened(self.chosen_gpu[0]))

    def on_click(self, event: events.Click) -> None:
        """A click chooses a GPU, a second one opens its rank."""
        if self._run_view is None or self._run_view.totals.gpus is None:
            return
        entries = self.page(self._run_view).entries
        row = event.y - self.gutter.top - table_top(self._run_view, self.size.height)
        if row < 0 or not 0 <= row + self.first < len(entries):
            return
        entry = entries[row + self.first].gpu
        if entry is not None:
            self.chosen_gpu, self._moved = key_of(entry), True
            self.paint_pane()
            if event.chain > 1:
                self.action_open()


class Devices(Pane):
    """The GPUs of the run: a map of many, a list, and the details of the chosen one."""

    def compose(self) -> ComposeResult:
        """The map, the list and the details."""
        yield Painted(gpu_map, title="all GPUs", id="device-map", classes="box fixed")
        yield DeviceList(title="devices", id="device-list", classes="box fixed")
        yield Painted(self._detail, title="this GPU", id="device-detail", classes="box fixed")

    def set_heights(self, run_view: RunView) -> None:
        """The list has what it needs; the details have what it leaves, and half of the room where the list is long."""
        listed, detail = self.query_one(DeviceList), self.query_one("#device-detail")
        seen = self.query_one("#device-map")
        room, has_gpus = self.room, run_view.totals.gpus is not None
        # Computed here for its height only.
        mapped = gpu_map(run_view, room.width - BOX_COLUMNS, room.height // 3) if has_gpus else []
        seen.display = bool(mapped)
        set_height(seen, len(mapped) + BOX_ROWS)
        listed.border_title = "GPUs" if has_gpus else "devices"
        if not has_gpus:
            detail.display = False
            set_height(listed, None)
            return
        rows = room.height - (len(mapped) + BOX_ROWS if mapped else 0)
        gpus = len(listed.page(run_view).entries) + table_top(run_view)
        most = rows * 2 // 3
        if gpus > most and rows >= ROOMY_ROWS:
            most = max(rows - DETAIL_ROWS, rows // 2)  # the list scrolls in any case
        wanted = min(gpus, most) + BOX_ROWS
        detail.display = rows - wanted >= MIN_DETAIL_ROWS
        set_height(listed, wanted if detail.display else None)

    def _detail(self, run_view: RunView, columns: int, rows: int) -> list[Line]:
        if run_view.totals.gpus is None:
            return []
        listed = self.query_one(DeviceList)
        page = listed.page(run_view)
        entry = page.entries[page.line_of(listed.chosen_gpu)].gpu
        if entry is None:
            return []
        lines = gpu_detail(entry, columns)
        # Curves are shown only if all of them fit below the rest.
        curves = gpu_curves(entry, columns, rows - len(lines) - 1)
        return [*lines, [], *curves] if curves else capped(lines, rows)
