"""`ddpwatch ticket`: write the addresses and the key with which a run can be watched from another host."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path

import click

from ddpwatch.cli._follow_run import find_run
from ddpwatch.cli._terminal import say
from ddpwatch.errors import UsageError


@click.command("ticket")
@click.argument("selector", metavar="[RUN]", required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write it to this file, readable by you alone.")
def command(*, selector: str | None, output: Path | None) -> None:
    """Print the ticket of a run: `ddpwatch attach FILE` then works where its ranks can be reached over TCP.

    Anyone with the ticket may watch this run, and no other, until the run ends. Treat it as a key.
    """
    import msgspec

    from ddpwatch import rundir
    from ddpwatch.core.units import ranks_text

    if output is not None:
        check_place(output)
    run = find_run(selector)
    which = f"run {run.id} ({run.name})"
    unreachable = [endpoint.rank for endpoint in run.endpoints if not endpoint.tcp_address and run.relay is None]
    if len(unreachable) == len(run.endpoints):
        raise UsageError(
            f"{which} listens on its own host only; start it with DDPWATCH_BIND=tcp to watch it from "
            "elsewhere (a job that has several hosts does so by itself)"
        )
    if output is not None:
        rundir.write_private(output, run)
    else:
        if sys.stdout.isatty():
            raise UsageError("a ticket holds a key: send it to a file, with > or -o")
        _keep_private()
        click.echo(msgspec.json.encode(run))
    say(f"ddpwatch: the ticket holds a key: who has it may watch {which} until it ends; keep it private")
    if unreachable:
        say(f"ddpwatch: {ranks_text(unreachable)} cannot be watched with it: no TCP there")
    missing = run.world_size - len(run.endpoints)
    if missing:
        say(f"ddpwatch: {missing} of {run.world_size} ranks have not come yet, and are not in it")


def check_place(file: Path) -> None:
    """Refuse to overwrite a file that is neither a ticket nor empty."""
    from ddpwatch import rundir

    try:
        if file.is_file() and not file.is_symlink() and not file.stat().st_size:
            return
        rundir.read(file)
    except ValueError:
        raise UsageError(f"{file} is there and is no ticket: it is not replaced; choose another name") from None
    except OSError:
        return  # It does not exist, or writing it will fail with the reason.


def _keep_private() -> None:
    """Remove the access of others from a file that the shell has just created, before the key is written to it."""
    with contextlib.suppress(OSError):
        found = os.fstat(sys.stdout.fileno())
        if stat.S_ISREG(found.st_mode) and not found.st_size and found.st_uid == os.getuid() and found.st_mode & 0o077:
            os.fchmod(sys.stdout.fileno(), 0o600)
            say("ddpwatch: the file is now readable by you alone (0600)")
