"""The GPU page: a table with one line per GPU, by host or sorted by a figure, and a map of many GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from ddpwatch.core.units import UNPROVEN, plural
from ddpwatch.view.cells import Cell, Level, clip, columns_of, fit
from ddpwatch.view.charts.sparkline import EIGHTHS
from ddpwatch.view.gpus.busy_and_waiting import (
    WORTH_SAYING_PERCENT,
    GpuRow,
    by_host,
    gpu_rows,
    gpu_totals,
    is_current,
    is_throttled,
    is_waiting,
    waiting_percent,
)
from ddpwatch.view.gpus.columns import (
    BUSY,
    FREE,
    MEMORY_BAR,
    OTHERS,
    PROCESS,
    SORT_KEYS,
    TORCH,
    WAITS,
    gpu_layout,
    gpu_line,
)
from ddpwatch.view.layout import capped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.view.cells import Line
    from ddpwatch.view.columns import Ordering
    from ddpwatch.view.gpus.busy_and_waiting import GpuTotals
    from ddpwatch.view.run_view import RunView

GUTTER_COLUMNS: Final = 2
"""Width left of the table for the cursor and the arrows, in terminal cells."""
ROOMY_ROWS: Final = 8
"""Tables with fewer rows have no legend."""
BY_HOST_UP_TO: Final = 32
"""Up to this number of GPUs hosts keep their places; of more, hosts with an alert come first."""
_MW_PER_KW: Final = 1e6

GpuKey = tuple[int, str]
"""Rank and device."""
EntryT = TypeVar("EntryT")


class Entry(NamedTuple):
    """A line of the page: a GPU, or the host of the GPUs below."""

    gpu: GpuRow | None
    host: str = ""
    under: Sequence[GpuRow] = ()
    """The GPUs of the host."""


@dataclass(frozen=True)
class GpuPage:
    """All lines of the page in their order, computed once for drawing, moving and choosing."""

    entries: list[Entry]
    ordering: Ordering
    by_host: bool

    def keys(self) -> list[GpuKey]:
        """The GPUs from top to bottom."""
        return [key_of(entry.gpu) for entry in self.entries if entry.gpu is not None]

    def line_of(self, key: GpuKey | None) -> int:
        """The line of a GPU, or of the first GPU if this one is not on the page."""
        places = {key_of(entry.gpu): place for place, entry in enumerate(self.entries) if entry.gpu is not None}
        first = min(places.values(), default=0)
        return first if key is None else places.get(key, first)


def key_of(entry: GpuRow) -> GpuKey:
    """What identifies a GPU when the order changes."""
    return entry.row.state.rank, entry.gpu.device if entry.gpu is not None else ""


def gpu_page(run_view: RunView, ordering: Ordering) -> GpuPage:
    """The lines by host; sorted by a figure, without lines for hosts."""
    found = gpu_rows(run_view.rows, of_now=not run_view.hindsight)
    if ordering.column in SORT_KEYS and ordering.column != "RANK":
        found.sort(key=SORT_KEYS[ordering.column], reverse=ordering.backwards)
        return GpuPage([Entry(entry) for entry in found], ordering, by_host=False)
    hosts = list(by_host(found, lambda entry: entry.row).items())
    if len(found) > BY_HOST_UP_TO and not ordering.column:
        hosts.sort(key=lambda item: not any(entry.row.finding is not None for entry in item[1]))
    entries: list[Entry] = []
    for host, under in reversed(hosts) if ordering.backwards else hosts:
        entries.append(Entry(None, host, under))
        entries += [Entry(entry) for entry in (reversed(under) if ordering.backwards else under)]
    return GpuPage(entries, ordering, by_host=True)


def gpu_table(
    run_view: RunView, page: GpuPage, columns: int, rows: int, *, first: int, chosen: GpuKey | None
) -> list[Line]:
    """The legend, the titles, then the lines from number `first` on. At most `rows` lines."""
    extent = run_view.totals.extent
    several = run_view.totals.hosts > 1
    host_columns = extent.host_columns if several and not page.by_host else 0
    layout = gpu_layout(columns - GUTTER_COLUMNS, rank_columns=extent.rank_columns, host_columns=host_columns)
    top: list[Line] = []
    if run_view.hindsight:
        top.append([Cell(f"‖ {run_view.hindsight}", Level.DIM)])
    if rows >= ROOMY_ROWS:
        top.append(_legend(split=any(column == MEMORY_BAR for column, _ in layout.columns)))
        if several and run_view.totals.gpus is not None:
            top.append(_summary(f"all {plural(run_view.totals.hosts, 'host')}", run_view.totals.gpus, columns))
    first, shown, below = visible(page.entries, rows - len(top) - 1, first)
    titles = layout.heading(page.ordering.column, backwards=page.ordering.backwards)
    lines: list[Line] = [*top, [Cell(f"{'↑' if first else ' ':{GUTTER_COLUMNS}}", Level.DIM), *titles]]
    for entry in shown:
        if entry.gpu is None:
            lines.append(_host_line(entry, columns))
        else:
            mark = Cell("▌ " if key_of(entry.gpu) == chosen else "  ", Level.TITLE)
            lines.append([mark, *gpu_line(layout, entry.gpu)])
    return capped([fit(line, columns) for line in [*lines, *below]], rows)


def visible(entries: Sequence[EntryT], rows: int, first: int) -> tuple[int, Sequence[EntryT], list[Line]]:
    """The number of the first line, the lines in sight, and a last line that counts those below, if there are any."""
    rows = max(rows, 1)
    first = min(max(first, 0), max(len(entries) - rows, 0))
    rest = len(entries) - first - rows
    if rest <= 0:
        return first, entries[first:], []
    return first, entries[first : first + rows - 1], [[Cell(f"  … {plural(rest + 1, 'more line')}", Level.DIM)]]


def table_top(run_view: RunView, rows: int = ROOMY_ROWS) -> int:
    """How many of the rows are above the first line of the page: hindsight, legend, totals and titles."""
    explained = (2 if run_view.totals.hosts > 1 else 1) if rows >= ROOMY_ROWS else 0
    return explained + bool(run_view.hindsight) + 1


def _legend(*, split: bool) -> Line:
    util = [
        Cell("  utilization ", Level.DIM),
        Cell(BUSY, Level.BACKWARD), Cell(" busy  ", Level.DIM),
        Cell(WAITS, Level.WAITING), Cell(" waiting in all-reduce", Level.DIM),
    ]  # fmt: skip
    if not split:
        return util
    return [
        *util,
        Cell("   memory ", Level.DIM),
        Cell(TORCH, Level.FORWARD), Cell(" torch  ", Level.DIM),
        Cell(PROCESS, Level.FORWARD), Cell(" rest of the process  ", Level.DIM),
        Cell(OTHERS, Level.OTHER), Cell(f" other processes  {FREE} free", Level.DIM),
    ]  # fmt: skip


def _host_line(entry: Entry, columns: int) -> Line:
    totals = gpu_totals(entry.under)
    name = clip(entry.host or "unknown host", max(columns // 3, 8))
    if totals is None:
        note = f"  {plural(len(entry.under), 'rank')} · no GPU data"
        return [Cell(name, Level.STRONG), Cell(note, Level.DIM)]
    return _summary(name, totals, columns)


def _summary(name: str, totals: GpuTotals, columns: int) -> Line:
    """Totals after a name, as many of them as fit; warnings always."""
    marks = [Cell(f"✖ {totals.failed} with errors", Level.BAD)] if totals.failed else []
    if totals.throttled:
        marks.append(Cell(f"▲ {totals.throttled} throttled", Level.WARN))
    line = [Cell(name, Level.STRONG)]
    left = columns - columns_of(name) - sum(columns_of(mark.text) + 3 for mark in marks)
    for place, part in enumerate(_totals_texts(totals)):
        text = f"{' · ' if place else '  '}{part}"
        if columns_of(text) <= left:
            line.append(Cell(text, Level.DIM))
            left -= columns_of(text)
    for mark in marks:
        line += [Cell(" · ", Level.DIM), mark]
    return line


def _totals_texts(totals: GpuTotals) -> list[str]:
    util = UNPROVEN if totals.util_percent is None else f"{totals.util_percent:.0f}%"
    if totals.waiting_percent is not None and totals.waiting_percent >= WORTH_SAYING_PERCENT:
        util += f", {totals.waiting_percent:.0f}% waiting"
    texts = [plural(totals.gpus, "GPU"), util]
    if totals.power_mw is not None:
        limit = f"/{totals.power_limit_mw / _MW_PER_KW:.1f}" if totals.power_limit_mw else ""
        texts.append(f"{totals.power_mw / _MW_PER_KW:.1f}{limit} kW")
    if totals.hottest is not None:
        texts.append(f"hottest {totals.hottest[0]} °C")
    if len(totals.names) == 1:
        texts.append(totals.names[0])
    return texts


MAP_FROM_GPUS: Final = 65
"""The map is shown from this number of GPUs on; fewer are in the table."""
_LABEL: Final = "rank"
_ERROR: Final = ("✖", Level.BAD)
_THROTTLED: Final = ("▲", Level.WARN)
_WAITS: Final = (WAITS, Level.WAITING)
_UNKNOWN: Final = ("?", Level.DIM)
_WORK: Final = Cell(EIGHTHS[2] + EIGHTHS[5] + EIGHTHS[8], Level.BACKWARD)
_LEGEND: Final = (
    Cell(*_WAITS), Cell(" waiting   ", Level.DIM), Cell(*_THROTTLED), Cell(" throttled   ", Level.DIM),
    Cell(*_ERROR), Cell(" error   ", Level.DIM), Cell(*_UNKNOWN), Cell(" no data", Level.DIM),
)  # fmt: skip


def gpu_map(run_view: RunView, columns: int, rows: int) -> list[Line]:
    """All GPUs with one glyph each, by host, below a legend; nothing where they are few or do not fit."""
    entries = gpu_rows(run_view.rows, of_now=not run_view.hindsight)
    if len(entries) < MAP_FROM_GPUS:
        return []
    label_columns = max(len(str(max(entry.row.state.rank for entry in entries))), len(_LABEL)) + 1
    width = max(columns - label_columns, 1)
    lines: list[Line] = []
    left = 0
    for under in by_host(entries, lambda entry: entry.row).values():
        for part in (under[place : place + width] for place in range(0, len(under), width)):
            if left < len(part) or not lines:
                left = columns - label_columns
                lines.append([Cell(f"{part[0].row.state.rank:>{label_columns - 1}} ", Level.DIM)])
            for (glyph, level), same in groupby(map(_glyph, part)):
                lines[-1].append(Cell(glyph * len(list(same)), level))
            lines[-1].append(Cell(" "))
            left -= len(part) + 1
    # In hindsight, current readings and past steps do not go together: the waiting cannot be subtracted.
    meaning = " utilization   " if run_view.hindsight else " busy   "
    legend = [Cell(_LABEL.ljust(label_columns), Level.DIM), _WORK, Cell(meaning, Level.DIM), *_LEGEND]
    return [fit(line, columns) for line in (legend, *lines)] if len(lines) < rows else []


def _glyph(entry: GpuRow) -> tuple[str, Level]:
    row, gpu = entry
    if gpu is None:
        return _UNKNOWN
    if gpu.lost or gpu.xids:
        return _ERROR
    if gpu.util_percent is None or not is_current(row):
        return _UNKNOWN
    if is_throttled(gpu):
        return _THROTTLED
    if is_waiting(row):
        return _WAITS
    busy = gpu.util_percent - (waiting_percent(row, gpu) or 0.0)
    return EIGHTHS[min(max(round(busy / 100 * 8), 1), 8)], Level.BACKWARD
