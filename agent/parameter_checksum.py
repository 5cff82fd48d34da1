"""Checksums of parameter slices, one every 200 steps, to detect replicas that drift apart."""

from __future__ import annotations

import ctypes
import weakref
import zlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ddpwatch.agent.cuda_calls import CUDA_CALLS, CudaCalls
from ddpwatch.agent.patching import WeakIdSet
from ddpwatch.agent.torch_private import ignored_parameters
from ddpwatch.wire import Checksum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.agent.cuda_calls import Event
    from ddpwatch.agent.step_recorder import Recorder

EVERY_STEPS: Final = 200
"""Steps between two checksums."""
FIRST_STEP: Final = 9
"""An early check for short runs; by then DDP has rebuilt its buckets and replicas must agree."""
SLICE_BYTES: Final = 64 << 10
"""Bytes of a parameter that enter one checksum, at most."""
INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by element size in bytes, to sum the bits of a parameter."""
MASK: Final = 2**62 - 1
"""Bits of a `wire.Count`."""


class _Sum(NamedTuple):
    """A sum that a GPU may not have computed yet."""

    device: int
    event: Event
    """Completes when the sum has been copied to `host`."""
    host: Tensor
    fields: dict[str, Any]
    """What the message will say of it."""


class Checksums:
    """Takes slices of the parameters in turn, chosen by step number: all ranks take the same slice at the same step.

    On the CPU it is a CRC-32 of the bytes in place. On a GPU a sum is queued on the current stream of the parameter's
    device, copied to pinned memory without waiting, and read at a later step once its event has completed; nothing is
    synchronized. While another device is current it is not touched, because that would create a CUDA context there.
    """

    def __init__(self, modules: list[weakref.ref[nn.Module]], cuda: CudaCalls = CUDA_CALLS) -> None:
        self._modules = modules
        self._cuda = cuda
        self._left_out = WeakIdSet()
        self._named: list[tuple[str, weakref.ref[Tensor]]] = []
        self._pending: _Sum | None = None

    def leave_out(self, module: nn.Module) -> None:
        """Take no checksums of this module: its replicas are on other ranks than those of the run's first model."""
        self._left_out.add(module)
        self._named.clear()

    def after_step(self, recorder: Recorder) -> None:
        """Take the slice that is due after this step, if any, and report a pending one that is complete."""
        if self._pending is not None:
            self._collect(self._pending, recorder)
        if recorder.index != FIRST_STEP and (recorder.index + 1) % EVERY_STEPS:
            return
        found = self._parameter(recorder.index // EVERY_STEPS)
        if found is not None:
            self._take(recorder, *found)

    def _parameter(self, turn: int) -> tuple[str, Tensor, int] | None:
        """Name and parameter of this turn, and the number of its earlier turns."""
        if not self._named:
            # Once: walking a large model takes a millisecond.
            modules = [module for module in (ref() for ref in self._modules) if module is not None]
            self._named = [
                (name, weakref.ref(parameter))
                for module in modules
                if id(module) not in self._left_out.ids
                for name, parameter in _synchronized(module)
                if type(parameter) is nn.Parameter and parameter.requires_grad and parameter.numel()
            ]
        if not self._named:
            return None
        name, reference = self._named[turn % len(self._named)]
        parameter = reference()
        return None if parameter is None else (name, parameter, turn // len(self._named))

    def _take(self, recorder: Recorder, name: str, parameter: Tensor, round_: int) -> None:
        if not parameter.is_contiguous() or parameter.layout is not torch.strided:
            return
        width = parameter.element_size()
        count = min(SLICE_BYTES // width, parameter.numel())
        offset = (round_ * count) % (parameter.numel() - count + 1)
        fields: dict[str, Any] = {"parameter": name[:200], "offset": offset}
        if parameter.device.type == "cpu":
            data = ctypes.string_at(parameter.data_ptr() + offset * width, count * width)
            recorder.event(Checksum, **fields, crc=zlib.crc32(data))
        elif parameter.device.type == "cuda" and width in INTEGERS:
            piece = parameter.detach().view(-1)[offset : offset + count]
            self._queue(piece, parameter.device.index, {**fields, "step": recorder.index})

    def _queue(self, piece: Tensor, device: int, fields: dict[str, Any]) -> None:
        cuda = self._cuda
        if cuda.any_capture(device):
            return
        with cuda.device(device):
            host = torch.empty(1, dtype=torch.int64, pin_memory=piece.device.type == "cuda")
            host.copy_(piece.view(INTEGERS[piece.element_size()]).sum(dtype=torch.int64).view(1), non_blocking=True)
            event = cuda.new_event()
            cuda.record(event, cuda.current_stream(device))
        self._pending = _Sum(device, event, host, fields)

    def _collect(self, pending: _Sum, recorder: Recorder) -> None:
        cuda = self._cuda
        if cuda.any_capture(pending.device):
            return
        with cuda.device(pending.device):
            if cuda.query(pending.event):
                self._pending = None
                recorder.event(Checksum, **pending.fields, crc=int(pending.host.item()) & MASK)


def _synchronized(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that DDP keeps equal on all ranks: those that the script does not make it ignore."""
    ignored = ignored_parameters(module)
    return (named for named in module.named_parameters() if named[0] not in ignored)
