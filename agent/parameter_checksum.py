"""Checksums of parameter slices, one every 200 steps, to detect replicas that drift apart."""

from __future__ import annotations

import ctypes
import weakref
import zlib
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from ddpwatch.wire import Checksum

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Checksums:
    """Takes slices of the parameters in turn, chosen by step number: all ranks take the same slice at the same step.

    On the CPU it is a CRC-32 of the bytes in place. On a GPU a sum is queued on the current stream, copied to pinned
    memory without waiting, and read at a later step once its event has completed; nothing is synchronized.
    """

    def __init__(self, modules: list[weakref.ref[nn.Module]], new_event: Callable[[], Any] = torch.cuda.Event) -> None:
        self._modules = modules
        self._new_event = new_event
        self._named: list[tuple[str, weakref.ref[Tensor]]] = []
        self._pending: tuple[Any, Tensor, dict[str, Any]] | None = None

    def after_step(self, recorder: Recorder) -> None:
        """Take the slice that is due after this step, if any, and report a pending one that is complete."""
        if self._pending is not None:
            self._collect(recorder)
        if recorder.index != FIRST_STEP and (recorder.index + 1) % EVERY_STEPS:
            return
        found = self._parameter(recorder.index // EVERY_STEPS)
        if found is not None:
            self._take(recorder, *found)

    def _parameter(self, turn: int) -> tuple[str, Tensor, int] | None:
        """Name and parameter of this turn, and the number of its earlier turns."""
        if not self._named:
            # Once: walking a large model takes a millisecond.
            self._named = [
                (name, weakref.ref(parameter))
                for module in (ref() for ref in self._modules)
                if module is not None
                for name, parameter in module.named_parameters()
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
        elif parameter.device.type == "cuda" and width in INTEGERS and not torch.cuda.is_current_stream_capturing():
            self._queue(parameter.detach().view(-1)[offset : offset + count], {**fields, "step": recorder.index})

    def _queue(self, piece: Tensor, fields: dict[str, Any]) -> None:
        host = torch.empty(1, dtype=torch.int64, pin_memory=piece.device.type == "cuda")
        host.copy_(piece.view(INTEGERS[piece.element_size()]).sum(dtype=torch.int64).view(1), non_blocking=True)
        event = self._new_event()
        event.record()
        self._pending = (event, host, fields)

    def _collect(self, recorder: Recorder) -> None:
        assert self._pending is not None
        event, host, fields = self._pending
        if event.query():
            self._pending = None
            recorder.event(Checksum, **fields, crc=int(host.item()) & MASK)
