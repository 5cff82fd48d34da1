"""Column charts over steps, with axes, units and a legend, readable without color.

`fold` maps steps to columns for all drawings over time, so that they stand in line; `Plot` draws stacked columns into a
grid of glyphs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from ddpwatch.core.units import count, plural
from ddpwatch.view.cells import Cell, Level, fit, line_columns, pad
from ddpwatch.view.charts.axis import MOST, round_steps, round_ticks, scale_top, tick_text
from ddpwatch.view.charts.sparkline import EIGHTHS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.state.step_store import IntArray
    from ddpwatch.view.cells import Line

SOLID: Final = EIGHTHS[-1]
"""The glyph of a band whose edge is drawn to an eighth of a row; other bands end with a row."""
NOTCH: Final = EIGHTHS[6]
"""A mark across solid columns: a gap at the upper edge of their row."""
HALF_ROW: Final = 4
"""Eighths of a row from which on the edge of a shaded band fills its row."""
BEYOND: Final = "▲"
"""The top of a column that exceeds the scale."""
DASH: Final = "╌"
DASH_EVERY: Final = 4
"""Over shaded columns a mark is drawn in every fourth one, which leaves them readable."""
_LEVELS: Final = tuple(Level)
_NUMBER: Final = {level: number for number, level in enumerate(_LEVELS)}
_EIGHTHS: Final = np.array(list(EIGHTHS))


@dataclass(frozen=True)
class Band:
    """One layer of stacked columns. Values that are not finite are not drawn."""

    name: str
    values: NDArray[np.float64]
    level: Level
    glyph: str
    """Distinguishes the band without color, where it fills a whole row."""


@dataclass(frozen=True)
class Mark:
    """A dashed horizontal line."""

    value: float
    name: str
    level: Level = Level.WARN


def row_of(value: float, top: float, rows: int) -> int:
    """The row, counted from below, in which a column of this height ends."""
    return min(max(math.ceil(value / top * rows - 1e-9) - 1, 0), rows - 1)


class Plot:
    """A grid of `rows` by `columns`, where `top` is the upper edge."""

    def __init__(self, columns: int, rows: int, top: float) -> None:
        self.columns, self.rows, self.top = columns, rows, top
        self.beyond = False
        """Whether a column exceeds the scale."""
        self._glyphs = np.full((rows, columns), " ")
        self._levels = np.full((rows, columns), _NUMBER[Level.PLAIN])

    def draw(self, bands: Sequence[Band]) -> None:
        """Stack the bands, the first one lowest; each has one value per column, from the left."""
        heights = np.array([band.values for band in bands]) / self.top * self.rows
        known = np.isfinite(heights).any(axis=0)
        heights = np.where(np.isfinite(heights), np.maximum(heights, 0.0), 0.0)
        tops = heights.cumsum(axis=0)
        bottoms = tops - heights
        total = tops[-1]
        # Any value above 0 is visible.
        eighths = np.where(known, np.maximum(np.rint(np.minimum(total, self.rows) * 8), total > 0), 0).astype(np.int64)
        band_glyphs = np.array([band.glyph for band in bands])
        band_levels = np.array([_NUMBER[band.level] for band in bands])
        solid = band_glyphs == SOLID
        used = slice(0, len(total))
        for row in range(self.rows):
            filled = np.clip(eighths - 8 * row, 0, 8)
            # A row shared by bands belongs to the one that takes most of it.
            owner = (np.minimum(tops, row + 1) - np.maximum(bottoms, row)).argmax(axis=0)
            # The edge of a shaded band is shaded: solid, it would look like another band on top of it.
            shaded = ~solid[owner] & (row > 0)
            edge = np.where(shaded, np.where(filled >= HALF_ROW, band_glyphs[owner], " "), _EIGHTHS[filled])
            self._glyphs[-1 - row, used] = np.where(filled == 8, band_glyphs[owner], edge)
            self._levels[-1 - row, used] = np.where(filled > 0, band_levels[owner], _NUMBER[Level.PLAIN])
        beyond = np.flatnonzero(total > self.rows * (1 + 1e-6))
        self._put(0, beyond, BEYOND, Level.WARN)
        self.beyond = bool(len(beyond))

    def draw_mark(self, mark: Mark) -> None:
        """Dashes where the row is empty and on every fourth shaded column, a notch in solid ones; edges stay."""
        row = self.rows - 1 - row_of(mark.value, self.top, self.rows)
        across = np.arange(self.columns)
        self._glyphs[row, self._glyphs[row] == SOLID] = NOTCH
        whole = ~np.isin(self._glyphs[row], [*EIGHTHS[:-1], BEYOND])
        free = (self._glyphs[row] == " ") | (whole & (across % DASH_EVERY == 0))
        self._put(row, across[free], DASH, mark.level)

    def draw_cursor(self, column: int) -> None:
        """Draw a line down to a column."""
        for row in range(self.rows):
            if self._glyphs[row, column] in {" ", DASH}:
                self._put(row, column, "│", Level.STRONG)
        self._put(0, column, "▼", Level.STRONG)

    def lines(self) -> list[Line]:
        """The rows from top to bottom, each as wide as the plot."""
        return [self._line(row) for row in range(self.rows)]

    def _put(self, row: int, columns: NDArray[np.int64] | int, glyph: str, level: Level) -> None:
        self._glyphs[row, columns] = glyph
        self._levels[row, columns] = _NUMBER[level]

    def _line(self, row: int) -> Line:
        levels = self._levels[row]
        begins = np.flatnonzero(np.diff(levels, prepend=-1)).tolist()
        text = "".join(self._glyphs[row].tolist())
        ends = [*begins[1:], self.columns]
        return [Cell(text[begin:end], _LEVELS[levels[begin]]) for begin, end in zip(begins, ends, strict=True)]


@dataclass(frozen=True)
class Folding:
    """Which steps share a column. A column without steps stays empty: gaps are shown, not closed."""

    first: int
    """The first step of the first column."""
    per_column: int
    """Steps per column."""
    columns: int
    """Columns in use; the newest step is in the last one."""
    kept: slice
    """The given steps that are shown."""
    starts: IntArray
    """For each column that has steps, the index of its first one among those kept."""
    places: IntArray
    """The numbers of these columns."""

    def column_of(self, step: int) -> int | None:
        """The column of a step; None = not shown."""
        column = (step - self.first) // self.per_column
        return column if 0 <= column < self.columns else None

    def spread(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values of the columns that have steps, with nan for the others."""
        spread = np.full(self.columns, np.nan)
        spread[self.places] = values
        return spread


def fold(steps: IntArray, columns: int) -> Folding | None:
    """Map ascending steps to at most `columns`; None = there is nothing to show.

    Columns begin at multiples of their number of steps, so that a new step changes only the last column and a moving
    chart does not flicker. Steps that do not fill a column at the old end are left out.
    """
    if not len(steps) or columns < 1:
        return None
    oldest, newest = int(steps[0]), int(steps[-1])
    per_column = -(-(newest - oldest + 1) // columns)
    last = newest // per_column
    first = min(-(-oldest // per_column), last)
    begin = int(np.searchsorted(steps, first * per_column))
    column = steps[begin:] // per_column - first
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    return Folding(first * per_column, per_column, last - first + 1, slice(begin, len(steps)), starts, column[starts])


How: TypeAlias = Literal["mean", "max"]
"""How steps of one column are combined: the mean for shares, the maximum where a spike must not get lost."""

GUTTER_COLUMNS: Final = 9
"""Room for the labels of the axis, always the same, so that charts stand in line and do not jump."""
MIN_PLOT_COLUMNS: Final = 12
"""With fewer columns than this for the plot, the labels are left out."""
# Min. height of a chart, in rows, for its legend, its axes, and the rule above the step numbers.
ROWS_FOR_LEGEND: Final = 3
ROWS_FOR_AXIS: Final = 5
ROWS_FOR_RULE: Final = 9


def chart(
    bands: Sequence[Band],
    steps: IntArray,
    columns: int,
    rows: int,
    *,
    unit: str,
    how: How = "mean",
    marks: Sequence[Mark] = (),
    cursor: int | None = None,
) -> list[Line]:
    """A stacked column chart over ascending `steps`, with one value of each band per step; empty without finite values.

    The step at the `cursor` gets a line and its number. Where there is little room the axes are dropped first, then the
    legend. Columns far above all others end in `▲` and do not flatten the rest.
    """
    has_axis = rows >= ROWS_FOR_AXIS and columns >= GUTTER_COLUMNS + MIN_PLOT_COLUMNS
    has_rule = has_axis and rows >= ROWS_FOR_RULE
    has_legend = rows >= ROWS_FOR_LEGEND
    plot_rows = rows - has_axis - has_rule - has_legend
    folding = fold(steps, columns - GUTTER_COLUMNS * has_axis)
    if folding is None or plot_rows < 1:
        return []
    bands = [folded for band in bands if np.isfinite((folded := _folded(band, folding, how)).values).any()]
    if not bands:
        return []
    top = scale_top(np.nansum([band.values for band in bands], axis=0), [mark.value for mark in marks])
    ticks = round_ticks(top, plot_rows)
    plot = Plot(columns - GUTTER_COLUMNS * has_axis, plot_rows, max(top, ticks[-1]))
    plot.draw(bands)
    for mark in marks:
        plot.draw_mark(mark)
    if cursor is not None and (column := folding.column_of(cursor)) is not None:
        plot.draw_cursor(column)
    lines = plot.lines()
    if has_axis:
        # With a rule, the tick at 0 is on it, and all ticks are equally far apart.
        gutter = _gutter(ticks[has_rule:], marks, plot, unit)
        labels = _step_labels(folding, plot.columns, cursor)
        lines = [[label, *line] for label, line in zip(gutter, lines, strict=True)]
        if has_rule:
            zero = pad(tick_text(ticks[0], unit), GUTTER_COLUMNS - 2, right=True)
            at = {column for column, _ in labels}
            rule = "".join("┬" if column in at else "─" for column in range(plot.columns))
            lines.append([Cell(f"{zero} └{rule}", Level.DIM)])
        lines.append([Cell(pad("step  ", GUTTER_COLUMNS, right=True), Level.DIM), *_placed(labels)])
    if has_legend:
        indent = Cell(" " * (GUTTER_COLUMNS * has_axis))
        room = columns - line_columns([indent])
        lines.append(fit([indent, *_legend(bands, marks, folding, how, room, beyond=plot.beyond)], columns))
    return lines


def _folded(band: Band, folding: Folding, how: How) -> Band:
    """The band with one value per column."""
    values = band.values[folding.kept]
    known = np.isfinite(values)
    values = np.where(known, np.clip(values, 0.0, MOST), 0.0)
    counts = np.add.reduceat(known.astype(np.float64), folding.starts)
    if how == "mean":
        folded = np.add.reduceat(values, folding.starts) / np.maximum(counts, 1.0)
    else:
        folded = np.maximum.reduceat(values, folding.starts)
    return replace(band, values=folding.spread(np.where(counts > 0, folded, np.nan)))


def _gutter(ticks: Sequence[float], marks: Sequence[Mark], plot: Plot, unit: str) -> list[Cell]:
    """Labels left of the plot, from the top; one of a mark replaces one of a tick."""
    labels = {row: Cell(" " * (GUTTER_COLUMNS - 1) + "│", Level.DIM) for row in range(plot.rows)}
    wanted = [(tick, "┤", Level.DIM) for tick in ticks] + [(mark.value, "┼", mark.level) for mark in marks]
    for value, end, level in wanted:
        text = pad(tick_text(value, unit), GUTTER_COLUMNS - 2, right=True)
        labels[row_of(value, plot.top, plot.rows)] = Cell(f"{text} {end}", level)
    return [labels[row] for row in reversed(range(plot.rows))]


def _step_labels(folding: Folding, columns: int, cursor: int | None) -> list[tuple[int, Cell]]:
    """Step numbers below the plot by column. The cursor's has priority; none touches another."""
    last = folding.first + folding.columns * folding.per_column - 1
    apart = round_steps(folding.per_column)
    first_round = -(-folding.first // apart) * apart
    wanted = [(step, Level.DIM) for step in range(first_round, last + 1, apart)] or [(folding.first, Level.DIM)]
    if cursor is not None:
        wanted.insert(0, (cursor, Level.STRONG))
    placed: list[tuple[int, Cell]] = []
    for step, level in wanted:
        column, text = folding.column_of(step), count(step)
        if column is None or len(text) > columns:
            continue
        column = min(column, columns - len(text)) if level is Level.STRONG else column
        fits = column + len(text) <= columns
        if fits and all(column > at + len(cell.text) or column + len(text) < at for at, cell in placed):
            placed.append((column, Cell(text, level)))
    return sorted(placed, key=lambda label: label[0])


def _placed(labels: list[tuple[int, Cell]]) -> Line:
    line: Line = []
    used = 0
    for column, cell in labels:
        line += [Cell(" " * (column - used)), cell]
        used = column + len(cell.text)
    return line


def _legend(
    bands: Sequence[Band], marks: Sequence[Mark], folding: Folding, how: How, columns: int, *, beyond: bool
) -> Line:
    """The legend, with as many words on the folding of steps as fit."""
    line: Line = []
    for band in bands:
        line += [Cell(band.glyph, band.level), Cell(f" {band.name}   ", Level.DIM)]
    for mark in marks:
        line += [Cell(DASH * 2, mark.level), Cell(f" {mark.name}   ", Level.DIM)]
    end = [Cell(BEYOND, Level.WARN), Cell(" off the scale", Level.DIM)] if beyond else []
    if folding.per_column > 1:
        steps = plural(folding.per_column, "step")
        shown = {"mean": "mean", "max": "max"}[how]
        for words in (f"1 column = {steps}, {shown}", f"{steps}/column, {shown}", f"{steps}/column"):
            folded = Cell(f"{words}   " if end else words, Level.DIM)
            if line_columns([*line, folded, *end]) <= columns:
                line.append(folded)
                break
    return [*line, *end]
