"""Where the time of a step goes. One phase is current at any moment; every stamp closes it and opens the next."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable

DATA, FORWARD, BACKWARD, SYNC, OPTIMIZER, OTHER = range(len(PHASES))
PRESYNC: Final = len(PHASES)
"""Communication before the forward pass. Kept apart inside the agent, a part of `sync` everywhere else."""


class Clock(Protocol):
    """What hooks see of time."""

    name: ClassVar[str]
    """Whose time it is: `host` or `cuda`."""
    phase: int
    """The phase under way."""
    since_ns: int
    """When it began."""

    def switch(self, phase: int) -> None:
        """End the current phase and begin another, or the same again."""

    def cut(self) -> tuple[list[int], int]:
        """End the step: nanoseconds by phase, and when it ended. The current phase goes on into the next step."""


class HostClock:
    """Stamps of the host's monotonic clock. The phases add up to the step because each stamp is used twice."""

    __slots__ = ("_now", "_totals", "phase", "since_ns")

    name: ClassVar[str] = "host"

    def __init__(self, now: Callable[[], int] = perf_counter_ns) -> None:
        self._now = now
        self._totals = [0] * (PRESYNC + 1)
        self.phase = OTHER
        self.since_ns = now()

    def switch(self, phase: int) -> None:
        """End the current phase and begin another, or the same again."""
        now = self._now()
        self._totals[self.phase] += now - self.since_ns
        self.since_ns = now
        self.phase = phase

    def cut(self) -> tuple[list[int], int]:
        """End the step: nanoseconds by phase, and when it ended. The current phase goes on into the next step."""
        now = self._now()
        totals = self._totals
        totals[self.phase] += now - self.since_ns
        self.since_ns = now
        self._totals = [0] * (PRESYNC + 1)
        return totals, now
