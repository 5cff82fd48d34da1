"""One line a GPU: which columns there are, how wide, and what each reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ddpwatch.core.units import UNPROVEN, size
from ddpwatch.view.cells import Cell, Level, fit, line_columns, pad
from ddpwatch.view.charts.sparkline import spark
from ddpwatch.view.gpus.usage import GpuRow, badges, held_by, held_harshly, stale_s, waiting_percent
from ddpwatch.view.layout import bar
from ddpwatch.view.ranks.columns import arrow

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ddpwatch.view.cells import Line
    from ddpwatch.view.ranks.columns import Row
    from ddpwatch.wire import Gpu

BUSY: Final = "█"
WAITS: Final = "░"
TORCH: Final = "▆"
PROCESS: Final = "▄"
OTHERS: Final = "▂"
FREE: Final = "·"
GAP: Final = 2
FULL_PERCENT: Final = 100 * 8 / 7
"""Where the row of a history ends: a full GPU leaves an eighth free, so that the rows stand apart."""
MIN_STATE_COLUMNS: Final = 14
MAX_STATE_COLUMNS: Final = 34
_WIDTHS: Final = {
    "RANK": 5, "DEVICE": 7, "UTIL": 14, "MEMORY": 8, "TEMP": 5, "SM MHZ": 9, "POWER": 9, "HISTORY": 10, "SPLIT": 10,
    "HOST": 12,
}  # fmt: skip
_TITLES: Final = {"DEVICE": "GPU"}
_GIVE_WAY: Final = ("SPLIT", "HISTORY", "POWER", "HOST", "DEVICE", "SM MHZ", "TEMP", "MEMORY")
"""Which goes first where there is no room."""
_GROW: Final = (("UTIL", 22), ("HISTORY", 20), ("SPLIT", 16), ("UTIL", 36), ("HISTORY", 40), ("SPLIT", 24))
"""Which takes what is left, in turn, up to so many columns."""
ORDERS: Final[dict[str, Callable[[GpuRow], Any]]] = {
    "RANK": lambda entry: entry.row.state.rank,
    "UTIL": lambda entry: _number(entry, "util_percent"),
    "MEMORY": lambda entry: -_share(entry.gpu),
    "TEMP": lambda entry: -_number(entry, "temperature_c"),
    "SM MHZ": lambda entry: _number(entry, "sm_mhz"),
    "POWER": lambda entry: -_number(entry, "power_mw"),
}
"""What can be sorted by, and what goes first: the one to look at."""
RISING: Final = frozenset({"RANK", "UTIL", "SM MHZ"})
"""Those whose smallest goes first."""


@dataclass(frozen=True)
class GpuPlan:
    """Widths by title, in the order in which they stand, and what is left for the state."""

    widths: dict[str, int]
    state_columns: int
    columns: int


def gpu_plan(columns: int, *, rank_columns: int, host_columns: int = 0) -> GpuPlan:
    """Share the width out; `host_columns` = every line says its host."""
    order = ("RANK", "HOST", "DEVICE", "UTIL", "HISTORY", "SPLIT", "MEMORY", "TEMP", "POWER", "SM MHZ")
    widths = {title: _WIDTHS[title] for title in order}
    widths["RANK"] = max(widths["RANK"], rank_columns)
    widths["HOST"] = min(max(host_columns, 4), 20)
    if not host_columns:
        del widths["HOST"]

    def left() -> int:
        return columns - sum(widths.values()) - GAP * len(widths) - MIN_STATE_COLUMNS

    for title in _GIVE_WAY:
        if left() >= 0:
            break
        widths.pop(title, None)
    for title, most in _GROW:
        if title in widths:
            widths[title] += max(0, min(left(), most - widths[title]))
    return GpuPlan(widths, min(MIN_STATE_COLUMNS + max(left(), 0), MAX_STATE_COLUMNS), columns)


def gpu_heading(plan: GpuPlan, sorted_by: str = "", *, backwards: bool = False) -> Line:
    """The titles; a click sorts by one."""
    line: Line = []
    for title, width in plan.widths.items():
        # The bar and the number of the memory share a title, which stands over the first of them.
        over_bar = title == "SPLIT"
        shown = "MEMORY" if over_bar else _TITLES.get(title, title)
        if title == "MEMORY" and "SPLIT" in plan.widths:
            shown = ""
        marked = bool(shown) and sorted_by in {title, shown}
        # Of a title that fills its column a letter gives way to the arrow.
        text = f"{shown[: width - 1]}{arrow(rises=(sorted_by in RISING) != backwards)}" if marked else shown
        action = f"sort('{'MEMORY' if over_bar else title}')" if title in ORDERS or over_bar else ""
        right = title not in {"HOST", "DEVICE", "UTIL", "HISTORY", "SPLIT"}
        line += [Cell(pad(text, width, right=right), Level.STRONG if marked else Level.DIM, action), Cell(" " * GAP)]
    return fit([*line, Cell("STATE", Level.DIM)], plan.columns)


def gpu_line(plan: GpuPlan, entry: GpuRow) -> Line:
    """One GPU, or a rank of which none is read."""
    row, gpu = entry
    if gpu is None:
        who = [cell for title in ("RANK", "HOST") if title in plan.widths for cell in _who(title, entry, plan)]
        return fit([*who, *badges(entry)], plan.columns)
    old = stale_s(row.state) is not None or row.condition not in {"ok", "paused"}
    line: Line = []
    for title, width in plan.widths.items():
        if title in {"RANK", "HOST"}:
            line += _who(title, entry, plan)
        else:
            line += [*_cells(title, row, gpu, width), Cell(" " * GAP)]
    if old:
        line = [cell._replace(level=Level.DIM) for cell in line]
    state: Line = []
    for badge in badges(entry, long=plan.state_columns >= MAX_STATE_COLUMNS - 4) or [Cell("ok", Level.OK)]:
        state += [*([Cell("  ")] if state else []), badge]
    return fit([*line, *fit(state, plan.state_columns)], plan.columns)


def _who(title: str, entry: GpuRow, plan: GpuPlan) -> Line:
    rank, width = entry.row.state, plan.widths[title]
    if title == "RANK":
        return [Cell(pad(str(rank.rank), width, right=True), Level.STRONG), Cell(" " * GAP)]
    return [Cell(pad(rank.host, width), Level.DIM), Cell(" " * GAP)]


def _cells(title: str, row: Row, gpu: Gpu, width: int) -> Line:
    if title == "UTIL":
        return _util(row, gpu, width)
    if title == "HISTORY":
        history = row.state.gpus.histories.get(gpu.device)
        curve: NDArray[np.float32] = history.curve("util_percent") if history is not None else np.zeros(0, np.float32)
        return spark(curve[-width:], width, level=Level.DIM, top=FULL_PERCENT)
    if title == "SPLIT":
        return memory_bar(gpu, width)
    text, level = _FIGURES[title](gpu)
    return [Cell(pad(text, width, right=title != "DEVICE"), level)]


def _util(row: Row, gpu: Gpu, width: int) -> Line:
    number_columns = 6
    if gpu.util_percent is None:
        return [Cell(pad(UNPROVEN, width), Level.DIM)]
    room = width - number_columns
    waiting = waiting_percent(row, gpu) or 0.0
    total = round(gpu.util_percent / 100 * room)
    waits = min(round(waiting / 100 * room), total)
    busy = bar((gpu.util_percent - waiting) / 100, room - waits) if not waits else BUSY * (total - waits)
    line = [Cell(busy, Level.BACKWARD), Cell(WAITS * waits, Level.WAITING)]
    line.append(Cell(" " * (room - line_columns(line))))
    return [*line, Cell(pad(f"{gpu.util_percent} %", number_columns, right=True), Level.STRONG)]


def memory_bar(gpu: Gpu, columns: int) -> Line:
    """Whose the memory is: torch's, the rest of this process, other processes; and what is free."""
    parts = memory_parts(gpu)
    if not gpu.total_bytes or parts is None:
        return [Cell(" " * columns)]
    line: Line = []
    done_bytes = used_columns = 0
    for (_, part_bytes), (glyph, level) in zip(
        parts, ((TORCH, Level.FORWARD), (PROCESS, Level.FORWARD), (OTHERS, Level.OTHER)), strict=True
    ):
        done_bytes += part_bytes
        upto = min(round(done_bytes / gpu.total_bytes * columns), columns)
        line.append(Cell(glyph * max(upto - used_columns, 0), level))
        used_columns = max(used_columns, upto)
    return [*line, Cell(FREE * (columns - used_columns), Level.DIM)]


def memory_parts(gpu: Gpu) -> list[tuple[str, int]] | None:
    """What is in use, by whose it is; None = not known. What cannot be told apart counts for the next larger part."""
    if gpu.used_bytes is None:
        return None
    own = min(gpu.own_bytes if gpu.own_bytes is not None else gpu.reserved_bytes or 0, gpu.used_bytes)
    torch = min(gpu.reserved_bytes or 0, own)
    return [("torch", torch), ("rest of this process", own - torch), ("others", gpu.used_bytes - own)]


def _memory(gpu: Gpu) -> tuple[str, Level]:
    if gpu.used_bytes is None:
        return UNPROVEN, Level.DIM
    return used_of(gpu.used_bytes, gpu.total_bytes or 0), Level.PLAIN


def used_of(used: int, total: int) -> str:
    """As `61/80G`; the unit is told once where it is the same."""
    one, other = size(used), size(total) if total else ""
    return f"{one[:-1]}/{other}" if other and one[-1:] == other[-1:] else f"{one}/{other}" if other else one


def _temperature(gpu: Gpu) -> tuple[str, Level]:
    if gpu.temperature_c is None:
        return UNPROVEN, Level.DIM
    hot = any("thermal" in reason for reason in held_by(gpu))
    return f"{gpu.temperature_c} °C", Level.WARN if hot else Level.PLAIN


def _power(gpu: Gpu) -> tuple[str, Level]:
    if gpu.power_mw is None:
        return UNPROVEN, Level.DIM
    limit = f"/{gpu.power_limit_mw / 1000:.0f}" if gpu.power_limit_mw else ""
    return f"{gpu.power_mw / 1000:.0f}{limit} W", Level.PLAIN


def _clocks(gpu: Gpu) -> tuple[str, Level]:
    if gpu.sm_mhz is None:
        return UNPROVEN, Level.DIM
    return f"{gpu.sm_mhz}{f'/{gpu.sm_max_mhz}' if gpu.sm_max_mhz else ''}", (
        Level.WARN if held_harshly(gpu) else Level.PLAIN
    )


_FIGURES: Final[dict[str, Callable[[Gpu], tuple[str, Level]]]] = {
    "DEVICE": lambda gpu: (gpu.device, Level.DIM),
    "MEMORY": _memory,
    "TEMP": _temperature,
    "POWER": _power,
    "SM MHZ": _clocks,
}


def _number(entry: GpuRow, name: str) -> float:
    value = getattr(entry.gpu, name) if entry.gpu is not None else None
    return -1.0 if value is None else float(value)


def _share(gpu: Gpu | None) -> float:
    return (gpu.used_bytes or 0) / gpu.total_bytes if gpu is not None and gpu.total_bytes else -1.0
