"""How hard the machines worked over a whole run: GPUs, and CPU and memory of the ranks. Its size is fixed.

To be shown the state often enough that no moment of a GPU has left its history: every few minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.metrics.histogram import MergingColumns
from ddpwatch.core.state.gpu import THROTTLE_REASONS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState

COLUMNS: Final = 120
FIRST_WIDTH_NS: Final = 1_000_000_000
MAX_BETWEEN_NS: Final = 60_000_000_000
"""Even of very many ranks two minutes of their GPUs are kept."""
MAX_DEVICES: Final = 16_384
"""GPUs of the whole run that are told apart."""
GPU_FIGURES: Final = ("util_percent", "used_bytes", "power_mw", "temperature_c")
RANK_FIGURES: Final = ("cpu_percent", "rss_bytes")
FIGURES: Final = (*GPU_FIGURES, *RANK_FIGURES)


@dataclass
class DeviceUtilization:
    """One GPU, or one rank: each figure as count, sum and the most."""

    rank: int
    device: str
    """Empty = this is the rank itself."""
    name: str = ""
    total_bytes: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)
    held_moments: int = 0
    """Moments of which it is known what held the clocks down."""
    held: dict[str, int] = field(default_factory=dict)
    """By reason, moments in which it did."""
    seen_ns: int = -1

    def put(self, name: str, values: NDArray[np.float32] | NDArray[np.float64]) -> None:
        """Take some values of a figure in; nan = not read."""
        known = values[np.isfinite(values)]
        if len(known):
            self.counts[name] = self.counts.get(name, 0) + len(known)
            self.sums[name] = self.sums.get(name, 0.0) + float(known.sum(dtype=np.float64))
            self.most[name] = max(self.most.get(name, 0.0), float(known.max()))

    def mean(self, name: str) -> float | None:
        """Of a figure; None = it was never read."""
        return self.sums[name] / self.counts[name] if name in self.counts else None

    @property
    def held_share(self) -> float | None:
        """Part of the moments in which clocks were held down, by the reason that did most; None = not known."""
        return max(self.held.values(), default=0) / self.held_moments if self.held_moments else None


class Utilization:
    """All GPUs and ranks of a run, each for itself, and together over time."""

    def __init__(self, every_ns: int = 0) -> None:
        """Begin with none. Looks that come sooner than `every_ns` after another are passed over."""
        self._every_ns = min(every_ns, MAX_BETWEEN_NS)
        self._due_ns = 0
        self._fresh: dict[str, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
        """What this look has found, by figure: times and values."""
        self.gpus: dict[tuple[int, str], DeviceUtilization] = {}
        self.ranks: dict[int, DeviceUtilization] = {}
        self.over_time = MergingColumns(COLUMNS, FIRST_WIDTH_NS)
        for name in FIGURES:
            for what in ("count", "sum"):
                self.over_time.keep(f"{name}.{what}")
            self.over_time.keep(f"{name}.min", "min")
            self.over_time.keep(f"{name}.max", "max")

    def sample(self, state: RunState, *, last: bool = False) -> None:
        """Take in what has come since the last look; `last` = there will be no other."""
        if not state.now_ns or (state.now_ns < self._due_ns and not last):
            return
        self._due_ns = state.now_ns + self._every_ns
        for rank in state.ranks.values():
            self._sample_beat(rank)
            for device in rank.gpus.histories:
                self._sample_gpu(rank, device, state.now_ns)
        self._spread()

    def curve(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """The mean, the least and the most of a figure by columns; nan where it was not read."""
        counts, sums = self.over_time[f"{name}.count"], self.over_time[f"{name}.sum"]
        known = np.where(counts > 0, counts, np.nan)
        least, most = (self.over_time[f"{name}.{what}"] for what in ("min", "max"))
        return sums / known, np.where(counts > 0, least, np.nan), np.where(counts > 0, most, np.nan)

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
        load = self.gpus.get((rank.rank, device))
        if load is None:
            if len(self.gpus) >= MAX_DEVICES:
                return
            load = self.gpus[rank.rank, device] = DeviceUtilization(rank.rank, device)
        times_ns = history.times_ns()
        fresh = times_ns > load.seen_ns
        if not fresh.any():
            return
        load.seen_ns = int(times_ns[-1])
        for gpu in latest.gpus if latest is not None else ():
            if gpu.device == device:
                load.name, load.total_bytes = gpu.name, gpu.total_bytes
        # The rank's clock and the viewer's differ by what does not change: the last reading has just come.
        when_ns = times_ns[fresh] - load.seen_ns + (rank.gpus.received_ns or now_ns)
        for name in GPU_FIGURES:
            self._put(load, name, when_ns, history.curve(name)[fresh].astype(np.float64))
        self._hold(load, history.held()[fresh])

    def _hold(self, load: DeviceUtilization, held: NDArray[np.int8]) -> None:
        reported = held[held >= 0]
        load.held_moments += len(reported)
        for place, reason in enumerate(THROTTLE_REASONS):
            if times := int(((reported >> place) & 1).sum()):
                load.held[reason] = load.held.get(reason, 0) + times

    def _put(self, load: DeviceUtilization, name: str, when_ns: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        load.put(name, values)
        self._fresh.setdefault(name, []).append((when_ns, values))

    def _spread(self) -> None:
        """Take what was found into the columns: of all ranks at once, which is far cheaper than one by one."""
        for name, found in self._fresh.items():
            when_ns, values = (np.concatenate([pair[which] for pair in found]) for which in (0, 1))
            known = np.isfinite(values)
            if not known.any():
                continue
            when_ns, values = when_ns[known], values[known]
            order = np.argsort(when_ns, kind="stable")
            places, values = self.over_time.places(when_ns[order]), values[order]
            self.over_time.add(f"{name}.count", places, np.ones(len(values)))
            for what in ("sum", "min", "max"):
                self.over_time.add(f"{name}.{what}", places, values)
        self._fresh.clear()
