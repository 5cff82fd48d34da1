"""The page of GPUs: all of them, host by host or in the order that is asked for, one line each.

Many GPUs at one glance: a sign each, host by host.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpwatch.core.units import UNPROVEN, plural
from ddpwatch.view.cells import Cell, Level, clip, columns_of, fit
from ddpwatch.view.charts.sparkline import EIGHTHS
from ddpwatch.view.gpus.columns import (
    BUSY,
    FREE,
    ORDERS,
    OTHERS,
    PROCESS,
    TORCH,
    WAITS,
    gpu_heading,
    gpu_line,
    gpu_plan,
)
from ddpwatch.view.gpus.usage import (
    WORTH_SAYING_PERCENT,
    GpuRow,
    gpu_rows,
    gpu_totals,
    held_harshly,
    stale_s,
    waiting_percent,
    waits_now,
)
from ddpwatch.view.layout import capped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.view.cells import Line
    from ddpwatch.view.gpus.usage import GpuTotals
    from ddpwatch.view.ranks.table import Ordering
    from ddpwatch.view.run_view import RunView

GUTTER_COLUMNS: Final = 2
ROOMY_ROWS: Final = 8
"""From here on the glyphs are explained."""
BY_HOST_UP_TO: Final = 32
"""So many GPUs keep their places; of more, hosts that need a look come first."""
_KILO: Final = 1e6
"""Milliwatts of a kilowatt."""

GpuKey = tuple[int, str]
"""Rank and device."""


class Entry(NamedTuple):
    """A line of the page: a GPU, or the host of those below."""

    gpu: GpuRow | None
    host: str = ""
    under: Sequence[GpuRow] = ()
    """What the host has."""


@dataclass(frozen=True)
class GpuPage:
    """All lines of the page in their order. Worked out once for drawing, moving and choosing."""

    entries: list[Entry]
    by_host: bool

    def keys(self) -> list[GpuKey]:
        """The GPUs from top to bottom."""
        return [key_of(entry.gpu) for entry in self.entries if entry.gpu is not None]

    def line_of(self, key: GpuKey | None) -> int:
        """Where a GPU stands; that of the first one if it is not there."""
        places = {key_of(entry.gpu): place for place, entry in enumerate(self.entries) if entry.gpu is not None}
        return places.get(key, min(places.values(), default=0)) if key is not None else min(places.values(), default=0)


def key_of(entry: GpuRow) -> GpuKey:
    """What a GPU is found again by when the order changes."""
    return entry.row.state.rank, entry.gpu.device if entry.gpu is not None else ""


def gpu_page(run_view: RunView, ordering: Ordering) -> GpuPage:
    """By host, unless it is sorted by something else: then the hosts' lines go, and each GPU says its host. Of many
    hosts those come first that an alert is about.
    """
    found = gpu_rows(run_view.rows, of_now=not run_view.hindsight)
    if ordering.column in ORDERS and ordering.column != "RANK":
        found.sort(key=ORDERS[ordering.column], reverse=ordering.backwards)
        return GpuPage([Entry(entry) for entry in found], by_host=False)
    hosts: dict[str, list[GpuRow]] = {}
    for entry in found:
        hosts.setdefault(entry.row.state.host, []).append(entry)
    ordered = list(hosts.items())
    if len(found) > BY_HOST_UP_TO and not ordering.column:
        ordered.sort(key=lambda item: not any(entry.row.finding is not None for entry in item[1]))
    entries: list[Entry] = []
    for host, under in reversed(ordered) if ordering.backwards else ordered:
        entries.append(Entry(None, host, under))
        entries += [Entry(entry) for entry in (reversed(under) if ordering.backwards else under)]
    return GpuPage(entries, by_host=True)


def gpu_table(
    run_view: RunView, page: GpuPage, columns: int, rows: int, *, first: int, chosen: GpuKey | None, ordering: Ordering
) -> list[Line]:
    """What the glyphs mean, the titles, then the lines from number `first` on. At most `rows` lines."""
    extent = run_view.totals.extent
    inner = columns - GUTTER_COLUMNS
    several = run_view.totals.hosts > 1
    plan = gpu_plan(
        inner, rank_columns=extent.rank_columns, host_columns=0 if page.by_host or not several else extent.host_columns
    )
    top: list[Line] = [fit(_legend(split="SPLIT" in plan.widths), columns)] if rows >= ROOMY_ROWS else []
    if several and top and run_view.totals.gpus is not None:
        top.append(_summary(f"all {plural(run_view.totals.hosts, 'host')}", run_view.totals.gpus, columns))
    if run_view.hindsight:
        top.insert(0, [Cell(f"‖ {run_view.hindsight}", Level.DIM)])
    first, shown, rest = visible(page, rows - len(top) - 1, first)
    sorted_by = ordering.column if ordering.column in ORDERS else ""
    titles = gpu_heading(plan, sorted_by, backwards=ordering.backwards)
    lines: list[Line] = [*top, [Cell(f"{'↑' if first else ' ':{GUTTER_COLUMNS}}", Level.DIM), *titles]]
    for entry in shown:
        if entry.gpu is None:
            lines.append(_host_line(entry, columns))
        else:
            mark = Cell("▌ " if key_of(entry.gpu) == chosen else "  ", Level.TITLE)
            lines.append([mark, *gpu_line(plan, entry.gpu)])
    if rest > 0:
        lines.append([Cell(f"  … {plural(rest, 'more line')}", Level.DIM)])
    return capped([fit(line, columns) for line in lines], rows)


def visible(page: GpuPage, room: int, first: int) -> tuple[int, list[Entry], int]:
    """Which line is the first, the lines that are in sight, and how many are below: those take a line to say so."""
    room = max(room, 1)
    first = min(max(first, 0), max(len(page.entries) - room, 0))
    rest = len(page.entries) - first - room
    shown = page.entries[first : first + (room - 1 if rest > 0 else room)]
    return first, shown, rest + 1 if rest > 0 else 0


def table_top(run_view: RunView, rows: int = ROOMY_ROWS) -> int:
    """How many lines stand above the first of the page: what the glyphs mean, all hosts together, and the titles."""
    explained = (2 if run_view.totals.hosts > 1 else 1) if rows >= ROOMY_ROWS else 0
    return explained + bool(run_view.hindsight) + 1


def table_rows(run_view: RunView, rows: int) -> int:
    """How many of the rows are for lines of the page."""
    return rows - table_top(run_view, rows)


def _legend(*, split: bool) -> Line:
    util = [
        Cell("  utilisation ", Level.DIM),
        Cell(BUSY, Level.BACKWARD), Cell(" busy  ", Level.DIM),
        Cell(WAITS, Level.WAITING), Cell(" waiting in all-reduce", Level.DIM),
    ]  # fmt: skip
    if not split:
        return util
    return [
        *util,
        Cell("   memory ", Level.DIM),
        Cell(TORCH, Level.FORWARD), Cell(" torch  ", Level.DIM),
        Cell(PROCESS, Level.FORWARD), Cell(" rest of its process  ", Level.DIM),
        Cell(OTHERS, Level.OTHER), Cell(f" others  {FREE} free", Level.DIM),
    ]  # fmt: skip


def _host_line(entry: Entry, columns: int) -> Line:
    totals = gpu_totals(entry.under)
    name = clip(entry.host or "host not known", max(columns // 3, 8))
    if totals is None:
        note = f"  {plural(len(entry.under), 'rank')} · no GPU is read"
        return [Cell(name, Level.STRONG), Cell(note, Level.DIM)]
    return _summary(name, totals, columns)


def _summary(who: str, totals: GpuTotals, columns: int) -> Line:
    parts, marks = host_words(totals)
    name = Cell(who, Level.STRONG)
    line = [name]
    left = columns - columns_of(name.text) - sum(columns_of(mark.text) + 3 for mark in marks)
    for place, part in enumerate(parts):
        text = f"{' · ' if place else '  '}{part}"
        if columns_of(text) > left:
            continue
        line.append(Cell(text, Level.DIM))
        left -= columns_of(text)
    for mark in marks:
        line += [Cell(" · ", Level.DIM), mark]
    return line


def host_words(totals: GpuTotals) -> tuple[list[str], list[Cell]]:
    """All GPUs of a host, what matters most first; and what must not be overlooked."""
    util = UNPROVEN if totals.util_percent is None else f"{totals.util_percent:.0f} %"
    if totals.waiting_percent is not None and totals.waiting_percent >= WORTH_SAYING_PERCENT:
        util += f", of it {totals.waiting_percent:.0f} waiting"
    parts = [plural(totals.gpus, "GPU"), util]
    if totals.power_mw is not None:
        limit = f" of {totals.power_limit_mw / _KILO:.1f}" if totals.power_limit_mw else ""
        parts.append(f"{totals.power_mw / _KILO:.1f}{limit} kW")
    if totals.hottest is not None:
        parts.append(f"hottest {totals.hottest[0]} °C")
    if len(totals.names) == 1:
        parts.append(totals.names[0])
    marks = [Cell(f"✖ {totals.trouble} with errors", Level.BAD)] if totals.trouble else []
    if totals.held:
        marks.append(Cell(f"▲ {totals.held} throttled", Level.WARN))
    return parts, marks


FROM_GPUS: Final = 65
"""Fewer are seen in the list."""
LEGEND_ROWS: Final = 1
_LABEL: Final = "rank"
_ERROR: Final = ("✖", Level.BAD)
_HELD: Final = ("▲", Level.WARN)
_WAITS: Final = (WAITS, Level.WAITING)
_UNKNOWN: Final = ("?", Level.DIM)
_WORK: Final = Cell(EIGHTHS[2] + EIGHTHS[5] + EIGHTHS[8], Level.BACKWARD)
_LEGEND: Final = (
    Cell(*_WAITS), Cell(" waits   ", Level.DIM), Cell(*_HELD), Cell(" throttled   ", Level.DIM),
    Cell(*_ERROR), Cell(" error   ", Level.DIM), Cell(*_UNKNOWN), Cell(" not read", Level.DIM),
)  # fmt: skip


def gpu_map(run_view: RunView, columns: int, rows: int) -> list[Line]:
    """What the signs mean, then all GPUs; nothing where they are few or do not fit."""
    entries = gpu_rows(run_view.rows, of_now=not run_view.hindsight)
    if len(entries) < FROM_GPUS:
        return []
    label_columns = max(len(str(max(entry.row.state.rank for entry in entries))) + 1, len(_LABEL) + 1)
    lines: list[Line] = []
    left = 0
    for first, signs in _hosts(entries, columns - label_columns):
        if left < len(signs) or not lines:
            left = columns - label_columns
            lines.append([Cell(f"{first:>{label_columns - 1}} ", Level.DIM)])
        for (sign, level), same in groupby(signs):
            lines[-1].append(Cell(sign * len(list(same)), level))
        lines[-1].append(Cell(" "))
        left -= len(signs) + 1
    if len(lines) + LEGEND_ROWS > rows:
        return []
    # Looking back, readings of now and steps of then do not go together: what of it is waiting cannot be told.
    reported = Cell(" in use, waiting too   " if run_view.hindsight else " work without waiting   ", Level.DIM)
    legend = [Cell(_LABEL.ljust(label_columns), Level.DIM), _WORK, reported, *_LEGEND]
    return [fit(line, columns) for line in (legend, *lines)]


def _hosts(entries: list[GpuRow], most: int) -> list[tuple[int, list[tuple[str, Level]]]]:
    """The first rank and the signs of each host; of a host that is wider than `most`, in parts."""
    hosts: dict[str, list[GpuRow]] = {}
    for entry in entries:
        hosts.setdefault(entry.row.state.host, []).append(entry)
    most = max(most, 1)
    parts = (under[k : k + most] for under in hosts.values() for k in range(0, len(under), most))
    return [(part[0].row.state.rank, [_sign(entry) for entry in part]) for part in parts]


def _sign(entry: GpuRow) -> tuple[str, Level]:
    row, gpu = entry
    if gpu is None:
        return _UNKNOWN
    if gpu.lost or gpu.xids:
        return _ERROR
    if gpu.util_percent is None or stale_s(row.state) is not None or row.condition not in {"ok", "paused"}:
        return _UNKNOWN
    if held_harshly(gpu):
        return _HELD
    if waits_now(row):
        return _WAITS
    busy = gpu.util_percent - (waiting_percent(row, gpu) or 0.0)
    return EIGHTHS[min(max(round(busy / 100 * 8), 1), 8)], Level.BACKWARD
