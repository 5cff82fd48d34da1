"""CUDA calls that hooks make in every step: torch's bindings without the Python around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

from ddpwatch.agent.torch_private import CUDA_EVENT, cuda_device, cuda_is_capturing, cuda_stream_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

Event: TypeAlias = Any
"""`torch.cuda.Event`, whose methods torch does not type."""
Stream: TypeAlias = Any
"""`torch.cuda.Stream`; likewise."""


class CudaCalls(NamedTuple):
    """What ddpwatch calls of CUDA on the training thread. None of these waits for a GPU."""

    current_device: Callable[[], int]
    """Index of the current device."""
    is_capturing: Callable[[], bool]
    """Whether the current stream of the current device captures a graph. Creates no CUDA context."""
    stream_id: Callable[[int], Any]
    """What identifies the current stream of a device: equal for equal streams."""
    current_stream: Callable[[int], Stream]
    """The current stream of a device as an object, which takes ten times as long as `stream_id`."""
    device: Callable[[int], AbstractContextManager[Any]]
    """Guard in which a device is current. Creates no context on the device that was current before."""
    new_event: Callable[..., Event]
    record: Callable[[Event, Stream], object]
    query: Callable[[Event], bool]
    elapsed_ms: Callable[[Event, Event], float]

    def any_capture(self, index: int) -> bool:
        """Whether a graph is captured on the current device or on this one: then even a query would invalidate it."""
        if self.is_capturing():
            return True
        if self.current_device() == index:
            return False
        with self.device(index):
            return self.is_capturing()


CUDA_CALLS: Final = CudaCalls(
    current_device=cuda_device,
    is_capturing=cuda_is_capturing,
    stream_id=cuda_stream_id,
    current_stream=torch.cuda.current_stream,
    device=torch.cuda.device,
    new_event=torch.cuda.Event,
    record=CUDA_EVENT.record,
    query=CUDA_EVENT.query,
    elapsed_ms=CUDA_EVENT.elapsed_time,
)
"""The calls of the torch at hand."""
