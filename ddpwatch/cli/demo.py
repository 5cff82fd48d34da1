"""`ddpwatch demo`: start a small real training, or a large simulated one, and open the dashboard on it."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Final

import click

from ddpwatch.cli._options import span
from ddpwatch.cli._terminal import open_dashboard, refusal, show, terminal_size
from ddpwatch.errors import UsageError

MAX_REAL: Final = 16
"""Max. number of real ranks, each a process that imports torch."""
MAX_SIMULATED: Final = 8192
"""`simulator.source.MAX_RANKS`, repeated because that module imports numpy, which would slow down the help."""
SIMULATED_RANKS: Final = 256
"""Number of simulated ranks unless `--ranks` is given."""
INTERACTIVE_S: Final = 600.0
"""Duration of the training, in seconds, with the dashboard."""
HEADLESS_S: Final = 40.0
"""Duration of the training, in seconds, without a terminal."""


@click.command("demo")
@click.option(
    "--ranks", type=click.IntRange(2, MAX_SIMULATED), help="Number of ranks.  [default: 4, or 256 with --simulated]"
)
@click.option(
    "--for",
    "for_s",
    type=span,
    metavar="DURATION",
    help="How long to train.  [default: 10m, or 40s without a terminal]",
)
@click.option("--simulated", is_flag=True, help="Show a large simulated run; needs no torch and trains nothing.")
def command(*, ranks: int | None, for_s: float | None, simulated: bool) -> None:
    """Train a small network on CPU ranks and open the dashboard on it. Needs torch but no GPU.

    The job is healthy at first; then one rank waits for its data, later another is slow in backward, and so on. All
    processes are stopped when you press q or Ctrl-C. Without a terminal, the status is printed instead.
    """
    if simulated:
        _simulate(ranks or SIMULATED_RANKS)
        return
    if ranks is not None and ranks > MAX_REAL:
        raise UsageError(f"--ranks {ranks} is too many for real training (max. {MAX_REAL}); add --simulated")
    _train(ranks or 4, for_s)


def _train(ranks: int, for_s: float | None) -> None:
    from ddpwatch.cli._demo_processes import remove_stale_dirs, training
    from ddpwatch.cli._status_loop import follow
    from ddpwatch.core.limits import DEFAULTS

    interactive = _is_interactive()
    remove_stale_dirs()
    click.echo(f"starting {ranks} CPU ranks; this takes a few seconds …", err=True)
    try:
        with training(ranks=ranks, seconds=for_s or (INTERACTIVE_S if interactive else HEADLESS_S)) as run:
            if interactive:
                from ddpwatch.tui.feed import Feed

                # Its run directory has no other run to choose.
                open_dashboard(Feed(DEFAULTS, run=run, find=None))
            else:
                follow(run, timeout_s=3.0, every_s=5.0, as_json=False)
    except KeyboardInterrupt:
        # The usual way to end a demo.
        click.echo("\nthe demo and its ranks have stopped", err=True)


def _is_interactive() -> bool:
    """Whether the dashboard can be shown; prints why not on a terminal that it cannot draw on."""
    why = refusal()
    if why and sys.stdout.isatty():
        click.echo(f"ddpwatch: {why}; printing the status instead", err=True)
    return not why


def _simulate(ranks: int) -> None:
    from ddpwatch.core.limits import DEFAULTS
    from ddpwatch.session.run_follower import RunFollower
    from ddpwatch.simulator.source import SimulatedSource

    source = SimulatedSource(ranks)
    follower = RunFollower(source.run, DEFAULTS, source=source)
    if _is_interactive():
        from ddpwatch.tui.feed import Feed

        open_dashboard(Feed(DEFAULTS, follows=follower, simulated=True))
        return
    from ddpwatch.view.run_view import current_view
    from ddpwatch.view.status import status_screen

    with closing(follower):
        while not follower.answered:
            follower.advance()
        follower.monitor.evaluate_now()
        click.echo("SIMULATED: none of this was measured")
        columns, rows = terminal_size()
        show(status_screen(current_view(follower.monitor), columns, rows or 40))
