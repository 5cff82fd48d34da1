"""How many cores this process may use.

File descriptors of the agent, in a process whose descriptors belong to somebody else.
"""

from __future__ import annotations

import os
import resource
import threading
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUP: Final = Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = CGROUPS, own_group: Path = OWN_GROUP) -> int:
    """Cores that the scheduler may give to it; a quota of its control group counts as whole cores, rounded up."""
    cores = float(len(os.sched_getaffinity(0)))
    for quota in _quotas(cgroups, own_group):
        cores = min(cores, quota)
    return max(1, ceil(cores))


def _quotas(cgroups: Path, own_group: Path) -> Iterator[float]:
    """What each control group from its own up to the root allows, in cores; a container sees its own as the root."""
    try:
        lines = own_group.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if not controllers:
            base, read = cgroups, _quota
        elif "cpu" in controllers.split(","):
            base, read = cgroups / "cpu", _old_quota
        else:
            continue
        folder = base / place.strip("/")
        for each in (folder, *folder.parents):
            quota = read(each)
            if quota is not None:
                yield quota
            if each == base:
                break


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _old_quota(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None


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
