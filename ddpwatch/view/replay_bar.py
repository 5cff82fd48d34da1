"""Replay bar: state, speed and time of a replay, and a timeline with its alerts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpwatch.core.units import moment_of
from ddpwatch.recording.damage_report import damage_mark
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.cells import Cell, Level, fit, line_columns
from ddpwatch.view.header import clock

if TYPE_CHECKING:
    from datetime import tzinfo

    from ddpwatch.core.alerts.model import Severity
    from ddpwatch.recording.damage_report import Damage
    from ddpwatch.view.cells import Line

MIN_COLUMNS: Final = 10
"""Min. width of the timeline, in columns."""
PARTS: Final = 10_000
"""Resolution of a click on the timeline: the action carries its position in 1/10,000 of the recording."""


class Mark(NamedTuple):
    """An alert on the timeline."""

    part: float
    """Position from 0 to 1."""
    severity: Severity


@dataclass(frozen=True)
class Position:
    """Position and state of a replay."""

    at_ns: int
    """Recorded Unix time, in nanoseconds."""
    passed_s: float
    """Recorded time before this position, in seconds, without the time between two attempts."""
    total_s: float
    playing: bool
    at_end: bool
    speed: float
    attempt: int
    """Number of the attempt, from 1."""
    attempts: int
    progress: float | None = None
    """Progress of seeking, from 0 to 1; None = not seeking."""
    marks: tuple[Mark, ...] = ()
    seams: tuple[float, ...] = ()
    """Positions, from 0 to 1, where the second and later attempts begin."""
    damage: Damage | None = None
    """Damage of the recording that was found so far."""
    older: bool = False
    """Whether older steps are still being read, and charts are shorter than they will be."""


def replay_line(position: Position, columns: int, zone: tzinfo) -> Line:
    """State, speed and times on the left, notes on the right, the timeline between them if there is room."""
    state, right = [Cell(" "), _state_cell(position)], _notes(position)
    moment = moment_of(position.at_ns)
    time_of_day = "--:--:--" if moment is None else f"{moment.astimezone(zone):%H:%M:%S}"
    total = Cell(f" {clock(position.passed_s)}/{clock(position.total_s)}", Level.DIM)
    left = [*state, Cell(" "), Cell(time_of_day, Level.STRONG, "go_to"), total]
    room = columns - line_columns(left) - line_columns(right) - 3
    if room < MIN_COLUMNS:
        left = [*state, Cell(f" {time_of_day}")]
        room = columns - line_columns(left) - line_columns(right) - 3
    if room < MIN_COLUMNS:
        return fit([*left, Cell(" "), *right], columns)
    return fit([*left, Cell(" "), *timeline(position, room), Cell(" "), *right], columns)


def timeline(position: Position, columns: int) -> Line:
    """The whole recording from left to right, thick up to the position; a click seeks."""
    here = _column(position.passed_s / position.total_s if position.total_s else 0.0, columns)
    worst: dict[int, Severity] = {}
    for mark in position.marks:
        column = _column(mark.part, columns)
        worst[column] = max(mark.severity, worst.get(column, mark.severity))
    seams = {_column(part, columns) for part in position.seams}
    cells = []
    for column in range(columns):
        action = f"seek_part({round((column + 0.5) / columns * PARTS)})"
        if column == here:
            cells.append(Cell("●", Level.STRONG, action))
        elif column in worst:
            cells.append(Cell(MARKS[worst[column]].text, MARKS[worst[column]].level, action))
        elif column in seams:
            cells.append(Cell("┊", Level.PLAIN, action))
        else:
            cells.append(Cell(*(("━", Level.OK) if column < here else ("─", Level.DIM)), action))
    return cells


def _column(part: float, columns: int) -> int:
    return min(max(int(part * columns), 0), columns - 1)


def _state_cell(position: Position) -> Cell:
    if position.progress is not None:
        return Cell(f"… {position.progress:4.0%}", Level.WARN)
    glyph = "■" if position.at_end else "▶" if position.playing else "‖"
    return Cell(f"{glyph} ×{position.speed:<4g}", Level.OK if glyph == "▶" else Level.WARN, "pause")


def _notes(position: Position) -> Line:
    line: Line = []
    if position.older:
        line.append(Cell("… reading earlier steps ", Level.WARN))
    if position.attempts > 1:
        line.append(Cell(f"attempt {position.attempt} of {position.attempts} ", Level.DIM))
    if position.damage is not None:
        line.append(Cell(f"▲ {damage_mark(position.damage)} ", Level.WARN))
    return line
