"""What becomes of a message that holds more than one thing, or more than is kept of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import force_setattr

from ddpwatch.core.taming import tamed_beat, tamed_bye, tamed_hello
from ddpwatch.core.text import NAME_CHARS, NOTE_CHARS, tamed
from ddpwatch.wire import FAILING, Bye

if TYPE_CHECKING:
    from ddpwatch.core.rank import RankState
    from ddpwatch.wire import Beat, Note, Snap


def lightened(beat: Beat) -> Beat:
    """The same beat, which is kept until the next one, without its steps and GPUs: those have a place of their own."""
    if beat.table:
        force_setattr(beat, "table", b"")
    if beat.steps:
        force_setattr(beat, "steps", [])
    if beat.gpus is not None:
        force_setattr(beat, "gpus", None)
    return beat


def hear_note(rank: RankState, note: Note, now_ns: int) -> None:
    """Keep a note; one that announces a goodbye is kept as that, until it comes."""
    if note.kind == FAILING:
        bye = Bye(rank=note.rank, seq=0, reason="failed", text=note.text, mono_ns=note.mono_ns)
        rank.failing = tamed_bye(bye), now_ns
    else:
        rank.note(tamed(note, NOTE_CHARS))


def hear_snap(rank: RankState, snap: Snap, now_ns: int) -> None:
    """Take in all that a rank tells somebody who comes late."""
    rank.sequence.cover(snap.seq)
    rank.snapped = True
    rank.meet(tamed_hello(snap.hello))
    rank.hear(tamed_beat(snap.beat), now_ns)
    rank.record(snap.steps)
    for note in snap.notes:
        rank.note(tamed(note, NOTE_CHARS))
    for loader in snap.loaders:
        rank.load(tamed(loader, NAME_CHARS))
    for checksum in snap.checksums:
        rank.check(tamed(checksum, NAME_CHARS))
    rank.gpus.recall(snap.gpu_moments)
    if snap.gpus is not None:
        rank.gpus.take(snap.gpus, now_ns)
