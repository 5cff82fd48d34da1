"""CPU and memory of each rank's process, by host: the page of devices where no GPU is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpwatch.core.units import UNPROVEN, duration, percent, plural, size
from ddpwatch.view.cells import Cell, Level, clip, fit, line_columns, pad, plain
from ddpwatch.view.columns import Column, lay_out
from ddpwatch.view.gpus.busy_and_waiting import by_host, cpu_percent
from ddpwatch.view.gpus.table import visible
from ddpwatch.view.layout import bar, capped, paragraph

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.view.cells import Line
    from ddpwatch.view.columns import Layout
    from ddpwatch.view.ranks.columns import Row
    from ddpwatch.view.run_view import RunView

NOT_REPORTED: Final = "no rank has reported a GPU"
INSTEAD: Final = "Shown instead: CPU and memory of each rank's process."
# Bounds of the width of CPU bars, in terminal cells.
BAR_MAX_COLUMNS: Final = 40
BAR_MIN_COLUMNS: Final = 6
MAX_CORES: Final = 99_999
"""Larger numbers of cores are shown as this one, so that they fit their column."""


@dataclass(frozen=True)
class _Host:
    """The ranks of one host. They are added up only where the host is shown: there may be thousands."""

    name: str
    rows: list[Row]

    @cached_property
    def cpu_percent(self) -> float:
        return sum(cpu_percent(row.state) for row in self.rows)

    @cached_property
    def rss_bytes(self) -> int:
        return sum(_rss_bytes(row.state) for row in self.rows)


class _Used(NamedTuple):
    """What one rank uses of its host."""

    rank: RankState
    host: _Host


def device_table(run_view: RunView, columns: int, rows: int, *, first: int) -> list[Line]:
    """Why no GPU is shown, then the hosts with their ranks, from line `first` on. At most `rows` lines."""
    top: list[Line] = [*paragraph(no_gpu(run_view), columns, Level.DIM, lead=[Cell("· ", Level.DIM)]), []]
    if run_view.hindsight:
        # At the top: the rest of the screen looks the same as it does live.
        top.insert(0, [Cell(f"‖ {run_view.hindsight}", Level.DIM)])
    if rows < len(top) + 3:
        top = top[:1] if run_view.hindsight else []
    entries: list[_Host | _Used] = []
    for name, under in by_host(run_view.rows, lambda row: row).items():
        host = _Host(name, under)
        entries += [host, *(_Used(row.state, host) for row in under)]
    first, shown, below = visible(entries, rows - len(top) - 1, first)
    layout = _layout(run_view, columns, above=first)
    titles = [Cell(plain(layout.heading()), Level.DIM)]
    lines = [_host_line(entry, layout) if isinstance(entry, _Host) else layout.line(entry) for entry in shown]
    return capped([fit(line, columns) for line in [*top, titles, *lines, *below]], rows)


def no_gpu(run_view: RunView) -> str:
    """That no GPU is read, and why: the reason that most ranks report."""
    reported = Counter(row.state.gpus.latest.why for row in run_view.rows if row.state.gpus.latest is not None)
    why = next((why for why, _ in reported.most_common() if why), NOT_REPORTED)
    return f"No GPU data: {why.rstrip('.')}. {INSTEAD}"


def cpu_share(rank: RankState) -> str:
    """CPU use as a share of the cores that the process may run on; empty = not reported."""
    cores = _cores(rank)
    return f"{percent(cpu_percent(rank) / 100 / cores)} of {plural(cores, 'core')}" if cores and rank.beat else ""


def memory_change(rank: RankState) -> str:
    """Change of the resident memory over the time watched; empty before there are two samples."""
    span = rank.rss_history.span
    if span is None:
        return ""
    (first_ns, first_bytes), (last_ns, last_bytes) = span
    change = last_bytes - first_bytes
    sign = "+" if change >= 0 else "-"
    return f"{sign}{size(abs(change))} in {duration((last_ns - first_ns) / 1e9)}"


def _layout(run_view: RunView, columns: int, *, above: int) -> Layout[_Used]:
    """Fit the columns; the title of the bars counts the lines `above`."""
    # One process may keep several cores busy: all bars have the scale of the busiest.
    full_percent = max((cpu_percent(row.state) for row in run_view.rows), default=0.0)
    full_percent = max(full_percent, 100.0)
    bars = Column[_Used](
        f"  ↑ {plural(above, 'line')}" if above else "", BAR_MIN_COLUMNS + 2, BAR_KEEP, right=False,
        draw=lambda used, width: [Cell("  "), Cell(bar(cpu_percent(used.rank) / full_percent, width - 2))],
        grow=(BAR_MAX_COLUMNS + 2,),
    )  # fmt: skip
    has_cores = any(_cores(row.state) for row in run_view.rows)
    gauges = GAUGES if has_cores else GAUGES[1:]
    return lay_out([*PROCESS, bars, *gauges], columns, gap=0)


def _host_line(host: _Host, layout: Layout[_Used]) -> Line:
    """The host's name goes over the bar's columns: a sum would not suit its scale."""
    room = sum(width for column, width in layout.columns if column.keep >= BAR_KEEP)
    together = f"  {plural(len(host.rows), 'rank')} · CPU {host.cpu_percent:.0f}%"
    name = clip(host.name or "unknown host", max(room - len(together), 8))
    line = fit([Cell(name, Level.STRONG), Cell(together, Level.DIM)], room)
    line.append(Cell(" " * (room - line_columns(line))))
    for column, width in layout.columns:
        if column.keep < BAR_KEEP:
            text = _size(host.rss_bytes) if column.title == "RSS" else ""
            line.append(Cell(pad(text, width, right=True), Level.DIM))
    return line


def _read(text: Callable[[_Used], str]) -> Callable[[_Used], Cell]:
    return lambda used: Cell(text(used), Level.PLAIN if used.rank.beat else Level.DIM)


def _cores(rank: RankState) -> int:
    return min(rank.hello.cores, MAX_CORES) if rank.hello else 0


def _rss_bytes(rank: RankState) -> int:
    return rank.beat.rss_bytes if rank.beat else 0


def _rss_share(used: _Used) -> str:
    return percent(_rss_bytes(used.rank) / used.host.rss_bytes if used.host.rss_bytes else None)


def _size(count_bytes: int) -> str:
    return size(count_bytes) if count_bytes else UNPROVEN


PROCESS: Final = (
    Column[_Used]("  RANK", 10, read=lambda used: Cell(f"  {used.rank.rank}", Level.STRONG), right=False),
    Column("CPU", 8, read=_read(lambda used: f"{cpu_percent(used.rank):.0f}%" if used.rank.beat else UNPROVEN)),
)
BAR_KEEP: Final = 5
"""`keep` of the CPU bars: all columns right of them are dropped before."""
GAUGES: Final = (
    Column("OF ITS CORES", 18, 4, _read(lambda used: cpu_share(used.rank))),
    Column("RSS", 7, 3, _read(lambda used: _size(_rss_bytes(used.rank)))),
    Column("OF RANKS'", 11, 2, _read(_rss_share)),
    Column("RSS CHANGE", 19, 1, _read(lambda used: memory_change(used.rank))),
)
"""The columns right of the bar; the first only where a rank reports how many cores it may run on."""
