"""Values that the script passed to `agent.log`, by rank and step; the run state keeps only the last ones.

As many steps are kept as a snapshot brings, so that a step received twice counts once. Names beyond `MAX_NAMES` are
only counted.
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
"""Max. number of names with statistics of their own."""
MAX_REFUSED: Final = 4096
"""Maximum count of further names."""
_STEPS: Final = b"\xa5steps"
"""msgpack key of steps with logged values; nearly all steps come packed, without any."""


class _LoggedSteps(Struct):
    rank: Rank
    steps: list[Step] = []


_decoder: Final = msgspec.msgpack.Decoder(_LoggedSteps)


@dataclass
class Series:
    """Statistics of one name. First and last go by step, then rank, because snapshots come after live steps."""

    count: int = 0
    first: float | None = None
    last: float | None = None
    first_at: tuple[int, int] = (0, 0)
    """Step and rank."""
    last_at: tuple[int, int] = (0, 0)
    min: float | None = None
    max: float | None = None
    finite: int = 0
    total: float = 0.0

    def add(self, value: float, at: tuple[int, int]) -> None:
        """Add a value of a step and rank. NaN and infinity count, but not for min, max and mean."""
        if not self.count or at < self.first_at:
            self.first, self.first_at = value, at
        if not self.count or at > self.last_at:
            self.last, self.last_at = value, at
        self.count += 1
        if math.isfinite(value):
            self.finite, self.total = self.finite + 1, self.total + value
            self.min = value if self.min is None else min(self.min, value)
            self.max = value if self.max is None else max(self.max, value)

    @property
    def mean(self) -> float | None:
        """Mean of the finite values."""
        return self.total / self.finite if self.finite else None


class Logged:
    """Collects logged values from the payloads of an attempt, in order."""

    def __init__(self, steps: tuple[int, int], world_size: int, kept: int) -> None:
        """Collect from the first to the last of `steps`, both included; a snapshot brings at most `kept` steps."""
        self.series: dict[str, Series] = {}
        """Statistics over all ranks by name, in the order of first appearance."""
        self._first, self._last = steps
        # Twice: a snapshot comes after the first live steps and brings those before them.
        self._world_size, self._kept = world_size, 2 * kept
        self._by_rank: dict[int, dict[int, dict[str, float]]] = {}
        self._refused: set[str] = set()

    @property
    def left_out(self) -> int:
        """Number of names beyond `MAX_NAMES`."""
        return len(self._refused)

    def add(self, payload: bytes) -> None:
        """Collect the logged values of a message; malformed ones are ignored."""
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
        """Logged values of a rank in a step, by name."""
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
            self.series[known].add(value, (index, rank))
            kept[known] = value
        of_rank[index] = kept
        if len(of_rank) > self._kept:
            del of_rank[next(iter(of_rank))]
