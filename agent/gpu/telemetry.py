"""What the agent knows of its GPUs: who reads them, and what was read last."""

from __future__ import annotations

from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Final

from ddpwatch.agent.gpu.devices import TorchDevice, torch_devices
from ddpwatch.agent.gpu.memory import TorchMemory
from ddpwatch.agent.gpu.sampler import Reading, Sampler
from ddpwatch.wire import MAX_GPUS, fit

if TYPE_CHECKING:
    from torch import nn

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
            return self._say(self._why)
        if self._sampler is None:
            self._sampler, self._started_s = Sampler(devices, self.memory), monotonic()
            try:
                self._sampler.start()
            except RuntimeError:
                self._sampler.latest = Reading(perf_counter_ns(), [], NO_THREAD)
        elif self._sampler.devices is not devices:
            self._sampler.devices = devices
        if self._sampler.latest is None and monotonic() - self._started_s >= PATIENCE_S:
            return self._say(NO_ANSWER)
        return self._sampler.latest

    def _say(self, why: str) -> Reading:
        """A reading of nothing; the same one until the reason changes, so that it is sent once."""
        if self._instead.why != why:
            self._instead = Reading(perf_counter_ns(), [], why)
        return self._instead

    def stop(self) -> None:
        """Let the reading end; waits for nothing."""
        if self._sampler is not None:
            self._sampler.stop()
