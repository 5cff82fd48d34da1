"""Charts over steps, with axes, units and a legend. All of it reads without colour."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from ddpwatch.core.numbers import count, plural
from ddpwatch.view.cells import Cell, Level, fit, line_columns, pad
from ddpwatch.view.folding import fold
from ddpwatch.view.plot import BEYOND, DASH, Band, Mark, Plot, row_of
from ddpwatch.view.scale import MOST, round_steps, round_ticks, scale_top, tick_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.ring import IntArray
    from ddpwatch.view.cells import Line
    from ddpwatch.view.folding import Folding

__all__ = ["Band", "How", "Mark", "chart"]

How: TypeAlias = Literal["mean", "max"]
"""What a column shows of several steps: the mean for shares, the largest where a spike must not get lost."""

GUTTER_COLUMNS: Final = 9
"""Room for the labels of the axis, always the same: charts stand in line, and do not jump when a label grows."""
MIN_PLOT_COLUMNS: Final = 12
"""With less room than this for the columns, the labels are left out."""
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
    """The bands on top of each other over ascending `steps`, with one value a step; empty without a finite value.

    A single band is a plain column chart. The step at the `cursor` gets a line and its number. Where there is little
    room the axes go first, then the legend. Columns far above all others end in `▲` and do not flatten the rest.
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
        # Nothing stands on the line below, if there is one: so all ticks are equally far apart.
        gutter = _gutter(ticks[has_rule:], marks, plot, unit)
        labels = _step_labels(folding, plot.columns, cursor)
        lines = [[label, *line] for label, line in zip(gutter, lines, strict=True)]
        if has_rule:
            nothing = pad(tick_text(ticks[0], unit), GUTTER_COLUMNS - 2, right=True)
            lines.append([Cell(f"{nothing} └{_rule(labels, plot.columns)}", Level.DIM)])
        lines.append([Cell(pad("step  ", GUTTER_COLUMNS, right=True), Level.DIM), *_placed(labels)])
    if has_legend:
        indent = Cell(" " * (GUTTER_COLUMNS * has_axis))
        room = columns - line_columns([indent])
        lines.append(fit([indent, *_legend(bands, marks, folding, how, room, beyond=plot.beyond)], columns))
    return lines


def _folded(band: Band, folding: Folding, how: How) -> Band:
    """The band with one value a column."""
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
    """The labels left of the plot, from above; a mark's goes before a tick's."""
    labels = {row: Cell(" " * (GUTTER_COLUMNS - 1) + "│", Level.DIM) for row in range(plot.rows)}
    wanted = [(tick, "┤", Level.DIM) for tick in ticks] + [(mark.value, "┼", mark.level) for mark in marks]
    for value, end, level in wanted:
        text = pad(tick_text(value, unit), GUTTER_COLUMNS - 2, right=True)
        labels[row_of(value, plot.top, plot.rows)] = Cell(f"{text} {end}", level)
    return [labels[row] for row in reversed(range(plot.rows))]


def _step_labels(folding: Folding, columns: int, cursor: int | None) -> list[tuple[int, Cell]]:
    """Where step numbers stand below the plot. The cursor's comes before all others; none touches another."""
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


def _rule(labels: list[tuple[int, Cell]], columns: int) -> str:
    ticks = {column for column, _ in labels}
    return "".join("┬" if column in ticks else "─" for column in range(columns))


def _legend(
    bands: Sequence[Band], marks: Sequence[Mark], folding: Folding, how: How, columns: int, *, beyond: bool
) -> Line:
    """What is what. The words on how steps were folded become fewer until all fits."""
    line: Line = []
    for band in bands:
        line += [Cell(band.glyph, band.level), Cell(f" {band.name}   ", Level.DIM)]
    for mark in marks:
        line += [Cell(DASH * 2, mark.level), Cell(f" {mark.name}   ", Level.DIM)]
    end = [Cell(BEYOND, Level.WARN), Cell(" beyond the scale", Level.DIM)] if beyond else []
    if folding.per_column > 1:
        steps = plural(folding.per_column, "step")
        shown = {"mean": "their mean", "max": "the largest"}[how]
        for words in (f"1 column = {steps}, {shown}", f"{steps} a column, {shown}", f"{steps} a column"):
            folded = Cell(f"{words}   " if end else words, Level.DIM)
            if line_columns([*line, folded, *end]) <= columns:
                line.append(folded)
                break
    return [*line, *end]
