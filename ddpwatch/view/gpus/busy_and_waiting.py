"""What GPU figures mean beside the steps of their rank: how much of the utilization is waiting, and what is stale.

Utilization alone misleads in DDP: a NCCL kernel that waits for another rank keeps a GPU at 100%.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from ddpwatch.core.alerts.severity import is_long_in_phase
from ddpwatch.core.limits import LivenessLimits
from ddpwatch.core.state.gpu import THROTTLE_REASONS
from ddpwatch.core.state.run import ALIVE
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.view.ranks.columns import Row
    from ddpwatch.wire import Gpu

WORTH_SAYING_PERCENT: Final = 10.0
"""Less waiting than this, in percent of the time, is not shown beside the utilization."""
MAX_CPU_PERCENT: Final = 99_999.0
"""Larger values, which no process reaches, are shown as this so that they fit their column."""
_SYNC: Final = PHASES.index("sync")

ItemT = TypeVar("ItemT")


class GpuRow(NamedTuple):
    """One GPU of one rank; without a GPU, a rank of which none is read."""

    row: Row
    gpu: Gpu | None


def gpu_rows(rows: Sequence[Row], *, of_now: bool = True) -> list[GpuRow]:
    """All GPUs of these ranks, in their order. GPU readings are always current: where the figures of the ranks are not,
    they cannot show what is waiting and are left out.
    """
    if not of_now:
        rows = [row._replace(figures=None) for row in rows]
    return [GpuRow(row, gpu) for row in rows for gpu in gpus_of(row.state) or (None,)]


def gpus_of(rank: RankState) -> Sequence[Gpu]:
    """The latest readings of a rank's GPUs."""
    return rank.gpus.latest.gpus if rank.gpus.latest is not None else ()


def by_host(items: Iterable[ItemT], row_of: Callable[[ItemT], Row]) -> dict[str, list[ItemT]]:
    """Group by host, in the order of their first ranks."""
    hosts: dict[str, list[ItemT]] = {}
    for item in items:
        hosts.setdefault(row_of(item).state.host, []).append(item)
    return hosts


def cpu_percent(rank: RankState) -> float:
    """CPU use of a rank's process, in percent of a core."""
    return min(rank.beat.cpu_percent, MAX_CPU_PERCENT) if rank.beat else 0.0


def stale_s(rank: RankState) -> float | None:
    """Age of the GPU readings of a rank whose other messages still arrive, in seconds; None = they are up to date."""
    if rank.gpus.latest is None or rank.last_received_ns is None:
        return None
    age_ns = rank.last_received_ns - rank.gpus.received_ns
    return age_ns / 1e9 if age_ns > LivenessLimits.GPU_STALE_NS else None


def is_current(row: Row) -> bool:
    """Whether the GPU readings of the rank are up to date."""
    return row.condition in ALIVE and stale_s(row.state) is None


def is_waiting(row: Row) -> bool:
    """Whether the rank has been in communication for so long that it must be waiting, whatever its steps were like."""
    beat = row.state.beat
    return beat is not None and beat.phase == _SYNC and is_long_in_phase(row.state, row.condition)


def waiting_percent(row: Row, gpu: Gpu) -> float | None:
    """The part of the utilization that is waiting for slower ranks; None = not known.

    NCCL waits in a kernel, so that all waiting counts as utilization. With other backends only what exceeds the rest of
    the step can be waiting.
    """
    util = gpu.util_percent
    if util is None:
        return None
    rank = row.state
    spins = rank.hello is not None and "nccl" in rank.hello.backend
    if is_waiting(row):
        return float(util) if spins else 0.0
    if row.figures is None or row.figures.wait_ns is None:
        return None
    waits = min(100.0 * row.figures.wait_ns / max(row.figures.step_ns, 1.0), 100.0)
    return min(waits, util) if spins else max(0.0, util + waits - 100.0)


def rank_util(rank: RankState) -> float | None:
    """Mean utilization of a rank's GPUs in percent; None = not read."""
    return _mean([gpu.util_percent for gpu in gpus_of(rank)])


def rank_waiting(row: Row) -> float | None:
    """Mean of the part of it that is waiting."""
    return _mean([waiting_percent(row, gpu) for gpu in gpus_of(row.state)])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _memory(gpus: Iterable[Gpu]) -> list[tuple[int, int]]:
    return [(gpu.used_bytes, gpu.total_bytes) for gpu in gpus if gpu.used_bytes is not None and gpu.total_bytes]


def rank_memory(rank: RankState) -> int | None:
    """Bytes in use on a rank's GPUs; None = not read."""
    known = _memory(gpus_of(rank))
    return sum(used for used, _ in known) if known else None


def throttle_reasons(gpu: Gpu) -> list[str]:
    """Throttle reasons, the worst first."""
    return [reason for reason in THROTTLE_REASONS if reason in gpu.throttle] if gpu.throttle else []


def is_throttled(gpu: Gpu) -> bool:
    """Whether heat or the hardware throttles it, and not the power cap alone."""
    reasons = throttle_reasons(gpu)
    return bool(reasons) and reasons[0] != "sw_power_cap"


@dataclass(frozen=True)
class GpuTotals:
    """Readings of all GPUs of a run or of a host. A GPU that several ranks use counts once."""

    gpus: int
    names: tuple[str, ...]
    util_percent: float | None
    """Median."""
    waiting_percent: float | None
    """Median of the part that is waiting."""
    fullest: tuple[int, int] | None
    """Bytes in use and in total, of the GPU whose memory is fullest."""
    hottest: tuple[int, int] | None
    """Degrees Celsius, and the rank."""
    power_mw: int | None
    power_limit_mw: int | None
    throttled: int
    """GPUs that heat or the hardware throttles."""
    power_capped: int
    """GPUs at their power cap, and not throttled otherwise."""
    slowest: tuple[Gpu, int] | None
    """The throttled GPU with the lowest clocks, and its rank; one at its power cap only without any other."""
    failed: int
    """GPUs that are lost or have reported an Xid."""


def gpu_totals(entries: Iterable[GpuRow]) -> GpuTotals | None:
    """Totals of these GPUs; None = none is read."""
    known: dict[tuple[str, str], tuple[Row, Gpu]] = {}
    for row, gpu in entries:
        if gpu is not None:
            key = (row.state.host, gpu.uuid) if gpu.uuid else (str(row.state.rank), gpu.device)
            known.setdefault(key, (row, gpu))
    if not known:
        return None
    read = [(row, gpu) for row, gpu in known.values() if stale_s(row.state) is None]
    gpus = [gpu for _, gpu in read]
    utils = [gpu.util_percent for gpu in gpus if gpu.util_percent is not None]
    waits = [waiting for row, gpu in read if (waiting := waiting_percent(row, gpu)) is not None]
    heat = [(gpu.temperature_c, row.state.rank) for row, gpu in read if gpu.temperature_c is not None]
    power = [gpu.power_mw for gpu in gpus if gpu.power_mw is not None]
    limits = [gpu.power_limit_mw for gpu in gpus if gpu.power_limit_mw is not None]
    slowed = [(gpu, row.state.rank) for row, gpu in read if throttle_reasons(gpu)]
    throttled = sum(is_throttled(gpu) for gpu, _ in slowed)
    return GpuTotals(
        gpus=len(known),
        names=tuple(sorted({gpu.name for _, gpu in known.values() if gpu.name})),
        util_percent=median(utils) if utils else None,
        waiting_percent=median(waits) if waits else None,
        fullest=max(_memory(gpus), key=lambda pair: pair[0] / pair[1], default=None),
        # The first rank among equally hot ones.
        hottest=max(heat, key=lambda pair: (pair[0], -pair[1]), default=None),
        power_mw=sum(power) if power else None,
        power_limit_mw=sum(limits) if len(limits) == len(power) and limits else None,
        throttled=throttled,
        power_capped=len(slowed) - throttled,
        slowest=min(slowed, key=lambda pair: (not is_throttled(pair[0]), pair[0].sm_mhz or 0), default=None),
        failed=sum(bool(gpu.lost or gpu.xids) for _, gpu in known.values()),
    )
