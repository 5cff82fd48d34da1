"""Discovery and selection of runs: the run directories of this user on this host, and tickets."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpwatch import rundir
from ddpwatch.errors import NoSuchRun, RunDirRefused, UsageError
from ddpwatch.sources.connections import probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.rundir import RunFile

SHORT_ID_CHARS: Final = 8
"""Characters of a run's id that messages show."""
NO_RUN_CHECKS: Final = (
    "1. Another host or user? Run ddpwatch there, or attach with a ticket.",
    "2. Container or private /tmp? Set one shared DDPWATCH_RUN_DIR for both.",
    "3. No ddpwatch.agent.install(model) in the script, or not reached yet?",
    "4. Exited? See `ddpwatch postmortem LOG...` or `ddpwatch replay FILE`.",
)
"""Why a job may not be found, the most likely reason first. Each fits on a line of the waiting screen."""
POSTMORTEM: Final = "`ddpwatch postmortem LOG...` finds the cause in its logs"
TICKET_ENDINGS: Final = (".json", ".ticket")
RECORDING_ENDING: Final = ".ddpw"
_MAX_NAMED: Final = 8
"""Runs that a message lists."""


def live_runs() -> list[RunFile]:
    """Runs with a live process in all places to look in, newest first. Removes the directories of dead ones.

    A place that is refused is skipped. Raises `RunDirRefused` if it is the first, to which an agent with this
    environment would write, and the others hold no run.
    """
    runs: dict[str, RunFile] = {}
    refused: RunDirRefused | None = None
    for place in rundir.places():
        try:
            runs.update((run.id, run) for run in _live_runs_in(place))
        except RunDirRefused as error:
            if place == rundir.base_path():
                refused = error
    if refused is not None and not runs:
        raise refused
    return sorted(runs.values(), key=lambda run: run.started_unix_s, reverse=True)


def _live_runs_in(base: Path) -> list[RunFile]:
    try:
        rundir.prune(base)
        found, _ = rundir.scan(base)
    except OSError as error:
        raise RunDirRefused(f"cannot read the run directory {base}: {error.strerror}; set DDPWATCH_RUN_DIR") from None
    # A dead run's directory may be impossible to remove.
    return [run for run in found if alive_ranks(run)]


def skipped_places() -> list[str]:
    """A warning for each place that is not searched, because it is not private to this user."""
    return [f"skipped: {why}" for place in rundir.places() if (why := rundir.refusal(place))]


def alive_ranks(run: RunFile) -> set[int]:
    """Ranks whose process is alive. Those on other nodes are assumed to be."""
    node = rundir.node_id()
    return {endpoint.rank for endpoint in run.endpoints if rundir.alive(endpoint, node)}


def no_run_text() -> str:
    """Where runs were looked for in vain: the run directories, the host and the user."""
    return f"no run found in {places_text()} (host {socket.gethostname()}, uid {os.getuid()})"


def places_text() -> str:
    """The places to look in, in one line."""
    return ", ".join(map(str, rundir.places()))


def find(selector: str | None) -> RunFile:
    """Select a run by id or its prefix, name, job id, or path of a ticket; None = the only one.

    Raises `UsageError` if several match.
    """
    if selector is not None and is_path(selector):
        return _read_ticket(Path(selector))
    runs = live_runs()
    if selector is None:
        matching = runs
    else:
        matching = [run for run in runs if run.id == selector] or [
            run for run in runs if selector and (run.id.startswith(selector) or selector in (run.name, run.job))
        ]
    if len(matching) == 1:
        return matching[0]
    if matching:
        which = "several runs are live" if selector is None else f"several runs match {selector!r}"
        names = {run.name for run in matching}
        by = "id or name" if len(names) == len(matching) and selector not in names else "id"
        raise UsageError(f"{which}: {_listed(matching)}; choose one by its {by}")
    if not runs:
        unmatched = "" if selector is None else f"no run matches {selector!r}: "
        raise NoSuchRun(unmatched + no_run_text(), [*skipped_places(), *NO_RUN_CHECKS])
    raise NoSuchRun(f"no run matches {selector!r}; live runs: {_listed(runs)}")


def read_again(run: RunFile) -> RunFile:
    """The run's current file in a run directory; the given one if there is none."""
    for place in rundir.places():
        if rundir.refusal(place):
            continue
        with contextlib.suppress(OSError, ValueError):
            now = rundir.read(place / run.id / rundir.RUN_FILE)
            if now.id == run.id:
                return now
    return run


def is_path(selector: str) -> bool:
    """Whether the selector is the path of a ticket and not a name, which may contain a slash too."""
    path = Path(selector)
    looks_so = os.sep in selector and (selector.startswith((os.sep, ".", "~")) or path.exists())
    return looks_so or selector.endswith(TICKET_ENDINGS) or path.is_file()


def is_readable_by_others(selector: str) -> bool:
    """Whether the selector is the path of a ticket that other users can read or replace."""
    path = Path(selector)
    try:
        file = path / rundir.RUN_FILE if path.is_dir() else path
        return is_path(selector) and bool(file.stat().st_mode & 0o077)
    except OSError:
        return False


def _read_ticket(path: Path) -> RunFile:
    file = path / rundir.RUN_FILE if path.is_dir() else path
    try:
        run = rundir.read(file)
    except OSError as error:
        why = f"the directory has no {rundir.RUN_FILE}" if path.is_dir() and not file.exists() else error.strerror
        raise NoSuchRun(f"no run at {path}: {why}") from None
    except ValueError as error:
        if file.suffix == RECORDING_ENDING:
            raise UsageError(f"{file} is a recording: ddpwatch replay {file}") from None
        raise UsageError(f"{file} is not a ticket: it {error}") from None
    if not alive_ranks(run):
        raise NoSuchRun(f"run {run.id[:SHORT_ID_CHARS]} ({run.name}) of {file} has exited; {POSTMORTEM}")
    elsewhere = not any(endpoint.node == rundir.node_id() for endpoint in run.endpoints)
    if run.endpoints and (elsewhere or run.relay is not None):
        probe(run)
    return run


def _listed(runs: Sequence[RunFile]) -> str:
    named = ", ".join(f"{run.id[:SHORT_ID_CHARS]} ({run.name})" for run in runs[:_MAX_NAMED])
    more = len(runs) - _MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named
