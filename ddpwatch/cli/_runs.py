"""The run that a command was told to take, with a word on a ticket that others may read.

What commands share that follow a run without a screen: waiting for it, what is said meanwhile, and the last line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.outputs.headless import AlertCounts, Ending
    from ddpwatch.rundir import RunFile


def find_run(selector: str | None) -> RunFile:
    """As `sources.runs.find` does. That a ticket lies open is said, and it is used all the same."""
    from ddpwatch.sources.runs import find, is_readable_by_others

    run = find(selector)
    if selector is not None and run.viewer_secret_key and is_readable_by_others(selector):
        say(f"ddpwatch: warning: {selector} is a key that others may read; take it from them (chmod 600)")
    return run


RECHECK_S: Final = 0.1
"""A job of a few steps is over within a second, and then cannot tell them any more."""
_MAX_LINE_CHARS: Final = 1000


def end_as_control_c() -> None:
    """A plain kill ends us in order: with a summary, and without leaving anything behind."""
    import signal

    signal.signal(signal.SIGTERM, _interrupt)


def deadline_ns(for_s: float | None) -> int | None:
    """When `--for` is over, on the monotonic clock; None = never."""
    import time

    return None if for_s is None else time.monotonic_ns() + int(for_s * 1e9)


def wait_for_run(selector: str | None, until_ns: int | None) -> RunFile:
    """The run that is meant, once it is there. A path is not waited for, nor is it waited longer than that."""
    import time

    from ddpwatch.errors import NoSuchRun
    from ddpwatch.sources.runs import is_path

    reported = False
    while True:
        try:
            return find_run(selector)
        except NoSuchRun:
            if selector is not None and is_path(selector):
                raise
        if not reported:
            which = "a run" if selector is None else f"run {selector!r}"
            say(f"waiting for {which}; add ddpwatch.agent.install(model) to the script")
            reported = True
        if until_ns is not None and time.monotonic_ns() >= until_ns:
            raise NoSuchRun("no run was seen in that time")
        left_s = RECHECK_S if until_ns is None else (until_ns - time.monotonic_ns()) / 1e9
        time.sleep(max(0.0, min(RECHECK_S, left_s)))


def say_missing_logs(patterns: Sequence[str]) -> None:
    """Name those that match nothing: a mistake in one would be found out too late."""
    import glob

    for pattern in patterns:
        if not glob.glob(pattern, recursive=True):  # noqa: PTH207 - the pattern may be absolute
            say(f"no file matches {pattern} yet; it is watched as soon as there is one")


def summary(run: RunFile, ending: Ending | None, alerts: AlertCounts, more: Iterable[str] = ()) -> str:
    """One line on how it came out; without an ending somebody stopped watching."""
    from ddpwatch.core.units import plural

    counts = alerts.by_severity()
    number = plural(counts.total(), "alert") if counts else "no alert"
    by_severity = ", ".join(f"{counts[severity]} {severity.word}" for severity in sorted(counts, reverse=True))
    return "; ".join(
        [f"{run_label(run)} {_how(ending)}", f"{number} opened" + (f": {by_severity}" if counts else ""), *more]
    )


def run_label(run: RunFile) -> str:
    """A run as it is named in a line."""
    from ddpwatch.sources.runs import SHORT_ID_CHARS

    return f"run {run.id[:SHORT_ID_CHARS]} ({run.name})"


def say(text: str) -> None:
    """A line on stderr."""
    import contextlib

    # Names of runs may be in it; they are as foreign here as on the screen.
    from ddpwatch.core.state.sanitize import sanitize

    # Nobody may be listening, and the threads of sinks and recorders say things, too.
    with contextlib.suppress(OSError):
        click.echo(sanitize(text, _MAX_LINE_CHARS), err=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _how(ending: Ending | None) -> str:
    from ddpwatch.view.outcome import bad_ranks_text, root_cause_text

    if ending is None:
        return "goes on, no longer watched"
    if ending.time_is_up:
        return "goes on; the time for watching is up"
    if ending.bad:
        alert = ending.outcome.reported_by
        how = root_cause_text(ending.outcome) or bad_ranks_text(ending.outcome)
        return f"ended badly: {how or (alert.finding.message if alert is not None else '')}"
    return end_of_watching(said_goodbye=ending.said_goodbye)


def end_of_watching(*, said_goodbye: bool) -> str:
    """Why there is nothing more to watch."""
    return f"has ended: its {'ranks said goodbye' if said_goodbye else 'processes are gone'}"
