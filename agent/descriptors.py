"""File descriptors of the agent, in a process whose descriptors belong to somebody else."""

from __future__ import annotations

import os
import resource
import threading
from typing import Final

# libzmq aborts the whole process when it finds no descriptor while it sets itself up (it takes nine) or while it lets
# a viewer in (ipc_listener.cpp tolerates ENFILE, not EMFILE). So it is only there while there are plenty; the two
# limits are further apart than what it gives back, or it would come and go.
ENOUGH: Final = 32
TOO_FEW: Final = 12
_OPEN: Final = "/proc/self/fd"


def free() -> int:
    """How many descriptors this process may still open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return ENOUGH
    try:
        # The size is their number since Linux 6.2; before, it is zero.
        return limit - (os.stat(_OPEN).st_size or len(os.listdir(_OPEN)))  # noqa: PTH116, PTH208 - half the time of Path
    except OSError:
        return 0


class Wake:
    """Ends the thread's wait early, from another thread.

    The lock is for the end: the number of a closed descriptor may already be a checkpoint file of the script's.
    """

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        self._lock = threading.RLock()
        self._closed = False

    def call(self) -> None:
        """Wake the thread, if it still runs."""
        with self._lock:
            if not self._closed:
                os.write(self._writer, b"x")

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.reader)
                os.close(self._writer)
