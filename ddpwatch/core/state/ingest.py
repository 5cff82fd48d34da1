"""What becomes of a message that holds more than one thing, or more than is kept of it.

Steps that come packed, as `wire.pack_steps` writes them, from many ranks at a time.

Messages whose text may be shown. One that is plain already, as nearly all are, is given back as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from ddpwatch.core.state.rank import PARTS
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, are_sanitized, is_sanitized, sanitize, sanitized
from ddpwatch.core.state.step_store import COLUMN, COLUMNS, FLAGS, LARGEST, MAX_STEP_NS, PHASES, PRESYNC, SYNC
from ddpwatch.wire import FAILING, STEP_BYTES, Bye, Stack, StackFrame, ThreadStack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.step_store import IntArray, StepRing
    from ddpwatch.wire import Beat, Group, Hello, Note, Snap


def sanitized_hello(hello: Hello) -> Hello:
    """Who a rank is; it says so every few seconds."""
    texts = [*hello.ddp, *hello.ddp.values(), *hello.environment, *hello.environment.values()]
    kept = sanitized(hello, NAME_CHARS) if is_sanitized(hello.command, NAME_CHARS) else _with_long_command(hello)
    if are_sanitized(texts, NAME_CHARS):
        return kept
    settings, environment = (
        {sanitize(name, NAME_CHARS): sanitize(value, NAME_CHARS) for name, value in pairs.items()}
        for pairs in (hello.ddp, hello.environment)
    )
    return msgspec.structs.replace(kept, ddp=settings, environment=environment)


def _with_long_command(hello: Hello) -> Hello:
    return msgspec.structs.replace(sanitized(hello, NAME_CHARS), command=sanitize(hello.command, NOTE_CHARS))


def sanitized_beat(beat: Beat) -> Beat:
    """A sign of life; each rank gives four a second."""
    if not beat.pause and _are_sanitized_groups(beat.groups):
        return beat
    kept = sanitized(beat, NAME_CHARS)
    groups = [sanitized(group, NAME_CHARS) for group in beat.groups]
    return kept if groups == beat.groups else msgspec.structs.replace(kept, groups=groups)


def _are_sanitized_groups(groups: list[Group]) -> bool:
    for group in groups:
        text = group.name
        if group.op or group.members or group.error or group.shape:
            # All at once: the usual ones are short even together.
            text = f"{text}{group.members}{group.op}{group.shape}{group.error}"
        if not (text.isascii() and text.isprintable() and len(text) <= NAME_CHARS):
            return False
    return True


def sanitized_stack(stack: Stack) -> Stack:
    """What the threads of a rank are doing."""
    threads = [
        ThreadStack(
            sanitize(thread.name, NAME_CHARS), thread.training, [_sanitized_frame(frame) for frame in thread.frames]
        )
        for thread in stack.threads
    ]
    collectives = [sanitized(collective, NAME_CHARS) for collective in stack.collectives]
    return msgspec.structs.replace(stack, threads=threads, collectives=collectives)


def _sanitized_frame(frame: StackFrame) -> StackFrame:
    # Of a path the end tells more than the beginning.
    file = sanitize(frame.file[-2 * NAME_CHARS :], 2 * NAME_CHARS)
    return StackFrame(sanitize(frame.function, NAME_CHARS), file, frame.line)


def sanitized_bye(bye: Bye) -> Bye:
    """A goodbye, on one line."""
    kept = sanitized(msgspec.structs.replace(bye, text=bye.text.replace("\n", PARTS)), NOTE_CHARS)
    collectives = [sanitized(collective, NAME_CHARS) for collective in bye.collectives]
    return kept if collectives == bye.collectives else msgspec.structs.replace(kept, collectives=collectives)


def without_steps_and_gpus(beat: Beat) -> Beat:
    """The same beat, which is kept until the next one, without its steps and GPUs: those have a place of their own."""
    if beat.table:
        force_setattr(beat, "table", b"")
    if beat.steps:
        force_setattr(beat, "steps", [])
    if beat.gpus is not None:
        force_setattr(beat, "gpus", None)
    return beat


def apply_note(rank: RankState, note: Note, now_ns: int) -> None:
    """Keep a note; one that announces a goodbye is kept as that, until it comes."""
    if note.kind == FAILING:
        bye = Bye(rank=note.rank, seq=0, reason="failed", text=note.text, mono_ns=note.mono_ns)
        rank.failing = sanitized_bye(bye), now_ns
    else:
        rank.note(sanitized(note, NOTE_CHARS))


def apply_snap(rank: RankState, snap: Snap, now_ns: int) -> None:
    """Take in all that a rank tells somebody who comes late."""
    rank.sequence.cover(snap.seq)
    rank.snapped = True
    rank.apply_hello(sanitized_hello(snap.hello))
    rank.apply_beat(sanitized_beat(snap.beat), now_ns)
    rank.record(snap.steps)
    for note in snap.notes:
        rank.note(sanitized(note, NOTE_CHARS))
    for loader in snap.loaders:
        rank.load(sanitized(loader, NAME_CHARS))
    for checksum in snap.checksums:
        rank.check(sanitized(checksum, NAME_CHARS))
    rank.gpus.recall(snap.gpu_moments)
    if snap.gpus is not None:
        rank.gpus.update(snap.gpus, now_ns)


WORTH_IT: Final = 16
"""Of fewer tables each is sooner read by itself."""
_INDEX: Final = COLUMN["index"]
_SURELY_NS: Final = MAX_STEP_NS // (PHASES.stop - PHASES.start)
"""No phase being longer, no step is too long."""


def put_tables(reported: Sequence[tuple[StepRing, bytes]]) -> list[int]:
    """Give each ring the steps of its table, in order; of each how many are impossible, or contradict what was told
    before.
    """
    if len(reported) >= WORTH_IT and _put_at_once(reported):
        return [0] * len(reported)
    return [ring.put_table(table) for ring, table in reported]


def _put_at_once(reported: Sequence[tuple[StepRing, bytes]]) -> bool:
    """Whether all of them are as nearly all are: possible, without a flag, and each following the one before."""
    store = reported[0][0].store
    data = b"".join([table for _, table in reported])
    if not data or len(data) % STEP_BYTES:
        return False
    rows: IntArray = np.frombuffer(data, "<i8").reshape(-1, len(COLUMNS)).astype(np.int64, copy=False)
    if not _is_surely_plain(rows):
        return False
    firsts: list[int] = []
    counts: list[int] = []
    places: list[int] = []
    same_store = True
    for ring, table in reported:
        # One after the other: a rank may have told more than one of them.
        count, first = len(table) // STEP_BYTES, ring.newest + 1
        ring.newest += count
        firsts.append(first)
        counts.append(count)
        places.append(ring.row)
        same_store &= ring.store is store
    of_table = np.repeat(np.arange(len(reported)), _array(counts))
    indices = rows[:, _INDEX]
    begins = np.cumsum(_array([0, *counts[:-1]]))
    expected = np.arange(len(rows)) + (_array(firsts) - begins)[of_table]
    if not (same_store and (indices == expected).all()):
        for (ring, _), count in zip(reported, counts, strict=True):
            ring.newest -= count
        return False
    where = _array(places)[of_table] * store.capacity + indices % store.capacity
    store.table.reshape(-1, len(COLUMNS))[where] = rows
    store.index.reshape(-1)[where] = indices
    return True


def _array(numbers: list[int]) -> IntArray:
    # `np.array` looks at each of them to find out what they are.
    return np.fromiter(numbers, np.int64, len(numbers))


def _is_surely_plain(rows: IntArray) -> bool:
    # Of all numbers first, which takes no longer than of one column.
    return bool(
        rows.min() >= 0
        and rows.max() <= LARGEST
        and rows[:, PHASES].max() <= _SURELY_NS
        and not rows[:, FLAGS].any()
        and (rows[:, PRESYNC] <= rows[:, SYNC]).all()
    )


def possible(rows: IntArray) -> NDArray[np.bool_]:
    """Which of these steps can be: as `wire.Step` and a rank's state demand it of each that is told one by one."""
    within = ((rows >= 0) & (rows <= LARGEST)).all(axis=1)
    spent = rows[:, PHASES]
    within &= (spent <= MAX_STEP_NS).all(axis=1)
    within &= np.where(within, spent.sum(axis=1), 0) <= MAX_STEP_NS
    fine: NDArray[np.bool_] = within & (rows[:, PRESYNC] <= rows[:, SYNC])
    return fine
