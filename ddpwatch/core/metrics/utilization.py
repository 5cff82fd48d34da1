"""Utilization of GPUs, and CPU and memory of ranks, over a whole run in constant memory.

`sample` must be called at least every few minutes, before GPU readings leave their history.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.metrics.histogram import How, MergingColumns
from ddpwatch.core.state.gpu import NOT_REPORTED, THROTTLE_REASONS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState

COLUMNS: Final = 120
"""Columns of the utilization over time, at most."""
FIRST_WIDTH_NS: Final = 1_000_000_000
"""Width of a column in ns at first; it doubles when the columns are full."""
MAX_BETWEEN_NS: Final = 60_000_000_000
"""Longest sampling interval: even with very many ranks two minutes of GPU history are kept."""
MAX_DEVICES: Final = 16_384
"""Maximum number of GPUs of a run."""
GPU_FIGURES: Final = ("util_percent", "used_bytes", "power_mw", "temperature_c")
RANK_FIGURES: Final = ("cpu_percent", "rss_bytes")
FIGURES: Final = (*GPU_FIGURES, *RANK_FIGURES)
_REDUCED: Final[tuple[How, ...]] = ("sum", "min", "max")


@dataclass
class DeviceUtilization:
    """Count, sum and maximum of each figure of one GPU, or of one rank."""

    rank: int
    device: str
    """Empty = the rank itself."""
    name: str = ""
    total_bytes: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)
    held_moments: int = 0
    """Number of moments with known throttle reasons."""
    held: dict[str, int] = field(default_factory=dict)
    """Number of moments by throttle reason."""
    seen_ns: int = -1

    def put(self, name: str, values: NDArray[np.float32] | NDArray[np.float64]) -> None:
        """Add values of a figure; NaN = not read."""
        known = values[np.isfinite(values)]
        if len(known):
            self.counts[name] = self.counts.get(name, 0) + len(known)
            self.sums[name] = self.sums.get(name, 0.0) + float(known.sum(dtype=np.float64))
            self.most[name] = max(self.most.get(name, 0.0), float(known.max()))

    def put_throttle(self, held: NDArray[np.int8]) -> None:
        """Add throttle bits as in `GpuHistory.held`."""
        known = held[held != NOT_REPORTED]
        self.held_moments += len(known)
        for bit, reason in enumerate(THROTTLE_REASONS):
            if times := int(((known >> bit) & 1).sum()):
                self.held[reason] = self.held.get(reason, 0) + times

    def mean(self, name: str) -> float | None:
        """Mean of a figure; None = never read."""
        return self.sums[name] / self.counts[name] if name in self.counts else None

    @property
    def held_share(self) -> float | None:
        """Fraction of the moments throttled by the most frequent reason; None = not known."""
        return max(self.held.values(), default=0) / self.held_moments if self.held_moments else None


class Utilization:
    """Utilization of all GPUs and ranks, each by itself, and together over time."""

    def __init__(self, every_ns: int = 0) -> None:
        """Calls of `sample` within `every_ns` of the last one are skipped."""
        self._every_ns = min(every_ns, MAX_BETWEEN_NS)
        self._due_ns = 0
        self._fresh: dict[str, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
        """Times and values of this sample, by figure."""
        self.gpus: dict[tuple[int, str], DeviceUtilization] = {}
        self.ranks: dict[int, DeviceUtilization] = {}
        self.over_time = MergingColumns(COLUMNS, FIRST_WIDTH_NS)
        for name in FIGURES:
            self.over_time.keep(f"{name}.count")
            for how in _REDUCED:
                self.over_time.keep(f"{name}.{how}", how)

    def sample(self, state: RunState, *, last: bool = False) -> None:
        """Add everything since the last sample; `last` = also if it is not due."""
        if not state.now_ns or (state.now_ns < self._due_ns and not last):
            return
        self._due_ns = state.now_ns + self._every_ns
        for rank in state.ranks.values():
            self._sample_beat(rank)
            for device in rank.gpus.histories:
                self._sample_gpu(rank, device, state.now_ns)
        self._flush()

    def curve(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Mean, minimum and maximum of a figure by column; NaN where it was not read."""
        counts = self.over_time[f"{name}.count"]
        sums, least, most = (np.where(counts > 0, self.over_time[f"{name}.{how}"], np.nan) for how in _REDUCED)
        return sums / np.maximum(counts, 1), least, most

    def _sample_beat(self, rank: RankState) -> None:
        beat, last_received_ns = rank.beat, rank.last_received_ns
        if beat is None or last_received_ns is None:
            return
        load = self.ranks.setdefault(rank.rank, DeviceUtilization(rank.rank, ""))
        if beat.mono_ns == load.seen_ns:
            return
        load.seen_ns = beat.mono_ns
        for name, value in (("cpu_percent", beat.cpu_percent), ("rss_bytes", float(beat.rss_bytes))):
            if value > 0:
                self._put(load, name, np.array([last_received_ns]), np.array([value]))

    def _sample_gpu(self, rank: RankState, device: str, now_ns: int) -> None:
        history, latest = rank.gpus.histories[device], rank.gpus.latest
        if (rank.rank, device) not in self.gpus and len(self.gpus) >= MAX_DEVICES:
            return
        load = self.gpus.setdefault((rank.rank, device), DeviceUtilization(rank.rank, device))
        times_ns = history.times_ns()
        fresh = times_ns > load.seen_ns
        if not fresh.any():
            return
        load.seen_ns = int(times_ns[-1])
        for gpu in latest.gpus if latest is not None else ():
            if gpu.device == device:
                load.name, load.total_bytes = gpu.name, gpu.total_bytes
        # The offset between the rank's clock and the viewer's is constant: the last reading has just arrived.
        when_ns = times_ns[fresh] - load.seen_ns + (rank.gpus.received_ns or now_ns)
        for name in GPU_FIGURES:
            self._put(load, name, when_ns, history.curve(name)[fresh].astype(np.float64))
        load.put_throttle(history.held()[fresh])

    def _put(self, load: DeviceUtilization, name: str, when_ns: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        load.put(name, values)
        self._fresh.setdefault(name, []).append((when_ns, values))

    def _flush(self) -> None:
        """Add the sample to the columns, for all ranks at once: far cheaper than one by one."""
        for name, found in self._fresh.items():
            when_ns, values = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
            known = np.isfinite(values)
            if not known.any():
                continue
            when_ns, values = when_ns[known], values[known]
            order = np.argsort(when_ns, kind="stable")
            places, values = self.over_time.places(when_ns[order]), values[order]
            self.over_time.add(f"{name}.count", places, np.ones(len(values)))
            for how in _REDUCED:
                self.over_time.add(f"{name}.{how}", places, values)
        self._fresh.clear()
