"""Keeps the dashboard small where it follows a thousand ranks. Asks the C library; where that is another, does nothing.

Tables of all ranks come and go with every look. Left to itself, glibc learns to keep the room for them, and more so
the more threads there are.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

M_ARENA_MAX: Final = -8
M_MMAP_THRESHOLD: Final = -3
LARGE_BYTES: Final = 1 << 20
"""What is larger goes back to the system as soon as it is let go of."""


def keep_small() -> None:
    """From now on. To be called before threads are started."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(M_ARENA_MAX, 1)


def give_back() -> None:
    """What is not used: histories of a thousand ranks have passed through at once."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
