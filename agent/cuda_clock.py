"""The phase clock of a GPU, which runs behind the host: each stamp is also a CUDA event in its stream."""

from __future__ import annotations

import contextlib
from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ddpwatch.agent.clock import CLOCK_PHASES, HostClock
from ddpwatch.agent.cuda_calls import CUDA_CALLS, CudaCalls

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from ddpwatch.agent.cuda_calls import Event, Stream

LATER_STEPS: Final = 2
"""Steps after which the events of a step are first queried; by then the GPU has usually reached them."""
MAX_PENDING: Final = 64
"""Steps that may wait for the GPU; beyond that the oldest one keeps the host's times."""
MAX_EVENTS: Final = 4096
"""CUDA events that are created, at most; when all are in use, a step keeps the host's times."""


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
    on_other_streams: tuple[Event, ...]
    """Events whose completion does not follow from that of `end`."""


class CudaClock(HostClock):
    """Takes two times at each stamp: the host's, for heartbeats, and an event in the current stream of one device.

    Called by the training thread, and by autograd's threads while that one waits. It never waits for the GPU, and makes
    no CUDA call while a graph is captured: even a query would invalidate the capture. A step without a full set of
    events, or whose events do not complete, keeps the host's times; no step is lost, and their order is kept.
    """

    __slots__ = ("_capturing", "_cuda", "_device", "_events", "_free", "_lost", "_made", "_on_other_streams",
                 "_overhang_ns", "_pending", "_phases", "_stream", "_stream_id")  # fmt: skip

    name = "cuda"

    def __init__(
        self, device: torch.device, cuda: CudaCalls = CUDA_CALLS, now: Callable[[], int] = perf_counter_ns
    ) -> None:
        super().__init__(now)
        self._cuda = cuda
        self._device = cuda.current_device() if device.index is None else device.index
        self._stream_id: Any = None
        self._stream: Stream = None
        """The stream of the latest event, as an object that is created only when the current stream changes."""
        self._free: list[Event] = []
        self._made = 0
        self._pending: deque[_Cut] = deque()
        self._overhang_ns = 0
        """Time by which an event on a slower stream reaches beyond the end of the last settled step."""
        self._capturing = False
        """Whether a graph was being captured at the latest stamp."""
        self._events: list[Event] = []
        self._phases: list[int] = []
        self._on_other_streams: tuple[Event, ...] = ()
        self._lost = False
        """Whether the current step will keep the host's times; its further stamps are not events."""
        self._begin(self._record())

    def switch(self, phase: int) -> None:
        """End the current phase and begin another."""
        ended = self.phase
        HostClock.switch(self, phase)
        if self._lost:
            return
        event = self._record()
        if event is None:
            self._lost = True
        else:
            self._events.append(event)
            self._phases.append(ended)

    def cut(self, phase: int) -> tuple[list[int], int]:
        """End the step and its last phase. Its nanoseconds are the host's until `settle` has returned the step."""
        self._phases.append(self.phase)
        totals, end_ns = HostClock.cut(self, phase)
        end = self._record()
        self._pending.append(
            _Cut(totals, self._events, self._phases, None if self._lost else end, self._on_other_streams)
        )
        self._begin(end)
        return totals, end_ns

    def settle(self) -> list[bool]:
        """Steps that have become final, oldest first: whether each has the GPU's times. Call it right after a cut."""
        return self._settle(LATER_STEPS, MAX_PENDING, ask=not self._capturing)

    def finish(self, *, ask: bool) -> list[bool]:
        """Settle every step that was cut, with the host's times if the GPU's are not available yet.

        Without `ask` it makes no CUDA call, not even to free an event.
        """
        try:
            ask = ask and not self._cuda.any_capture(self._device)
        except Exception:  # noqa: BLE001 - after an error CUDA may refuse every call; the steps are settled nevertheless
            ask = False
        settled = self._settle(0, 0, ask=ask)
        if ask:
            self._free.clear()
            self._begin(None)
        return settled

    def _begin(self, event: Event | None) -> None:
        self._events = [] if event is None else [event]
        self._phases = []
        self._on_other_streams = ()
        self._lost = event is None

    def _record(self) -> Event | None:
        """Record an event in the current stream of our device, whichever device is current; None = not possible."""
        cuda = self._cuda
        device = self._device
        # Most scripts have one device, and a call of `any_capture` takes as long as both questions.
        self._capturing = cuda.is_capturing() or (cuda.current_device() != device and cuda.any_capture(device))
        if self._capturing:
            return None
        if self._free:
            event = self._free.pop()
        elif self._made < MAX_EVENTS:
            event = cuda.new_event(enable_timing=True)
            self._made += 1
        else:
            return None
        # Asked at each stamp, because the script may change it at any time.
        stream_id = cuda.stream_id(device)
        if stream_id != self._stream_id:
            self._on_other_streams += tuple(self._events[-1:])
            self._stream = cuda.current_stream(device)
            self._stream_id = stream_id
        cuda.record(event, self._stream)
        return event

    def _settle(self, keep: int, max_pending: int, *, ask: bool) -> list[bool]:
        settled: list[bool] = []
        if len(self._pending) <= keep:
            return settled
        # Where another device is current, a query would create a CUDA context on it.
        guard = ask and self._cuda.current_device() != self._device
        with self._cuda.device(self._device) if guard else contextlib.nullcontext():
            while len(self._pending) > keep:
                step = self._pending[0]
                times = None
                if step.end is not None:
                    try:
                        times = self._times(step, step.end) if ask else None
                        if times is None and len(self._pending) <= max_pending:
                            break
                    except Exception:  # noqa: BLE001, S110 - on any CUDA error the step keeps the host's times
                        pass
                if times is None:
                    self._overhang_ns = 0
                else:
                    step.totals[:] = times
                settled.append(times is not None)
                self._pending.popleft()
                # Also events that have not completed: recording an event again resets it.
                self._free += step.events
        return settled

    def _times(self, step: _Cut, end: Event) -> list[int] | None:
        """Nanoseconds by phase, as differences of times since one event, so that rounding errors do not add up; None =
        the GPU has not reached the end of the step.

        On another stream a later event may complete earlier: its phase then took no time, and time that was counted
        once is not counted again, neither in this step nor in the next.
        """
        query, elapsed_ms = self._cuda.query, self._cuda.elapsed_ms
        # On the stream of the last event, the others have completed before it.
        if not query(end) or not all(map(query, step.on_other_streams)):
            return None
        first, *stamps = step.events
        stamps.append(end)
        totals = [0] * CLOCK_PHASES
        reached_ns = self._overhang_ns
        passed_ns = 0
        for phase, event in zip(step.phases, stamps, strict=True):
            passed_ns = round(elapsed_ms(first, event) * 1e6)
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
