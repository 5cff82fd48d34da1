"""`ddpwatch runs`: list the runs on this host."""

from __future__ import annotations

import json
import time

import click

from ddpwatch.cli._terminal import say, show, terminal_size


@click.command("runs")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def command(*, as_json: bool) -> None:
    """List the runs on this host, newest first."""
    from ddpwatch.sources.find_run import NO_RUN_CHECKS, live_runs, no_run_text, skipped_places
    from ddpwatch.view.run_picker import row_of, runs_object, runs_table

    now_s = time.time()
    rows = [row_of(run, now_s) for run in live_runs()]
    for warning in skipped_places():
        say(f"ddpwatch: warning: {warning}")
    if as_json:
        click.echo(json.dumps(runs_object(rows), indent=2))
    elif rows:
        show(runs_table(rows, terminal_size()[0]))
    else:
        click.echo("\n  ".join([no_run_text(), *NO_RUN_CHECKS]))
