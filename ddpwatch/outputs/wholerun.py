"""All recorded steps of a run added up, as a dashboard has them that has looked on from its beginning to its end.

Who goes to the end of a recording has the last steps only. The others are read from the beginning, in portions, so that
whoever waits for something else does not wait for this.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from ddpwatch.core.tally import Tally
from ddpwatch.outputs.readout import Readout
from ddpwatch.recording import Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.core.window import Window
    from ddpwatch.sources.recorded import Attempt, Recorded

NEARLY: Final = 0.99


class WholeRun:
    """One attempt, read from its first frame to its last."""

    def __init__(self, recorded: Recorded, attempt: Attempt) -> None:
        """Nothing is read yet, nor is it looked how much there is: somebody may wait for the first picture."""
        self.attempt = attempt
        self.done = False
        self.tally = Tally()
        """The steps so far."""
        self._recorded = recorded
        self._frames, self._read = 1, 0
        self._portions: Iterator[Window | None] | None = None

    @property
    def part(self) -> float:
        """How much of it was read, from 0 to 1, which is the end and nothing else."""
        return 1.0 if self.done else min(self._read / self._frames, NEARLY)

    def go_on(self, budget_s: float) -> None:
        """Read for so long at most."""
        until_s = time.monotonic() + budget_s
        if self._portions is None:
            readout = Readout(self._recorded, self.attempt, self._count)
            self._frames, self._portions = max(readout.frames, 1), readout.portions()
        while not self.done and time.monotonic() < until_s:
            try:
                window = next(self._portions)
            except (StopIteration, Unreadable):
                self.done = True
                return
            if window is not None:
                self._take(window)

    def _count(self, frames: int) -> None:
        self._read += frames

    def _take(self, window: Window) -> None:
        if not window.complete:
            return
        if not self.tally.steps:
            self.tally = Tally(window.ranks)
        later = window.indices > 0
        if later.all():
            self.tally.take(window)
        elif later.any():
            # The first one holds warming up.
            self.tally.take(window.last(int(later.sum())))
