"""Sanitizes the text of messages, and applies messages with several parts to a rank.

A message with plain text only, as nearly all have, is returned as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import force_setattr

from ddpwatch.core.state.rank import PARTS
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, are_sanitized, is_sanitized, sanitize, sanitized
from ddpwatch.wire import FAILING, Bye, Checksum, Loader, LoaderWorkers, Stack, StackFrame, ThreadStack

if TYPE_CHECKING:
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.wire import Beat, Group, Hello, Note, Snap, SyncPath


def sanitized_hello(hello: Hello) -> Hello:
    """Identity of a rank, sent every few seconds."""
    texts = [*hello.ddp, *hello.ddp.values(), *hello.environment, *hello.environment.values()]
    kept = sanitized(hello, NAME_CHARS)
    if not is_sanitized(hello.command, NAME_CHARS):
        kept = msgspec.structs.replace(kept, command=sanitize(hello.command, NOTE_CHARS))
    if are_sanitized(texts, NAME_CHARS):
        return kept
    settings, environment = (
        {sanitize(name, NAME_CHARS): sanitize(value, NAME_CHARS) for name, value in pairs.items()}
        for pairs in (hello.ddp, hello.environment)
    )
    return msgspec.structs.replace(kept, ddp=settings, environment=environment)


def sanitized_beat(beat: Beat) -> Beat:
    """A heartbeat, sent four times a second by each rank."""
    if not beat.pause and not beat.activity and _are_sanitized(beat.groups):
        return beat
    kept = sanitized(beat, NAME_CHARS)
    groups = [sanitized(group, NAME_CHARS) for group in beat.groups]
    return kept if groups == beat.groups else msgspec.structs.replace(kept, groups=groups)


def _are_sanitized(groups: list[Group]) -> bool:
    for group in groups:
        text = group.name
        if group.op or group.members or group.error or group.shape:
            # In one check: the typical ones are short even together.
            text = f"{text}{group.members}{group.op}{group.shape}{group.error}"
        if not (text.isascii() and text.isprintable() and len(text) <= NAME_CHARS):
            return False
    return True


def sanitized_stack(stack: Stack) -> Stack:
    """Stacks of a rank's threads."""
    threads = [
        ThreadStack(
            sanitize(thread.name, NAME_CHARS), thread.training, [_sanitized_frame(frame) for frame in thread.frames]
        )
        for thread in stack.threads
    ]
    collectives = [sanitized(collective, NAME_CHARS) for collective in stack.collectives]
    return msgspec.structs.replace(stack, threads=threads, collectives=collectives)


def _sanitized_frame(frame: StackFrame) -> StackFrame:
    # The end of a path says more than its beginning.
    file = sanitize(frame.file[-2 * NAME_CHARS :], 2 * NAME_CHARS)
    return StackFrame(sanitize(frame.function, NAME_CHARS), file, frame.line)


def sanitized_bye(bye: Bye) -> Bye:
    """A rank's exit message, on one line."""
    kept = sanitized(msgspec.structs.replace(bye, text=bye.text.replace("\n", PARTS)), NOTE_CHARS)
    collectives = [sanitized(collective, NAME_CHARS) for collective in bye.collectives]
    return kept if collectives == bye.collectives else msgspec.structs.replace(kept, collectives=collectives)


def sanitized_path(path: SyncPath) -> SyncPath:
    """A sequence of sync points."""
    return msgspec.structs.replace(path, points=[sanitized(point, NAME_CHARS) for point in path.points])


def without_steps_and_gpus(beat: Beat) -> Beat:
    """The same heartbeat without its steps and GPUs, which are stored elsewhere: it is kept until the next one."""
    if beat.table:
        force_setattr(beat, "table", b"")
    if beat.steps:
        force_setattr(beat, "steps", [])
    if beat.gpus is not None:
        force_setattr(beat, "gpus", None)
    return beat


def apply_event(rank: RankState, event: Note | Loader | LoaderWorkers | Checksum, now_ns: int) -> None:
    """Keep an event of the training."""
    match event:
        case Loader():
            rank.add_loader(sanitized(event, NAME_CHARS))
        case LoaderWorkers():
            rank.apply_workers(event)
        case Checksum():
            rank.add_checksum(sanitized(event, NAME_CHARS))
        case _:
            _apply_note(rank, event, now_ns)


def _apply_note(rank: RankState, note: Note, now_ns: int) -> None:
    """Keep a note; a note of a failure is kept as the exit message that it announces."""
    if note.kind == FAILING:
        bye = Bye(rank=note.rank, seq=0, reason="failed", text=note.text, mono_ns=note.mono_ns)
        rank.failing = sanitized_bye(bye), now_ns
    else:
        rank.add_note(sanitized(note, NOTE_CHARS))


def apply_snap(rank: RankState, snap: Snap, now_ns: int) -> None:
    """Apply a snapshot: the history that a rank sends to late viewers."""
    rank.sequence.cover(snap.seq)
    rank.snapped = True
    rank.apply_hello(sanitized_hello(snap.hello))
    for moment in snap.queued:
        rank.cpu_starvation.put(moment.mono_ns, moment.queued_ns)
    rank.apply_beat(sanitized_beat(snap.beat), now_ns)
    rank.add_steps(snap.steps)
    for note in snap.notes:
        rank.add_note(sanitized(note, NOTE_CHARS))
    for loader in snap.loaders:
        rank.add_loader(sanitized(loader, NAME_CHARS))
    for checksum in snap.checksums:
        rank.add_checksum(sanitized(checksum, NAME_CHARS))
    for path in snap.sync_paths:
        rank.add_sync_path(sanitized_path(path))
    if snap.workers is not None:
        rank.apply_workers(snap.workers)
    rank.gpus.recall(snap.gpu_moments)
    if snap.gpus is not None:
        rank.gpus.update(snap.gpus, now_ns)
