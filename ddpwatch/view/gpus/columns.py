"""The columns of the GPU table: what each one shows of a GPU, what it sorts by, and which are dropped first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.diagnosis.xids import xid_meaning
from ddpwatch.core.state.gpu import reasons_text
from ddpwatch.core.units import UNPROVEN, duration, size
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.cells import Cell, Level, fit, line_columns, pad
from ddpwatch.view.charts.sparkline import spark
from ddpwatch.view.columns import Column, lay_out, sort_keys
from ddpwatch.view.gpus.busy_and_waiting import (
    GpuRow,
    is_current,
    is_throttled,
    is_waiting,
    stale_s,
    throttle_reasons,
    waiting_percent,
)
from ddpwatch.view.layout import bar, spelled_size
from ddpwatch.view.ranks.columns import condition_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.view.cells import Line
    from ddpwatch.view.columns import Layout
    from ddpwatch.wire import Gpu

BUSY: Final = "█"
WAITS: Final = "░"
TORCH: Final = "▆"
PROCESS: Final = "▄"
OTHERS: Final = "▂"
FREE: Final = "·"
GAP: Final = 2
"""Distance of columns, in terminal cells."""
FULL_PERCENT: Final = 100 * 8 / 7
"""Top of the scale of a history, in percent: 100% leaves an eighth of the row free, so that rows stand apart."""
LONG_BADGE_COLUMNS: Final = 30
"""From this width on, the state names all throttle reasons."""
SHORT: Final = {
    "hw_thermal_slowdown": "hw thermal",
    "sw_thermal_slowdown": "thermal",
    "hw_power_brake_slowdown": "power brake",
    "hw_slowdown": "hw slowdown",
    "sw_power_cap": "power cap",
}


def badges(entry: GpuRow, *, long: bool = False) -> list[Cell]:
    """What is wrong with a GPU, the worst first; `long` = with all throttle reasons."""
    row, gpu = entry
    rank = row.state
    if gpu is None:
        why = rank.gpus.latest.why if rank.gpus.latest else "not reported"
        return [Cell(f"no GPU data: {why}" if why else "no GPU", Level.DIM)]
    if gpu.lost:
        return [Cell("✖ lost", Level.BAD)]
    cells = []
    if gpu.xids:
        mark, level, _ = MARKS[xid_meaning(gpu.xids[-1])[1]]
        cells.append(Cell(f"{mark} Xid {gpu.xids[-1]}", level))
    if gpu.ecc_uncorrected:
        new = gpu.ecc_uncorrected > rank.gpus.ecc_before.get(gpu.device, 0)
        cells.append(Cell(f"{'✖' if new else '·'} ECC {gpu.ecc_uncorrected}", Level.BAD if new else Level.DIM))
    if reasons := throttle_reasons(gpu):
        words = reasons_text(reasons) if long else SHORT[reasons[0]]
        cells.append(Cell(f"▲ {words}", Level.WARN) if is_throttled(gpu) else Cell(f"· {words}", Level.DIM))
    if (age_s := stale_s(rank)) is not None:
        cells.append(Cell(f"▲ stale, {duration(age_s)}", Level.WARN))
    if row.condition != "ok":
        cells.append(Cell(condition_text(row.condition), Level.DIM))
    elif is_waiting(row):
        cells.append(Cell("░ waiting", Level.WAITING))
    return cells


def memory_bar(gpu: Gpu, columns: int) -> Line:
    """Memory as a bar, by owner: torch, the rest of this process, other processes; then what is free."""
    parts = memory_parts(gpu)
    if not gpu.total_bytes or parts is None:
        return [Cell(" " * columns)]
    line: Line = []
    done_bytes = used_columns = 0
    glyphs = ((TORCH, Level.FORWARD), (PROCESS, Level.FORWARD), (OTHERS, Level.OTHER))
    for (_, part_bytes), (glyph, level) in zip(parts, glyphs, strict=True):
        done_bytes += part_bytes
        upto = min(round(done_bytes / gpu.total_bytes * columns), columns)
        line.append(Cell(glyph * max(upto - used_columns, 0), level))
        used_columns = max(used_columns, upto)
    return [*line, Cell(FREE * (columns - used_columns), Level.DIM)]


def memory_parts(gpu: Gpu) -> list[tuple[str, int]] | None:
    """Bytes in use by owner; None = not known. What cannot be attributed counts for the next larger part."""
    if gpu.used_bytes is None:
        return None
    own = min(gpu.own_bytes if gpu.own_bytes is not None else gpu.reserved_bytes or 0, gpu.used_bytes)
    torch = min(gpu.reserved_bytes or 0, own)
    return [("torch", torch), ("rest of this process", own - torch), ("other processes", gpu.used_bytes - own)]


def memory_text(used: int, total: int, *, spelled: bool = False) -> str:
    """Bytes as `61/80G`, with one unit where both have the same; `spelled` = as `61/80 GiB`."""
    write = spelled_size if spelled else size
    if not total:
        return write(used)
    one, other = size(used), size(total)
    return f"{one[:-1] if one[-1] == other[-1] else write(used)}/{write(total)}"


def _util(entry: GpuRow, width: int) -> Line:
    number_columns = 6
    row, gpu = entry
    if gpu is None or gpu.util_percent is None:
        return [Cell(pad(UNPROVEN, width), Level.DIM)]
    room = width - number_columns
    waiting = waiting_percent(row, gpu) or 0.0
    total = round(gpu.util_percent / 100 * room)
    waits = min(round(waiting / 100 * room), total)
    busy = bar((gpu.util_percent - waiting) / 100, room - waits) if not waits else BUSY * (total - waits)
    line = [Cell(busy, Level.BACKWARD), Cell(WAITS * waits, Level.WAITING)]
    line.append(Cell(" " * (room - line_columns(line))))
    return [*line, Cell(pad(f"{gpu.util_percent}%", number_columns, right=True), Level.STRONG)]


def _history(entry: GpuRow, width: int) -> Line:
    history = entry.row.state.gpus.histories.get(entry.gpu.device if entry.gpu is not None else "")
    curve = history.curve("util_percent")[-width:] if history is not None else np.zeros(0, np.float32)
    return spark(curve, width, level=Level.DIM, top=FULL_PERCENT)


def _temperature(gpu: Gpu, celsius: int) -> Cell:
    hot = any("thermal" in reason for reason in throttle_reasons(gpu))
    return Cell(f"{celsius} °C", Level.WARN if hot else Level.PLAIN)


def _power(gpu: Gpu, milliwatts: int) -> Cell:
    limit = f"/{gpu.power_limit_mw / 1000:.0f}" if gpu.power_limit_mw else ""
    return Cell(f"{milliwatts / 1000:.0f}{limit} W")


def _clocks(gpu: Gpu, mhz: int) -> Cell:
    limit = f"/{gpu.sm_max_mhz}" if gpu.sm_max_mhz else ""
    return Cell(f"{mhz}{limit}", Level.WARN if is_throttled(gpu) else Level.PLAIN)


def _state(entry: GpuRow, width: int) -> Line:
    line: Line = []
    for badge in badges(entry, long=width >= LONG_BADGE_COLUMNS) or [Cell("ok", Level.OK)]:
        line += [*([Cell("  ")] if line else []), badge]
    return fit(line, width)


def _by(name: str, sign: int) -> Callable[[GpuRow], float]:
    """Sort key of a reading; -1 stands for one that is absent."""

    def order(entry: GpuRow) -> float:
        value = getattr(entry.gpu, name, None)
        return sign * (-1.0 if value is None else float(value))

    return order


def _text(name: str, text: Callable[[Gpu, int], Cell]) -> Callable[[GpuRow], Cell]:
    """Text of a reading, or the sign for an absent one."""

    def read(entry: GpuRow) -> Cell:
        value = getattr(entry.gpu, name, None)
        return Cell(UNPROVEN, Level.DIM) if entry.gpu is None or value is None else text(entry.gpu, value)

    return read


def _memory_share(entry: GpuRow) -> float:
    gpu = entry.gpu
    return -(gpu.used_bytes or 0) / gpu.total_bytes if gpu is not None and gpu.total_bytes else 1.0


MEMORY_BAR: Final = Column[GpuRow](
    "MEMORY", 10, 1, draw=lambda entry, width: memory_bar(entry.gpu, width) if entry.gpu else [], order=_memory_share,
    right=False, grow=(16, 24),
)  # fmt: skip
_IDENTITY: Final = frozenset({"RANK", "HOST"})
"""Columns of a rank of which no GPU is read."""
COLUMNS: Final = (
    Column[GpuRow](
        "RANK", 5, read=lambda entry: Cell(str(entry.row.state.rank), Level.STRONG),
        order=lambda entry: entry.row.state.rank, rises=True,
    ),
    Column[GpuRow]("HOST", 12, 4, lambda entry: Cell(entry.row.state.host, Level.DIM), right=False),
    Column[GpuRow]("GPU", 7, 5, lambda entry: Cell(entry.gpu.device if entry.gpu else "", Level.DIM), right=False),
    Column("UTIL", 14, draw=_util, order=_by("util_percent", 1), right=False, rises=True, grow=(22, 36)),
    Column("HISTORY", 10, 2, draw=_history, right=False, grow=(20, 40)),
    MEMORY_BAR,
    Column(
        "MEMORY", 8, 8, _text("used_bytes", lambda gpu, used: Cell(memory_text(used, gpu.total_bytes or 0))),
        order=_memory_share,
    ),
    Column("TEMP", 5, 7, _text("temperature_c", _temperature), order=_by("temperature_c", -1)),
    Column("POWER", 9, 3, _text("power_mw", _power), order=_by("power_mw", -1)),
    Column("SM MHZ", 9, 6, _text("sm_mhz", _clocks), order=_by("sm_mhz", 1), rises=True),
    # It grows last, after two rounds of the others.
    Column("STATE", 14, draw=_state, right=False, grow=(14, 14, 34), fills=False),
)  # fmt: skip
SORT_KEYS: Final = sort_keys(COLUMNS)


def gpu_layout(room: int, *, rank_columns: int, host_columns: int = 0) -> Layout[GpuRow]:
    """Fit the columns into the room; `host_columns` = 0 leaves out the host."""
    widths = {"RANK": max(5, rank_columns), "HOST": min(max(host_columns, 4), 20)}
    columns = [replace(column, width=widths.get(column.title, column.width)) for column in COLUMNS]
    return lay_out([column for column in columns if column.title != "HOST" or host_columns], room, GAP)


def gpu_line(layout: Layout[GpuRow], entry: GpuRow) -> Line:
    """One GPU, dim where its figures are out of date; or a rank of which no GPU is read, with the reason."""
    *figures, (state, state_columns) = layout.columns
    if entry.gpu is None:
        figures = [(column, width) for column, width in figures if column.title in _IDENTITY]
    cells = [cell for column, width in figures for cell in (*column.cells(entry, width), Cell(" " * GAP))]
    if entry.gpu is None:
        return fit([*cells, *badges(entry)], layout.room)
    if not is_current(entry.row):
        cells = [cell._replace(level=Level.DIM) for cell in cells]
    return fit([*cells, *state.cells(entry, state_columns)], layout.room)
