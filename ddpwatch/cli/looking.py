"""Attach to a run, follow its frames, and show the state when it is due: once, or again and again."""

from __future__ import annotations

import json
import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

import click

from ddpwatch.cli.paint import is_terminal, redraw, show, terminal_size
from ddpwatch.core.figures import measure
from ddpwatch.core.rank import Place
from ddpwatch.core.state import RunState
from ddpwatch.sources.frames import Frame
from ddpwatch.sources.live import Live
from ddpwatch.sources.runs import SHORT_ID_CHARS, alive_ranks
from ddpwatch.view.screen import status_screen
from ddpwatch.view.status import status_object

if TYPE_CHECKING:
    from collections.abc import Generator

    from ddpwatch.rundir import RunFile
    from ddpwatch.view.cells import Line

_PROCESS_CHECK_NS: Final = 1_000_000_000
_PROMPT_ROWS: Final = 1


def look_once(run: RunFile, *, timeout_s: float, as_json: bool) -> None:
    """Print the run as it is now. Ranks that do not answer in time are shown as missing."""
    with closing(moments(run, timeout_s=timeout_s, every_s=timeout_s)) as states:
        state = next(states)
    if as_json:
        click.echo(json.dumps(status_object(state, measure(state)), indent=2))
    else:
        show(_lines(state))


def follow(run: RunFile, *, timeout_s: float, every_s: float, as_json: bool) -> None:
    """Show the run every so often until it ends, and then say so. On a terminal each look replaces the last."""
    first = True
    with closing(moments(run, timeout_s=timeout_s, every_s=every_s)) as states:
        for state in states:
            if as_json:
                click.echo(json.dumps(status_object(state, measure(state))))
            elif is_terminal():
                redraw(_lines(state), first=first)
            else:
                show([*([] if first else [[]]), *_lines(state)])
            first = False
    said_goodbye = state.run_condition() == "ended"
    how = "its ranks said goodbye" if said_goodbye else "its processes are gone"
    click.echo(f"run {run.id[:SHORT_ID_CHARS]} has ended: {how}", err=as_json)


def moments(run: RunFile, *, timeout_s: float, every_s: float) -> Generator[RunState, None, None]:
    """The state each time it is due: when all ranks have answered or time is up, then every so often, and at the end.

    It is one and the same state, further on each time.
    """
    state = _new_state(run)
    due_ns = time.monotonic_ns() + int(timeout_s * 1e9)
    check_ns = 0
    alive = alive_ranks(run)
    answered = False
    with closing(Live(run)) as source:
        for item in source:
            now_ns = item.received_ns if isinstance(item, Frame) else item.now_ns
            if isinstance(item, Frame):
                state.take(item.payload, now_ns)
            else:
                state.tick(now_ns)
            if now_ns >= check_ns:
                alive, check_ns = alive_ranks(run), now_ns + _PROCESS_CHECK_NS
            if _has_ended(state, alive):
                yield state
                return
            all_answered = not answered and all(state.ranks[rank].snapped for rank in alive)
            if now_ns >= due_ns or all_answered:
                answered = True
                due_ns = now_ns + int(every_s * 1e9)
                yield state


def _new_state(run: RunFile) -> RunState:
    places = [Place(endpoint.rank, endpoint.host, endpoint.pid) for endpoint in run.endpoints]
    return RunState(run.id, run.name, run.world_size, places)


def _has_ended(state: RunState, alive: set[int]) -> bool:
    return not alive or all(rank.bye is not None for rank in state.ranks.values())


def _lines(state: RunState) -> list[Line]:
    columns, rows = terminal_size()
    return status_screen(state, measure(state), columns, None if rows is None else rows - _PROMPT_ROWS)
