"""Whether the job stands still: one rank is stuck, the others wait for it, and no step ends."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from ddpwatch.core.figures import Figures
    from ddpwatch.core.rank import RankState
    from ddpwatch.core.state import RunState

LEAST_S: Final = 4.0
"""A standstill is told after so long, or after so many of the usual steps where these take longer."""
LEAST_STEPS: Final = 4
ASKED_RANKS: Final = 16
"""Ranks go in step: a few of them tell it for all."""
MOST_S: Final = 10 * 365 * 86_400
"""Longer than this nobody has waited: it is a clock that is wrong."""


def standstill_s(state: RunState, figures: Figures | None) -> float | None:
    """For how long no step has ended; None = not for long, or it cannot be told, or the run is over."""
    if figures is None or state.run_condition() not in {"live", "silent"}:
        return None
    ages_s = (_age_s(rank, state.now_ns) for rank in state.ranks.values())
    known_s = list(islice((age_s for age_s in ages_s if age_s is not None), ASKED_RANKS))
    least_s = max(LEAST_S, LEAST_STEPS * figures.step_ns / 1e9)
    age_s = min(known_s, default=0.0)
    return age_s if least_s <= age_s < MOST_S else None


def _age_s(rank: RankState, now_ns: int) -> float | None:
    """How long ago its last step ended, by its own clock up to its last beat and by ours since."""
    beat, sign_ns, newest = rank.beat, rank.sign_ns, rank.steps.newest
    if beat is None or sign_ns is None or rank.bye is not None or newest < 0 or not rank.steps.has(newest):
        return None
    end_ns = int(rank.steps.column("end_ns", np.array([newest]))[0])
    return (max(beat.mono_ns - end_ns, 0) + max(now_ns - sign_ns, 0)) / 1e9
