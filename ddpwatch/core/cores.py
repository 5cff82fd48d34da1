"""How long a rank's training thread waited for a core, over the latest half minute."""

from __future__ import annotations

from typing import Final

import numpy as np

KEPT: Final = 64
EVERY_NS: Final = 500_000_000
LATELY_NS: Final = 10_000_000_000
LEAST_SPAN_NS: Final = 250_000_000
"""Over less than a beat nothing can be told."""


class Queueing:
    """The time without a core at some moments, by the rank's own clock. Refuses what runs backwards."""

    __slots__ = ("_count", "_samples")

    def __init__(self) -> None:
        self._samples: np.ndarray[tuple[int, int], np.dtype[np.int64]] | None = None
        self._count = 0

    def put(self, mono_ns: int, queued_ns: int) -> None:
        """Take a moment: in place of the one before, unless that is long enough after its own."""
        if self._samples is None:
            # Not before it is told: a thousand ranks may run where it cannot be read.
            self._samples = np.zeros((KEPT, 2), dtype=np.int64)
        samples = self._samples
        if self._count and (mono_ns <= samples[self._count - 1, 0] or queued_ns < samples[self._count - 1, 1]):
            return
        if self._count >= 2 and samples[self._count - 1, 0] - samples[self._count - 2, 0] < EVERY_NS:
            self._count -= 1
        elif self._count == KEPT:
            samples[:-1] = samples[1:]
            self._count -= 1
        samples[self._count] = mono_ns, queued_ns
        self._count += 1

    @property
    def lately(self) -> float | None:
        """Part of the last seconds that went into waiting for a core; None = it is not known."""
        if self._samples is None or not self._count:
            return None
        newest_ns = int(self._samples[self._count - 1, 0])
        return self.share(newest_ns - LATELY_NS, newest_ns)

    def share(self, first_ns: int, last_ns: int) -> float | None:
        """Part of a span of time that went into waiting for a core; None = it is not known."""
        if self._samples is None or self._count < 2:
            return None
        known = self._samples[: self._count]
        first_ns, last_ns = max(first_ns, int(known[0, 0])), min(last_ns, int(known[-1, 0]))
        if last_ns - first_ns < LEAST_SPAN_NS:
            return None
        begin_ns, end_ns = np.interp([first_ns, last_ns], known[:, 0], known[:, 1]).tolist()
        return float((end_ns - begin_ns) / (last_ns - first_ns))
