"""One device of this rank, read as a whole: each figure that there is, and for the rest a reason."""

from __future__ import annotations

import os
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from ddpwatch.agent.gpu import nvml as figures
from ddpwatch.agent.gpu.devices import Card, Place, TorchDevice, device_at, find, visible_devices
from ddpwatch.agent.gpu.nvml import GPU_IS_LOST, REASONS, Absent, Device, Nvml
from ddpwatch.wire import MAX_GPU_PROCESSES, Gpu, GpuProcess, fit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.agent.gpu.memory import TorchMemory
    from ddpwatch.agent.gpu.xids import XidWatch

PCIE_EVERY_S: Final = 5.0
"""The driver takes 40 ms to tell."""
STEADY_EVERY_S: Final = 60.0
"""Somebody may set another power limit while the training runs."""
TORCH: Final = ("allocated_bytes", "reserved_bytes", "peak_bytes")
NOT_AMONG: Final = (
    "the driver does not name this process; in a container with process numbers of its own it cannot be told"
)
FIRST: Final = "known from the second reading on"


class _Lost(Exception):
    """The GPU has fallen off the bus while it was read."""


class DeviceReader:
    """Reads one device. Limits are read once a minute, and again after the GPU was lost."""

    def __init__(self, device: TorchDevice, nvml: Nvml | Absent, cards: Sequence[Card], turn: int = 0) -> None:
        self._device = device
        self.card: int | None = None
        """Number of the card that it is."""
        self._card = Card()
        self._instance: int | None = None
        """Number of the GPU instance, where it is a part of the card."""
        self._uuid = ""
        self._source = self._look(nvml, cards)
        self._steady: dict[str, int] = {}
        self._steady_absent: dict[str, str] = {}
        self._next_steady_s = 0.0
        self._pcie: figures.Values = Absent("not read yet")
        # Devices take turns: no reading waits for the buses of all.
        self._next_pcie_s = monotonic() + turn % PCIE_EVERY_S
        self._nvlink: tuple[float, int, int] | None = None
        self._names: dict[int, str] = {}

    def _look(self, nvml: Nvml | Absent, cards: Sequence[Card]) -> Device | Absent:
        if isinstance(nvml, Absent):
            return nvml
        place = find(self._device, cards, *visible_devices())
        if not isinstance(place, Place):
            return Absent(place, GPU_IS_LOST if place == REASONS[GPU_IS_LOST] else 0)
        self.card, self._card = place.card, cards[place.card]
        self._uuid = self._card.uuid
        if place.instance is not None:
            instance = self._card.instances[place.instance]
            self._instance, self._uuid = instance.gi, instance.uuid
        return device_at(nvml, place)

    def read(self, memory: TorchMemory, xids: XidWatch | None) -> Gpu:
        """Everything that can be told of the device now."""
        told: dict[str, Any] = {}
        absent: dict[str, str] = {}
        lost = self._source.lost if isinstance(self._source, Absent) else not self._ask(self._source, told, absent)
        if lost:
            told.clear()
            self._forget()
        if lost or isinstance(self._source, Absent):
            why = self._source.why if isinstance(self._source, Absent) else REASONS[GPU_IS_LOST]
            absent = dict.fromkeys((*figures.FIGURES, "own_bytes"), fit(why))
        if "total_bytes" in absent and self._device.total_bytes and not lost:
            told["total_bytes"] = self._device.total_bytes
            del absent["total_bytes"]
        held = memory.held.get(self._device.index)
        if held is None:
            absent |= dict.fromkeys(TORCH, memory.why)
        else:
            told |= {name: getattr(held, name) for name in TORCH}
        if xids is None or self.card is None:
            absent["xids"] = next(iter(absent.values()), REASONS[3])
        elif self.card in xids.why:
            absent["xids"] = fit(xids.why[self.card])
        return Gpu(
            device=self._device.label,
            uuid=fit(self._uuid or self._device.uuid),
            name=self._card.name or self._device.name,
            xids=xids.of(self.card, self._instance) if xids is not None and self.card is not None else [],
            lost=lost,
            absent=absent,
            **told,
        )

    def _forget(self) -> None:
        self._next_steady_s = 0.0
        self._nvlink = None
        self._next_pcie_s = 0.0

    def _ask(self, source: Device, told: dict[str, Any], absent: dict[str, str]) -> bool:
        """Read all of NVML; whether the GPU is still there. The first call that finds it lost is the last one."""
        try:
            for names, read in figures.MOVING:
                self._put(names, read(source), told, absent)
            self._ask_steady(source, told, absent)
            self._ask_links(source, told, absent)
            throttle = figures.throttle(source)
            if isinstance(throttle, Absent):
                self._put(("throttle",), throttle, told, absent)
            else:
                told["throttle"] = throttle
            self._ask_processes(source, told, absent)
        except _Lost:
            return False
        return True

    @staticmethod
    def _put(names: Sequence[str], values: figures.Values, told: dict[str, Any], absent: dict[str, str]) -> None:
        if not isinstance(values, Absent):
            told.update(zip(names, values, strict=True))
        elif values.lost:
            raise _Lost
        else:
            absent |= dict.fromkeys(names, values.why)

    def _ask_steady(self, source: Device, told: dict[str, Any], absent: dict[str, str]) -> None:
        now_s = monotonic()
        if now_s >= self._next_steady_s:
            self._steady, self._steady_absent = {}, {}
            for names, read in figures.STEADY:
                self._put(names, read(source), self._steady, self._steady_absent)
            self._next_steady_s = now_s + STEADY_EVERY_S
        told |= self._steady
        absent |= self._steady_absent

    def _ask_links(self, source: Device, told: dict[str, Any], absent: dict[str, str]) -> None:
        now_s = monotonic()
        if now_s >= self._next_pcie_s:
            self._pcie = figures.pcie(source)
            self._next_pcie_s = now_s + PCIE_EVERY_S
        self._put(figures.PCIE, self._pcie, told, absent)
        counted = figures.nvlink(source)
        now_s = monotonic()
        before, self._nvlink = self._nvlink, None if isinstance(counted, Absent) else (now_s, counted[0], counted[1])
        if self._nvlink is None:
            self._put(figures.NVLINK, counted, told, absent)
        elif before is None or now_s <= before[0]:
            absent |= dict.fromkeys(figures.NVLINK, FIRST)
        else:
            # Counters begin anew when the driver is loaded again.
            rates = (max(0, int((self._nvlink[k] - before[k]) / (now_s - before[0]))) for k in (1, 2))
            told.update(zip(figures.NVLINK, rates, strict=True))

    def _ask_processes(self, source: Device, told: dict[str, Any], absent: dict[str, str]) -> None:
        found = figures.processes(source)
        if isinstance(found, Absent):
            self._put(("processes", "own_bytes"), found, told, absent)
            return
        own = os.getpid()
        shown = sorted(found, key=lambda process: (process[0] != own, -(process[1] or 0)))[:MAX_GPU_PROCESSES]
        self._names = {pid: self._names.get(pid) or _name(source.nvml.ask, pid) for pid, _ in shown}
        told["processes"] = [GpuProcess(pid, held, self._names[pid]) for pid, held in shown]
        if not shown or shown[0][0] != own:
            absent["own_bytes"] = NOT_AMONG
        elif shown[0][1] is None:
            absent["own_bytes"] = figures.NOT_TOLD
        else:
            told["own_bytes"] = shown[0][1]


def _name(ask: Callable[..., Any], pid: int) -> str:
    import psutil  # only here, once a process: the import of the agent stays fast

    try:
        return fit(psutil.Process(pid).name())
    except psutil.Error:
        told = ask("nvmlSystemGetProcessName", pid)
        return "" if isinstance(told, Absent) else fit(os.path.basename(told))  # noqa: PTH119 - no path of ours
