"""What brings an empty state to where another one is: messages, as the ranks themselves would send them.

The last steps only, so that it stays small; who needs more of the past reads it where it was kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.ring import COLUMNS
from ddpwatch.core.window import WINDOW_STEPS
from ddpwatch.wire import Gone, Held, Snap, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.core.rank import RankState
    from ddpwatch.core.state import RunState
    from ddpwatch.wire import Message

SNAPSHOT_STEPS: Final = WINDOW_STEPS + 14
"""As many as figures and rules that go by time need, and some to spare."""


def snapshot(state: RunState, steps: int = SNAPSHOT_STEPS) -> Iterator[Message]:
    """The ranks that were heard, one after another."""
    for rank in state.ranks.values():
        yield from _rank(rank, steps)


def _rank(rank: RankState, steps: int) -> Iterator[Message]:
    if rank.hello is not None and rank.beat is not None:
        yield Snap(
            rank=rank.rank,
            seq=rank.sequence.newest,
            hello=rank.hello,
            beat=rank.beat,
            steps=_steps(rank, steps),
            notes=list(rank.notes.values()),
            loaders=list(rank.loaders.values()),
            checksums=list(rank.checksums.values()),
            gpus=rank.gpus.latest,
        )
    elif rank.hello is not None:
        yield rank.hello
    if rank.buckets is not None:
        yield rank.buckets
    if rank.stack is not None:
        yield rank.stack
    if rank.bye is not None:
        yield rank.bye
    if rank.gone_ns is not None:
        yield Gone(rank=rank.rank, seq=0, oom_kills=rank.oom_kills)
    if rank.held_by:
        yield Held(rank=rank.rank, seq=0, by=rank.held_by)


def _steps(rank: RankState, most: int) -> list[Step]:
    indices = rank.steps.indices()[-most:]
    table = [rank.steps.column(name, indices).tolist() for name in COLUMNS]
    return [Step(**dict(zip(COLUMNS, row, strict=True))) for row in zip(*table, strict=True)]
