"""GPUs of a synthetic run, one per rank, with figures that follow the steps.

A rank that computes slowly is hot, one that waits in the all-reduce is at 100 %, one that waits for data is not.
Figures are a function of the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch import wire
from ddpwatch.simulator.scenario import PROFILE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.simulator.scenario import Fault

NAME: Final = "Simulated 80GB"
# Memory, clocks and power limit of an H100 SXM.
TOTAL_BYTES: Final = 80 << 30
MAX_MHZ: Final = 1980
MEMORY_MHZ: Final = 2619
LIMIT_MW: Final = 700_000
EVERY_NS: Final = 1_000_000_000
"""Interval of readings in ns."""
UNSEEN_PERCENT: Final = 4.0
"""Utilization added for pauses that are too short for the driver to see."""
_COMPUTING: Final = ("forward", "backward")
_FLICKERS: Final = 1024
"""Length of the noise sequence, which is repeated."""


class SimulatedGpus:
    """All GPUs of the run."""

    def __init__(self, world_size: int, ranks_per_host: int, seed: int) -> None:
        rng = np.random.default_rng(seed + 1)
        self._ranks_per_host = ranks_per_host
        self._flicker: list[float] = rng.normal(0.0, 1.0, _FLICKERS).tolist()
        self._extra_bytes: list[int] = (rng.uniform(0.0, 1.5, world_size) * (1 << 30)).astype(np.int64).tolist()

    def gpu(self, rank: int, pid: int, step: wire.Step, faults: Sequence[Fault], now_ns: int) -> wire.Gpu:
        """GPU of a rank at the end of this step, which these faults affect."""
        local = rank % self._ranks_per_host
        device = f"cuda:{local}"
        flicker = self._flicker[(now_ns // EVERY_NS + 37 * rank) % _FLICKERS]
        idle = (step.data_ns + step.other_ns / 2) / max(step.step_ns, 1)
        util = min(max(100.0 * (1.0 - idle) + UNSEEN_PERCENT + flicker, 0.0), 100.0)
        slower = _slower(rank, faults)
        hot = slower > 1.0
        waits = step.sync_ns / max(step.step_ns, 1)
        power_mw = (430_000 if hot else 610_000) - 180_000 * waits + 6_000 * flicker
        own_bytes = (60 << 30) + self._extra_bytes[rank]
        return wire.Gpu(
            device=device, uuid=f"GPU-{rank:08x}", name=NAME, util_percent=round(util),
            memory_util_percent=round(util * 0.45), used_bytes=own_bytes + (600 << 20), total_bytes=TOTAL_BYTES,
            own_bytes=own_bytes, temperature_c=round((88.0 if hot else 58.0 + local) + 0.6 * flicker),
            power_mw=round(power_mw), power_limit_mw=LIMIT_MW,
            sm_mhz=round(MAX_MHZ / slower / 15) * 15 - (0 if hot else 15 * (flicker > 1)), sm_max_mhz=MAX_MHZ,
            memory_mhz=MEMORY_MHZ, memory_max_mhz=MEMORY_MHZ,
            throttle=["hw_slowdown", "hw_thermal_slowdown"] if hot else [],
            pcie_tx_bytes_s=(90 << 20) + int(abs(flicker) * (8 << 20)), pcie_rx_bytes_s=800 << 20,
            nvlink_tx_bytes_s=24 << 30, nvlink_rx_bytes_s=24 << 30, ecc_corrected=0, ecc_uncorrected=0,
            allocated_bytes=own_bytes - (8 << 30), reserved_bytes=own_bytes - (3 << 30),
            peak_bytes=own_bytes - (4 << 30),
            processes=[wire.GpuProcess(pid, own_bytes, "python")],
        )  # fmt: skip

    def moments(
        self, rank: int, steps: Sequence[wire.Step], faults_at: Callable[[int], Sequence[Fault]]
    ) -> list[wire.GpuMoment]:
        """History of a GPU: about one moment for each second of these steps."""
        moments: list[wire.GpuMoment] = []
        last = -1
        for step in steps:
            if step.end_ns // EVERY_NS != last:
                last = step.end_ns // EVERY_NS
                gpu = self.gpu(rank, 0, step, faults_at(step.index), step.end_ns)
                figures = (getattr(gpu, name) for name in wire.GpuMoment.__struct_fields__[1:])
                moments.append(wire.GpuMoment(step.end_ns, *figures))
        return moments


def _slower(rank: int, faults: Sequence[Fault]) -> float:
    """Factor by which the rank's computation is slower, and its clocks lower."""
    healthy = sum(PROFILE[phase] for phase in _COMPUTING)
    return 1.0 + sum(fault.size for fault in faults if rank in fault.ranks and fault.phase in _COMPUTING) / healthy
