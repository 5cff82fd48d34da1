"""What the script has given to `agent.log`, by rank and step: the state keeps the last of it only.

As many steps are remembered as a history brings, so that one which is told twice counts once. More names than
`MAX_NAMES` are not told: they are counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Struct

from ddpwatch.core.state.rank import MAX_LOGGED
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.wire import Rank, Step

MAX_NAMES: Final = 64
MAX_REFUSED: Final = 4096
"""Names beyond that are counted one by one up to here."""
_STEPS: Final = b"\xa5steps"
"""The key under which a message has steps with something logged in them; nearly all come packed, and have none."""


class _LoggedSteps(Struct):
    rank: Rank
    steps: list[Step] = []


_decoder: Final = msgspec.msgpack.Decoder(_LoggedSteps)


@dataclass
class Series:
    """All values of one name, added up. First and last go by step, then by rank: histories come after live steps."""

    count: int = 0
    first: float | None = None
    last: float | None = None
    first_at: tuple[int, int] = (0, 0)
    """Step and rank."""
    last_at: tuple[int, int] = (0, 0)
    least: float | None = None
    most: float | None = None
    finite: int = 0
    total: float = 0.0

    def take(self, value: float, at: tuple[int, int]) -> None:
        """One more, of a step and a rank. What is no number counts, and may be the last of them, but is neither the
        least nor in the mean.
        """
        if not self.count or at < self.first_at:
            self.first, self.first_at = value, at
        if not self.count or at > self.last_at:
            self.last, self.last_at = value, at
        self.count += 1
        if math.isfinite(value):
            self.finite, self.total = self.finite + 1, self.total + value
            self.least = value if self.least is None else min(self.least, value)
            self.most = value if self.most is None else max(self.most, value)

    @property
    def mean(self) -> float | None:
        """Of those that are numbers; None = there is none."""
        return self.total / self.finite if self.finite else None


class Logged:
    """Hears the payloads of an attempt, in order."""

    def __init__(self, steps: tuple[int, int], world_size: int, kept: int) -> None:
        """From the first to the last of `steps`, both included; a history brings at most so many as are `kept`."""
        self.series: dict[str, Series] = {}
        """By name, over all ranks, in the order in which they were first heard."""
        self._first, self._last = steps
        # Twice: a history comes after the first live steps, and what it fills in comes before them.
        self._world_size, self._kept = world_size, 2 * kept
        self._by_rank: dict[int, dict[int, dict[str, float]]] = {}
        self._refused: set[str] = set()

    @property
    def left_out(self) -> int:
        """Names beyond `MAX_NAMES`."""
        return len(self._refused)

    def add(self, payload: bytes) -> None:
        """Take what was logged out of a message. What cannot be read was logged by nobody."""
        if _STEPS not in payload:
            return
        try:
            reported = _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if reported.rank >= self._world_size:
            return
        for step in reported.steps:
            if step.values and self._first <= step.index <= self._last:
                self._keep(reported.rank, step.index, step.values)

    def at(self, rank: int, step: int) -> dict[str, float]:
        """What a rank has logged in a step, by name."""
        return self._by_rank.get(rank, {}).get(step, {})

    def _keep(self, rank: int, index: int, values: dict[str, float]) -> None:
        of_rank = self._by_rank.setdefault(rank, {})
        if index in of_rank or (len(of_rank) >= self._kept and index < next(iter(of_rank))):
            return
        kept: dict[str, float] = {}
        for name, value in list(values.items())[:MAX_LOGGED]:
            known = sanitize(name, NAME_CHARS)
            if known not in self.series:
                if len(self.series) >= MAX_NAMES:
                    if len(self._refused) < MAX_REFUSED:
                        self._refused.add(known)
                    continue
                self.series[known] = Series()
            self.series[known].take(value, (index, rank))
            kept[known] = value
        of_rank[index] = kept
        if len(of_rank) > self._kept:
            del of_rank[next(iter(of_rank))]
