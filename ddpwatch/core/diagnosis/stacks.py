"""A Python stack in a few words: the line of the training script, not of the library beneath it."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ddpwatch.wire import Stack, StackFrame, ThreadStack

LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/lib/python", "/ddpwatch/agent/", "<frozen ")
"""Parts of paths of files that are not the user's own."""


def training_thread(stack: Stack | None) -> ThreadStack | None:
    """The thread that trains, if it is in the stack."""
    return next((thread for thread in stack.threads if thread.training), None) if stack is not None else None


def top_of_stack(stack: Stack | None) -> str:
    """The innermost call, and the script's own line if that is another: `sleep … in collate (train.py:88)`."""
    thread = training_thread(stack)
    if thread is None or not thread.frames:
        return ""
    innermost = thread.frames[0]
    own = next((frame for frame in thread.frames if not is_library(frame)), innermost)
    where = f"{own.function} ({PurePath(own.file).name}:{own.line})"
    return where if own is innermost else f"{innermost.function} in {where}"


def is_library(frame: StackFrame) -> bool:
    """Whether the call is in Python or an installed package."""
    return any(part in frame.file for part in LIBRARIES)
