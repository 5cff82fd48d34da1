"""All GPUs of a run, or of a host, in a few numbers. A GPU that several ranks use counts once."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddpwatch.view.gpuload import held_by, held_harshly, stale_s, waiting_percent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.view.gpuload import GpuRow
    from ddpwatch.wire import Gpu


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
