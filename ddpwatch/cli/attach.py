"""`ddpwatch attach`: open the dashboard on a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpwatch.cli._config import limit_options, limits_of
from ddpwatch.cli._follow_run import find_run
from ddpwatch.cli._options import CommandWithLogs, check_retention, recording_summary, retention_options
from ddpwatch.cli._recordings import baseline_of, baseline_option
from ddpwatch.cli._terminal import open_dashboard, refusal, say
from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command("attach", cls=CommandWithLogs)
@click.argument("selector", metavar="[RUN]", required=False)
@click.option("--theme", help="Colours; ctrl+p in the dashboard lists them.  [default: $DDPWATCH_THEME, or ddpwatch]")
@click.option("--log", multiple=True, metavar="GLOB", help="Watch these log files, too; repeatable.")
@click.option("--record", metavar="FILE", help="Record what comes, too; `ddpwatch replay FILE` shows it again.")
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
    """Open the dashboard on a run. Without RUN on the only one; where there is none yet, it waits for one.

    RUN is the beginning of a run id, a run's name, or the path of a run.json.
    """
    from ddpwatch.recording.writer import Recorder
    from ddpwatch.tui.feed import Feed

    check_retention(record, keep_s, max_bytes)
    if record is not None and (why := refusal()):
        raise UsageError(f"{why}; `ddpwatch record` works without")
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
