"""Maps the CUDA devices of torch to GPUs and MIG instances of NVML."""

from __future__ import annotations

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
WHICH_MIG: Final = "the GPU is divided into MIG instances, and CUDA_VISIBLE_DEVICES names none of them"
MIXED: Final = (
    "GPU models differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID, so the device index does not identify the GPU"
)
UNKNOWN: Final = "the driver reports no GPU that matches this device"


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """A CUDA device as torch knows it."""

    index: int
    uuid: str = ""
    """UUID of the GPU; torch writes it without a prefix."""
    bus_id: str = ""
    """`0000:1b:00`: domain, bus and device."""
    name: str = ""
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Instance:
    """A MIG instance: a part of a GPU that CUDA treats as a device."""

    uuid: str
    gi: int = -1
    ci: int = -1


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as NVML knows it; all fields but `why` are empty if it could not be read."""

    uuid: str = ""
    bus_id: str = ""
    name: str = ""
    instances: tuple[Instance, ...] = ()
    is_mig: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Index of a card, and of the MIG instance on it."""

    card: int
    instance: int | None = None


def torch_devices(model: nn.Module) -> list[TorchDevice]:
    """The CUDA devices of a model's parameters and buffers.

    Call it on the training thread: from another one torch might create a CUDA context while a graph is captured.
    """
    tensors = [*model.parameters(), *model.buffers()]
    indices = dict.fromkeys(
        tensor.device.index or 0 for tensor in tensors if not is_lazy(tensor) and tensor.device.type == "cuda"
    )
    return [_torch_device(index) for index in list(indices)[:MAX_GPUS]]


def _torch_device(index: int) -> TorchDevice:
    try:
        properties: Any = torch.cuda.get_device_properties(index)
    except Exception:  # noqa: BLE001 - torch may be of any version, and the driver in any state
        return TorchDevice(index)
    # torch 2.4 has none of these.
    bus = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    return TorchDevice(
        index,
        uuid=fit(str(getattr(properties, "uuid", ""))),
        bus_id="" if -1 in bus else "{:04x}:{:02x}:{:02x}".format(*bus),
        name=fit(str(getattr(properties, "name", ""))),
        total_bytes=int(getattr(properties, "total_memory", 0)),
    )


def cards(nvml: Nvml) -> list[Card]:
    """All GPUs that the driver shows to this process."""
    return [_card(nvml, index) for index in range(nvml.ask_or(0, "nvmlDeviceGetCount"))]


def _card(nvml: Nvml, index: int) -> Card:
    handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
    if isinstance(handle, Absent):
        return Card(why=handle.why)
    bus = nvml.ask("nvmlDeviceGetPciInfo", handle)
    is_mig = bool(nvml.ask_or((0,), "nvmlDeviceGetMigMode", handle)[0])
    return Card(
        uuid=nvml.ask_or("", "nvmlDeviceGetUUID", handle),
        bus_id="" if isinstance(bus, Absent) else f"{bus.domain:04x}:{bus.bus:02x}:{bus.device:02x}",
        name=fit(nvml.ask_or("", "nvmlDeviceGetName", handle)),
        instances=tuple(_instance(nvml, each) for each in _instance_handles(nvml, handle)) if is_mig else (),
        is_mig=is_mig,
    )


def _instance_handles(nvml: Nvml, handle: Any) -> list[Any]:
    """Handles of the MIG instances of a GPU, always in the same order. Their indices may have gaps."""
    indices = range(nvml.ask_or(0, "nvmlDeviceGetMaxMigDeviceCount", handle))
    found = [nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, k) for k in indices]
    return [each for each in found if not isinstance(each, Absent)]


def _instance(nvml: Nvml, handle: Any) -> Instance:
    return Instance(
        uuid=nvml.ask_or("", "nvmlDeviceGetUUID", handle),
        gi=nvml.ask_or(-1, "nvmlDeviceGetGpuInstanceId", handle),
        ci=nvml.ask_or(-1, "nvmlDeviceGetComputeInstanceId", handle),
    )


def device_at(nvml: Nvml, place: Place) -> Device | Absent:
    """Handles of the device at a place."""
    handle = nvml.ask("nvmlDeviceGetHandleByIndex", place.card)
    if isinstance(handle, Absent):
        return handle
    if place.instance is None:
        return Device(nvml, handle, handle)
    instances = _instance_handles(nvml, handle)
    if place.instance >= len(instances):
        return Absent("its MIG instance does not exist")
    return Device(nvml, handle, instances[place.instance], is_mig=True)


def find(device: TorchDevice, known: Sequence[Card], visible: str | None, order: str) -> Place | str:
    """The place of a torch device, or the reason why it cannot be found. `visible` and `order` are CUDA's variables.

    A MIG instance that is named comes first, because CUDA may report its GPU's identity instead of its own. Then the
    UUID, the bus id, and last the index, which is the least certain.
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
    """The entry of a device in CUDA_VISIBLE_DEVICES, or empty."""
    entries = [] if visible is None else [entry.strip() for entry in visible.split(",")]
    return entries[index] if index < len(entries) else ""


def _find_instance(named: str, known: Sequence[Card]) -> Place | str:
    """Find `MIG-<uuid>`, or `MIG-GPU-<uuid>/<gi>/<ci>` as drivers before 470 write it."""
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
    """The reason of a card that could not be read, which is probably the one that was searched."""
    return next((card.why for card in known if card.why), UNKNOWN)


def _with_prefix(uuid: str) -> str:
    return uuid if uuid.startswith(GPU) else f"{GPU}{uuid}"
