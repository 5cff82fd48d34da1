"""Limits of this process: the cores that it may use (affinity and cgroup quotas), and its free file descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUP: Final = Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = CGROUPS, own_group: Path = OWN_GROUP) -> int:
    """Number of cores by CPU affinity and cgroup quota, rounded up."""
    return max(1, ceil(min([len(os.sched_getaffinity(0)), *_quotas(cgroups, own_group)])))


def _quotas(cgroups: Path, own_group: Path) -> Iterator[float]:
    """CPU quotas in cores, of the process's cgroup and its parents; a container sees its own cgroup as the root."""
    try:
        lines = own_group.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base, read = (cgroups / "cpu", _quota_v1) if controllers else (cgroups, _quota_v2)
        folder = base / place.strip("/")
        for each in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                yield read(each)
            if each == base:
                break


def _quota_v2(folder: Path) -> float:
    quota, period = (folder / "cpu.max").read_text().split()
    return inf if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return inf if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())


# libzmq aborts the process when it finds no descriptor while it starts (it takes nine) or accepts a viewer
# (ipc_listener.cpp tolerates ENFILE, not EMFILE). So it runs only while there are plenty. The two limits are further
# apart than what it frees, or it would start and stop repeatedly.
ENOUGH: Final = 32
TOO_FEW: Final = 12
_OPEN: Final = "/proc/self/fd"


def free() -> int:
    """Number of descriptors that this process may still open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return ENOUGH
    try:
        # Since Linux 6.2 the size is the number of descriptors; before it is zero.
        return limit - (os.stat(_OPEN).st_size or len(os.listdir(_OPEN)))  # noqa: PTH116, PTH208 - half the time of Path
    except OSError:
        return 0


class Wake:
    """A pipe that ends the poll of the agent's thread early, from another thread.

    The lock guards the end: the number of a closed descriptor may already belong to a file of the script.
    """

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        self._lock = threading.RLock()
        self._closed = False

    def call(self) -> None:
        """Wake the thread, unless the pipe is closed."""
        with self._lock:
            if not self._closed:
                os.write(self._writer, b"x")

    def close(self) -> None:
        """Close the pipe."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.reader)
                os.close(self._writer)
