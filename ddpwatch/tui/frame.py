"""The lines around the screens, and the summary: what they take from the dashboard and what from the picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpwatch.core.text import NAME_CHARS, tame
from ddpwatch.tui.field import Field
from ddpwatch.tui.keys import SUMMARY, TABS, keys_of
from ddpwatch.tui.panes import WHOLE
from ddpwatch.view.cells import Cell, Level, fit
from ddpwatch.view.header import header_line, key_line, recording_mark, tab_line
from ddpwatch.view.summary import summary_lines

if TYPE_CHECKING:
    from ddpwatch.tui.app import Dashboard
    from ddpwatch.view.cells import Line
    from ddpwatch.view.picture import Picture


def header(app: Dashboard, picture: Picture, columns: int) -> Line:
    """The first line: which run, and how it does."""
    recorded = app.feed.recorder is not None
    return header_line(picture, columns, recording_mark(app.feed.not_recorded) if recorded else ())


def tabs(app: Dashboard, columns: int) -> Line:
    """The second: the screens, and what is filtered."""
    shown = [*TABS, *([(SUMMARY, SUMMARY)] if app.told_end else [])]
    line = tab_line(shown, app.where, columns)
    wanted = app.screen_stack[0].query_one("#filter", Field).value if app.tables() else ""
    if wanted:
        line = [*line, Cell(f"  only {tame(wanted, NAME_CHARS)} · esc shows all", Level.WARN, "leave")]
    return fit(line, columns)


def keys(app: Dashboard, picture: Picture, columns: int) -> Line:
    """The last one: what can be pressed here."""
    told = keys_of(
        app.where,
        paused=picture.paused,
        gpus=picture.totals.gpus is not None,
        replayed=picture.replayed,
        ended=app.told_end,
        runs=app.feed.choosable,
    )
    return key_line(told, columns, app.feed.not_recorded)


def summary(app: Dashboard, picture: Picture, columns: int) -> list[Line]:
    """The page of a run that is over."""
    return summary_lines(
        picture,
        columns,
        WHOLE,
        duration_s=picture.totals.running_s or 0.0,
        newer=[run.name or run.id for run in app.feed.newer],
        runs=app.feed.choosable,
    )
