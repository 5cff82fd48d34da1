"""`ddpwatch record`: write every frame of a run, and its alerts, to a file."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

import click

from ddpwatch.cli._config import limit_options, limits_of
from ddpwatch.cli._follow_run import (
    deadline_ns,
    interrupt_on_sigterm,
    run_label,
    say_missing_logs,
    summary,
    wait_for_run,
)
from ddpwatch.cli._options import (
    RUN_HELP,
    CommandWithLogs,
    check_retention,
    default_file,
    recorder_of,
    recording_summary,
    retention_options,
    span,
)
from ddpwatch.cli._terminal import say
from ddpwatch.cli.main import ENDED_BADLY, NOT_KEPT
from ddpwatch.errors import RunDirRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.limits import Limits
    from ddpwatch.outputs.headless import Ending
    from ddpwatch.recording.writer import Recorder
    from ddpwatch.rundir import RunFile

RESTART: Final = "2m"
RECHECK_S: Final = 0.5
"""Interval, in seconds, of looking for the restarted run."""


@click.command("record", cls=CommandWithLogs, epilog=RUN_HELP)
@click.argument("selector", metavar="[RUN]", required=False)
@click.option(
    "-o",
    "--output",
    "file",
    metavar="FILE",
    help="File to write; an existing recording is continued.  [default: ./RUN-DATE-TIME.ddpw]",
)
@retention_options
@click.option("--for", "for_s", type=span, metavar="DURATION", help="Stop after this time: 60s, 5m, 2h.")
@click.option(
    "--restart",
    "restart_s",
    type=span,
    default=RESTART,
    metavar="DURATION",
    show_default=True,
    help="Max. wait for the restart of a run that ended badly.",
)
@click.option("--log", multiple=True, metavar="GLOB", help="Also record these log files; repeatable.")
@limit_options
def command(
    *,
    selector: str | None,
    file: str | None,
    keep_s: float | None,
    max_bytes: int | None,
    for_s: float | None,
    restart_s: float,
    log: Sequence[str],
    limit: Sequence[str],
    config: str | None,
) -> None:
    """Record a run until it ends: every frame received, and every alert change. Waits for the run to start.

    If the run ends badly and is restarted, the restart is recorded into the same file.

    Exits with 4 if a rank failed, was lost or had no heartbeat when the run ended, and it was not restarted; otherwise
    with 1 if the recording is incomplete, for instance because the disk is full, and with 0 if not.
    """
    interrupt_on_sigterm()
    check_retention("", keep_s, max_bytes)
    until_ns = deadline_ns(for_s)
    limits = limits_of(config, limit)
    run = None if file is not None else wait_for_run(selector, until_ns)
    place = default_file(run.name) if run is not None else file
    recorder = None
    ending: Ending | None = None
    try:
        # Opened before waiting for a run, so that a file that cannot be written is reported at once.
        with recorder_of(place, keep_s, max_bytes) as recorder:
            assert recorder is not None
            run = run or wait_for_run(selector, until_ns)
            say_missing_logs(log)
            ending = _record_restarts(run, recorder, limits, log, until_ns, restart_s)
    finally:
        if recorder is not None and run is not None:
            say(recording_summary(recorder))
    if ending.bad:
        raise click.exceptions.Exit(ENDED_BADLY)
    if recorder is not None and recorder.incomplete:
        raise click.exceptions.Exit(NOT_KEPT)


def _record_restarts(
    run: RunFile, recorder: Recorder, limits: Limits, logs: Sequence[str], until_ns: int | None, restart_s: float
) -> Ending:
    """Record a run and its restarts into one file, and return how the last of them ended."""
    from ddpwatch.outputs.headless import AlertCounts, watch_until_end

    while True:
        say(f"recording {run_label(run)} into {recorder.path}")
        alerts = AlertCounts()
        try:
            ending = watch_until_end(run, limits, alerts.count, until_ns=until_ns, logs=logs, recorder=recorder)
        except KeyboardInterrupt:
            say(summary(run, None, alerts))
            raise
        say(summary(run, ending, alerts))
        if not ending.bad:
            return ending
        say(f"waiting {restart_s:.0f} s for {run.name} to be restarted")
        give_up_ns = time.monotonic_ns() + int(restart_s * 1e9)
        restarted = _wait_for_restart(run, give_up_ns if until_ns is None else min(give_up_ns, until_ns))
        if restarted is None:
            return ending
        run = restarted


def _wait_for_restart(ended: RunFile, until_ns: int) -> RunFile | None:
    """Wait for a new run of the same name; None = there was none in that time."""
    from ddpwatch.sources.find_run import live_runs

    while time.monotonic_ns() < until_ns:
        with contextlib.suppress(RunDirRefused):
            restarts = [run for run in live_runs() if run.id != ended.id and run.name == ended.name]
            if restarts:
                return max(restarts, key=lambda run: run.started_unix_s)
        time.sleep(RECHECK_S)
    return None
