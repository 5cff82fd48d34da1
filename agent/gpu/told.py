"""What viewers are told of the GPUs: each reading once, and some minutes of the past for those who come later."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from ddpwatch.wire import MAX_GPU_MOMENTS, GpuMoment, Gpus, fit

if TYPE_CHECKING:
    from ddpwatch.agent.gpu.sampler import Reading
    from ddpwatch.agent.gpu.telemetry import Telemetry


class Told:
    """Used by the agent's thread."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self.reading: Reading | None = None
        """The last one that was told."""
        self._moments: deque[list[GpuMoment]] = deque(maxlen=MAX_GPU_MOMENTS)

    def anew(self) -> None:
        """Those who listen from now on have heard of none."""
        self.reading = None

    def news(self, rank: int, seq: int) -> Gpus | None:
        """A reading that was not told yet: none while the driver hangs, when viewers see how old the last is."""
        reading = self._telemetry.latest()
        if reading is None or reading is self.reading:
            return None
        self.reading = reading
        self._moments.append(
            [
                GpuMoment(
                    reading.mono_ns, gpu.device, gpu.util_percent, gpu.memory_util_percent, gpu.used_bytes,
                    gpu.temperature_c, gpu.power_mw, gpu.sm_mhz,
                )
                for gpu in reading.gpus
            ]
        )  # fmt: skip
        return self.latest(rank, seq)

    def latest(self, rank: int, seq: int) -> Gpus | None:
        """The last one again."""
        told = self.reading
        return (
            None if told is None else Gpus(rank=rank, seq=seq, mono_ns=told.mono_ns, gpus=told.gpus, why=fit(told.why))
        )

    def moments(self) -> list[GpuMoment]:
        """The past, oldest first."""
        return list(chain.from_iterable(self._moments))
