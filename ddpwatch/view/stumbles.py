"""Time that was lost: steps that took far longer than the others, and the hang that the run has not come out of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.hangs import last_hang
from ddpwatch.core.numbers import count, plural, ranks_text
from ddpwatch.core.timeline import NOT_KNOWN
from ddpwatch.view.alertpage import all_alerts

if TYPE_CHECKING:
    from ddpwatch.core.hangs import Hang
    from ddpwatch.view.picture import Picture

FAR_TIMES: Final = 4.0
"""So many times the median is far above it …"""
FAR_S: Final = 1.0
"""… if it is at least so much longer: of short steps every scheduler makes long ones."""
GUILTY_PERCENT: Final = 50
"""The rank whose own work made up so much more of the step than the middle rank's is the one that stood still."""


def lost_text(picture: Picture) -> str:
    """The time in which nothing went on, and why; empty = there was none."""
    return "; ".join(filter(None, (hang_text(last_hang(picture.state, all_alerts(picture))), stumbles_text(picture))))


def hang_text(hang: Hang | None) -> str:
    """The hang at the end, in a few words; empty = there was none."""
    if hang is None:
        return ""
    who = f", for {ranks_text(hang.ranks)}" if hang.ranks else ""
    return f"{hang.seconds:.1f} s in a hang that no step has come after{who}"


def stumbles_text(picture: Picture) -> str:
    """The time that was lost to such steps, how many there were, and the longest; empty = there were none.

    Of the steps that are kept: of a long run these are the last ones.
    """
    timeline = picture.timeline
    steps = timeline.steps(picture.last_step)
    if not len(steps):
        return ""
    step_s = timeline.series("step_ns", steps) / 1e9
    usual_s = float(np.median(step_s))
    far = step_s > max(FAR_TIMES * usual_s, usual_s + FAR_S)
    if not far.any():
        return ""
    lost_s = float((step_s[far] - usual_s).sum())
    longest = int(np.argmax(step_s))
    worst = f"step {count(int(steps[longest]))} took {step_s[longest]:.1f} s{_who(picture, int(steps[longest]))}"
    number = int(far.sum())
    told = worst if number == 1 else f"the longest: {worst}"
    return f"{lost_s:.1f} s in {plural(number, 'step')} of the last {count(len(steps))} that stood still: {told}"


def _who(picture: Picture, step: int) -> str:
    excess = picture.timeline.excess(np.array([step], dtype=np.int64))[:, 0]
    known = np.where(excess == NOT_KNOWN, 0, excess)
    if picture.state.world_size < 2 or not len(known) or int(known.max()) < GUILTY_PERCENT:
        return ""
    return f", for rank {picture.timeline.ranks[int(known.argmax())]}"
