"""Backfill after a seek: steps and GPU readings from before the checkpoint, for charts that reach further back.

Read backwards, from one checkpoint to the previous one, as generators that yield often, so that the caller can do
something else in between.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct

from ddpwatch.core.state.gpu import GpuReading, GpuReadings
from ddpwatch.core.state.step_codec import apply_table
from ddpwatch.errors import WireError
from ddpwatch.wire import (
    MAX_GPUS,
    SNAP_PREFIX,
    TOPICS,
    Beat,
    Comms,
    Count,
    GpuMoment,
    Gpus,
    Rank,
    Snap,
    Steps,
    decode,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.recording.reader import Attempt, Recording

AT_ONCE: Final = 32
"""Messages between two yields."""
LATE_NS: Final = 2_000_000_000
"""Max nanoseconds between the end of a step and its message."""
GPU_WINDOW_NS: Final = 20_000_000_000
"""Nanoseconds of the recording that are read for GPU readings before they are shown; doubles each time."""
MAX_GPU_NS: Final = 80_000_000_000
"""Max nanoseconds of the recording that are read for GPU readings at a time."""
GPU_EVERY_NS: Final = 2_000_000_000
"""Upper bound of the interval between GPU readings, in nanoseconds; limits how far back they are read."""


def backfill_steps(recorded: Recording, attempt: Attempt, state: RunState, before_ns: int) -> Iterator[bool]:
    """Add the steps before a moment, as far back as rings hold. Yields True when steps are complete, else False."""
    reach_ns, oldest = before_ns, None
    # If a portion brings nothing, older steps were lost.
    while reach_ns > attempt.first_ns and (now := _oldest(state)) != oldest:
        oldest = now
        if not any(_has_room(state.ranks[rank], step) for rank, step in now.items()):
            return
        checkpoint = recorded.checkpoint(attempt, reach_ns - 1)
        from_ns = attempt.first_ns - 1 if checkpoint is None else checkpoint.at_ns
        entries = recorded.entries(attempt, from_ns=from_ns, upto_ns=reach_ns + LATE_NS)
        known = () if checkpoint is None else checkpoint.payloads
        for number, payload in enumerate(chain((entry.payload for entry in entries), known), 1):
            take_older_steps(state, payload)
            if number % AT_ONCE == 0:
                yield False
        for table in () if checkpoint is None else checkpoint.tables:
            apply_table(state, table, earlier=True)
            yield False
        yield True
        ended_ns = [state.ranks[rank].finished_ns(step) for rank, step in _oldest(state).items()]
        # The latest of the ranks' oldest steps: all ranks have what comes after it.
        reach_ns = min(from_ns, max((ns for ns in ended_ns if ns is not None), default=from_ns))


def backfill_gpus(recorded: Recording, attempt: Attempt, state: RunState, before_ns: int) -> Iterator[bool]:
    """Add the GPU readings before a moment. Yields True when a history got longer, and False in between."""
    kept = max((rank.gpus.kept for rank in state.ranks.values() if rank.gpus.histories), default=0)
    oldest_ns = max(attempt.first_ns - 1, before_ns - kept * GPU_EVERY_NS)
    reach_ns, window_ns = before_ns, GPU_WINDOW_NS
    while reach_ns > oldest_ns and _gpus_have_room(state):
        from_ns = max(reach_ns - window_ns, oldest_ns)
        read: dict[int, list[GpuReadings | GpuMoment]] = {}
        entries = recorded.entries(attempt, from_ns=from_ns, upto_ns=reach_ns, wanted=_has_gpus)
        for number, entry in enumerate(entries, 1):
            _keep_readings(read, entry.payload)
            if number % AT_ONCE == 0:
                yield False
        longer = False
        for number, rank in enumerate(state.ranks.values(), 1):
            longer |= rank.rank in read and rank.gpus.recall_earlier(read[rank.rank])
            if number % AT_ONCE == 0:
                yield False
        yield longer
        reach_ns, window_ns = from_ns, min(2 * window_ns, MAX_GPU_NS)


def _has_gpus(topic: bytes) -> bool:
    return topic == TOPICS[Gpus] or topic.startswith(SNAP_PREFIX)


class _GpuFields(Struct):
    """The GPU fields of any message: `Beat` and `Snap` have readings of one moment, `Gpus` is one."""

    rank: Rank
    mono_ns: Count = 0
    gpus: GpuReadings | Annotated[list[GpuReading], Meta(max_length=MAX_GPUS)] | None = None
    gpu_moments: list[GpuMoment] = []


_decoder: Final = msgspec.msgpack.Decoder(_GpuFields)


def _keep_readings(read: dict[int, list[GpuReadings | GpuMoment]], payload: bytes) -> None:
    try:
        message = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    readings = read.setdefault(message.rank, [])
    readings.extend(message.gpu_moments)
    if isinstance(message.gpus, GpuReadings):
        readings.append(message.gpus)
    elif message.gpus is not None:
        readings.append(GpuReadings(message.mono_ns, message.gpus))


def _gpus_have_room(state: RunState) -> bool:
    return any(history.room for rank in state.ranks.values() for history in rank.gpus.histories.values())


def take_older_steps(state: RunState, payload: bytes) -> None:
    """Take only the finished steps from a message that is older than the state."""
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
        # A later step than the newest comes from a rank that counted differently before.
        rank.steps.put_all([step for step in message.steps if step.index <= rank.steps.newest])
        if isinstance(message, Beat) and message.table:
            rank.steps.put_table(message.table, upto=rank.steps.newest)


def _oldest(state: RunState) -> dict[int, int]:
    """Index of the first step of each rank that has one."""
    ranks = state.ranks.values()
    return {rank.rank: int(rank.steps.indices()[0]) for rank in ranks if rank.steps.newest >= 0}


def _has_room(rank: RankState, oldest: int) -> bool:
    """Whether the ring has room for older steps than this."""
    return oldest > max(0, rank.steps.newest - rank.steps.store.capacity + 1)
