"""Columns of tables: which of them fit, how wide they are, how they draw a row, and what rows are sorted by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from ddpwatch.view.cells import Cell, Level, fit, pad

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.view.cells import Line

ALWAYS: Final = 99
"""`keep` of a column that is never dropped."""

RowT = TypeVar("RowT")


@dataclass(frozen=True)
class Column(Generic[RowT]):
    """One column of a table. It has either `read` or `draw`."""

    title: str
    width: int
    """Smallest width, in terminal columns."""
    keep: int = ALWAYS
    """Without room for all, the column with the lowest value is dropped first."""
    read: Callable[[RowT], Cell] | None = None
    """The text of a row, to be padded to the width."""
    draw: Callable[[RowT, int], Line] | None = None
    """The cells of a row at a width, for bars and curves."""
    order: Callable[[RowT], Any] | None = None
    """Sort key; negative where the largest number comes first. None = the column cannot be sorted by."""
    right: bool = True
    """Whether text is aligned to the right."""
    rises: bool = False
    """Whether the smallest number, or the first of the alphabet, comes first."""
    grow: tuple[int, ...] = ()
    """Widths to grow to: all columns have reached their first one before any grows to its second."""
    fills: bool = True
    """Whether the title is padded to the width, which a last column does not need."""

    def cells(self, row: RowT, width: int) -> Line:
        """A row in this column."""
        if self.draw is not None:
            return self.draw(row, width)
        cell = self.read(row) if self.read is not None else Cell("")
        return [cell._replace(text=pad(cell.text, width, right=self.right))]


@dataclass(frozen=True)
class Layout(Generic[RowT]):
    """The columns that fit, from left to right, with their widths."""

    columns: tuple[tuple[Column[RowT], int], ...]
    gap: int
    room: int

    @property
    def titles(self) -> tuple[str, ...]:
        """Titles that can be sorted by."""
        return tuple(column.title for column, _ in self.columns if column.order is not None)

    def heading(self, sorted_by: str = "", *, backwards: bool = False) -> Line:
        """The titles; a click sorts by one. `▴` marks ascending and `▾` descending order."""
        cells: list[Line] = []
        left = ""
        for column, width in self.columns:
            # Two columns of the same figure share the title, which stands over the first of them.
            title, left = "" if column.title == left else column.title, column.title
            marked = bool(title) and title == sorted_by
            if marked:
                title = f"{title[: width - 1]}{'▴' if column.rises != backwards else '▾'}"
            text = pad(title, width, right=column.right) if column.fills else title
            action = f"sort('{column.title}')" if column.order is not None else ""
            cells.append([Cell(text, Level.STRONG if marked else Level.DIM, action)])
        return self._join(cells)

    def line(self, row: RowT) -> Line:
        """One row, as wide as the heading."""
        return self._join([column.cells(row, width) for column, width in self.columns])

    def _join(self, cells: Sequence[Line]) -> Line:
        line: Line = []
        for place, part in enumerate(cells):
            line += [Cell(" " * self.gap), *part] if place and self.gap else part
        return fit(line, self.room)


def lay_out(columns: Sequence[Column[RowT]], room: int, gap: int) -> Layout[RowT]:
    """Drop the columns with the lowest `keep` until the others fit, then let these grow in rounds."""
    chosen = list(columns)
    spare = room - sum(column.width + gap for column in chosen) + gap
    while spare < 0 and (least := min(chosen, key=lambda column: column.keep)).keep < ALWAYS:
        chosen.remove(least)
        spare += least.width + gap
    widths = [column.width for column in chosen]
    for turn in range(max(len(column.grow) for column in chosen)):
        for place, column in enumerate(chosen):
            more = max(0, min(spare, column.grow[turn] - widths[place])) if turn < len(column.grow) else 0
            widths[place] += more
            spare -= more
    return Layout(tuple(zip(chosen, widths, strict=True)), gap, room)


def sort_keys(columns: Sequence[Column[RowT]]) -> dict[str, Callable[[RowT], Any]]:
    """Sort keys by title, of the columns that have one."""
    return {column.title: column.order for column in columns if column.order is not None}


@dataclass(frozen=True)
class Ordering:
    """Which rows of a table to show, and in which order."""

    column: str = ""
    """Title of the column to sort by; empty = by rank, or the most urgent first where there are many."""
    backwards: bool = False
    wanted: str = ""
    """Show only ranks whose number, host, state or finding has all these words."""
    follow_worst: bool = False
    """Keep the most urgent rank at the top, with the cursor on it."""

    def by(self, column: str) -> Ordering:
        """Sorted by a column; a second time reverses it."""
        return replace(self, column=column, backwards=column == self.column and not self.backwards, follow_worst=False)

    def by_next(self, titles: Sequence[str]) -> Ordering:
        """Sorted by the column after this one among `titles`; after the last, by none."""
        order = ["", *titles]
        place = order.index(self.column) if self.column in order else 0
        return replace(self, column=order[(place + 1) % len(order)], backwards=False, follow_worst=False)

    def turned(self) -> Ordering:
        """In reverse order."""
        return replace(self, backwards=not self.backwards, follow_worst=False)

    def following(self) -> Ordering:
        """Follow the worst rank, or stop following it."""
        return replace(self, follow_worst=not self.follow_worst)

    def unfollowed(self) -> Ordering:
        """With a cursor that stays where it is put."""
        return replace(self, follow_worst=False) if self.follow_worst else self

    @property
    def marked(self) -> str:
        """The column that the heading marks; empty = none."""
        return "" if self.follow_worst else self.column
