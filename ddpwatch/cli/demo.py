"""`ddpwatch demo`: a real training started for you, or a large one made up, and the dashboard on top.

A training job of our own as a child of the command: started, waited for, and always taken down again.

Directories in which demos keep what they need: made, signed, and cleared away when their owner was killed.
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

import click

from ddpwatch import rundir
from ddpwatch.cli._options import span
from ddpwatch.errors import DdpwatchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.simulator.source import Simulated

MOST_REAL: Final = 16
MOST_SIMULATED: Final = 8192
SIMULATED_RANKS: Final = 256
WATCHED_S: Final = 600.0
UNWATCHED_S: Final = 40.0


@click.command("demo")
@click.option(
    "--ranks", type=click.IntRange(2, MOST_SIMULATED), help="Processes that train.  [default: 4, or 256 simulated]"
)
@click.option(
    "--for", "for_s", type=span, metavar="SPAN", help="How long to train.  [default: 10m, or 40s without a terminal]"
)
@click.option("--simulated", is_flag=True, help="Play a large made-up run; nothing is trained.")
def command(*, ranks: int | None, for_s: float | None, simulated: bool) -> None:
    """Train a small network on CPU ranks and open the dashboard on it.

    All is well at first; then one rank waits for its data, later another is slow in backward, and so on. No GPU is
    needed. Everything that is started is stopped again when this ends: press q, or Ctrl-C. Without a terminal the
    status is printed instead.
    """
    if simulated:
        _play(ranks or SIMULATED_RANKS)
        return
    if ranks is not None and ranks > MOST_REAL:
        raise UsageError(f"{ranks} ranks are too many to train here, the most is {MOST_REAL}; --simulated plays more")
    _train(ranks or 4, for_s)


def _train(ranks: int, for_s: float | None) -> None:
    from ddpwatch.cli._terminal import open_dashboard
    from ddpwatch.cli.status import follow
    from ddpwatch.core.limits import DEFAULTS

    watched = _watched()
    clear_up()
    click.echo(f"starting {ranks} ranks on the CPU; this takes some seconds …", err=True)
    try:
        with training(ranks=ranks, seconds=for_s or (WATCHED_S if watched else UNWATCHED_S)) as run:
            if watched:
                from ddpwatch.tui.feed import Feed

                # Its run directory is its own: no other run is ever meant.
                open_dashboard(Feed(DEFAULTS, run=run, find=None))
            else:
                follow(run, timeout_s=3.0, every_s=5.0, as_json=False)
    except KeyboardInterrupt:
        # The way to end it, and no failure.
        click.echo("\nthe demo and its ranks have ended", err=True)


def _watched() -> bool:
    """Whether the dashboard can be shown; a terminal on which it cannot is told why it sees something else."""
    from ddpwatch.cli._terminal import refusal

    why = refusal()
    if why and sys.stdout.isatty():
        click.echo(f"ddpwatch: {why}; this is the status instead, as `ddpwatch status` prints it", err=True)
    return not why


def _play(ranks: int) -> None:
    from ddpwatch.cli._terminal import open_dashboard
    from ddpwatch.core.limits import DEFAULTS
    from ddpwatch.session.follow import Following
    from ddpwatch.simulator.source import Simulated

    source = Simulated(ranks)
    if not _watched():
        _print(source)
        return
    from ddpwatch.tui.feed import Feed

    open_dashboard(Feed(DEFAULTS, follows=Following(source.run, DEFAULTS, source=source), simulated=True))


def _print(source: Simulated) -> None:
    """One look, for a pipe or a log."""
    from contextlib import closing

    from ddpwatch.cli._terminal import show, terminal_size
    from ddpwatch.session.follow import Following
    from ddpwatch.view.run_view import picture_now
    from ddpwatch.view.status import status_screen

    with closing(Following(source.run, source=source)) as following:
        while not following.answered:
            following.advance()
        following.watch.judge_now()
        click.echo("SIMULATED: none of this was measured")
        columns, rows = terminal_size()
        show(status_screen(picture_now(following.watch), columns, rows or 40))


PLACE: Final = "ddpw-demo-"
"""How their names begin."""
OWNER: Final = "owner.json"
"""In it: the process that the directory belongs to, and when that started."""
MOST_OWNER_BYTES: Final = 4096


def make_place(folder: Path | None = None) -> Path:
    """A directory of our own, which says whose it is to a later demo that finds it."""
    place = Path(tempfile.mkdtemp(prefix=PLACE, dir=folder))
    owner = {"pid": os.getpid(), "created_s": rundir.created_s(os.getpid()), "node": rundir.node_id()}
    (place / OWNER).write_text(json.dumps(owner), encoding="utf-8")
    return place


def clear_up(folder: Path | None = None) -> None:
    """Remove the places of demos that were killed. Only our own ones, and only if their owner has surely ended: one
    that is not signed, or was signed on another host, stays.
    """
    for place in (folder or Path(tempfile.gettempdir())).glob(f"{PLACE}*"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if _is_left_over(place):
                shutil.rmtree(place, ignore_errors=True)


def _is_left_over(place: Path) -> bool:
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    with (place / OWNER).open("rb") as file:
        owner = json.loads(file.read(MOST_OWNER_BYTES))
    return owner["node"] == rundir.node_id() and rundir.created_s(int(owner["pid"])) != float(owner["created_s"])


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
