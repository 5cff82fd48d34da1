"""What a GPU's figures mean beside its rank's steps: which part of its utilisation is waiting, and what is out of date.

Utilisation alone misleads in DDP: a kernel of NCCL that waits for another rank keeps a GPU at 100 %.

All GPUs of a run, or of a host, in a few numbers. A GPU that several ranks use counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpwatch.core.limits import LivenessLimits
from ddpwatch.core.state.gpu import THROTTLE_REASONS, reasons_text, xid_meaning
from ddpwatch.core.units import duration
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.cells import Cell, Level
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.view.ranks.columns import Row
    from ddpwatch.wire import Gpu

LONG_IN_SYNC_NS: Final = 1_000_000_000
"""A rank that is in communication for longer waits, whatever its steps have been like."""
WORTH_SAYING_PERCENT: Final = 10.0
"""Less waiting than this is not named beside the number."""
SHORT: Final = {
    "hw_thermal_slowdown": "hw thermal",
    "sw_thermal_slowdown": "thermal",
    "hw_power_brake_slowdown": "power brake",
    "hw_slowdown": "hw slowdown",
    "sw_power_cap": "power cap",
}
_SYNC: Final = PHASES.index("sync")


class GpuRow(NamedTuple):
    """One GPU of one rank as the page sees it; without a GPU it is a rank of which none is read."""

    row: Row
    gpu: Gpu | None


def gpu_rows(rows: Sequence[Row], *, of_now: bool = True) -> list[GpuRow]:
    """All GPUs of these ranks, in their order. Readings are always of now: where the figures of the ranks are not, they
    say nothing about what is waiting.
    """
    found: list[GpuRow] = []
    for row in rows if of_now else [row._replace(figures=None) for row in rows]:
        latest = row.state.gpus.latest
        gpus = latest.gpus if latest is not None else ()
        if len(gpus) == 1:
            found.append(GpuRow(row, gpus[0]))
        else:
            found += [GpuRow(row, gpu) for gpu in gpus or (None,)]
    return found


def stale_s(rank: RankState) -> float | None:
    """For how long nothing was read of the GPUs of a rank that is heard; None = they are read."""
    if rank.gpus.latest is None or rank.last_received_ns is None:
        return None
    age_ns = rank.last_received_ns - rank.gpus.received_ns
    return age_ns / 1e9 if age_ns > LivenessLimits.GPU_STALE_NS else None


def waits_now(row: Row) -> bool:
    """Whether the rank is in communication for so long that it must be waiting."""
    beat = row.state.beat
    return row.condition == "ok" and beat is not None and beat.phase == _SYNC and beat.phase_ns >= LONG_IN_SYNC_NS


def waiting_percent(row: Row, gpu: Gpu) -> float | None:
    """Of the utilisation, what is waiting for slower ranks; None = cannot be told.

    With NCCL all waiting counts as utilisation. Elsewhere only as much is taken for it as there must be.
    """
    util = gpu.util_percent
    if util is None:
        return None
    rank = row.state
    spins = rank.hello is not None and "nccl" in rank.hello.backend
    if waits_now(row):
        return float(util) if spins else 0.0
    if row.figures is None or row.figures.wait_ns is None:
        return None
    waits = min(100.0 * row.figures.wait_ns / max(row.figures.step_ns, 1.0), 100.0)
    return min(waits, util) if spins else max(0.0, util + waits - 100.0)


def rank_util(rank: RankState) -> float | None:
    """Mean utilisation of a rank's GPUs in per cent; None = not read."""
    gpus = rank.gpus.latest.gpus if rank.gpus.latest else []
    known = [gpu.util_percent for gpu in gpus if gpu.util_percent is not None]
    return sum(known) / len(known) if known else None


def rank_waiting(row: Row) -> float | None:
    """Of it, what is waiting."""
    gpus = row.state.gpus.latest.gpus if row.state.gpus.latest else []
    known = [waits for gpu in gpus if (waits := waiting_percent(row, gpu)) is not None]
    return sum(known) / len(known) if known else None


def rank_memory(rank: RankState) -> tuple[int, int] | None:
    """Bytes in use and in all of a rank's GPUs; None = not read."""
    gpus = rank.gpus.latest.gpus if rank.gpus.latest else []
    known = [(gpu.used_bytes, gpu.total_bytes) for gpu in gpus if gpu.used_bytes is not None and gpu.total_bytes]
    return (sum(used for used, _ in known), sum(total for _, total in known)) if known else None


def held_by(gpu: Gpu) -> list[str]:
    """What holds its clocks down, the worst first."""
    return [reason for reason in THROTTLE_REASONS if reason in gpu.throttle] if gpu.throttle else []


def held_harshly(gpu: Gpu) -> bool:
    """Whether heat or the hardware does, and not the power limit alone."""
    held = held_by(gpu)
    return bool(held) and held[0] != "sw_power_cap"


def badges(entry: GpuRow, *, long: bool = False) -> list[Cell]:
    """What somebody must know of a GPU, the worst first; `long` = in full words."""
    row, gpu = entry
    rank = row.state
    if gpu is None:
        why = rank.gpus.latest.why if rank.gpus.latest else "not told"
        return [Cell(f"no GPU is read: {why}" if why else "no GPU", Level.DIM)]
    if gpu.lost:
        return [Cell("✖ lost", Level.BAD)]
    cells = []
    if gpu.xids:
        mark, level, _ = MARKS[xid_meaning(gpu.xids[-1])[1]]
        cells.append(Cell(f"{mark} Xid {gpu.xids[-1]}", level))
    if gpu.ecc_uncorrected:
        new = gpu.ecc_uncorrected > rank.gpus.ecc_before.get(gpu.device, 0)
        cells.append(Cell(f"{'✖' if new else '·'} ECC {gpu.ecc_uncorrected}", Level.BAD if new else Level.DIM))
    if held := held_by(gpu):
        words = reasons_text(held) if long else SHORT[held[0]]
        cells.append(Cell(f"▲ {words}", Level.WARN) if held_harshly(gpu) else Cell(f"· {words}", Level.DIM))
    if (age_s := stale_s(rank)) is not None:
        cells.append(Cell(f"▲ not read for {duration(age_s)}", Level.WARN))
    if row.condition != "ok":
        cells.append(Cell(row.condition, Level.DIM))
    elif waits_now(row):
        cells.append(Cell("░ waits", Level.WAITING))
    return cells


@dataclass(frozen=True)
class GpuTotals:
    """What is read of GPUs."""

    gpus: int
    names: tuple[str, ...]
    util_percent: float | None
    """Median."""
    waiting_percent: float | None
    """Of it, in the median."""
    fullest: tuple[int, int] | None
    """Bytes in use and in all, of the GPU whose memory is fullest."""
    hottest: tuple[int, int] | None
    """Degrees and rank."""
    power_mw: int | None
    power_limit_mw: int | None
    held: int
    """GPUs whose clocks are held down by heat or hardware."""
    capped: int
    """GPUs at their power cap, and nothing worse."""
    slowest: tuple[Gpu, int] | None
    """Of those that are held down the one with the lowest clocks, and its rank; first of those held by worse."""
    trouble: int
    """GPUs that are lost, or have told of an Xid."""


def gpu_totals(entries: Iterable[GpuRow]) -> GpuTotals | None:
    """Of these; None = nothing is read of any."""
    known: dict[tuple[str, str], GpuRow] = {}
    for entry in entries:
        if entry.gpu is not None:
            rank = entry.row.state
            key = (rank.host, entry.gpu.uuid) if entry.gpu.uuid else (str(rank.rank), entry.gpu.device)
            known.setdefault(key, entry)
    if not known:
        return None
    read = [(row, gpu) for row, gpu in known.values() if gpu is not None and stale_s(row.state) is None]
    gpus = [gpu for _, gpu in read]
    utils = [gpu.util_percent for gpu in gpus if gpu.util_percent is not None]
    waits = [waiting for row, gpu in read if (waiting := waiting_percent(row, gpu)) is not None]
    memory = [(gpu.used_bytes, gpu.total_bytes) for gpu in gpus if gpu.used_bytes is not None and gpu.total_bytes]
    heat = [(gpu.temperature_c, row.state.rank) for row, gpu in read if gpu.temperature_c is not None]
    power = [gpu.power_mw for gpu in gpus if gpu.power_mw is not None]
    limits = [gpu.power_limit_mw for gpu in gpus if gpu.power_limit_mw is not None]
    held = [(gpu, row.state.rank) for row, gpu in read if held_by(gpu)]
    harsh = sum(held_harshly(gpu) for gpu, _ in held)
    return GpuTotals(
        gpus=len(known),
        names=tuple(sorted({entry.gpu.name for entry in known.values() if entry.gpu is not None and entry.gpu.name})),
        util_percent=median(utils) if utils else None,
        waiting_percent=median(waits) if waits else None,
        fullest=max(memory, key=lambda pair: pair[0] / pair[1], default=None),
        # Of equally hot ones the first rank.
        hottest=max(heat, key=lambda pair: (pair[0], -pair[1]), default=None),
        power_mw=sum(power) if power else None,
        power_limit_mw=sum(limits) if len(limits) == len(power) and limits else None,
        held=harsh,
        capped=len(held) - harsh,
        slowest=min(held, key=lambda pair: (not held_harshly(pair[0]), pair[0].sm_mhz or 0), default=None),
        trouble=sum(bool(entry.gpu and (entry.gpu.lost or entry.gpu.xids)) for entry in known.values()),
    )
