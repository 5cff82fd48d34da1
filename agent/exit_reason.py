"""The uncaught exception that ends the process, as text for viewers."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Final

import torch

from ddpwatch.wire import fit

MAX_CHARS: Final = 2000
"""Characters of the exception's text; the frames may take as many again."""
LAST_FRAMES: Final = 3
"""Innermost frames of the traceback that are sent."""
_TORCH: Final = str(Path(torch.__file__).parent)
_OWN: Final = str(Path(__file__).parent)


def failure() -> str | None:
    """The uncaught exception with the last frames of its traceback; None = there is none.

    The innermost frame outside torch is always included, and frames of ddpwatch's hooks, in which an interrupt may
    arrive, never are. Keeps no reference to the exception.
    """
    error = _error()
    if error is None:
        return None
    what = "".join(traceback.format_exception_only(error)).strip()
    frames = [each for each in traceback.extract_tb(error.__traceback__)[::-1] if not each.filename.startswith(_OWN)]
    last = frames[:LAST_FRAMES]
    if last and all(frame.filename.startswith(_TORCH) for frame in last):
        last[-1:] = [frame for frame in frames if not frame.filename.startswith(_TORCH)][:1] or last[-1:]
    where = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in last]
    return fit("\n".join([what[:MAX_CHARS], *where]), 2 * MAX_CHARS)


def fatal() -> BaseException | None:
    """The exception that is ending the script, or None. Any thread may call it."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        # An interactive session remembers errors that have not ended it.
        return None
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return last if isinstance(last, BaseException) else None


def _error() -> BaseException | None:
    """The exception in flight, which finalizers of multiprocessing see, or the one that has ended the script."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        if error.code is None or error.code == 0:
            return None
        # torch.multiprocessing catches the exception and exits with 1.
        return error.__context__ or error
    return error if error is not None else fatal()
