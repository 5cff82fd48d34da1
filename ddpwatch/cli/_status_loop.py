"""Loop behind `ddpwatch status`: follow a run and print its status, once or at an interval."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Final

import click

from ddpwatch.cli._follow_run import end_of_watching
from ddpwatch.cli._terminal import redraw, show, terminal_size
from ddpwatch.core.limits import DEFAULTS, Limits
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.sources.find_run import SHORT_ID_CHARS
from ddpwatch.view.run_view import current_view
from ddpwatch.view.status import status_object, status_screen

if TYPE_CHECKING:
    from collections.abc import Generator

    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.rundir import RunFile
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

_PROMPT_ROWS: Final = 1
"""Rows left free for the prompt of the shell."""
STACK_NS: Final = 1_500_000_000
"""Longest wait, in nanoseconds, for the stacks of ranks that are stuck."""


def show_once(
    run: RunFile, *, timeout_s: float, as_json: bool, limits: Limits = DEFAULTS, baseline: Profile | None = None
) -> None:
    """Print the run's status. Ranks that do not answer in time are shown as missing."""
    with closing(_snapshots(run, limits, timeout_s, every_s=timeout_s)) as snapshots:
        run_view = current_view(next(snapshots).monitor, baseline)
    if as_json:
        click.echo(json.dumps(status_object(run_view), indent=2))
    else:
        show(_lines(run_view))


def follow(
    run: RunFile,
    *,
    timeout_s: float,
    every_s: float,
    as_json: bool,
    limits: Limits = DEFAULTS,
    baseline: Profile | None = None,
) -> None:
    """Print the run's status every `every_s` until the run ends. On a terminal each replaces the one before."""
    first, timeline = True, Timeline()
    with closing(_snapshots(run, limits, timeout_s, every_s)) as snapshots:
        for follower in snapshots:
            run_view = current_view(follower.monitor, baseline, timeline)
            if as_json:
                click.echo(json.dumps(status_object(run_view)))
            elif sys.stdout.isatty():
                redraw(_lines(run_view), first=first)
            else:
                show([*([] if first else [[]]), *_lines(run_view)])
            first = False
    how = end_of_watching(said_goodbye=follower.said_goodbye)
    click.echo(f"run {run.id[:SHORT_ID_CHARS]} {how}", err=as_json)


def _snapshots(run: RunFile, limits: Limits, timeout_s: float, every_s: float) -> Generator[RunFollower, None, None]:
    """Yield the follower when all ranks have answered or the timeout is over, then at the interval, and at the end."""
    due_ns = stack_ns = 0
    with closing(RunFollower(run, limits, history_s=timeout_s)) as follower:
        while True:
            now_ns = follower.advance()
            ended = follower.ended
            if not ended and not due_ns and _awaits_stacks(follower, now_ns, stack_ns):
                stack_ns = stack_ns or now_ns + STACK_NS
                continue
            if ended or (follower.answered and now_ns >= due_ns):
                due_ns = now_ns + int(every_s * 1e9)
                follower.monitor.evaluate_now()
                yield follower
            if ended:
                return


def _awaits_stacks(follower: RunFollower, now_ns: int, until_ns: int) -> bool:
    """Whether the first status waits for stacks: ranks that are stuck have been asked for theirs."""
    monitor = follower.monitor
    if not follower.answered or (until_ns and now_ns >= until_ns):
        return False
    monitor.evaluate_now()
    return any(monitor.state.ranks[rank].stack is None for rank in monitor.suspects)


def _lines(run_view: RunView) -> list[Line]:
    columns, rows = terminal_size()
    return status_screen(run_view, columns, None if rows is None else rows - _PROMPT_ROWS)
