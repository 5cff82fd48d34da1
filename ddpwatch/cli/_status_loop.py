"""Attach to a run, follow its frames, and show the state when it is due: once, or again and again."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Final

import click

from ddpwatch.cli._runs import end_of_watching
from ddpwatch.cli._terminal import is_terminal, redraw, show, terminal_size
from ddpwatch.core.limits import DEFAULTS, Limits
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.session.follow import RunFollower
from ddpwatch.sources.runs import SHORT_ID_CHARS
from ddpwatch.view.run_view import picture_now
from ddpwatch.view.status import status_object, status_screen

if TYPE_CHECKING:
    from collections.abc import Generator

    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.rundir import RunFile
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

_PROMPT_ROWS: Final = 1
STACK_NS: Final = 1_500_000_000
"""Longest wait for the stacks of ranks that are stuck."""


def show_once(
    run: RunFile, *, timeout_s: float, as_json: bool, limits: Limits = DEFAULTS, baseline: Profile | None = None
) -> None:
    """Print the run as it is now. Ranks that do not answer in time are shown as missing."""
    with closing(moments(run, timeout_s=timeout_s, every_s=timeout_s, limits=limits)) as looks:
        run_view = picture_now(next(looks).monitor, baseline)
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
    """Show the run every so often until it ends, and then say so. On a terminal each look replaces the last."""
    first, timeline = True, Timeline()
    with closing(moments(run, timeout_s=timeout_s, every_s=every_s, limits=limits)) as looks:
        for follower in looks:
            run_view = picture_now(follower.monitor, baseline, timeline)
            if as_json:
                click.echo(json.dumps(status_object(run_view)))
            elif is_terminal():
                redraw(_lines(run_view), first=first)
            else:
                show([*([] if first else [[]]), *_lines(run_view)])
            first = False
    how = end_of_watching(said_goodbye=follower.said_goodbye)
    click.echo(f"run {run.id[:SHORT_ID_CHARS]} {how}", err=as_json)


def moments(
    run: RunFile, *, timeout_s: float, every_s: float, limits: Limits = DEFAULTS
) -> Generator[RunFollower, None, None]:
    """The run each time it is due: when all ranks have answered or time is up, then every so often, and at the end.

    It is one and the same object, further on each time.
    """
    due_ns = stack_ns = 0
    with closing(RunFollower(run, limits, history_s=timeout_s)) as follower:
        while True:
            now_ns = follower.advance()
            ended = follower.ended
            if not ended and not due_ns and _stack_is_coming(follower, now_ns, stack_ns):
                stack_ns = stack_ns or now_ns + STACK_NS
                continue
            if ended or (follower.answered and now_ns >= due_ns):
                due_ns = now_ns + int(every_s * 1e9)
                follower.monitor.evaluate_now()
                yield follower
            if ended:
                return


def _stack_is_coming(follower: RunFollower, now_ns: int, until_ns: int) -> bool:
    """Whether the first look waits a moment more: ranks that are stuck have been asked where."""
    monitor = follower.monitor
    if not follower.answered or (until_ns and now_ns >= until_ns):
        return False
    monitor.evaluate_now()
    return any(monitor.state.ranks[rank].stack is None for rank in monitor.suspects)


def _lines(run_view: RunView) -> list[Line]:
    columns, rows = terminal_size()
    return status_screen(run_view, columns, None if rows is None else rows - _PROMPT_ROWS)
