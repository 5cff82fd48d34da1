"""Which of the driver's GPUs are this rank's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.parameter import is_lazy

from ddpwatch.agent.gpu.nvml import Absent, Device, Nvml
from ddpwatch.wire import MAX_GPUS, fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

GPU: Final = "GPU-"
MIG: Final = "MIG-"
WHICH_MIG: Final = "the GPU is divided into MIG instances and none of them is named in CUDA_VISIBLE_DEVICES"
MIXED: Final = "GPUs differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID, so a number does not tell which one it is"
UNKNOWN: Final = "the driver tells of no GPU that is this device"


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """A CUDA device as torch knows it."""

    index: int
    uuid: str = ""
    """Of the GPU; torch writes it without a prefix."""
    bus_id: str = ""
    """`0000:1b:00`: domain, bus and device."""
    name: str = ""
    total_bytes: int = 0

    @property
    def label(self) -> str:
        """As torch writes it."""
        return f"cuda:{self.index}"


@dataclass(frozen=True, slots=True)
class Instance:
    """A part of a GPU that CUDA takes for a whole one."""

    uuid: str
    gi: int = -1
    ci: int = -1


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as NVML knows it; all empty if it could not be asked."""

    uuid: str = ""
    bus_id: str = ""
    name: str = ""
    instances: tuple[Instance, ...] = ()
    is_mig: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device was found: number of the card, and of the MIG instance on it."""

    card: int
    instance: int | None = None


def torch_devices(model: nn.Module) -> list[TorchDevice]:
    """The CUDA devices that a model has parameters or buffers on. To be called on the training thread.

    From another one, torch might make a CUDA context while a graph is captured.
    """
    tensors = [*model.parameters(), *model.buffers()]
    indices = dict.fromkeys(
        tensor.device.index or 0 for tensor in tensors if not is_lazy(tensor) and tensor.device.type == "cuda"
    )
    return [_torch_device(index) for index in list(indices)[:MAX_GPUS]]


def _torch_device(index: int) -> TorchDevice:
    try:
        reported: Any = torch.cuda.get_device_properties(index)
    except Exception:  # noqa: BLE001 - torch may be of any version, and the driver in any state
        return TorchDevice(index)
    # Each of these is newer than torch 2.4.
    bus = [getattr(reported, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    return TorchDevice(
        index,
        uuid=fit(str(getattr(reported, "uuid", ""))),
        bus_id="" if -1 in bus else "{:04x}:{:02x}:{:02x}".format(*bus),
        name=fit(str(getattr(reported, "name", ""))),
        total_bytes=int(getattr(reported, "total_memory", 0)),
    )


def cards(nvml: Nvml) -> list[Card]:
    """All GPUs that the driver shows to this process."""
    count = nvml.ask("nvmlDeviceGetCount")
    return [] if isinstance(count, Absent) else [_card(nvml, index) for index in range(count)]


def _card(nvml: Nvml, index: int) -> Card:
    handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
    if isinstance(handle, Absent):
        return Card(why=handle.why)
    uuid, name, bus = (nvml.ask(f"nvmlDeviceGet{what}", handle) for what in ("UUID", "Name", "PciInfo"))
    mode = nvml.ask("nvmlDeviceGetMigMode", handle)
    is_mig = not isinstance(mode, Absent) and bool(mode[0])
    return Card(
        uuid="" if isinstance(uuid, Absent) else uuid,
        bus_id="" if isinstance(bus, Absent) else f"{bus.domain:04x}:{bus.bus:02x}:{bus.device:02x}",
        name="" if isinstance(name, Absent) else fit(name),
        instances=tuple(_instance(nvml, each) for each in _instance_handles(nvml, handle)) if is_mig else (),
        is_mig=is_mig,
    )


def _instance_handles(nvml: Nvml, handle: Any) -> list[Any]:
    """Numbers of instances may have gaps, and the order does not change."""
    most = nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle)
    found = [
        nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, k)
        for k in range(0 if isinstance(most, Absent) else most)
    ]
    return [each for each in found if not isinstance(each, Absent)]


def _instance(nvml: Nvml, handle: Any) -> Instance:
    uuid = nvml.ask("nvmlDeviceGetUUID", handle)
    gi, ci = nvml.ask("nvmlDeviceGetGpuInstanceId", handle), nvml.ask("nvmlDeviceGetComputeInstanceId", handle)
    return Instance(
        uuid="" if isinstance(uuid, Absent) else uuid,
        gi=-1 if isinstance(gi, Absent) else gi,
        ci=-1 if isinstance(ci, Absent) else ci,
    )


def device_at(nvml: Nvml, place: Place) -> Device | Absent:
    """What to ask for the figures of a place."""
    handle = nvml.ask("nvmlDeviceGetHandleByIndex", place.card)
    if isinstance(handle, Absent):
        return handle
    if place.instance is None:
        return Device(nvml, handle, handle)
    instances = _instance_handles(nvml, handle)
    if place.instance >= len(instances):
        return Absent("its MIG instance is gone")
    return Device(nvml, handle, instances[place.instance], is_mig=True)


def visible_devices() -> tuple[str | None, str]:
    """What the environment says about devices: those that are visible, and their order."""
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER", "")


def find(device: TorchDevice, known: Sequence[Card], visible: str | None, order: str) -> Place | str:
    """Which card a device of torch is, or why that cannot be told.

    A MIG instance that is named comes first, because CUDA may give its GPU's identity instead of its own. Then the
    UUID, the place on the bus, and at last the number, which says least.
    """
    named = _entry(device.index, visible)
    if named.startswith(MIG):
        return _find_instance(named, known)
    for matches in (
        [k for k, card in enumerate(known) if device.uuid and card.uuid == _with_prefix(device.uuid)],
        [k for k, card in enumerate(known) if device.bus_id and card.bus_id == device.bus_id],
        [k for k, card in enumerate(known) if named.startswith(GPU) and card.uuid.startswith(named)],
    ):
        if len(matches) == 1:
            return _whole(matches[0], known)
    for k, card in enumerate(known):
        for j, instance in enumerate(card.instances):
            if device.uuid and instance.uuid.removeprefix(MIG) == device.uuid.removeprefix(MIG):
                return Place(k, j)
    if device.uuid or device.bus_id or named.startswith(GPU):
        return _unknown(known)
    return _find_number(device.index if visible is None else named, known, order)


def _entry(index: int, visible: str | None) -> str:
    """What is named for the device; CUDA does not read on after an entry that it does not know."""
    entries = [] if visible is None else [entry.strip() for entry in visible.split(",")]
    return entries[index] if index < len(entries) else ""


def _find_instance(named: str, known: Sequence[Card]) -> Place | str:
    """`MIG-<uuid>`, or as drivers before 470 have it, `MIG-GPU-<uuid>/<gi>/<ci>`."""
    gpu, _, numbers = named.removeprefix(MIG).partition("/")
    matches = [
        Place(k, j)
        for k, card in enumerate(known)
        for j, instance in enumerate(card.instances)
        if instance.uuid.startswith(named) or (card.uuid == gpu and numbers == f"{instance.gi}/{instance.ci}")
    ]
    return matches[0] if len(matches) == 1 else _unknown(known)


def _find_number(named: int | str, known: Sequence[Card], order: str) -> Place | str:
    try:
        number = int(named)
    except ValueError:
        return UNKNOWN
    if order != "PCI_BUS_ID" and len({card.name for card in known if card.name}) > 1:
        return MIXED
    return _whole(number, known) if 0 <= number < len(known) else UNKNOWN


def _whole(k: int, known: Sequence[Card]) -> Place | str:
    card = known[k]
    if card.why:
        return card.why
    if card.is_mig:
        return Place(k, 0) if len(card.instances) == 1 else WHICH_MIG
    return Place(k)


def _unknown(known: Sequence[Card]) -> str:
    """A card that could not be asked is probably the one that was looked for."""
    return next((card.why for card in known if card.why), UNKNOWN)


def _with_prefix(uuid: str) -> str:
    return uuid if uuid.startswith(GPU) else f"{GPU}{uuid}"
