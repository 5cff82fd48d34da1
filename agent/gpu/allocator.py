"""Memory of torch's CUDA allocator by device. Resets no counter: the peak is the script's."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

EVERY_S: Final = 1.0
"""Seconds between readings of the allocator's counters."""


@dataclass(frozen=True, slots=True)
class AllocatorStats:
    """Bytes of one device."""

    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int


class TorchMemory:
    """Reads the counters at the end of a step, at most once a second; any thread may read the result.

    On the training thread, because the counters need the allocator's lock: another thread would wait for it while it
    holds the GIL. Not while a CUDA graph is captured.
    """

    def __init__(self) -> None:
        self._indices: tuple[int, ...] = ()
        self._next_s = 0.0
        self.held: dict[int, AllocatorStats] = {}
        """By device index; replaced as a whole."""
        self.why = "torch's allocator was not read yet"
        """Why a device is not in `held`."""

    def watch(self, indices: Iterable[int]) -> None:
        """Read these devices from now on."""
        self._indices = tuple(indices)
        self._next_s = 0.0

    def after_step(self) -> None:
        """Read the counters if it is time. Never raises."""
        if not self._indices:
            return
        now_s = monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        try:
            if not torch.cuda.is_current_stream_capturing():
                self.held = {index: _stats(torch.cuda.memory_stats_as_nested_dict(index)) for index in self._indices}
        except Exception as error:  # noqa: BLE001 - a custom allocator need not count
            self._next_s = float("inf")
            self.held = {}
            self.why = f"torch's allocator does not report it ({type(error).__name__})"


def _stats(stats: dict[str, Any]) -> AllocatorStats:
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return AllocatorStats(
        max(0, int(allocated["current"])), max(0, int(reserved["current"])), max(0, int(allocated["peak"]))
    )
