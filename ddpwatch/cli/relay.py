"""`ddpwatch relay`: forward a whole run through one port."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpwatch.cli._follow_run import find_run, interrupt_on_sigterm, run_label
from ddpwatch.cli._options import RUN_HELP, safe_file_name
from ddpwatch.cli._terminal import say
from ddpwatch.cli.ticket import check_place

if TYPE_CHECKING:
    from ddpwatch.outputs.relay import Relay
    from ddpwatch.rundir import RunFile


@click.command("relay", epilog=RUN_HELP)
@click.argument("selector", metavar="[RUN]", required=False)
@click.option("--bind", required=True, metavar="HOST:PORT", help="Listen at this address; port 0 picks a free one.")
@click.option("--advertise", metavar="HOST:PORT", help="Address for viewers, if it differs, as behind a tunnel.")
@click.option(
    "--ticket", metavar="FILE", help="Write the ticket to this file, readable only by you.  [default: NAME.ticket]"
)
def command(*, selector: str | None, bind: str, advertise: str | None, ticket: str | None) -> None:
    """Forward a run through one TCP port, encrypted, until it ends. Viewers use its ticket: `ddpwatch attach FILE`.

    For networks with one open port, or for a tunnel: ssh -L 7000:127.0.0.1:7000 HOST. Start it on a host that can reach
    all ranks. Anyone with its ticket can watch this run until the run or the relay ends. Treat it as a secret key.
    """
    from ddpwatch import rundir
    from ddpwatch.core.units import count, plural
    from ddpwatch.outputs.relay import Relay

    interrupt_on_sigterm()
    run = find_run(selector)
    file = Path(ticket) if ticket is not None else Path(f"{safe_file_name(run.name)}.ticket")
    check_place(file)
    with closing(Relay(run, bind, advertise, lambda: _write_again(file, relay.ticket))) as relay:
        rundir.write_private(file, relay.ticket)
        try:
            _introduce(relay, run, file)
            _serve(relay)
        finally:
            how = f"has ended: {relay.ended}" if relay.ended else "is still running; the relay has stopped"
            refused = f"; {plural(relay.refused, 'connection')} refused" if relay.refused else ""
            say(f"{run_label(run)} {how}; {count(relay.passed)} frames forwarded{refused}")


def _introduce(relay: Relay, run: RunFile, file: Path) -> None:
    from ddpwatch.core.units import plural, ranks_text

    say(f"relaying {run_label(run)}, {plural(len(run.endpoints), 'rank')}, at {relay.address}; Ctrl-C stops it")
    say(f"watch with: ddpwatch attach {file}    (a secret key: anyone with this file can watch the run)")
    if missing := run.world_size - len(run.endpoints):
        say(f"{missing} of {run.world_size} ranks have not joined yet; the ticket is updated when they do")
    if relay.unreachable:
        why = next(iter(relay.unreachable.values()))
        say(f"{ranks_text(relay.unreachable)} cannot be reached from here: {why}")


def _serve(relay: Relay) -> None:
    """Forward frames until the run ends. Refused keys are reported at the first, and at every tenfold number."""
    reported = 0
    while not relay.ended:
        relay.turn()
        if relay.refused >= max(1, 10 * reported):
            reported = relay.refused
            times = "once" if reported == 1 else f"{reported} times"
            say(f"refused a connection without the key of the ticket, {times} so far")


def _write_again(file: Path, ticket: RunFile) -> None:
    """Write the ticket with the ranks that have joined. Viewers with the old one continue if this fails."""
    from ddpwatch import rundir

    try:
        rundir.write_private(file, ticket)
    except OSError as error:
        say(f"more ranks have joined, but the ticket {file} cannot be updated: {error.strerror}")
