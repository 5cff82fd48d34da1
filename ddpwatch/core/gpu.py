"""The GPUs of one rank: what was read last, and some minutes of the figures that make a curve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from ddpwatch.core.text import NAME_CHARS, tame, tamed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.wire import Gpu, GpuMoment, Gpus

CURVES: Final = ("util_percent", "memory_util_percent", "used_bytes", "temperature_c", "power_mw", "sm_mhz")
"""The figures that are remembered."""
KEPT_MOMENTS: Final = 600
CROWDED_MOMENTS: Final = 120
"""Kept of each GPU where there are very many ranks."""
MOST_KNOWN: Final = 16
"""GPUs of one rank; a rank that claims more of them, one after the other, is not believed."""


class GpuHistory:
    """The last moments of one GPU, in order of the rank's own clock. A figure that was not read is NaN."""

    __slots__ = ("_kept", "_times_ns", "_values", "count")

    def __init__(self, kept: int = KEPT_MOMENTS) -> None:
        self._kept = kept
        # A little longer than it must be: shifted only when it is full.
        room = kept + max(kept // 8, 1)
        self._times_ns = np.zeros(room, np.int64)
        self._values = np.zeros((room, len(CURVES)), np.float32)
        self.count = 0

    def put(self, mono_ns: int, figures: tuple[float | None, ...]) -> None:
        """Remember a moment; one that is not later than the last is known already, or came too late."""
        if self.count and mono_ns <= self._times_ns[self.count - 1]:
            return
        if self.count == len(self._times_ns):
            keep = self._kept - 1
            self._times_ns[:keep] = self._times_ns[self.count - keep :]
            self._values[:keep] = self._values[self.count - keep :]
            self.count = keep
        self._times_ns[self.count] = mono_ns
        self._values[self.count] = [np.nan if figure is None else figure for figure in figures]
        self.count += 1

    def times_ns(self) -> NDArray[np.int64]:
        """When the moments were, by the rank's monotonic clock; oldest first."""
        return self._times_ns[max(0, self.count - self._kept) : self.count]

    def curve(self, name: str) -> NDArray[np.float32]:
        """One figure at these times."""
        return self._values[max(0, self.count - self._kept) : self.count, CURVES.index(name)]


@dataclass(slots=True)
class RankGpus:
    """What a rank has said of its GPUs."""

    kept: int = KEPT_MOMENTS
    latest: Gpus | None = None
    heard_ns: int = 0
    """Viewer's clock when that came."""
    histories: dict[str, GpuHistory] = field(default_factory=dict)
    """By torch's name of the device."""

    def take(self, gpus: Gpus, now_ns: int) -> None:
        """Keep a reading in place of an older one."""
        if self.latest is not None and gpus.mono_ns <= self.latest.mono_ns:
            return
        self.latest, self.heard_ns = _tamed_gpus(gpus), now_ns
        for gpu in self.latest.gpus:
            self._put(gpu.device, gpus.mono_ns, tuple(getattr(gpu, name) for name in CURVES))

    def recall(self, moments: list[GpuMoment]) -> None:
        """Take the history that a snapshot brings; it comes before anything that is known."""
        known = {device: history.count for device, history in self.histories.items()}
        for moment in moments:
            device = tame(moment.device, NAME_CHARS)
            if not known.get(device):
                self._put(device, moment.mono_ns, tuple(getattr(moment, name) for name in CURVES))

    def _put(self, device: str, mono_ns: int, figures: tuple[float | None, ...]) -> None:
        history = self.histories.get(device)
        if history is None:
            if len(self.histories) >= MOST_KNOWN:
                return
            history = self.histories[device] = GpuHistory(self.kept)
        history.put(mono_ns, figures)


def _tamed_gpus(gpus: Gpus) -> Gpus:
    kept = tamed(gpus, NAME_CHARS)
    return msgspec.structs.replace(kept, gpus=[_tamed_gpu(gpu) for gpu in gpus.gpus])


def _tamed_gpu(gpu: Gpu) -> Gpu:
    return msgspec.structs.replace(
        tamed(gpu, NAME_CHARS),
        throttle=[tame(reason, NAME_CHARS) for reason in gpu.throttle],
        processes=[tamed(process, NAME_CHARS) for process in gpu.processes],
        absent={tame(name, NAME_CHARS): tame(why, NAME_CHARS) for name, why in gpu.absent.items()},
    )
