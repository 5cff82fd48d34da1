"""Lines around every screen: header with the run and its state, tabs, and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.model_kinds import kind_name
from ddpwatch.core.state.sanitize import NOTE_CHARS, sanitize
from ddpwatch.core.units import count, plural
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.cells import Cell, Level, clip, fit, line_columns
from ddpwatch.view.status import RUN_MARKS, backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

KEYS_COLUMNS: Final = 20
"""Columns of the last line that a warning leaves to the keys."""


def header_line(run_view: RunView, columns: int, marks: Sequence[Cell] = ()) -> Line:
    """Name and facts on the left, `marks` and state on the right. Without room, the last facts are left out first."""
    state, figures, totals = run_view.state, run_view.figures, run_view.totals
    facts = []
    # Stepping through a replay shows the step of the figures, not the one that a rank has already reached.
    latest = run_view.last_step if run_view.by_steps else totals.step
    step = run_view.at if run_view.at is not None else latest
    if step is not None:
        facts.append(f"step {count(step)}")
    facts.append(f"{plural(state.world_size, 'rank')} on {plural(totals.hosts, 'host')}")
    facts += [*filter(None, [kind_name(state)]), backend(state) or "backend unknown"]
    if totals.running_s is not None:
        facts.append(clock(totals.running_s))
    if figures and figures.effective_batch is not None:
        facts.append(f"batch {count(figures.effective_batch)}")
    right = [*marks, *_state_cells(run_view), Cell(" ")]
    room = columns - line_columns(right) - 2
    # A long name leaves half of the room to the facts.
    name = Cell(clip(state.name or state.run_id, max(room // 2, 8)), Level.STRONG)
    line: Line = [Cell(" ddpwatch ", Level.TITLE, "help"), Cell(" "), name]
    for fact in facts:
        if line_columns(line) + len(fact) + 3 > room:
            break
        line.append(Cell(f" · {fact}"))
    line = fit(line, room)
    return fit([*line, Cell(" " * (columns - line_columns(line) - line_columns(right))), *right], columns)


def _state_cells(run_view: RunView) -> Line:
    line: Line = []
    if run_view.simulated:
        line += [Cell("SIMULATED", Level.WARN), Cell("  ")]
    if run_view.replayed:
        line += [Cell("REPLAY", Level.TITLE), Cell("  ")]
    if run_view.at is not None:
        line.append(Cell(f"‖ STEP {count(run_view.at)}", Level.WARN, "live"))
    elif run_view.paused:
        line.append(Cell("‖ PAUSED", Level.WARN, "live"))
    elif run_view.hang is not None:
        mark = MARKS[run_view.hang.finding.severity]
        line.append(Cell(f"{mark.text} HANGS", mark.level, "open_stuck"))
    elif not run_view.replayed or run_view.condition != "live":
        mark = RUN_MARKS[run_view.condition]
        line.append(mark if run_view.condition == "waiting" else mark._replace(text=mark.text.upper()))
    elif run_view.by_steps and run_view.last_step is not None:
        # A replay that is stepped through is paused at the newest step, too.
        line.append(Cell(f"‖ STEP {count(run_view.last_step)}", Level.WARN, "pause"))
    else:
        line.pop()
    for severity in (Severity.WARNING, Severity.CRITICAL):
        if alerts := sum(alert.finding.severity == severity for alert in run_view.fresh):
            mark = MARKS[severity]
            line += [Cell("  "), Cell(f"{mark.text} {alerts}", mark.level, "show('alerts')")]
    return line


def tab_line(tabs: Sequence[tuple[str, str]], chosen: str, columns: int) -> Line:
    """Numbered screens, with the shown one marked; on narrow terminals the others are numbers only."""
    for narrow in (False, True):
        line: Line = [Cell(" ")]
        for number, (name, title) in enumerate(tabs, 1):
            action = f"show('{name}')"
            if name == chosen:
                line.append(Cell(f"[{number} {title}]", Level.TITLE, action))
            else:
                line.append(Cell(f" {number} " if narrow else f" {number} {title} ", Level.DIM, action))
        if line_columns(line) <= columns:
            break
    return fit(line, columns)


def recording_mark(trouble: str) -> Line:
    """Mark of a recording; `trouble` = the recorder's error, if any."""
    return [Cell("▲ REC", Level.WARN) if trouble else Cell("◉ REC", Level.OK), Cell("  ")]


def key_line(keys: Sequence[tuple[str, str, str]], columns: int, trouble: str = "") -> Line:
    """Keys, each as (key, word, action), after a warning if there is one.

    Without room, keys are left out; the last two, help and quit, stay longest.
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
        # Without its trailing blanks, which `fit` would replace by an ellipsis.
        line.pop()
    return fit(line, columns)


def clock(seconds: float) -> str:
    """Format a time span as 00:42:17 or 3d 00:42:17."""
    whole = max(0, int(seconds))
    days = f"{whole // 86400}d " if whole >= 86400 else ""
    return f"{days}{whole // 3600 % 24:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
