"""The line that says where a replay is: whether it plays, how fast, what time it is there, and what went wrong when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpwatch.core.units import moment_of
from ddpwatch.recording.health import damage_mark
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.cells import Cell, Level, fit, line_columns
from ddpwatch.view.header import clock

if TYPE_CHECKING:
    from datetime import tzinfo

    from ddpwatch.core.alerts.model import Severity
    from ddpwatch.recording.health import Damage
    from ddpwatch.view.cells import Line

MIN_COLUMNS: Final = 10
"""A timeline with fewer columns tells nothing."""
PARTS: Final = 10_000
"""A click tells the place in parts of so many."""


class Mark(NamedTuple):
    """An alert on the timeline."""

    part: float
    """Where, from 0 to 1."""
    severity: Severity


@dataclass(frozen=True)
class Position:
    """Where a replay is."""

    at_ns: int
    """What time it is there; Unix."""
    passed_s: float
    """How much of the recording lies behind; the time between two attempts does not count."""
    total_s: float
    playing: bool
    at_end: bool
    speed: float
    attempt: int
    """From 1."""
    attempts: int
    progress: float | None = None
    """How much is done of the way to where it shall be; None = it is there."""
    marks: tuple[Mark, ...] = ()
    seams: tuple[float, ...] = ()
    """Where an attempt begins, but for the first one."""
    damage: Damage | None = None
    """What could not be read of the recording; None = nothing so far."""
    older: bool = False
    """Whether what came before is still looked for, and charts are shorter than they will be."""


def replay_line(position: Position, columns: int, zone: tzinfo) -> Line:
    """Sign, speed and times on the left, attempts on the right, the timeline between them."""
    left = [Cell(" "), *_sign(position), Cell(" "), *_times(position, zone)]
    right = _attempts(position)
    room = columns - line_columns(left) - line_columns(right) - 3
    if room < MIN_COLUMNS:
        left = [Cell(" "), *_sign(position), Cell(f" {_time_of_day(position, zone)}")]
        room = columns - line_columns(left) - line_columns(right) - 3
    if room < MIN_COLUMNS:
        return fit([*left, Cell(" "), *right], columns)
    return fit([*left, Cell(" "), *timeline(position, room), Cell(" "), *right], columns)


def timeline(position: Position, columns: int) -> Line:
    """The whole recording from left to right. What has passed is drawn thick; a click on a place goes there."""
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


def _sign(position: Position) -> Line:
    if position.progress is not None:
        return [Cell(f"… {position.progress:4.0%}", Level.WARN)]
    sign = "■" if position.at_end else "▶" if position.playing else "‖"
    level = Level.OK if sign == "▶" else Level.WARN
    return [Cell(f"{sign} ×{position.speed:<4g}", level, "pause")]


def _times(position: Position, zone: tzinfo) -> Line:
    return [
        Cell(_time_of_day(position, zone), Level.STRONG, "go_to"),
        Cell(f" {clock(position.passed_s)}/{clock(position.total_s)}", Level.DIM),
    ]


def _time_of_day(position: Position, zone: tzinfo) -> str:
    moment = moment_of(position.at_ns)
    return "--:--:--" if moment is None else f"{moment.astimezone(zone):%H:%M:%S}"


def _attempts(position: Position) -> Line:
    line: Line = []
    if position.older:
        line.append(Cell("… reading the past of the charts ", Level.WARN))
    if position.attempts > 1:
        line.append(Cell(f"attempt {position.attempt} of {position.attempts} ", Level.DIM))
    if position.damage is not None:
        line.append(Cell(f"▲ {damage_mark(position.damage)} ", Level.WARN))
    return line
