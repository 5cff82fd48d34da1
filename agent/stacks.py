"""Python stacks of this process's threads, read from the agent's thread without stopping any of them."""

from __future__ import annotations

import sys
import threading
from collections import deque
from traceback import walk_tb
from typing import TYPE_CHECKING

from ddpwatch.agent.exit_reason import fatal
from ddpwatch.wire import MAX_FRAMES, MAX_THREADS, StackFrame, ThreadStack, fit

if TYPE_CHECKING:
    from types import FrameType


def stacks(training_thread: int, *, everything: bool) -> list[ThreadStack]:
    """The stack of the training thread, and on request of all others except the caller's.

    If an exception has ended the script, it is the stack at which the exception was raised.
    """
    error = fatal()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    found = [
        ThreadStack(
            fit(names.get(ident) or f"thread {ident}"),
            ident == training_thread,
            _frames_of(error) if error is not None and ident == training_thread else _frames(frame),
        )
        for ident, frame in sys._current_frames().items()
        if ident == training_thread or (everything and ident != here)
    ]
    return sorted(found, key=lambda stack: not stack.training)[:MAX_THREADS]


def _frames(frame: FrameType | None) -> list[StackFrame]:
    """Innermost call first; a deep stack is cut at the outer end."""
    frames: list[StackFrame] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        frames.append(_frame_message(frame, frame.f_lineno))
        frame = frame.f_back
    return frames


def _frames_of(error: BaseException) -> list[StackFrame]:
    """The traceback of an exception, innermost call first."""
    places = deque(walk_tb(error.__traceback__), maxlen=MAX_FRAMES)
    return [_frame_message(frame, line) for frame, line in reversed(places)]


def _frame_message(frame: FrameType, line: int | None) -> StackFrame:
    code = frame.f_code
    name = code.co_qualname if hasattr(code, "co_qualname") else code.co_name
    return StackFrame(fit(name), fit(code.co_filename[-200:]), line or 0)
