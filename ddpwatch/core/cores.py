"""How long a rank's training thread waited for a core, over the latest half minute."""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

KEPT: Final = 64
EVERY_NS: Final = 500_000_000
LATELY_NS: Final = 10_000_000_000
LEAST_SPAN_NS: Final = 250_000_000
"""Over less than a beat nothing can be told."""


class Queueing:
    """The time without a core at some moments, by the rank's own clock. Refuses what runs backwards."""

    __slots__ = ("_queued_ns", "_times_ns")

    def __init__(self) -> None:
        self._times_ns = array("q")
        self._queued_ns = array("q")

    def copy(self) -> Queueing:
        """Another one, which takes its own moments from now on."""
        other = Queueing()
        other._times_ns, other._queued_ns = self._times_ns[:], self._queued_ns[:]
        return other

    def put(self, mono_ns: int, queued_ns: int) -> None:
        """Take a moment: in place of the one before, unless that is long enough after its own."""
        times_ns, kept_ns = self._times_ns, self._queued_ns
        if times_ns and (mono_ns <= times_ns[-1] or queued_ns < kept_ns[-1]):
            return
        if len(times_ns) >= 2 and times_ns[-1] - times_ns[-2] < EVERY_NS:
            times_ns[-1], kept_ns[-1] = mono_ns, queued_ns
            return
        if len(times_ns) == KEPT:
            del times_ns[0], kept_ns[0]
        times_ns.append(mono_ns)
        kept_ns.append(queued_ns)

    @property
    def lately(self) -> float | None:
        """Part of the last seconds that went into waiting for a core; None = it is not known."""
        return self.share(self._times_ns[-1] - LATELY_NS, self._times_ns[-1]) if self._times_ns else None

    def share(self, first_ns: int, last_ns: int) -> float | None:
        """Part of a span of time that went into waiting for a core; None = it is not known."""
        # Copies: the intake may go on while somebody draws.
        times_ns, queued_ns = self._times_ns[:], self._queued_ns[:]
        if len(times_ns) < 2 or len(times_ns) != len(queued_ns):
            return None
        first_ns, last_ns = max(first_ns, times_ns[0]), min(last_ns, times_ns[-1])
        if last_ns - first_ns < LEAST_SPAN_NS:
            return None
        begin_ns, end_ns = np.interp([first_ns, last_ns], times_ns, queued_ns).tolist()
        return float((end_ns - begin_ns) / (last_ns - first_ns))
