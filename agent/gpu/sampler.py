"""The thread that asks the driver, about once a second. A driver that hangs makes this thread late, and no other.

One device of this rank, read as a whole: each figure that there is, and for the rest a reason.

What the agent knows of its GPUs: who reads them, and what was read last.

What viewers are told of the GPUs: each reading once, and some minutes of the past for those who come later.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from dataclasses import dataclass
from itertools import chain
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

from ddpwatch.agent.gpu import nvml as figures
from ddpwatch.agent.gpu.allocator import TorchMemory
from ddpwatch.agent.gpu.devices import Card, Place, TorchDevice, cards, device_at, find, torch_devices, visible_devices
from ddpwatch.agent.gpu.nvml import GPU_IS_LOST, REASONS, Absent, Device, Nvml, open_nvml
from ddpwatch.agent.gpu.xids import XidWatch
from ddpwatch.wire import MAX_GPU_MOMENTS, MAX_GPU_PROCESSES, MAX_GPUS, Gpu, GpuMoment, GpuProcess, Gpus, fit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

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
        reported: dict[str, Any] = {}
        absent: dict[str, str] = {}
        lost = self._source.lost if isinstance(self._source, Absent) else not self._ask(self._source, reported, absent)
        if lost:
            reported.clear()
            self._forget()
        if lost or isinstance(self._source, Absent):
            why = self._source.why if isinstance(self._source, Absent) else REASONS[GPU_IS_LOST]
            absent = dict.fromkeys((*figures.FIGURES, "own_bytes"), fit(why))
        if "total_bytes" in absent and self._device.total_bytes and not lost:
            reported["total_bytes"] = self._device.total_bytes
            del absent["total_bytes"]
        held = memory.held.get(self._device.index)
        if held is None:
            absent |= dict.fromkeys(TORCH, memory.why)
        else:
            reported |= {name: getattr(held, name) for name in TORCH}
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
            **reported,
        )

    def _forget(self) -> None:
        self._next_steady_s = 0.0
        self._nvlink = None
        self._next_pcie_s = 0.0

    def _ask(self, source: Device, reported: dict[str, Any], absent: dict[str, str]) -> bool:
        """Read all of NVML; whether the GPU is still there. The first call that finds it lost is the last one."""
        try:
            for names, read in figures.MOVING:
                self._put(names, read(source), reported, absent)
            self._ask_steady(source, reported, absent)
            self._ask_links(source, reported, absent)
            throttle = figures.throttle(source)
            if isinstance(throttle, Absent):
                self._put(("throttle",), throttle, reported, absent)
            else:
                reported["throttle"] = throttle
            self._ask_processes(source, reported, absent)
        except _Lost:
            return False
        return True

    @staticmethod
    def _put(names: Sequence[str], values: figures.Values, reported: dict[str, Any], absent: dict[str, str]) -> None:
        if not isinstance(values, Absent):
            reported.update(zip(names, values, strict=True))
        elif values.lost:
            raise _Lost
        else:
            absent |= dict.fromkeys(names, values.why)

    def _ask_steady(self, source: Device, reported: dict[str, Any], absent: dict[str, str]) -> None:
        now_s = monotonic()
        if now_s >= self._next_steady_s:
            self._steady, self._steady_absent = {}, {}
            for names, read in figures.STEADY:
                self._put(names, read(source), self._steady, self._steady_absent)
            self._next_steady_s = now_s + STEADY_EVERY_S
        reported |= self._steady
        absent |= self._steady_absent

    def _ask_links(self, source: Device, reported: dict[str, Any], absent: dict[str, str]) -> None:
        now_s = monotonic()
        if now_s >= self._next_pcie_s:
            self._pcie = figures.pcie(source)
            self._next_pcie_s = now_s + PCIE_EVERY_S
        self._put(figures.PCIE, self._pcie, reported, absent)
        counted = figures.nvlink(source)
        now_s = monotonic()
        before, self._nvlink = self._nvlink, None if isinstance(counted, Absent) else (now_s, counted[0], counted[1])
        if self._nvlink is None:
            self._put(figures.NVLINK, counted, reported, absent)
        elif before is None or now_s <= before[0]:
            absent |= dict.fromkeys(figures.NVLINK, FIRST)
        else:
            # Counters begin anew when the driver is loaded again.
            rates = (max(0, int((self._nvlink[k] - before[k]) / (now_s - before[0]))) for k in (1, 2))
            reported.update(zip(figures.NVLINK, rates, strict=True))

    def _ask_processes(self, source: Device, reported: dict[str, Any], absent: dict[str, str]) -> None:
        found = figures.processes(source)
        if isinstance(found, Absent):
            self._put(("processes", "own_bytes"), found, reported, absent)
            return
        own = os.getpid()
        shown = sorted(found, key=lambda process: (process[0] != own, -(process[1] or 0)))[:MAX_GPU_PROCESSES]
        self._names = {pid: self._names.get(pid) or _name(source.nvml.ask, pid) for pid, _ in shown}
        reported["processes"] = [GpuProcess(pid, held, self._names[pid]) for pid, held in shown]
        if not shown or shown[0][0] != own:
            absent["own_bytes"] = NOT_AMONG
        elif shown[0][1] is None:
            absent["own_bytes"] = figures.NOT_REPORTED
        else:
            reported["own_bytes"] = shown[0][1]


def _name(ask: Callable[..., Any], pid: int) -> str:
    import psutil  # only here, once a process: the import of the agent stays fast

    try:
        return fit(psutil.Process(pid).name())
    except psutil.Error:
        reported = ask("nvmlSystemGetProcessName", pid)
        return "" if isinstance(reported, Absent) else fit(os.path.basename(reported))  # noqa: PTH119 - no path of ours


EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """All GPUs of this rank at one moment."""

    mono_ns: int
    """When reading began: no figure is older."""
    gpus: list[Gpu]
    why: str = ""


class Sampler(threading.Thread):
    """Reads the given devices until stopped. Leaves each reading in `latest`, once it is complete."""

    def __init__(self, devices: Sequence[TorchDevice], memory: TorchMemory) -> None:
        super().__init__(name="ddpwatch-gpu", daemon=True)
        self.devices = tuple(devices)
        """May be replaced at any time."""
        self._memory = memory
        self._ending = threading.Event()
        self._readers: dict[int, DeviceReader] = {}
        self._xids: dict[int, XidWatch] = {}
        """By number of a card, who listens for its errors."""
        self.latest: Reading | None = None

    def stop(self) -> None:
        """End after the call that is under way; nobody waits for that, because it may hang."""
        self._ending.set()

    def run(self) -> None:
        """Read until stopped."""
        nvml: Nvml | Absent | None = None
        try:
            nvml = open_nvml()
            self._serve(nvml)
        except Exception as error:  # noqa: BLE001 - a fault here costs the GPUs' figures, not the agent
            self.latest = Reading(perf_counter_ns(), [], f"reading the GPUs failed ({type(error).__name__})")
        finally:
            for xids in self._xids.values():
                xids.stop()
            if isinstance(nvml, Nvml):
                with contextlib.suppress(Exception):
                    nvml.close()

    def _serve(self, nvml: Nvml | Absent) -> None:
        next_s = monotonic()
        while not self._ending.is_set():
            began_ns = perf_counter_ns()
            self._find_devices(nvml)
            gpus = [self._read(device) for device in self.devices]
            self.latest = Reading(began_ns, gpus, nvml.why if isinstance(nvml, Absent) else "")
            next_s = max(next_s + EVERY_S, monotonic())
            self._ending.wait(next_s - monotonic())

    def _find_devices(self, nvml: Nvml | Absent) -> None:
        """Find the devices that were not looked for yet, and listen for errors of their cards."""
        fresh = [device for device in self.devices if device.index not in self._readers]
        if not fresh:
            return
        known = [] if isinstance(nvml, Absent) else cards(nvml)
        for device in fresh:
            self._readers[device.index] = DeviceReader(device, nvml, known, turn=len(self._readers))
        wanted = {self._readers[device.index].card for device in fresh}
        numbers = tuple(sorted(card for card in wanted if card is not None and card not in self._xids))
        if numbers:
            xids = XidWatch(numbers)
            self._xids |= dict.fromkeys(numbers, xids)
            try:
                xids.start()
            except RuntimeError:
                xids.give_up("no thread could be started to listen for them")

    def _read(self, device: TorchDevice) -> Gpu:
        reader = self._readers[device.index]
        return reader.read(self._memory, None if reader.card is None else self._xids.get(reader.card))


ON_THE_CPU: Final = "the model is on the CPU"
ELSEWHERE: Final = "the model is on {kind}; only NVIDIA GPUs are read"
NO_THREAD: Final = "no thread could be started to read the GPUs"
NO_ANSWER: Final = "the NVIDIA driver has not answered yet"
PATIENCE_S: Final = 5.0


class Telemetry:
    """The devices come from the training thread, readings go to the agent's. Without a device nothing runs."""

    def __init__(self) -> None:
        self.memory = TorchMemory()
        """To be told of each step."""
        self._devices: tuple[TorchDevice, ...] = ()
        self._why = ON_THE_CPU
        self._sampler: Sampler | None = None
        self._started_s = 0.0
        self._instead = Reading(0, [])
        """What is said as long as there is no reading."""

    def watch(self, model: nn.Module) -> None:
        """Add the devices of a model. To be called on the training thread."""
        known = {device.index for device in self._devices}
        found = [device for device in torch_devices(model) if device.index not in known]
        if found:
            self._devices = (*self._devices, *found)[:MAX_GPUS]
            self.memory.watch(device.index for device in self._devices)
        kinds = sorted({parameter.device.type for parameter in model.parameters()} - {"cpu", "cuda"})
        if kinds:
            self._why = fit(ELSEWHERE.format(kind=kinds[0]))

    def latest(self) -> Reading | None:
        """The last reading; the same one as before if there is none since. Begins to read when there is a device."""
        devices = self._devices
        if not devices:
            return self._no_reading(self._why)
        if self._sampler is None:
            self._sampler, self._started_s = Sampler(devices, self.memory), monotonic()
            try:
                self._sampler.start()
            except RuntimeError:
                self._sampler.latest = Reading(perf_counter_ns(), [], NO_THREAD)
        elif self._sampler.devices is not devices:
            self._sampler.devices = devices
        if self._sampler.latest is None and monotonic() - self._started_s >= PATIENCE_S:
            return self._no_reading(NO_ANSWER)
        return self._sampler.latest

    def _no_reading(self, why: str) -> Reading:
        """A reading of nothing; the same one until the reason changes, so that it is sent once."""
        if self._instead.why != why:
            self._instead = Reading(perf_counter_ns(), [], why)
        return self._instead

    def stop(self) -> None:
        """Let the reading end; waits for nothing."""
        if self._sampler is not None:
            self._sampler.stop()


class GpuFeed:
    """Used by the agent's thread."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self.reading: Reading | None = None
        """The last one that was told."""
        self._moments: deque[list[GpuMoment]] = deque(maxlen=MAX_GPU_MOMENTS)

    def reset(self) -> None:
        """Those who listen from now on have heard of none."""
        self.reading = None

    def next_reading(self, rank: int, seq: int) -> Gpus | None:
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
        reported = self.reading
        return (
            None
            if reported is None
            else Gpus(rank=rank, seq=seq, mono_ns=reported.mono_ns, gpus=reported.gpus, why=fit(reported.why))
        )

    def moments(self) -> list[GpuMoment]:
        """The past, oldest first."""
        return list(chain.from_iterable(self._moments))
