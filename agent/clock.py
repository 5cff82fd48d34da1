"""The phase clock by the host's time: one phase is current, and every stamp ends it and begins the next."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, ClassVar, Final

from ddpwatch.wire import MAX_POINTS, PHASES

if TYPE_CHECKING:
    from collections.abc import Callable

DATA, FORWARD, BACKWARD, SYNC, OPTIMIZER, OTHER = range(len(PHASES))
SAVING: Final = len(PHASES)
"""A checkpoint save; a separate phase inside the agent, part of `other` elsewhere."""
EVALUATING: Final = SAVING + 1
"""An evaluation; likewise."""
PRESYNC: Final = EVALUATING + 1
"""Communication before the forward pass; a separate phase inside the agent, part of `sync` elsewhere."""
SYNC_POINTS: Final = PRESYNC + 1
"""The first sync point outside DDP; likewise. The further ones follow, and after them all that are summed."""
CLOCK_PHASES: Final = SYNC_POINTS + MAX_POINTS + 1
"""Number of phases that a clock distinguishes."""


class HostClock:
    """Phase clock of the host's monotonic time. Each stamp ends a phase and begins one, so they add up to the step."""

    __slots__ = ("_now", "_totals", "phase", "since_ns")

    name: ClassVar[str] = "host"
    """Source of time: `host` or `cuda`."""

    def __init__(self, now: Callable[[], int] = perf_counter_ns) -> None:
        self._now = now
        self._totals = [0] * CLOCK_PHASES
        self.phase = OTHER
        self.since_ns = now()
        """Start of the current phase, by the host's monotonic clock."""

    def switch(self, phase: int) -> None:
        """End the current phase and begin another."""
        now = self._now()
        self._totals[self.phase] += now - self.since_ns
        self.since_ns = now
        self.phase = phase

    def cut(self, phase: int) -> tuple[list[int], int]:
        """End the step and begin the next one in this phase: nanoseconds by phase, and the end time."""
        now = self._now()
        totals = self._totals
        totals[self.phase] += now - self.since_ns
        self.since_ns = now
        self.phase = phase
        self._totals = [0] * CLOCK_PHASES
        return totals, now
