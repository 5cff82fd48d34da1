"""`ddpwatch attach`: the dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ddpwatch.cli.recordings import baseline_of, baseline_option
from ddpwatch.cli.settings import limit_options, limits_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@click.command("attach")
@click.argument("selector", metavar="[RUN]", required=False)
@click.option("--theme", help="Colours; ctrl+p in the dashboard lists them.  [default: $DDPWATCH_THEME, or ddpwatch]")
@click.option("--log", multiple=True, metavar="GLOB", help="Watch these log files, too; repeatable.")
@baseline_option
@limit_options
def command(
    *,
    selector: str | None,
    theme: str | None,
    log: Sequence[str],
    baseline: Path | None,
    limit: Sequence[str],
    config: str | None,
) -> None:
    """Open the dashboard on a run. Without RUN on the only one; where there is none yet, it waits for one.

    RUN is the beginning of a run id, a run's name, or the path of a run.json.
    """
    from ddpwatch.cli.dashboard import open_dashboard
    from ddpwatch.sources.runs import find
    from ddpwatch.tui.feed import Feed

    limits = limits_of(config, limit)
    against = baseline_of(baseline)
    run = None if selector is None else find(selector)
    open_dashboard(Feed(limits, run=run, logs=log, baseline=against), theme=theme)
