"""`ddpwatch ticket`: write the addresses and the key with which a run can be watched from another host."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path

import click

from ddpwatch.cli._follow_run import find_run
from ddpwatch.cli._options import RUN_HELP
from ddpwatch.cli._terminal import say
from ddpwatch.errors import UsageError


@click.command("ticket", epilog=RUN_HELP)
@click.argument("selector", metavar="[RUN]", required=False)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the ticket to this file, readable only by you.",
)
def command(*, selector: str | None, output: Path | None) -> None:
    """Write the ticket of a run: addresses and key for `ddpwatch attach FILE` on hosts that reach its ranks over TCP.

    Anyone with the ticket can watch this run, and only this one, until it ends. Treat it as a secret key.
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
            f"{which} listens only on its own host; to watch it from elsewhere, start the job with DDPWATCH_BIND=tcp "
            "(the default in a job on several hosts)"
        )
    if output is not None:
        rundir.write_private(output, run)
    else:
        if sys.stdout.isatty():
            raise UsageError(
                "a ticket holds a secret key and is not printed on a terminal; write it to a file with -o FILE"
            )
        _keep_private()
        click.echo(msgspec.json.encode(run))
    say(f"ddpwatch: the ticket holds a secret key: anyone with it can watch {which} until it ends")
    if unreachable:
        say(f"ddpwatch: not in the ticket, because they do not listen on TCP: {ranks_text(unreachable)}")
    missing = run.world_size - len(run.endpoints)
    if missing:
        say(f"ddpwatch: {missing} of {run.world_size} ranks have not joined yet and are not in the ticket")


def check_place(file: Path) -> None:
    """Refuse to overwrite a file that is neither a ticket nor empty."""
    from ddpwatch import rundir

    try:
        if file.is_file() and not file.is_symlink() and not file.stat().st_size:
            return
        rundir.read(file)
    except ValueError:
        raise UsageError(f"{file} exists and is not a ticket; choose another name") from None
    except OSError:
        return  # It does not exist, or writing it will fail with the reason.


def _keep_private() -> None:
    """Remove the access of others from a file that the shell has just created, before the key is written to it."""
    with contextlib.suppress(OSError):
        found = os.fstat(sys.stdout.fileno())
        if stat.S_ISREG(found.st_mode) and not found.st_size and found.st_uid == os.getuid() and found.st_mode & 0o077:
            os.fchmod(sys.stdout.fileno(), 0o600)
            say("ddpwatch: made the file readable only by you (0600)")
