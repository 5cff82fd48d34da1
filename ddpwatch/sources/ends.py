"""The end of processes of this node, as it happens and with its exit status. Linux only; elsewhere nothing is seen."""

from __future__ import annotations

import contextlib
import os
import select
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

MOST: Final = 256
"""Each costs a file descriptor; of more, the rest is found ended by who looks."""
_OPEN: Final[Callable[[int], int] | None] = getattr(os, "pidfd_open", None)
_INFO: Final = struct.Struct("QQ11Ii")
"""`struct pidfd_info` of <linux/pidfd.h>: what is asked for comes first, the exit status last."""
_GET_INFO: Final = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_WITH_EXIT: Final = 1 << 3
_EXIT_FIELD: Final = 49
"""Of /proc/PID/stat, counted from the state."""


class Seen(NamedTuple):
    """One process that has ended."""

    pid: int
    exit_code: int | None
    """Minus the signal if one ended it; None = the system does not tell."""
    at_ns: int


class Ends:
    """Waits for the end of some processes. Belongs to the thread that made it."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if _OPEN is not None and hasattr(select, "epoll") else None
        self._pids: dict[int, int] = {}
        """By descriptor."""

    def fileno(self) -> int | None:
        """Readable as soon as one of them has ended; None = that cannot be seen here."""
        return None if self._epoll is None else self._epoll.fileno()

    def follow(self, pid: int) -> None:
        """Wait for this one, too. One that cannot be opened is not waited for."""
        if self._epoll is None or _OPEN is None or pid in self._pids.values() or len(self._pids) >= MOST:
            return
        with contextlib.suppress(OSError):
            handle = _OPEN(pid)
            self._pids[handle] = pid
            self._epoll.register(handle, select.EPOLLIN)

    def follows(self, pid: int) -> bool:
        """Whether its end is yet to be seen."""
        return pid in self._pids.values()

    def seen(self, now_ns: int) -> list[Seen]:
        """Those that have ended since the last time."""
        if self._epoll is None or not self._pids:
            return []
        ended = []
        for handle, _ in self._epoll.poll(0):
            pid = self._pids.pop(handle)
            ended.append(Seen(pid, _exit_code(pid, handle), now_ns))
            self._epoll.unregister(handle)
            os.close(handle)
        return ended

    def close(self) -> None:
        """Wait for nobody any more."""
        for handle in self._pids:
            os.close(handle)
        self._pids.clear()
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None


def _exit_code(pid: int, handle: int) -> int | None:
    """From the zombie; from the kernel's memory of it where its parent has taken it in (Linux 6.15)."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] == b"Z":
            return os.waitstatus_to_exitcode(int(fields[_EXIT_FIELD]))
    with contextlib.suppress(ImportError, OSError, ValueError):
        from fcntl import ioctl

        told = _INFO.unpack(ioctl(handle, _GET_INFO, _INFO.pack(_WITH_EXIT, *(0,) * 13)))
        if told[0] & _WITH_EXIT:
            return os.waitstatus_to_exitcode(told[-1])
    return None
