"""The lines around every screen: which run this is and how it does, where one can go, and which keys work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.state.sanitize import NOTE_CHARS, sanitize
from ddpwatch.core.units import count, plural
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.alerts.panel import hang_of
from ddpwatch.view.cells import Cell, Level, clip, fit, line_columns
from ddpwatch.view.status import backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.state.run import RunCondition
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

KEYS_COLUMNS: Final = 20
"""So much of the last line is left to the keys when something else must be said there."""
_LIVE: Final[dict[RunCondition, Cell]] = {
    "waiting": Cell("… no rank heard yet", Level.WARN),
    "live": Cell("● LIVE", Level.OK),
    "silent": Cell("▲ SILENT", Level.WARN),
    "ended": Cell("■ ENDED", Level.DIM),
}


def header_line(run_view: RunView, columns: int, marks: Sequence[Cell] = ()) -> Line:
    """Name and facts on the left, how it does on the right, with `marks` of the front end. Facts give way first, from
    the right.
    """
    state, figures, totals = run_view.state, run_view.figures, run_view.totals
    facts = []
    # Who goes from step to step sees which one that is, and not the one that a rank is in already.
    latest = run_view.last_step if run_view.by_steps else totals.step
    step = run_view.at if run_view.at is not None else latest
    if step is not None:
        facts.append(f"step {count(step)}")
    facts.append(f"{plural(state.world_size, 'rank')} on {plural(totals.hosts, 'host')}")
    facts.append(backend(state) or "backend not known")
    if totals.running_s is not None:
        facts.append(clock(totals.running_s))
    if figures and figures.effective_batch is not None:
        facts.append(f"batch {count(figures.effective_batch)}")
    right = [*marks, *_how(run_view), Cell(" ")]
    room = columns - line_columns(right) - 2
    # A long name leaves room for where the run is.
    name = Cell(clip(state.name or state.run_id, max(room // 2, 8)), Level.STRONG)
    line: Line = [Cell(" ddpwatch ", Level.TITLE, "help"), Cell(" "), name]
    for fact in facts:
        if line_columns(line) + len(fact) + 3 > room:
            break
        line.append(Cell(f" · {fact}"))
    line = fit(line, room)
    return fit([*line, Cell(" " * (columns - line_columns(line) - line_columns(right))), *right], columns)


def _how(run_view: RunView) -> Line:
    line: Line = []
    if run_view.simulated:
        line += [Cell("SIMULATED", Level.WARN), Cell("  ")]
    if run_view.replayed:
        line += [Cell("REPLAY", Level.TITLE), Cell("  ")]
    if run_view.at is not None:
        line.append(Cell(f"‖ STEP {count(run_view.at)}", Level.WARN, "live"))
    elif run_view.paused:
        line.append(Cell("‖ PAUSED", Level.WARN, "live"))
    elif (hang := hang_of(run_view)) is not None:
        mark = MARKS[hang.finding.severity]
        line.append(Cell(f"{mark.text} HANGS", mark.level, "open_stuck"))
    elif not run_view.replayed or run_view.condition != "live":
        line.append(_LIVE[run_view.condition])
    elif run_view.by_steps and run_view.last_step is not None:
        # Standing still at the newest step that is known by then is standing still, too.
        line.append(Cell(f"‖ STEP {count(run_view.last_step)}", Level.WARN, "pause"))
    else:
        line.pop()
    for severity in (Severity.WARNING, Severity.CRITICAL):
        alerts = sum(alert.finding.severity == severity for alert in run_view.fresh)
        if alerts:
            mark = MARKS[severity]
            line += [Cell("  "), Cell(f"{mark.text} {alerts}", mark.level, "show('alerts')")]
    return line


def tab_line(tabs: Sequence[tuple[str, str]], chosen: str, columns: int) -> Line:
    """The screens by number; the one that is shown is marked. On narrow terminals only it keeps its name."""
    for short in (False, True):
        line: Line = [Cell(" ")]
        for number, (name, title) in enumerate(tabs, 1):
            here = name == chosen
            text = f"[{number} {title}]" if here else f" {number} {title} "
            if short and not here:
                text = f" {number} "
            line.append(Cell(text, Level.TITLE if here else Level.DIM, f"show('{name}')"))
        if line_columns(line) <= columns:
            break
    return fit(line, columns)


def recording_mark(trouble: str) -> Line:
    """That it is recorded, or that it is not."""
    return [Cell("▲ REC", Level.WARN) if trouble else Cell("◉ REC", Level.OK), Cell("  ")]


def key_line(keys: Sequence[tuple[str, str, str]], columns: int, trouble: str = "") -> Line:
    """Keys with what they do, each (key, word, action). The last two, help and the way out, give way last. Trouble that
    must not be overlooked stands before them.
    """
    if trouble:
        listed = fit([Cell(f" ▲ {sanitize(trouble, NOTE_CHARS)}", Level.WARN)], max(columns - KEYS_COLUMNS, 0))
        return [*listed, *key_line(keys, columns - line_columns(listed))]
    pieces = [
        [Cell(key, Level.KEY, action), Cell(f" {word}", Level.DIM, action), Cell("  ")] for key, word, action in keys
    ]
    while len(pieces) > 1 and sum(map(line_columns, pieces)) - 1 > columns:
        del pieces[max(len(pieces) - 3, 0)]
    line = [Cell(" "), *(cell for piece in pieces for cell in piece)]
    if line_columns(line) > columns:
        # The blanks at the end: cut, they would look as if a word were missing.
        line.pop()
    return fit(line, columns)


def clock(seconds: float) -> str:
    """A span as hours, minutes and seconds: 00:42:17; days in front where there are any."""
    whole = max(0, int(seconds))
    days = f"{whole // 86400}d " if whole >= 86400 else ""
    return f"{days}{whole // 3600 % 24:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
