"""Why there are no figures of a run, in words: it has no step, or none that counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpwatch.core.hangs import done_by_all
from ddpwatch.core.window import ENOUGH_STEPS

if TYPE_CHECKING:
    from ddpwatch.core.digest import Digest
    from ddpwatch.core.limits import Limits
    from ddpwatch.core.state import RunState


def why_none(state: RunState, *, ended: bool = False) -> str:
    """Of a run without figures, as part of a sentence; `ended` = no more steps will come."""
    if done_by_all(state) == 0:
        return "only the first step, which is not measured"
    return f"no step {'' if ended else 'yet '}that all ranks have finished"


def why_none_recorded(state: RunState) -> str:
    """Of a recording without measured steps, as part of a sentence."""
    done = done_by_all(state)
    if done < 0:
        return "no step that all ranks have finished is in the recording"
    if not done:
        return "only the first step is in the recording, which is not measured"
    return "none of the steps in the recording could be measured"


def too_few(digest: Digest, limits: Limits) -> bool:
    """Whether no rule that goes by steps has judged these, because they are too few or the first of their run."""
    enough = limits.judge.warmup_steps + ENOUGH_STEPS
    return digest.steps < ENOUGH_STEPS or (digest.last_step or 0) < enough
