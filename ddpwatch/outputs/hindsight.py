"""Steps from before the moment at which a reading of a recording began, for charts that reach further back.

A checkpoint brings only the last steps. The others are looked for backwards, from one checkpoint to the one before, and
in portions, so that whoever waits for something else does not wait for this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.rank import MAX_STEP_NS
from ddpwatch.errors import WireError
from ddpwatch.wire import Beat, Comms, Snap, Steps, decode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.core.rank import RankState
    from ddpwatch.core.state import RunState
    from ddpwatch.sources.recorded import Attempt, Recorded

AT_ONCE: Final = 32
"""Messages between two pauses."""
LATE_NS: Final = 2_000_000_000
"""A step is told up to so long after it has ended."""


def fill_in(recorded: Recorded, attempt: Attempt, state: RunState, before_ns: int) -> Iterator[bool]:
    """Give the ranks the steps that came before a moment, as far back as they are kept. Goes on for as long as it is
    asked; each time whether the steps so far are a whole again, and worth a look.
    """
    reach_ns = before_ns
    while reach_ns > attempt.first_ns and any(map(_has_room, state.ranks.values())):
        checkpoint = recorded.checkpoint(attempt, reach_ns - 1)
        from_ns = attempt.first_ns - 1 if checkpoint is None else checkpoint.at_ns
        payloads = (entry.payload for entry in recorded.entries(attempt, from_ns=from_ns, upto_ns=reach_ns + LATE_NS))
        for number, payload in enumerate(payloads, 1):
            recall(state, payload)
            if number % AT_ONCE == 0:
                yield False
        for number, payload in enumerate(() if checkpoint is None else checkpoint.payloads, 1):
            recall(state, payload)
            if number % AT_ONCE == 0:
                yield False
        yield True
        reach_ns = min([from_ns, *_oldest_ns(state)])


def recall(state: RunState, payload: bytes) -> None:
    """Take the finished steps out of a message that came earlier than all that is known, and nothing else."""
    try:
        message = decode(payload)
    except WireError:
        return
    rank = state.ranks.get(message.rank)
    if rank is None:
        return
    if isinstance(message, Comms):
        rank.amend(message.comms)
    elif isinstance(message, (Beat, Steps, Snap)):
        for step in message.steps:
            if step.presync_ns <= step.sync_ns and step.step_ns <= MAX_STEP_NS:
                rank.steps.put(step)


def step_ns(rank: RankState, index: int) -> int | None:
    """When a step ended, by the recorder's clock; None = cannot be told."""
    if rank.beat is None or rank.sign_ns is None or index < 0 or not rank.steps.has(index):
        return None
    end_ns = int(rank.steps.column("end_ns", np.array([index]))[0])
    return rank.sign_ns - (rank.beat.mono_ns - end_ns)


def _has_room(rank: RankState) -> bool:
    """Whether older steps would be kept."""
    oldest = max(0, rank.steps.newest - rank.steps.store.capacity + 1)
    return rank.steps.newest >= 0 and not rank.steps.has(oldest)


def _oldest_ns(state: RunState) -> Iterator[int]:
    """When the oldest step that all ranks have ended, if that can be told."""
    oldest = [(int(rank.steps.indices()[0]), rank) for rank in state.ranks.values() if rank.steps.newest >= 0]
    ended_ns = [step_ns(rank, index) for index, rank in oldest]
    known_ns = [ended for ended in ended_ns if ended is not None]
    if known_ns:
        yield max(known_ns)
