"""The first moment of an attempt at which there is something to see: before it, ranks are just being heard."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

from ddpwatch.core.rank import Place
from ddpwatch.core.state import RunState
from ddpwatch.core.tables import take_table
from ddpwatch.recording import ALERTS_TOPIC
from ddpwatch.sources.replay import Pace, Replay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.sources.frames import Frame
    from ddpwatch.sources.recorded import Attempt, Recorded

COMING_NS: Final = 1_000_000_000
"""So long after the beginning ranks are heard, as a rule: there it is, if there is no step for long."""
LONG_NS: Final = 10_000_000_000
"""A step that comes later than this is not the beginning: it is worth seeing how it was waited for."""
MOST_FRAMES: Final = 20_000
"""Of thousands of ranks no more is read than this: somebody waits for it."""
_AT_ONCE: Final = 64


def first_sight(recorded: Recorded, attempt: Attempt) -> int:
    """When all ranks had first told a step that they have in common; `COMING_NS` after the beginning, if that took
    longer than `LONG_NS`.
    """
    first_ns = attempt.first_ns
    upto_ns = min(first_ns + LONG_NS, attempt.last_ns)
    places = [Place(endpoint.rank, endpoint.host, endpoint.pid) for endpoint in attempt.run.endpoints]
    state = RunState(attempt.run.id, attempt.run.name, attempt.run.world_size, places)
    # The checkpoint is that of the very beginning; only then time goes on.
    pace = Pace(first_ns, playing=False)
    with closing(Replay(recorded, attempt, pace, end_ns=upto_ns)) as source:
        for table in source.tables:
            take_table(state, table)
        pace.move(upto_ns)
        # Each is asked until it has one, and not again: all of them with every frame is too much for thousands.
        waiting = list(state.ranks.values())
        for frame in _frames(source):
            state.take(frame.payload, frame.received_ns)
            while waiting and waiting[-1].steps.newest >= 1:
                waiting.pop()
            if not waiting and _in_common(state):
                return max(frame.received_ns, first_ns)
    return min(first_ns + COMING_NS, attempt.last_ns)


def _frames(source: Replay) -> Iterator[Frame]:
    count = 0
    while count < MOST_FRAMES and (frames := source.at_hand(_AT_ONCE)):
        count += len(frames)
        yield from (frame for frame in frames if frame.topic != ALERTS_TOPIC)


def _in_common(state: RunState) -> bool:
    ranks = state.ranks.values()
    step = min((rank.steps.newest for rank in ranks), default=-1)
    return step >= 1 and all(rank.steps.has(step) for rank in ranks)
