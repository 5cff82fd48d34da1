"""Checkpoint of a state: messages, as ranks would send them, that bring an empty state to the same point.

Holds only the last steps, to stay small; `session.replay_backfill` reads older ones from the recording.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ddpwatch.core.metrics.window import WINDOW_STEPS
from ddpwatch.core.state.run import MAX_EXPECTED
from ddpwatch.core.state.step_codec import write_tables
from ddpwatch.wire import MAX_FRAME_BYTES, Gone, Held, Snap, encode, step_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.wire import Beat, Hello

CHECKPOINT_STEPS: Final = WINDOW_STEPS + 14
"""Steps of each rank: as many as figures and time-based rules need, and a margin."""


def checkpoint_messages(state: RunState, steps: int = CHECKPOINT_STEPS) -> Iterator[tuple[int, bytes]]:
    """Payloads of messages about the ranks that have sent any, each with the time at which to apply it.

    Each message keeps its age, so that a rank without heartbeats is so again. Steps of ranks that every state of this
    run expects follow in tables (`step_codec`), which are not messages.
    """
    if state.relay is not None:
        yield state.relay_ns, encode(state.relay)
    in_tables = []
    for rank in state.ranks.values():
        expected = rank.rank < MAX_EXPECTED
        yield from _rank(rank, 0 if expected else steps, state.now_ns)
        if expected and rank.hello is not None and rank.beat is not None:
            in_tables.append((rank.rank, rank.steps))
    for table in write_tables(in_tables, steps):
        yield state.now_ns, table


def _rank(rank: RankState, steps: int, now_ns: int) -> Iterator[tuple[int, bytes]]:
    last_received_ns = now_ns if rank.last_received_ns is None else rank.last_received_ns
    if rank.hello is not None and rank.beat is not None:
        yield last_received_ns, _snap(rank, rank.hello, rank.beat, steps)
    elif rank.hello is not None:
        yield last_received_ns, encode(rank.hello)
    if rank.buckets is not None:
        yield last_received_ns, encode(rank.buckets)
    if rank.stack is not None:
        yield last_received_ns, encode(rank.stack)
    if rank.bye is not None:
        yield now_ns if rank.bye_ns is None else rank.bye_ns, encode(msgspec.structs.replace(rank.bye, seq=0))
    if rank.gone_ns is not None:
        ago_ns = max(1, rank.gone_ns - rank.ended_ns) if rank.ended_ns is not None else 0
        gone = Gone(rank=rank.rank, seq=0, oom_kills=rank.oom_kills, exit_code=rank.exit_code, ago_ns=ago_ns)
        yield rank.gone_ns, encode(gone)
    if rank.held_by:
        yield rank.held_ns or now_ns, encode(Held(rank=rank.rank, seq=0, by=rank.held_by))


def _snap(rank: RankState, hello: Hello, beat: Beat, steps: int) -> bytes:
    snap = Snap(
        rank=rank.rank, seq=rank.sequence.newest, hello=hello, beat=beat,
        steps=[step_of(row) for row in rank.steps.latest(steps).tolist()] if steps else [],
        notes=list(rank.notes.values()), loaders=list(rank.loaders.values()),
        checksums=list(rank.checksums.values()), sync_paths=list(rank.sync_paths.values()),
        queued=rank.cpu_starvation.moments(), gpus=rank.gpus.latest,
        workers=rank.workers,
    )  # fmt: skip
    payload = encode(snap)
    # Only text can fill a frame; without it the snapshot is small.
    return payload if len(payload) <= MAX_FRAME_BYTES else encode(msgspec.structs.replace(snap, notes=[], gpus=None))
