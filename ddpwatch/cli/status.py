"""`ddpwatch status`: print a run's status, once or every few seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ddpwatch.cli._config import limit_options, limits_of
from ddpwatch.cli._follow_run import find_run
from ddpwatch.cli._options import RUN_HELP, seconds, timeout_option
from ddpwatch.cli._recordings import baseline_of, baseline_option

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@click.command("status", epilog=RUN_HELP)
@click.argument("selector", metavar="[RUN]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object; with --every, one per line.")
@click.option(
    "--every", "every_s", type=seconds, metavar="SECONDS", help="Stay attached, and print the status at this interval."
)
@timeout_option
@baseline_option
@limit_options
def command(
    *,
    selector: str | None,
    as_json: bool,
    every_s: float | None,
    timeout_s: float,
    baseline: Path | None,
    limit: Sequence[str],
    config: str | None,
) -> None:
    """Print where a run's time goes: all-reduce share, waiting, and the slowest rank.

    Ranks that do not answer in time are shown as missing.
    """
    from ddpwatch.cli._status_loop import follow, show_once

    limits = limits_of(config, limit)
    against = baseline_of(baseline)
    run = find_run(selector)
    if every_s is None:
        show_once(run, timeout_s=timeout_s, as_json=as_json, limits=limits, baseline=against)
    else:
        follow(run, timeout_s=timeout_s, every_s=every_s, as_json=as_json, limits=limits, baseline=against)
