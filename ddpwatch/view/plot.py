"""The field of a chart: stacked columns drawn into a grid of glyphs, solid ones to an eighth of a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.view.cells import Cell, Level
from ddpwatch.view.spark import EIGHTHS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.view.cells import Line

SOLID: Final = EIGHTHS[-1]
"""The glyph of a band whose edge is told to an eighth of a row; others end with a row."""
NOTCH: Final = EIGHTHS[6]
"""What a mark leaves of a solid row: a gap below its upper edge, through all columns."""
HALF_ROW: Final = 4
BEYOND: Final = "▲"
"""At the top of a column that goes on above the scale."""
DASH: Final = "╌"
DASH_EVERY: Final = 4
"""On top of columns a mark shows in every so-manieth, which leaves them readable."""
_LEVELS: Final = tuple(Level)
_NUMBER: Final = {level: number for number, level in enumerate(_LEVELS)}
_EIGHTHS: Final = np.array(list(EIGHTHS))


@dataclass(frozen=True)
class Band:
    """One layer of the columns. What is not finite is not drawn."""

    name: str
    values: NDArray[np.float64]
    level: Level
    glyph: str
    """Tells it apart without colour, wherever it fills a whole row."""


@dataclass(frozen=True)
class Mark:
    """A dashed line across the chart."""

    value: float
    name: str
    level: Level = Level.WARN


def row_of(value: float, top: float, rows: int) -> int:
    """The row, counted from below, in which a column of that height ends."""
    return min(max(math.ceil(value / top * rows - 1e-9) - 1, 0), rows - 1)


class Plot:
    """A grid of `rows` by `columns`, where `top` is the upper edge."""

    def __init__(self, columns: int, rows: int, top: float) -> None:
        """Begin with an empty one."""
        self.columns, self.rows, self.top = columns, rows, top
        self.beyond = False
        """Whether a column goes on above the scale."""
        self._glyphs = np.full((rows, columns), " ")
        self._levels = np.full((rows, columns), _NUMBER[Level.PLAIN])

    def draw(self, bands: Sequence[Band]) -> None:
        """The bands on top of each other, the first one lowest; one value a column, from the left."""
        heights = np.array([band.values for band in bands]) / self.top * self.rows
        known = np.isfinite(heights).any(axis=0)
        heights = np.where(np.isfinite(heights), np.maximum(heights, 0.0), 0.0)
        tops = heights.cumsum(axis=0)
        bottoms = tops - heights
        total = tops[-1]
        # However little it is, it is not nothing.
        eighths = np.where(known, np.maximum(np.rint(np.minimum(total, self.rows) * 8), total > 0), 0).astype(np.int64)
        band_glyphs = np.array([band.glyph for band in bands])
        band_levels = np.array([_NUMBER[band.level] for band in bands])
        solid = band_glyphs == SOLID
        used = slice(0, len(total))
        for row in range(self.rows):
            filled = np.clip(eighths - 8 * row, 0, 8)
            # A row that bands share belongs to the one with most of it.
            owner = (np.minimum(tops, row + 1) - np.maximum(bottoms, row)).argmax(axis=0)
            # The edge of a shaded band is shaded, too: solid, it would look like another band on top of it.
            shaded = ~solid[owner] & (row > 0)
            edge = np.where(shaded, np.where(filled >= HALF_ROW, band_glyphs[owner], " "), _EIGHTHS[filled])
            self._glyphs[-1 - row, used] = np.where(filled == 8, band_glyphs[owner], edge)
            self._levels[-1 - row, used] = np.where(filled > 0, band_levels[owner], _NUMBER[Level.PLAIN])
        beyond = np.flatnonzero(total > self.rows * (1 + 1e-6))
        self._put(0, beyond, BEYOND, Level.WARN)
        self.beyond = bool(len(beyond))

    def draw_mark(self, mark: Mark) -> None:
        """Its line: whole where nothing is, a notch in solid columns, here and there on shaded ones, no edge."""
        row = self.rows - 1 - row_of(mark.value, self.top, self.rows)
        across = np.arange(self.columns)
        self._glyphs[row, self._glyphs[row] == SOLID] = NOTCH
        whole = ~np.isin(self._glyphs[row], [*EIGHTHS[:-1], BEYOND])
        free = (self._glyphs[row] == " ") | (whole & (across % DASH_EVERY == 0))
        self._put(row, across[free], DASH, mark.level)

    def draw_cursor(self, column: int) -> None:
        """A line down to the column of that place."""
        free = [row for row in range(self.rows) if self._glyphs[row, column] in {" ", DASH}]
        for row in free:
            self._put(row, np.array([column]), "│", Level.STRONG)
        self._put(0, np.array([column]), "▼", Level.STRONG)

    def lines(self) -> list[Line]:
        """The rows from above, each exactly as wide as the plot."""
        return [self._line(row) for row in range(self.rows)]

    def _put(self, row: int, columns: NDArray[np.int64], glyph: str, level: Level) -> None:
        self._glyphs[row, columns] = glyph
        self._levels[row, columns] = _NUMBER[level]

    def _line(self, row: int) -> Line:
        levels = self._levels[row]
        begins = np.flatnonzero(np.diff(levels, prepend=-1)).tolist()
        text = "".join(self._glyphs[row].tolist())
        ends = [*begins[1:], self.columns]
        return [Cell(text[begin:end], _LEVELS[levels[begin]]) for begin, end in zip(begins, ends, strict=True)]
