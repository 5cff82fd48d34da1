"""What ended the process, as far as the interpreter tells when it exits."""

from __future__ import annotations

import sys
import traceback
from typing import Final

from ddpwatch.wire import fit

MOST_CHARS: Final = 2000
LAST_FRAMES: Final = 3


def failure() -> str | None:
    """The exception that nobody caught, and the last places it came through; None if there was none.

    In an interactive session the interpreter remembers errors that ended nothing.
    """
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(error, BaseException):
        return None
    what = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)[-LAST_FRAMES:]
    where = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames)]
    return fit("\n".join([what[:MOST_CHARS], *where]), 2 * MOST_CHARS)
