"""Messages whose text may be shown. One that is plain already, as nearly all are, is given back as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ddpwatch.core.rank import PARTS
from ddpwatch.core.text import NAME_CHARS, NOTE_CHARS, are_tame, is_tame, tame, tamed
from ddpwatch.wire import Stack, StackFrame, ThreadStack

if TYPE_CHECKING:
    from ddpwatch.wire import Beat, Bye, Group, Hello


def tamed_hello(hello: Hello) -> Hello:
    """Who a rank is; it says so every few seconds."""
    texts = [*hello.ddp, *hello.ddp.values(), *hello.environment, *hello.environment.values()]
    kept = tamed(hello, NAME_CHARS) if is_tame(hello.command, NAME_CHARS) else _with_long_command(hello)
    if are_tame(texts, NAME_CHARS):
        return kept
    settings, environment = (
        {tame(name, NAME_CHARS): tame(value, NAME_CHARS) for name, value in pairs.items()}
        for pairs in (hello.ddp, hello.environment)
    )
    return msgspec.structs.replace(kept, ddp=settings, environment=environment)


def _with_long_command(hello: Hello) -> Hello:
    return msgspec.structs.replace(tamed(hello, NAME_CHARS), command=tame(hello.command, NOTE_CHARS))


def tamed_beat(beat: Beat) -> Beat:
    """A sign of life; each rank gives four a second."""
    if not beat.pause and _are_tame_groups(beat.groups):
        return beat
    kept = tamed(beat, NAME_CHARS)
    groups = [tamed(group, NAME_CHARS) for group in beat.groups]
    return kept if groups == beat.groups else msgspec.structs.replace(kept, groups=groups)


def _are_tame_groups(groups: list[Group]) -> bool:
    for group in groups:
        text = group.name
        if group.op or group.members or group.error or group.shape:
            # All at once: the usual ones are short even together.
            text = f"{text}{group.members}{group.op}{group.shape}{group.error}"
        if not (text.isascii() and text.isprintable() and len(text) <= NAME_CHARS):
            return False
    return True


def tamed_stack(stack: Stack) -> Stack:
    """What the threads of a rank are doing."""
    threads = [
        ThreadStack(tame(thread.name, NAME_CHARS), thread.training, [_tamed_frame(frame) for frame in thread.frames])
        for thread in stack.threads
    ]
    collectives = [tamed(collective, NAME_CHARS) for collective in stack.collectives]
    return msgspec.structs.replace(stack, threads=threads, collectives=collectives)


def _tamed_frame(frame: StackFrame) -> StackFrame:
    # Of a path the end tells more than the beginning.
    file = tame(frame.file[-2 * NAME_CHARS :], 2 * NAME_CHARS)
    return StackFrame(tame(frame.function, NAME_CHARS), file, frame.line)


def tamed_bye(bye: Bye) -> Bye:
    """A goodbye, on one line."""
    kept = tamed(msgspec.structs.replace(bye, text=bye.text.replace("\n", PARTS)), NOTE_CHARS)
    collectives = [tamed(collective, NAME_CHARS) for collective in bye.collectives]
    return kept if collectives == bye.collectives else msgspec.structs.replace(kept, collectives=collectives)
