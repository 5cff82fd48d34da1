"""Where the time of a step goes on a GPU, which runs behind the host: each stamp is also an event in its stream."""

from __future__ import annotations

import contextlib
from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from ddpwatch.agent.clock import PRESYNC, Clock, HostClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

LATER_STEPS: Final = 2
"""So many steps later the events of a step are asked for the first time; by then the GPU has usually passed them."""
MAX_PENDING: Final = 64
"""With more steps than this not yet told, the oldest one is told with the host's times."""
MAX_EVENTS: Final = 4096


class Event(Protocol):
    """What is used of a `torch.cuda.Event`."""

    def record(self, stream: Any) -> None:
        """Mark this place in the stream; an earlier mark is forgotten, whether it was passed or not."""

    def query(self) -> bool:
        """Whether the stream has passed the mark; never waits."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this mark to another; raises unless both were passed."""


class _Cut(NamedTuple):
    """A step that has ended on the host and perhaps not yet on the GPU."""

    totals: list[int]
    """Nanoseconds by phase: the host's, until the GPU's are put in their place."""
    events: list[Event]
    """The step's beginning, and every stamp in it. They are free again once the step is settled."""
    phases: list[int]
    """The phase that ended at each event after the first, and at `end`."""
    end: Event | None
    """The step's end, which is the first event of the next one; None where the GPU's times cannot be had."""


class CudaClock(HostClock):
    """Takes both times at each stamp: the host's, which beats read, and an event in the current stream of one device.

    Called by the thread that trains, and by autograd's while that one waits. It never waits for the GPU, and makes no
    CUDA call while a graph is captured: there even a question would spoil the capture. A step that has no full set of
    events, or whose events do not pass, keeps the host's times; none is lost, and their order is kept.
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
        """How far the step settled last reaches beyond its last event, where an earlier one lay on a slower stream."""
        self.host_timed = 0
        """Steps that were told with the host's times."""
        self._events: list[Event] = []
        self._phases: list[int] = []
        self._lost = False
        """The step under way will have the host's times; no more of its stamps are events."""
        self._begin(self._record())

    def switch(self, phase: int) -> None:
        """End the current phase and begin another, or the same again."""
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
        """End the step. Its list of nanoseconds is final when `settle` has counted it; until then it is the host's."""
        totals, end_ns = super().cut()
        end = self._record()
        self._phases.append(self.phase)
        self._pending.append(_Cut(totals, self._events, self._phases, None if self._lost else end))
        self._begin(end)
        return totals, end_ns

    def settle(self) -> int:
        """How many more steps are final now, the oldest first. To be called after each cut."""
        return self._settle(LATER_STEPS, MAX_PENDING, ask=True)

    def finish(self, *, ask: bool) -> int:
        """Settle every step that was cut, with the host's times where the GPU's are not there yet.

        Without `ask` there is no CUDA call, not even the one that gives an event back: they are all kept.
        """
        settled = self._settle(0, 0, ask=ask)
        # After an error CUDA may refuse every call; the steps are settled all the same.
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
        """An event in the current stream of our device, whichever device is current; None where there can be none."""
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
        """Whether a graph is being captured: on the current device, or on ours if that is another."""
        cuda = self._cuda
        if cuda.is_current_stream_capturing():
            return True
        if cuda.current_device() == self._device.index:
            return False
        with cuda.device(self._device):
            return bool(cuda.is_current_stream_capturing())

    def _settle(self, keep: int, patience: int, *, ask: bool) -> int:
        settled = 0
        while len(self._pending) > keep:
            step = self._pending[0]
            times = None
            if ask and step.end is not None:
                try:
                    if self._passed(step, step.end):
                        times = self._times(step, step.end)
                    elif len(self._pending) <= patience:
                        break
                except Exception:  # noqa: BLE001, S110 - whatever CUDA says: the step has the host's times
                    pass
            if times is None:
                self.host_timed += 1
                self._overhang_ns = 0
            else:
                step.totals[:] = times
            self._pending.popleft()
            # Those that were not passed too: recording an event anew forgets what it stood for.
            self._free += step.events
            settled += 1
        return settled

    def _passed(self, step: _Cut, end: Event) -> bool:
        """From the last one: on one stream it is the only one to answer no. The user may have changed streams."""
        return not self._capturing() and end.query() and all(event.query() for event in reversed(step.events))

    def _times(self, step: _Cut, end: Event) -> list[int]:
        """Nanoseconds by phase. All are differences of times since one event, so that no rounding adds up.

        On another stream a later stamp may have been passed earlier: its phase took no time, and what was counted
        once is not counted again, neither in this step nor in the next.
        """
        first, *stamps = step.events
        totals = [0] * (PRESYNC + 1)
        reached_ns = self._overhang_ns
        passed_ns = 0
        for phase, event in zip(step.phases, (*stamps, end), strict=True):
            passed_ns = round(first.elapsed_time(event) * 1e6)
            if passed_ns > reached_ns:
                totals[phase] += passed_ns - reached_ns
                reached_ns = passed_ns
        self._overhang_ns = reached_ns - passed_ns
        return totals


def clock_for(model: nn.Module, choice: str) -> Clock:
    """The clock of the model's GPU; the host's without one, or by choice."""
    device = gpu_of(model) if choice != "host" else None
    return HostClock() if device is None else CudaClock(device)


def gpu_of(model: nn.Module) -> torch.device | None:
    """Where its first CUDA parameter is; None = on no GPU that torch can use."""
    if not torch.cuda.is_available():
        return None
    return next((each.device for each in model.parameters() if each.device.type == "cuda"), None)
