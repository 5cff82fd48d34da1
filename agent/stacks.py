"""Where the threads of this process are, as Python sees them. Read from the agent's thread; stops nobody."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from ddpwatch.wire import MAX_FRAMES, MAX_THREADS, StackFrame, ThreadStack, fit

if TYPE_CHECKING:
    from types import FrameType


def stacks(training_thread: int, *, everything: bool) -> list[ThreadStack]:
    """The stack of the thread that trains, and on request of all others but the caller's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    found = [
        ThreadStack(fit(names.get(ident) or f"thread {ident}"), ident == training_thread, _frames(frame))
        for ident, frame in sys._current_frames().items()
        if ident == training_thread or (everything and ident != here)
    ]
    return sorted(found, key=lambda stack: not stack.training)[:MAX_THREADS]


def _frames(frame: FrameType | None) -> list[StackFrame]:
    """The innermost first. Of a deep recursion only that end is told."""
    frames: list[StackFrame] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        code = frame.f_code
        frames.append(StackFrame(fit(code.co_qualname if hasattr(code, "co_qualname") else code.co_name),
                                 fit(code.co_filename[-200:]), frame.f_lineno or 0))  # fmt: skip
        frame = frame.f_back
    return frames
