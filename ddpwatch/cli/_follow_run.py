"""What the commands that follow a run have in common: finding it, waiting for it, and the line on how it ended."""

from __future__ import annotations

import glob
import signal
import time
from typing import TYPE_CHECKING, Final

from ddpwatch.cli._terminal import say
from ddpwatch.errors import NoSuchRun

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.outputs.headless import AlertCounts, Ending
    from ddpwatch.rundir import RunFile

RECHECK_S: Final = 0.1
"""Interval, in seconds, of looking for the run: a job of a few steps lasts less than a second."""


def find_run(selector: str | None) -> RunFile:
    """Find the run as `sources.find_run.find` does. Warn of skipped places, and of a ticket readable by others."""
    from ddpwatch.sources.find_run import find, is_path, is_readable_by_others, skipped_places

    run = find(selector)
    if selector is None or not is_path(selector):
        for warning in skipped_places():
            say(f"ddpwatch: warning: {warning}")
    if selector is not None and run.viewer_secret_key and is_readable_by_others(selector):
        say(f"ddpwatch: warning: {selector} holds a key and is readable by others; run: chmod 600 {selector}")
    return run


def interrupt_on_sigterm() -> None:
    """Handle SIGTERM like Ctrl-C, so that the summary is printed and files are closed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def deadline_ns(for_s: float | None) -> int | None:
    """When `--for` is over, on the monotonic clock; None = never."""
    return None if for_s is None else time.monotonic_ns() + int(for_s * 1e9)


def wait_for_run(selector: str | None, until_ns: int | None) -> RunFile:
    """Wait for the run to appear, at most until `until_ns`. A path must exist at once."""
    from ddpwatch.sources.find_run import is_path, places_text

    reported = False
    while True:
        try:
            return find_run(selector)
        except NoSuchRun as error:
            missing = error
            if selector is not None and is_path(selector):
                raise
        if not reported:
            which = "a run" if selector is None else f"run {selector!r}"
            say(f"waiting for {which} in {places_text()}; if the job is running, see `ddpwatch doctor`")
            reported = True
        left_s = RECHECK_S if until_ns is None else (until_ns - time.monotonic_ns()) / 1e9
        if left_s <= 0:
            raise NoSuchRun(f"gave up waiting: {missing}", missing.hints)
        time.sleep(min(RECHECK_S, left_s))


def say_missing_logs(patterns: Sequence[str]) -> None:
    """Name patterns that match no file: a typing error in one would be noticed too late."""
    for pattern in patterns:
        if not glob.glob(pattern, recursive=True):  # noqa: PTH207 - the pattern may be absolute
            say(f"no file matches {pattern} yet; files that appear later are watched")


def summary(run: RunFile, ending: Ending | None, alerts: AlertCounts, more: Iterable[str] = ()) -> str:
    """One line on how the run ended and its alerts; `ending` is None if the user interrupted it."""
    from ddpwatch.core.units import plural

    counts = alerts.by_severity()
    number = plural(counts.total(), "alert") if counts else "no alert"
    by_severity = ", ".join(f"{counts[severity]} {severity.word}" for severity in sorted(counts, reverse=True))
    return "; ".join(
        [f"{run_label(run)} {_ending_text(ending)}", f"{number} opened" + (f": {by_severity}" if counts else ""), *more]
    )


def run_label(run: RunFile) -> str:
    """A run's short id and name."""
    from ddpwatch.sources.find_run import SHORT_ID_CHARS

    return f"run {run.id[:SHORT_ID_CHARS]} ({run.name})"


def _ending_text(ending: Ending | None) -> str:
    from ddpwatch.view.outcome_text import bad_ranks_text, root_cause_text

    if ending is None:
        return "is still running; stopped watching"
    if ending.time_is_up:
        return "is still running; stopped watching after --for"
    if ending.bad:
        alert = ending.outcome.reported_by
        how = root_cause_text(ending.outcome) or bad_ranks_text(ending.outcome)
        return f"ended badly: {how or (alert.finding.message if alert is not None else '')}"
    return end_of_watching(said_goodbye=ending.said_goodbye)


def end_of_watching(*, said_goodbye: bool) -> str:
    """Why there is nothing more to watch."""
    return f"has ended: {'all ranks have exited' if said_goodbye else 'its processes are gone'}"
