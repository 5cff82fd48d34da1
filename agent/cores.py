"""How many cores this process may use."""

from __future__ import annotations

import os
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
