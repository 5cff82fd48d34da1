"""Many GPUs at one glance: a sign each, host by host."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from ddpwatch.view.cells import Cell, Level, fit
from ddpwatch.view.gpuline import WAITS
from ddpwatch.view.gpuload import gpu_rows, held_harshly, stale_s, waiting_percent, waits_now
from ddpwatch.view.spark import EIGHTHS

if TYPE_CHECKING:
    from ddpwatch.view.cells import Line
    from ddpwatch.view.gpuload import GpuRow
    from ddpwatch.view.picture import Picture

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


def gpu_map(picture: Picture, columns: int, rows: int) -> list[Line]:
    """What the signs mean, then all GPUs; nothing where they are few or do not fit."""
    entries = gpu_rows(picture.rows, of_now=not picture.hindsight)
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
    told = Cell(" in use, waiting too   " if picture.hindsight else " work without waiting   ", Level.DIM)
    legend = [Cell(_LABEL.ljust(label_columns), Level.DIM), _WORK, told, *_LEGEND]
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
