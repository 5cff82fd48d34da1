"""`ddpwatch demo`: a real training started for you, and the status of it."""

from __future__ import annotations

import click

from ddpwatch.cli.options import seconds


@click.command("demo")
@click.option("--ranks", type=click.IntRange(2, 16), default=4, show_default=True, help="Processes that train.")
@click.option("--for", "for_s", type=seconds, help="How long to train.  [default: 600s, or 20s without a terminal]")
def command(*, ranks: int, for_s: float | None) -> None:
    """Train a small network on CPU ranks, one of them slow in backward, and show where the time goes.

    No GPU is needed. Everything that is started is stopped again when this ends; Ctrl-C ends it.
    """
    from ddpwatch.cli.looking import follow
    from ddpwatch.cli.paint import is_terminal
    from ddpwatch.cli.training import training

    duration_s = for_s if for_s is not None else (600.0 if is_terminal() else 20.0)
    click.echo(f"starting {ranks} ranks on the CPU; rank {ranks // 2} is slow in backward …", err=True)
    try:
        with training(ranks=ranks, slow_rank=ranks // 2, seconds=duration_s) as run:
            follow(run, timeout_s=3.0, every_s=1.0 if is_terminal() else 5.0, as_json=False)
    except KeyboardInterrupt:
        # The way to end it, and no failure.
        click.echo("\nthe demo and its ranks have ended", err=True)
