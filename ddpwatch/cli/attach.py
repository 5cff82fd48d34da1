"""`ddpwatch attach`: the dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ddpwatch.cli.options import size, span
from ddpwatch.cli.settings import limit_options, limits_of
from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command("attach")
@click.argument("selector", metavar="[RUN]", required=False)
@click.option("--theme", help="Colours; ctrl+p in the dashboard lists them.  [default: $DDPWATCH_THEME, or ddpwatch]")
@click.option("--log", multiple=True, metavar="GLOB", help="Watch these log files, too; repeatable.")
@click.option("--record", metavar="FILE", help="Record what comes, too; `ddpwatch replay FILE` shows it again.")
@click.option("--keep", "keep_s", type=span, metavar="SPAN", help="Record: let go of what is older; 24h, 90m.")
@click.option("--max", "max_bytes", type=size, metavar="SIZE", help="Record: let go of the oldest above it; 2GB.")
@limit_options
def command(
    *,
    selector: str | None,
    theme: str | None,
    log: Sequence[str],
    record: str | None,
    keep_s: float | None,
    max_bytes: int | None,
    limit: Sequence[str],
    config: str | None,
) -> None:
    """Open the dashboard on a run. Without RUN on the only one; where there is none yet, it waits for one.

    RUN is the beginning of a run id, a run's name, or the path of a run.json.
    """
    from pathlib import Path

    from ddpwatch.cli.dashboard import open_dashboard, refusal
    from ddpwatch.core.numbers import plural
    from ddpwatch.outputs.recorder import Recorder
    from ddpwatch.sources.runs import find
    from ddpwatch.tui.feed import Feed

    limits = limits_of(config, limit)
    run = None if selector is None else find(selector)
    if record is None:
        if keep_s is not None or max_bytes is not None:
            raise UsageError("--keep and --max are for --record FILE")
        open_dashboard(Feed(limits, run=run, logs=log), theme=theme)
        return
    if why := refusal():
        raise UsageError(f"{why}; `ddpwatch record` works without")
    recorder = Recorder(Path(record), keep_s=keep_s, max_bytes=max_bytes)
    try:
        open_dashboard(Feed(limits, run=run, logs=log, recorder=recorder), theme=theme)
    finally:
        recorder.close()
        if recorder.given_up:
            why = f": {recorder.trouble}" if recorder.trouble else ""
            click.echo(f"ddpwatch: {plural(recorder.given_up, 'frame')} could not be recorded{why}", err=True)
