"""GPU sampler: a thread that reads this rank's GPUs about once a second, and the readings for viewers.

A driver that hangs delays this thread and no other. A figure that cannot be read has a reason instead.
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
from ddpwatch.agent.gpu.devices import Card, Place, TorchDevice, cards, device_at, find, torch_devices
from ddpwatch.agent.gpu.nvml import GPU_IS_LOST, REASONS, Absent, Device, Nvml, open_nvml
from ddpwatch.agent.gpu.xid_events import XidListener
from ddpwatch.wire import MAX_GPU_MOMENTS, MAX_GPU_PROCESSES, MAX_GPUS, Gpu, GpuMoment, GpuProcess, Gpus, fit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

EVERY_S: Final = 1.0
"""Seconds between readings of the GPUs."""
PCIE_EVERY_S: Final = 5.0
"""Seconds between readings of PCIe rates, which take the driver 40 ms."""
STEADY_EVERY_S: Final = 60.0
"""Seconds between readings of limits; the power limit may be changed while the training runs."""
PATIENCE_S: Final = 5.0
"""Seconds until a missing first reading is reported."""
TORCH: Final = ("allocated_bytes", "reserved_bytes", "peak_bytes")
NOT_AMONG: Final = (
    "the driver does not list this process; in a container with its own pid namespace it cannot be identified"
)
FIRST: Final = "available from the second reading on"
ON_THE_CPU: Final = "the model is on the CPU"
ELSEWHERE: Final = "the model is on {kind}; only NVIDIA GPUs are read"
NO_THREAD: Final = "no thread could be started to read the GPUs"
NO_ANSWER: Final = "the NVIDIA driver has not responded yet"


class _Lost(Exception):
    """The GPU has fallen off the bus while it was read."""


class DeviceReader:
    """Reads one device. Limits are read once a minute, and again after the GPU was lost."""

    def __init__(self, device: TorchDevice, nvml: Nvml | Absent, cards: Sequence[Card], turn: int = 0) -> None:
        self._device = device
        self.card: int | None = None
        """Index of its card."""
        self._card = Card()
        self._instance: int | None = None
        """Id of its GPU instance, if it is one."""
        self._uuid = ""
        self._source = self._find(nvml, cards)
        self._steady: dict[str, int] = {}
        self._steady_absent: dict[str, str] = {}
        self._next_steady_s = 0.0
        self._pcie: figures.Values = Absent("not read yet")
        # Devices take turns, so that no reading waits for the buses of all of them.
        self._next_pcie_s = monotonic() + turn % PCIE_EVERY_S
        self._nvlink: tuple[float, int, int] | None = None
        self._names: dict[int, str] = {}

    def _find(self, nvml: Nvml | Absent, cards: Sequence[Card]) -> Device | Absent:
        if isinstance(nvml, Absent):
            return nvml
        visible, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER", "")
        place = find(self._device, cards, visible, order)
        if not isinstance(place, Place):
            return Absent(place, GPU_IS_LOST if place == REASONS[GPU_IS_LOST] else 0)
        self.card, self._card = place.card, cards[place.card]
        self._uuid = self._card.uuid
        if place.instance is not None:
            instance = self._card.instances[place.instance]
            self._instance, self._uuid = instance.gi, instance.uuid
        return device_at(nvml, place)

    def read(self, memory: TorchMemory, xids: XidListener | None) -> Gpu:
        """All figures of the device, and the reasons for those that are missing."""
        values: dict[str, Any] = {}
        absent: dict[str, str] = {}
        lost, why = False, ""
        if isinstance(self._source, Absent):
            lost, why = self._source.lost, self._source.why
        else:
            try:
                self._read_nvml(self._source, values, absent)
            except _Lost:
                lost, why = True, REASONS[GPU_IS_LOST]
        if lost:
            values.clear()
            self._next_steady_s = self._next_pcie_s = 0.0
            self._nvlink = None
        if why:
            absent = dict.fromkeys((*figures.FIGURES, "own_bytes"), fit(why))
        if "total_bytes" in absent and self._device.total_bytes and not lost:
            values["total_bytes"] = self._device.total_bytes
            del absent["total_bytes"]
        held = memory.held.get(self._device.index)
        if held is None:
            absent |= dict.fromkeys(TORCH, memory.why)
        else:
            values |= {name: getattr(held, name) for name in TORCH}
        if xids is None or self.card is None:
            absent["xids"] = next(iter(absent.values()), REASONS[3])
        elif self.card in xids.why:
            absent["xids"] = fit(xids.why[self.card])
        return Gpu(
            device=f"cuda:{self._device.index}",
            uuid=fit(self._uuid or self._device.uuid),
            name=self._card.name or self._device.name,
            xids=xids.of(self.card, self._instance) if xids is not None and self.card is not None else [],
            lost=lost,
            absent=absent,
            **values,
        )

    def _read_nvml(self, source: Device, values: dict[str, Any], absent: dict[str, str]) -> None:
        """Read every figure of NVML. Raises `_Lost` at the first call that finds the GPU lost."""
        for names, read in figures.MOVING:
            self._put(names, read(source), values, absent)
        now_s = monotonic()
        if now_s >= self._next_steady_s:
            self._steady, self._steady_absent = {}, {}
            for names, read in figures.STEADY:
                self._put(names, read(source), self._steady, self._steady_absent)
            self._next_steady_s = now_s + STEADY_EVERY_S
        values |= self._steady
        absent |= self._steady_absent
        self._read_links(source, values, absent)
        throttle = figures.throttle(source)
        self._put(("throttle",), throttle if isinstance(throttle, Absent) else (throttle,), values, absent)
        self._read_processes(source, values, absent)

    @staticmethod
    def _put(
        names: Sequence[str], read: tuple[Any, ...] | Absent, values: dict[str, Any], absent: dict[str, str]
    ) -> None:
        if not isinstance(read, Absent):
            values.update(zip(names, read, strict=True))
        elif read.lost:
            raise _Lost
        else:
            absent |= dict.fromkeys(names, read.why)

    def _read_links(self, source: Device, values: dict[str, Any], absent: dict[str, str]) -> None:
        now_s = monotonic()
        if now_s >= self._next_pcie_s:
            self._pcie = figures.pcie(source)
            self._next_pcie_s = now_s + PCIE_EVERY_S
        self._put(figures.PCIE, self._pcie, values, absent)
        counted = figures.nvlink(source)
        now_s = monotonic()
        before, self._nvlink = self._nvlink, None if isinstance(counted, Absent) else (now_s, counted[0], counted[1])
        if self._nvlink is None:
            self._put(figures.NVLINK, counted, values, absent)
        elif before is None or now_s <= before[0]:
            absent |= dict.fromkeys(figures.NVLINK, FIRST)
        else:
            # Counters restart when the driver is loaded again.
            rates = (max(0, int((self._nvlink[k] - before[k]) / (now_s - before[0]))) for k in (1, 2))
            values.update(zip(figures.NVLINK, rates, strict=True))

    def _read_processes(self, source: Device, values: dict[str, Any], absent: dict[str, str]) -> None:
        found = figures.processes(source)
        if isinstance(found, Absent):
            self._put(("processes", "own_bytes"), found, values, absent)
            return
        own = os.getpid()
        shown = sorted(found, key=lambda process: (process[0] != own, -(process[1] or 0)))[:MAX_GPU_PROCESSES]
        self._names = {pid: self._names.get(pid) or _name(source.nvml.ask_or, pid) for pid, _ in shown}
        values["processes"] = [GpuProcess(pid, held, self._names[pid]) for pid, held in shown]
        if not shown or shown[0][0] != own:
            absent["own_bytes"] = NOT_AMONG
        elif shown[0][1] is None:
            absent["own_bytes"] = figures.NOT_REPORTED
        else:
            values["own_bytes"] = shown[0][1]


def _name(ask_or: Callable[..., Any], pid: int) -> str:
    import psutil  # only here, once per process: the import of the agent stays fast

    try:
        return fit(psutil.Process(pid).name())
    except psutil.Error:
        return fit(os.path.basename(ask_or("", "nvmlSystemGetProcessName", pid)))  # noqa: PTH119 - not a path of ours


@dataclass(frozen=True, slots=True)
class Reading:
    """All GPUs of this rank at one moment."""

    mono_ns: int
    """Start of the reading: no figure is older."""
    gpus: list[Gpu]
    why: str = ""


class Sampler(threading.Thread):
    """Reads the given devices until stopped, and leaves each complete reading in `latest`."""

    def __init__(self, devices: Sequence[TorchDevice], memory: TorchMemory) -> None:
        super().__init__(name="ddpwatch-gpu", daemon=True)
        self.devices = tuple(devices)
        """May be replaced at any time."""
        self._memory = memory
        self._ending = threading.Event()
        self._readers: dict[int, DeviceReader] = {}
        self._xids: dict[int, XidListener] = {}
        """Listener by index of a card."""
        self.latest: Reading | None = None

    def stop(self) -> None:
        """End after the current call, without waiting for it, because it may hang."""
        self._ending.set()

    def run(self) -> None:
        """Read until stopped."""
        nvml: Nvml | Absent | None = None
        try:
            nvml = open_nvml()
            self._serve(nvml)
        except Exception as error:  # noqa: BLE001 - a fault here costs the GPU figures, not the agent
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
        """Find devices that are new, and listen for errors of their cards."""
        fresh = [device for device in self.devices if device.index not in self._readers]
        if not fresh:
            return
        known = [] if isinstance(nvml, Absent) else cards(nvml)
        for device in fresh:
            self._readers[device.index] = DeviceReader(device, nvml, known, turn=len(self._readers))
        wanted = {self._readers[device.index].card for device in fresh}
        numbers = tuple(sorted(card for card in wanted if card is not None and card not in self._xids))
        if numbers:
            xids = XidListener(numbers)
            self._xids |= dict.fromkeys(numbers, xids)
            try:
                xids.start()
            except RuntimeError:
                xids.give_up("no thread could be started to listen for them")

    def _read(self, device: TorchDevice) -> Gpu:
        reader = self._readers[device.index]
        return reader.read(self._memory, None if reader.card is None else self._xids.get(reader.card))


class Telemetry:
    """GPU readings for viewers: each once in a heartbeat, and minutes of history in snapshots.

    Devices come from the training thread, which calls `watch`; the agent's thread calls the rest. The sampler starts
    once there is a device.
    """

    def __init__(self) -> None:
        self.memory = TorchMemory()
        self._devices: tuple[TorchDevice, ...] = ()
        self._why = ON_THE_CPU
        self._sampler: Sampler | None = None
        self._started_s = 0.0
        self._empty = Reading(0, [])
        self._sent: Reading | None = None
        self._moments: deque[list[GpuMoment]] = deque(maxlen=MAX_GPU_MOMENTS)

    def watch(self, model: nn.Module) -> None:
        """Add the devices of a model. Call it on the training thread."""
        known = {device.index for device in self._devices}
        found = [device for device in torch_devices(model) if device.index not in known]
        if found:
            self._devices = (*self._devices, *found)[:MAX_GPUS]
            self.memory.watch(device.index for device in self._devices)
        kinds = sorted({parameter.device.type for parameter in model.parameters()} - {"cpu", "cuda"})
        if kinds:
            self._why = fit(ELSEWHERE.format(kind=kinds[0]))

    def reset(self) -> None:
        """Send the last reading again, to new viewers."""
        self._sent = None

    def next_reading(self, rank: int, seq: int) -> Gpus | None:
        """A reading that was not sent yet, or None: while the driver hangs, viewers see the age of the last one."""
        reading = self._latest()
        if reading is None or reading is self._sent:
            return None
        self._sent = reading
        self._moments.append(
            [
                GpuMoment(
                    reading.mono_ns, gpu.device, gpu.util_percent, gpu.memory_util_percent, gpu.used_bytes,
                    gpu.temperature_c, gpu.power_mw, gpu.sm_mhz,
                )
                for gpu in reading.gpus
            ]
        )  # fmt: skip
        return self.last_reading(rank, seq)

    def last_reading(self, rank: int, seq: int) -> Gpus | None:
        """The last reading that was sent."""
        if (sent := self._sent) is None:
            return None
        return Gpus(rank=rank, seq=seq, mono_ns=sent.mono_ns, gpus=sent.gpus, why=fit(sent.why))

    def moments(self) -> list[GpuMoment]:
        """The history, oldest first."""
        return list(chain.from_iterable(self._moments))

    def stop(self) -> None:
        """Stop the sampler without waiting for it."""
        if self._sampler is not None:
            self._sampler.stop()

    def _latest(self) -> Reading | None:
        """The sampler's last reading, the same object until there is a new one."""
        devices = self._devices
        if not devices:
            return self._empty_reading(self._why)
        if self._sampler is None:
            self._sampler, self._started_s = Sampler(devices, self.memory), monotonic()
            try:
                self._sampler.start()
            except RuntimeError:
                self._sampler.latest = Reading(perf_counter_ns(), [], NO_THREAD)
        self._sampler.devices = devices
        if self._sampler.latest is None and monotonic() - self._started_s >= PATIENCE_S:
            return self._empty_reading(NO_ANSWER)
        return self._sampler.latest

    def _empty_reading(self, why: str) -> Reading:
        """A reading without GPUs; the same object until the reason changes, so that it is sent once."""
        if self._empty.why != why:
            self._empty = Reading(perf_counter_ns(), [], why)
        return self._empty
