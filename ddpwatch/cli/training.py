"""A training job of our own as a child of the command: started, waited for, and always taken down again."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

from ddpwatch import rundir
from ddpwatch.cli.places import make_place
from ddpwatch.errors import DdpwatchError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START_S: Final = 120.0
"""Importing torch in several processes at once takes long on a small machine."""
POLL_S: Final = 0.1


@contextlib.contextmanager
def training(
    *, ranks: int, slow_rank: int | None = None, seconds: float, pace: float | None = None, lag: float | None = None
) -> Iterator[rundir.RunFile]:
    """The demo job, running, in a run directory of its own. All its processes are gone afterwards.

    It plays its story, or else `slow_rank` is slow in backward throughout; -1 = nobody ever is. `pace` is how fast the
    story is told, `lag` what its slow rank takes longer, in healthy steps; None = as the story has it.
    """
    if importlib.util.find_spec("torch") is None:
        raise DdpwatchError("the demo trains for real and needs torch; install it with: pip install 'ddpwatch[torch]'")
    place = make_place()
    base, log = place / "run", place / "log"
    environment = {**os.environ, "DDPWATCH_RUN_DIR": str(base), "OMP_NUM_THREADS": "1"}
    chosen = {"slow-rank": slow_rank, "pace": pace, "lag": lag}
    arguments = [f"--ranks={ranks}", f"--store={place / 'store'}", f"--seconds={seconds}"]
    arguments += [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    job: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("wb") as output:
            job.extend(
                # A session of its own, so that Ctrl-C reaches only us, and we end the ranks in order.
                subprocess.Popen(  # noqa: S603 - the command is ours
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
    """The run, once all its ranks listen."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        runs, _ = rundir.scan(base)
        if runs and len(runs[0].endpoints) == len(job):
            return runs[0]
        ended = [rank.returncode for rank in job if rank.poll() is not None]
        if ended:
            raise DdpwatchError(f"a rank of the demo ended with code {ended[0]}: {_last_line(log)}")
        time.sleep(POLL_S)
    raise DdpwatchError(f"the demo's training did not start within {START_S:.0f} s: {_last_line(log)}")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
