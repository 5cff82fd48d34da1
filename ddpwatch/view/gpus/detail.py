"""The details of one GPU: all its readings in words, and their curves over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ddpwatch.core.diagnosis.xids import xid_meaning
from ddpwatch.core.state.gpu import reasons_text
from ddpwatch.core.units import UNPROVEN, count, duration_text, percent, size
from ddpwatch.view.cells import Cell, Level, fit, pad
from ddpwatch.view.charts.sparkline import sparks
from ddpwatch.view.gpus.busy_and_waiting import WORTH_SAYING_PERCENT, is_waiting, throttle_reasons, waiting_percent
from ddpwatch.view.gpus.columns import memory_parts, memory_text
from ddpwatch.view.layout import FACT_COLUMNS, beside, facts, heading, paragraph

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.view.cells import Line
    from ddpwatch.view.gpus.busy_and_waiting import GpuRow
    from ddpwatch.view.ranks.columns import Row
    from ddpwatch.wire import Gpu

# Max. numbers of processes and of different Xid errors shown.
PROCESSES_SHOWN: Final = 6
XIDS_SHOWN: Final = 3
WIDE_COLUMNS: Final = 110
"""Min. width, in terminal cells, for two columns of facts."""
NAMES: Final = {
    "util_percent": "utilization", "memory_util_percent": "memory utilization", "used_bytes": "memory in use",
    "total_bytes": "memory", "own_bytes": "memory of this process", "temperature_c": "temperature",
    "power_mw": "power", "power_limit_mw": "power limit", "sm_mhz": "SM clock", "sm_max_mhz": "max SM clock",
    "memory_mhz": "memory clock", "memory_max_mhz": "max memory clock", "throttle": "throttle reasons",
    "pcie_tx_bytes_s": "PCIe out", "pcie_rx_bytes_s": "PCIe in", "nvlink_tx_bytes_s": "NVLink out",
    "nvlink_rx_bytes_s": "NVLink in", "ecc_corrected": "corrected errors", "ecc_uncorrected": "uncorrected errors",
    "xids": "Xid errors", "allocated_bytes": "torch's tensors", "reserved_bytes": "torch's memory",
    "peak_bytes": "torch's peak", "processes": "processes",
}  # fmt: skip
OTHER_REASONS: Final = {
    "applications_clocks_setting": "set by applications clocks",
    "sync_boost": "limited by its sync boost group",
    "display_clocks_setting": "limited by a display setting",
    "board_limit": "at the board limit",
    "reliability": "limited for reliability",
}
"""Reasons for lower clocks that are not throttling."""


def gpu_detail(entry: GpuRow, columns: int) -> list[Line]:
    """One GPU: its name, its readings, the processes on it, and why readings are absent."""
    row, gpu = entry
    rank = row.state
    if gpu is None:
        why = rank.gpus.latest.why if rank.gpus.latest else ""
        text = f"No GPU data: {why}." if why else "This rank has reported no GPU."
        return paragraph(text, columns, Level.DIM, lead=[Cell(f"rank {rank.rank}  ", Level.STRONG)])
    where = "  ".join(filter(None, (gpu.name, rank.host, gpu.uuid)))
    top = fit([Cell(f"rank {rank.rank} · {gpu.device}", Level.STRONG), Cell(f"  {where}", Level.DIM)], columns)
    readings, users = gpu_facts(row, gpu), _users(row, gpu)
    if columns < WIDE_COLUMNS:
        # What the table does not show comes first.
        return [top, *facts([*readings[:2], *users, *readings[2:]], columns)]
    left = columns * 3 // 5 - 2
    return [top, *beside(facts(readings, left), facts(users, columns - left - 3), left)]


def gpu_facts(row: Row, gpu: Gpu) -> list[tuple[str, str]]:
    """The readings in words; absent ones are left out."""
    pairs = [
        ("utilization", _utilization(row, gpu)),
        ("memory", _memory(gpu)),
        ("clocks", _clocks(gpu)),
        ("power, temp", _power(gpu)),
        ("links", _links(gpu)),
        ("errors", _errors(gpu)),
    ]
    return [(name, text) for name, text in pairs if text]


def absences(gpu: Gpu) -> str:
    """Which readings are absent, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in gpu.absent.items():
        by_reason.setdefault(why, []).append(NAMES.get(name, name))
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())


def _utilization(row: Row, gpu: Gpu) -> str:
    if gpu.lost:
        return "lost: NVML cannot read it"
    if gpu.util_percent is None:
        return ""
    text = f"{gpu.util_percent}%"
    waiting = waiting_percent(row, gpu)
    if is_waiting(row) and waiting:
        text += ", all of it waiting in all-reduce"
    elif waiting is not None and waiting >= WORTH_SAYING_PERCENT:
        text += f", {waiting:.0f}% waiting in all-reduce"
    return text + (f"; memory controller {gpu.memory_util_percent}%" if gpu.memory_util_percent is not None else "")


def _memory(gpu: Gpu) -> str:
    parts = memory_parts(gpu)
    if parts is None or gpu.used_bytes is None:
        return ""
    text = memory_text(gpu.used_bytes, gpu.total_bytes or 0, spelled=True)
    if gpu.total_bytes:
        text += f" ({percent(gpu.used_bytes / gpu.total_bytes)})"
    text += ": " + ", ".join(f"{name} {size(part)}" for name, part in parts if part)
    if gpu.allocated_bytes is not None:
        peak = f", peak {size(gpu.peak_bytes)}" if gpu.peak_bytes is not None else ""
        text += f"; tensors {size(gpu.allocated_bytes)}{peak}"
    return text.removesuffix(": ")


def _clocks(gpu: Gpu) -> str:
    parts = [
        _clock("SM", gpu.sm_mhz, gpu.sm_max_mhz),
        _clock("memory", gpu.memory_mhz, gpu.memory_max_mhz),
        reasons_text(throttle_reasons(gpu)),
        *(OTHER_REASONS[reason] for reason in gpu.throttle if reason in OTHER_REASONS),
    ]
    return ", ".join(filter(None, parts))


def _clock(name: str, mhz: int | None, max_mhz: int | None) -> str:
    return "" if mhz is None else f"{name} {mhz}{f'/{max_mhz}' if max_mhz else ''} MHz"


def _power(gpu: Gpu) -> str:
    parts = []
    if gpu.power_mw is not None:
        limit = f"/{gpu.power_limit_mw / 1000:.0f}" if gpu.power_limit_mw else ""
        parts.append(f"{gpu.power_mw / 1000:.0f}{limit} W")
    if gpu.temperature_c is not None:
        parts.append(f"{gpu.temperature_c} °C")
    return ", ".join(parts)


def _links(gpu: Gpu) -> str:
    links = (
        ("PCIe", gpu.pcie_tx_bytes_s, gpu.pcie_rx_bytes_s),
        ("NVLink", gpu.nvlink_tx_bytes_s, gpu.nvlink_rx_bytes_s),
    )
    return "; ".join(
        f"{name} {UNPROVEN if sent is None else size(sent)}/s out, {UNPROVEN if came is None else size(came)}/s in"
        for name, sent, came in links
        if sent is not None or came is not None
    )


def _errors(gpu: Gpu) -> str:
    errors = [f"Xid {code}, {xid_meaning(code)[0]}" for code in dict.fromkeys(reversed(gpu.xids))][:XIDS_SHOWN]
    if gpu.ecc_uncorrected is not None:
        corrected = f", {count(gpu.ecc_corrected)} corrected" if gpu.ecc_corrected else ""
        errors.append(f"ECC: {count(gpu.ecc_uncorrected)} uncorrected{corrected}")
    return "; ".join(errors)


def _users(row: Row, gpu: Gpu) -> list[tuple[str, str]]:
    processes = sorted(gpu.processes, key=lambda process: -(process.bytes or 0))
    texts = [
        f"{process.pid}{' (this rank)' if process.pid == row.state.pid else ''} {process.name} "
        f"{UNPROVEN if process.bytes is None else size(process.bytes)}"
        for process in processes[:PROCESSES_SHOWN]
    ]
    more = len(processes) - PROCESSES_SHOWN
    pairs = [("processes", " · ".join(texts) + (f" · … {more} more" if more > 0 else ""))] if texts else []
    if absent := absences(gpu):
        pairs.append(("no data", absent))
    return pairs


RANGE_COLUMNS: Final = 22
"""Width of the range of values beside a curve, in terminal cells."""
MIN_COLUMNS: Final = 50
"""Min. width of curves with their labels, in terminal cells."""
MAX_ROWS: Final = 2
"""Most rows of one curve."""


class _Curve(NamedTuple):
    title: str
    name: str
    full: Callable[[Gpu], float | None]
    """The value at the top of the scale; None = the largest one."""
    text: Callable[[float], str]


CURVES: Final = (
    _Curve("utilization", "util_percent", lambda _: 100.0, lambda value: f"{value:.0f}%"),
    _Curve("memory", "used_bytes", lambda gpu: gpu.total_bytes, size),
    _Curve("SM clock", "sm_mhz", lambda gpu: gpu.sm_max_mhz, lambda value: f"{value:.0f} MHz"),
    _Curve("power", "power_mw", lambda gpu: gpu.power_limit_mw, lambda value: f"{value / 1000:.0f} W"),
    _Curve("temperature", "temperature_c", lambda _: 100.0, lambda value: f"{value:.0f} °C"),
)


def gpu_curves(entry: GpuRow, columns: int, rows: int) -> list[Line]:
    """Curves of the readings, newest at the right, as high as the rows allow; nothing without room or history."""
    row, gpu = entry
    history = row.state.gpus.histories.get(gpu.device) if gpu is not None else None
    width = columns - FACT_COLUMNS - RANGE_COLUMNS
    if gpu is None or history is None or columns < MIN_COLUMNS or len(history.times_ns()) < 2:
        return []
    times_ns = history.times_ns()[-width:]
    shown = [(curve, history.curve(curve.name)[-width:].astype(np.float64)) for curve in CURVES]
    shown = [(curve, values) for curve, values in shown if not np.isnan(values).all()]
    each = min((rows - 1) // max(len(shown), 1), MAX_ROWS)
    if not shown or each < 1:
        return []
    lines = [heading("history", columns, f"last {duration_text((int(times_ns[-1]) - int(times_ns[0])) / 1e9)}")]
    for curve, values in shown:
        full = curve.full(gpu)
        # The top of the scale leaves an eighth of a row free, so that the curves stand apart.
        drawn = sparks(values, width, each, level=Level.DIM, top=full / (1 - 1 / (8 * each)) if full else None)
        blank = [Cell(" " * (FACT_COLUMNS + RANGE_COLUMNS))]
        ends = dict.fromkeys(curve.text(float(end)) for end in (np.nanmin(values), np.nanmax(values)))
        title = [Cell(pad(curve.title, FACT_COLUMNS), Level.DIM), Cell(pad(" to ".join(ends), RANGE_COLUMNS))]
        lines += [[*(blank if row else title), *line] for row, line in enumerate(drawn)]
    return lines
