"""The training job of `ddpwatch demo`: its processes, always killed at the end, and its temporary directory.

A demo that is killed cannot remove its directory; a later demo does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpwatch import rundir
from ddpwatch.errors import DdpwatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO_DIR_PREFIX: Final = "ddpw-demo-"
OWNER: Final = "owner.json"
"""File in the directory with the process that owns it, and when that process started."""
MAX_OWNER_BYTES: Final = 4096
"""Max. number of bytes read of the file that names the demo's process."""
START_S: Final = 120.0
"""Longest wait for the ranks, in seconds: several processes import torch at once, maybe on a small machine."""
POLL_S: Final = 0.1
"""Interval, in seconds, of checking whether the ranks have started."""


def make_demo_dir(folder: Path | None = None) -> Path:
    """Create a temporary directory, with the owner's process in it for a later demo that finds it."""
    place = Path(tempfile.mkdtemp(prefix=DEMO_DIR_PREFIX, dir=folder))
    owner = {"pid": os.getpid(), "created_s": rundir.created_s(os.getpid()), "node": rundir.node_id()}
    (place / OWNER).write_text(json.dumps(owner), encoding="utf-8")
    return place


def remove_stale_dirs(folder: Path | None = None) -> None:
    """Remove directories of killed demos: only the user's own, and only if the owner ran on this host and has ended."""
    for place in (folder or Path(tempfile.gettempdir())).glob(f"{DEMO_DIR_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if _is_stale(place):
                shutil.rmtree(place, ignore_errors=True)


def _is_stale(place: Path) -> bool:
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    with (place / OWNER).open("rb") as file:
        owner = json.loads(file.read(MAX_OWNER_BYTES))
    return owner["node"] == rundir.node_id() and rundir.created_s(int(owner["pid"])) != float(owner["created_s"])


@contextlib.contextmanager
def training(
    *, ranks: int, slow_rank: int | None = None, seconds: float, pace: float | None = None, lag: float | None = None
) -> Iterator[rundir.RunFile]:
    """Run the demo job in a run directory of its own, and kill its processes at the end of the block.

    With `slow_rank` that rank is slow in backward throughout (-1 = none is); else faults follow the demo's schedule.
    `pace` is the speed of the schedule, `lag` the delay of its slow rank in healthy steps; None = the job's default.
    """
    if importlib.util.find_spec("torch") is None:
        raise DdpwatchError("the demo needs torch: pip install 'ddpwatch[torch]', or try `ddpwatch demo --simulated`")
    place = make_demo_dir()
    base, log = place / "run", place / "log"
    environment = {**os.environ, "DDPWATCH_RUN_DIR": str(base), "OMP_NUM_THREADS": "1"}
    chosen = {"slow-rank": slow_rank, "pace": pace, "lag": lag}
    arguments = [f"--ranks={ranks}", f"--store={place / 'store'}", f"--seconds={seconds}"]
    arguments += [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    job: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("wb") as output:
            job.extend(
                # In a session of its own, so that Ctrl-C reaches only this process, which then ends the ranks.
                subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [sys.executable, "-m", "ddpwatch.demo.job", f"--rank={rank}", *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                for rank in range(ranks)
            )
        yield _started(job, base, log)
    finally:
        for rank in job:
            rank.kill()
        for rank in job:
            rank.wait()
        shutil.rmtree(place, ignore_errors=True)


def _started(job: list[subprocess.Popen[bytes]], base: Path, log: Path) -> rundir.RunFile:
    """Wait until all ranks listen, and return the run."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        runs, _ = rundir.scan(base)
        if runs and len(runs[0].endpoints) == len(job):
            return runs[0]
        ended = [rank.returncode for rank in job if rank.poll() is not None]
        if ended:
            raise DdpwatchError(f"a rank of the demo exited with code {ended[0]}: {_last_line(log)}")
        time.sleep(POLL_S)
    raise DdpwatchError(f"the demo's training did not start within {START_S:.0f} s: {_last_line(log)}")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
