"""What ended the process, as far as the interpreter tells when it exits."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Final

import torch

from ddpwatch.wire import fit

MAX_CHARS: Final = 2000
LAST_FRAMES: Final = 3
_TORCH: Final = str(Path(torch.__file__).parent)
_OWN: Final = str(Path(__file__).parent)


def failure() -> str | None:
    """The exception that nobody caught, and the last places it came through; None if there was none.

    Torch's own places say little: the last one outside of it is always told. Those of our hooks, in which an interrupt
    may arrive as well, say nothing. Nothing of the exception is kept.
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
    """The exception that is ending the script; None = none is. May be asked by any thread."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        # A session remembers errors that ended nothing.
        return None
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return last if isinstance(last, BaseException) else None


def _error() -> BaseException | None:
    """The one in flight, as multiprocessing lets those see it who clean up; else the one that has ended the script."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        if error.code is None or error.code == 0:
            return None
        # torch.multiprocessing catches what was raised and exits with 1.
        return error.__context__ or error
    return error if error is not None else fatal()
