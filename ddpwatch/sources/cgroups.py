"""Whether the kernel has killed a process for its memory, as far as its control group tells."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")


def events_file(pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> Path | None:
    """Where the kernel counts what memory limits have done to the control group of a process; None = cannot be told."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines():
            number, _, path = line.partition("::")
            if number == "0" and ".." not in path:
                return cgroups / path.lstrip("/") / "memory.events"
    return None


def oom_kills(events: Path | None) -> int:
    """How many processes of the group were killed for their memory so far; 0 where nobody counts."""
    if events is not None:
        with contextlib.suppress(OSError, ValueError):
            for line in events.read_text(errors="replace").splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return 0
