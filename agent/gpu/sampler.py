"""The thread that asks the driver, about once a second. A driver that hangs makes this thread late, and no other."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Final

from ddpwatch.agent.gpu.devices import cards
from ddpwatch.agent.gpu.nvml import Absent, Nvml, open_nvml
from ddpwatch.agent.gpu.reader import DeviceReader
from ddpwatch.agent.gpu.xids import XidWatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.agent.gpu.devices import TorchDevice
    from ddpwatch.agent.gpu.memory import TorchMemory
    from ddpwatch.wire import Gpu

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
            self._meet(nvml)
            gpus = [self._read(device) for device in self.devices]
            self.latest = Reading(began_ns, gpus, nvml.why if isinstance(nvml, Absent) else "")
            next_s = max(next_s + EVERY_S, monotonic())
            self._ending.wait(next_s - monotonic())

    def _meet(self, nvml: Nvml | Absent) -> None:
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
