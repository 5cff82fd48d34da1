"""The page of devices where no GPU is read: what each rank's process uses of its host, host by host, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from ddpwatch.core.units import UNPROVEN, duration, percent, plural, size
from ddpwatch.view.cells import Cell, Level, clip, fit, line_columns, pad
from ddpwatch.view.layout import bar, capped, paragraph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.view.cells import Line
    from ddpwatch.view.ranks.columns import Row
    from ddpwatch.view.run_view import RunView

NOT_REPORTED: Final = "no rank has told of one"
INSTEAD: Final = "CPU and memory of each rank's process instead."
BAR_MAX_COLUMNS: Final = 40
BAR_MIN_COLUMNS: Final = 6
MAX_CPU_PERCENT: Final = 99_999.0
MAX_CORES: Final = 99_999
_NAME_COLUMNS: Final = 10
_CPU_COLUMNS: Final = 8


@dataclass(frozen=True)
class _Host:
    """The ranks of one host, and what they use together. Added up only where it is shown: there may be thousands."""

    name: str
    rows: list[Row]

    @cached_property
    def cpu_percent(self) -> float:
        return sum(_cpu_percent(row.state) for row in self.rows)

    @cached_property
    def rss_bytes(self) -> int:
        return sum(_rss_bytes(row.state) for row in self.rows)


@dataclass(frozen=True)
class Gauge:
    """One column: its title, its width, and how it reads a rank and a whole host."""

    title: str
    columns: int
    of_rank: Callable[[RankState, _Host], str]
    of_host: Callable[[_Host], str]


CPU_GAUGES: Final = (
    Gauge("RSS", 7, lambda rank, _: _size(_rss_bytes(rank)), lambda host: _size(host.rss_bytes)),
    Gauge(
        "OF RANKS'",
        11,
        lambda rank, host: percent(_rss_bytes(rank) / host.rss_bytes if host.rss_bytes else None),
        lambda _: "",
    ),
    Gauge("RSS CHANGE", 19, lambda rank, _: memory_change(rank), lambda _: ""),
)
"""In the order of their importance: the last go first where there is no room."""
CORES_GAUGE: Final = Gauge("OF ITS CORES", 18, lambda rank, _: cpu_share(rank), lambda _: "")
"""Before all of them, where ranks tell how many they may run on."""


def device_table(run_view: RunView, columns: int, rows: int, *, first: int) -> list[Line]:
    """A remark on what is shown, then the hosts with their ranks, from line `first` on. At most `rows` lines."""
    top: list[Line] = [*paragraph(no_gpu(run_view), columns, Level.DIM, lead=[Cell("· ", Level.DIM)]), []]
    if run_view.hindsight:
        # In words of its own, above all else: the rest of the screen does not look any different.
        top.insert(0, [Cell(f"‖ {run_view.hindsight}", Level.DIM)])
    if rows < len(top) + 3:
        top = top[:1] if run_view.hindsight else []
    hosts = _hosts(run_view)
    gauges, bar_columns = _plan(columns, with_cores=any(_cores(row.state) for row in run_view.rows))
    # One process may keep several cores busy: all bars have the scale of the busiest.
    full_percent = max((_cpu_percent(row.state) for row in run_view.rows), default=0.0)
    room = max(rows - len(top) - 1, 1)
    height = len(hosts) + len(run_view.rows)
    first = min(max(first, 0), max(height - room, 0))
    rest = height - first - room
    shown = _entries(hosts, first, room - 1 if rest > 0 else room)
    lines = [*top, _titles(gauges, bar_columns, first)]
    for host, row in shown:
        if row is None:
            lines.append(_host_line(host, gauges, bar_columns))
        else:
            lines.append(_rank_line(row, host, gauges, bar_columns, max(full_percent, 100.0)))
    if rest > 0:
        lines.append([Cell(f"  … {plural(rest + 1, 'more line')}", Level.DIM)])
    return capped([fit(line, columns) for line in lines], rows)


def no_gpu(run_view: RunView) -> str:
    """That no GPU is read, and why: what most ranks say."""
    reported = Counter(row.state.gpus.latest.why for row in run_view.rows if row.state.gpus.latest is not None)
    why = next((why for why, _ in reported.most_common() if why), NOT_REPORTED)
    return f"No GPU data: {why.rstrip('.')}. {INSTEAD}"


def cpu_share(rank: RankState) -> str:
    """What part of the cores that the process may run on it uses; empty = not told."""
    cores = _cores(rank)
    return f"{percent(_cpu_percent(rank) / 100 / cores)} of {plural(cores, 'core')}" if cores and rank.beat else ""


def memory_change(rank: RankState) -> str:
    """How the resident memory has changed over the time watched; nothing before there are two samples."""
    span = rank.rss_history.span
    if span is None:
        return ""
    (first_ns, first_bytes), (last_ns, last_bytes) = span
    change = last_bytes - first_bytes
    sign = "+" if change >= 0 else "-"
    return f"{sign}{size(abs(change))} in {duration((last_ns - first_ns) / 1e9)}"


def _plan(columns: int, *, with_cores: bool) -> tuple[Sequence[Gauge], int]:
    """The gauges that fit beside the shortest bar, and the bar's length."""
    gauges = [*([CORES_GAUGE] if with_cores else []), *CPU_GAUGES]
    while gauges and _fixed_columns(gauges) + BAR_MIN_COLUMNS > columns:
        gauges.pop()
    left = columns - _fixed_columns(gauges)
    return gauges, min(left, BAR_MAX_COLUMNS) if left >= BAR_MIN_COLUMNS else 0


def _fixed_columns(gauges: Sequence[Gauge]) -> int:
    return _NAME_COLUMNS + _CPU_COLUMNS + 2 + sum(gauge.columns for gauge in gauges)


def _titles(gauges: Sequence[Gauge], bar_columns: int, above: int) -> Line:
    text = pad("  RANK", _NAME_COLUMNS) + pad("CPU", _CPU_COLUMNS, right=True) + "  "
    text += pad(f"↑ {plural(above, 'line')}" if above else "", bar_columns)
    return [Cell(text + "".join(pad(gauge.title, gauge.columns, right=True) for gauge in gauges), Level.DIM)]


def _host_line(host: _Host, gauges: Sequence[Gauge], bar_columns: int) -> Line:
    """The host's name goes over the bar's columns: a sum would not suit its scale."""
    room = _NAME_COLUMNS + _CPU_COLUMNS + 2 + bar_columns
    together = f"  {plural(len(host.rows), 'rank')} · CPU {host.cpu_percent:.0f} %"
    name = clip(host.name or "host not known", max(room - len(together), 8))
    line = fit([Cell(name, Level.STRONG), Cell(together, Level.DIM)], room)
    space = Cell(" " * (room - line_columns(line)))
    totals = (pad(gauge.of_host(host), gauge.columns, right=True) for gauge in gauges)
    return [*line, space, *(Cell(total, Level.DIM) for total in totals)]


def _rank_line(row: Row, host: _Host, gauges: Sequence[Gauge], bar_columns: int, full_percent: float) -> Line:
    rank = row.state
    level = Level.PLAIN if rank.beat else Level.DIM
    cpu = f"{_cpu_percent(rank):.0f} %" if rank.beat else UNPROVEN
    filled = bar(_cpu_percent(rank) / full_percent, bar_columns)
    return [
        Cell(pad(f"  {rank.rank}", _NAME_COLUMNS), Level.STRONG),
        Cell(pad(cpu, _CPU_COLUMNS, right=True), level),
        Cell("  "),
        Cell(filled),
        *(Cell(pad(gauge.of_rank(rank, host), gauge.columns, right=True), level) for gauge in gauges),
    ]


def _hosts(run_view: RunView) -> list[_Host]:
    """In the order of their first rank, also where the ranks of a host do not stand together."""
    by_host: dict[str, list[Row]] = {}
    for row in run_view.rows:
        by_host.setdefault(row.state.host, []).append(row)
    return [_Host(name, rows) for name, rows in by_host.items()]


def _entries(hosts: Sequence[_Host], first: int, most: int) -> list[tuple[_Host, Row | None]]:
    """The lines from number `first` on, each a rank with its host, or the host itself."""
    shown: list[tuple[_Host, Row | None]] = []
    for host in hosts:
        lines = 1 + len(host.rows)
        if first < lines:
            until = first + most - len(shown)
            shown += [(host, None)] if first == 0 and until > 0 else []
            shown += [(host, row) for row in host.rows[max(first - 1, 0) : max(until - 1, 0)]]
        first = max(first - lines, 0)
        if len(shown) >= most:
            break
    return shown


def _cpu_percent(rank: RankState) -> float:
    return min(rank.beat.cpu_percent, MAX_CPU_PERCENT) if rank.beat else 0.0


def _cores(rank: RankState) -> int:
    return min(rank.hello.cores, MAX_CORES) if rank.hello else 0


def _rss_bytes(rank: RankState) -> int:
    return rank.beat.rss_bytes if rank.beat else 0


def _size(count_bytes: int) -> str:
    return size(count_bytes) if count_bytes else UNPROVEN
