"""Steps of several ranks on one timeline, for a trace.

Clocks of different hosts are never compared. The timeline is the clock of the lowest rank: a step ends there at one and
the same moment for all ranks, as it does in synchronous training, give or take an optimizer. A rank whose step took
longer than there is room since the step before is drawn a little shorter; its figures are in the arguments.

What is known of a step is how long its phases were, not when each began. They are laid out in their usual order, from
one `optimizer.step()` to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from ddpwatch.core.ring import IntArray
    from ddpwatch.core.window import Window

PIECES: Final = ("other", "data", "waiting", "wire", "forward", "backward", "waiting", "wire", "optimizer")
"""Of a step, in the order in which they are drawn: ranks meet before the forward pass and after backward."""
UNSPLIT: Final = "sync"
"""In place of waiting, where a rank is missing and the wire cannot be told from it."""
ARRIVAL: Final = 6
"""Up to here a rank is on its own; then it waits in the all-reduce for the others."""
RELEASE: Final = 7
"""Here the last rank has arrived, and the wire's own time begins."""
LEAST_STEP_NS: Final = 1000


@dataclass(frozen=True)
class Layout:
    """Where the pieces of some steps begin and end, in ns from the beginning of the trace."""

    ends_ns: IntArray
    """(step)"""
    cuts_ns: IntArray
    """(rank, piece + 1, step): the first is where the step begins, the last where it ends."""


class Ruler:
    """Puts one window after another on the timeline."""

    def __init__(self) -> None:
        """Begin at 0."""
        self._end_ns = 0
        self._rank: int | None = None
        self._offset_ns = 0

    def lay(self, window: Window) -> Layout:
        """The next steps."""
        ends_ns = self._ends(window)
        before_ns = np.concatenate([[self._end_ns], ends_ns[:-1]])
        begins_ns = np.maximum(before_ns, ends_ns - window.step_ns)
        pieces_ns = _pieces(window)
        done = np.cumsum(pieces_ns, axis=1) / np.maximum(window.step_ns, 1)[:, None]
        room_ns = ends_ns - begins_ns
        cuts_ns = begins_ns[:, None] + np.rint(done * room_ns[:, None]).astype(np.int64)
        cuts_ns[:, -1] = ends_ns
        self._end_ns = int(ends_ns[-1])
        return Layout(ends_ns, np.concatenate([begins_ns[:, None], cuts_ns], axis=1))

    def _ends(self, window: Window) -> IntArray:
        clock_ns = window.column("end_ns")[0]
        if window.ranks[0] != self._rank:
            # Another rank has another clock: its first step comes right after the last of the one before.
            self._rank = window.ranks[0]
            self._offset_ns = self._end_ns + max(int(window.step_ns[0, 0]), LEAST_STEP_NS) - int(clock_ns[0])
        least_ns = LEAST_STEP_NS * np.arange(1, len(window) + 1)
        ends_ns: IntArray = np.maximum.accumulate(
            np.maximum(clock_ns + self._offset_ns, self._end_ns + LEAST_STEP_NS) - least_ns
        )
        return ends_ns + least_ns


def _pieces(window: Window) -> IntArray:
    """(rank, piece, step), adding up to the steps. Without all ranks, what is not told apart counts as waiting."""
    phases_ns = {name: window.phases_ns[:, place] for place, name in enumerate(PHASES)}
    split: list[IntArray] = []
    for sync_ns in window.meetings_ns:
        wire_ns = sync_ns.min(axis=0) if window.complete else np.zeros(len(window), dtype=np.int64)
        split += [sync_ns - wire_ns, np.broadcast_to(wire_ns, sync_ns.shape)]
    return np.stack(
        [
            phases_ns["other"],
            phases_ns["data"],
            *split[:2],
            phases_ns["forward"],
            phases_ns["backward"],
            *split[2:],
            phases_ns["optimizer"],
        ],
        axis=1,
    )
