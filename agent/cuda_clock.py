"""The phase clock of a GPU, which runs behind the host: each stamp is also a CUDA event in its stream."""

from __future__ import annotations

import contextlib
from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

from ddpwatch.agent.clock import CLOCK_PHASES, HostClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

LATER_STEPS: Final = 2
"""Steps after which the events of a step are first queried; by then the GPU has usually reached them."""
MAX_PENDING: Final = 64
"""Steps that may wait for the GPU; beyond that the oldest one keeps the host's times."""
MAX_EVENTS: Final = 4096
"""CUDA events that are created, at most; when all are in use, a step keeps the host's times."""
Event: TypeAlias = Any
"""`torch.cuda.Event`, whose methods torch does not type."""


class _Cut(NamedTuple):
    """A step that has ended on the host, but perhaps not yet on the GPU."""

    totals: list[int]
    """Nanoseconds by phase: the host's, until they are replaced by the GPU's."""
    events: list[Event]
    """Start of the step and every stamp in it; reused once the step is settled."""
    phases: list[int]
    """The phase that ended at each event after the first, and at `end`."""
    end: Event | None
    """End of the step, which is the first event of the next one; None = the GPU's times are not available."""


class CudaClock(HostClock):
    """Takes two times at each stamp: the host's, for heartbeats, and an event in the current stream of one device.

    Called by the training thread, and by autograd's threads while that one waits. It never waits for the GPU, and makes
    no CUDA call while a graph is captured: even a query would invalidate the capture. A step without a full set of
    events, or whose events do not complete, keeps the host's times; no step is lost, and their order is kept.
    """

    __slots__ = ("_cuda", "_device", "_events", "_free", "_lost", "_made", "_overhang_ns", "_pending", "_phases",
                 "host_timed")  # fmt: skip

    name = "cuda"

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, now: Callable[[], int] = perf_counter_ns) -> None:
        super().__init__(now)
        self._device = device
        self._cuda = cuda
        self._free: list[Event] = []
        self._made = 0
        self._pending: deque[_Cut] = deque()
        self._overhang_ns = 0
        """Time by which an event on a slower stream reaches beyond the end of the last settled step."""
        self.host_timed = 0
        """Steps that kept the host's times."""
        self._events: list[Event] = []
        self._phases: list[int] = []
        self._lost = False
        """Whether the current step will keep the host's times; its further stamps are not events."""
        self._begin(self._record())

    def switch(self, phase: int) -> None:
        """End the current phase and begin another."""
        ended = self.phase
        super().switch(phase)
        if self._lost:
            return
        event = self._record()
        if event is None:
            self._lost = True
        else:
            self._events.append(event)
            self._phases.append(ended)

    def cut(self) -> tuple[list[int], int]:
        """End the step. Its nanoseconds are the host's until `settle` has counted the step."""
        totals, end_ns = super().cut()
        end = self._record()
        self._phases.append(self.phase)
        self._pending.append(_Cut(totals, self._events, self._phases, None if self._lost else end))
        self._begin(end)
        return totals, end_ns

    def settle(self) -> int:
        """Number of steps that have become final, oldest first. Call it after each cut."""
        return self._settle(LATER_STEPS, MAX_PENDING, ask=True)

    def finish(self, *, ask: bool) -> int:
        """Settle every step that was cut, with the host's times if the GPU's are not available yet.

        Without `ask` it makes no CUDA call, not even to free an event.
        """
        settled = self._settle(0, 0, ask=ask)
        # After an error CUDA may refuse every call; the steps are settled nevertheless.
        with contextlib.suppress(Exception):
            if ask and not self._capturing():
                self._free.clear()
                self._begin(None)
        return settled

    def _begin(self, event: Event | None) -> None:
        self._events = [] if event is None else [event]
        self._phases = []
        self._lost = event is None

    def _record(self) -> Event | None:
        """Record an event in the current stream of our device, whichever device is current; None = not possible."""
        if self._capturing():
            return None
        if self._free:
            event = self._free.pop()
        elif self._made < MAX_EVENTS:
            event = self._cuda.Event(enable_timing=True)
            self._made += 1
        else:
            return None
        event.record(self._cuda.current_stream(self._device))
        return event

    def _capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current device or on ours."""
        cuda = self._cuda
        if cuda.is_current_stream_capturing():
            return True
        if cuda.current_device() == self._device.index:
            return False
        with cuda.device(self._device):
            return bool(cuda.is_current_stream_capturing())

    def _settle(self, keep: int, max_pending: int, *, ask: bool) -> int:
        settled = 0
        while len(self._pending) > keep:
            step = self._pending[0]
            times = None
            if ask and step.end is not None:
                try:
                    if self._completed(step, step.end):
                        times = self._times(step, step.end)
                    elif len(self._pending) <= max_pending:
                        break
                except Exception:  # noqa: BLE001, S110 - on any CUDA error the step keeps the host's times
                    pass
            if times is None:
                self.host_timed += 1
                self._overhang_ns = 0
            else:
                step.totals[:] = times
            self._pending.popleft()
            # Also events that have not completed: recording an event again resets it.
            self._free += step.events
            settled += 1
        return settled

    def _completed(self, step: _Cut, end: Event) -> bool:
        """Whether all events have completed. Last one first: on a single stream the others have completed before it."""
        return not self._capturing() and end.query() and all(event.query() for event in reversed(step.events))

    def _times(self, step: _Cut, end: Event) -> list[int]:
        """Nanoseconds by phase, as differences of times since one event, so that rounding errors do not add up.

        On another stream a later event may complete earlier: its phase then took no time, and time that was counted
        once is not counted again, neither in this step nor in the next.
        """
        first, *stamps = step.events
        totals = [0] * CLOCK_PHASES
        reached_ns = self._overhang_ns
        passed_ns = 0
        for phase, event in zip(step.phases, (*stamps, end), strict=True):
            passed_ns = round(first.elapsed_time(event) * 1e6)
            if passed_ns > reached_ns:
                totals[phase] += passed_ns - reached_ns
                reached_ns = passed_ns
        self._overhang_ns = reached_ns - passed_ns
        return totals


def clock_for(model: nn.Module, choice: str) -> HostClock:
    """A CUDA clock if the model is on a GPU and `choice` is not `host`, else a host clock."""
    device = gpu_of(model) if choice != "host" else None
    return HostClock() if device is None else CudaClock(device)


def gpu_of(model: nn.Module) -> torch.device | None:
    """Device of the model's first CUDA parameter; None = it has none that torch can use."""
    if not torch.cuda.is_available():
        return None
    return next((each.device for each in model.parameters() if each.device.type == "cuda"), None)
