"""`ddpwatch attach`: open the dashboard on a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpwatch.cli._config import limit_options, limits_of
from ddpwatch.cli._follow_run import find_run
from ddpwatch.cli._options import RUN_HELP, CommandWithLogs, check_retention, recording_summary, retention_options
from ddpwatch.cli._recordings import baseline_of, baseline_option
from ddpwatch.cli._terminal import open_dashboard, refusal, say
from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command("attach", cls=CommandWithLogs, epilog=RUN_HELP)
@click.argument("selector", metavar="[RUN]", required=False)
@click.option(
    "--theme", help="Color theme; Ctrl-P in the dashboard lists them.  [default: $DDPWATCH_THEME, or ddpwatch]"
)
@click.option("--log", multiple=True, metavar="GLOB", help="Also watch these log files; repeatable.")
@click.option("--record", metavar="FILE", help="Also record the run into FILE, for `ddpwatch replay FILE`.")
@retention_options
@baseline_option
@limit_options
def command(
    *,
    selector: str | None,
    theme: str | None,
    log: Sequence[str],
    record: str | None,
    keep_s: float | None,
    max_bytes: int | None,
    baseline: Path | None,
    limit: Sequence[str],
    config: str | None,
) -> None:
    """Open the dashboard on a run. Without RUN, it waits until a run starts, and shows a list if there are several."""
    from ddpwatch.recording.writer import Recorder
    from ddpwatch.tui.feed import Feed

    check_retention(record, keep_s, max_bytes)
    if record is not None and (why := refusal()):
        raise UsageError(f"{why}; use `ddpwatch record` instead")
    limits = limits_of(config, limit)
    against = baseline_of(baseline)
    run = None if selector is None else find_run(selector)
    # Without `say`: the dashboard owns the screen, and shows the recorder's errors itself.
    recorder = None if record is None else Recorder(Path(record), keep_s=keep_s, max_bytes=max_bytes)
    try:
        open_dashboard(Feed(limits, run=run, logs=log, recorder=recorder, baseline=against), theme=theme)
    finally:
        if recorder is not None:
            recorder.close()
            say(recording_summary(recorder))
