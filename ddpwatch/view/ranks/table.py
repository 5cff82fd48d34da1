"""The rank table: one row a rank, as many columns as the terminal has room for.

Which ranks the table shows, and in which order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ddpwatch.view.cells import Cell, Level, columns_of, fit, pad
from ddpwatch.view.charts.phase_bar import phase_bar
from ddpwatch.view.ranks.columns import ALWAYS, GPU_TITLES, LEFT, RIGHT, arrow, badge
from ddpwatch.view.run_view import extent_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.view.cells import Line
    from ddpwatch.view.ranks.columns import Column, Row
    from ddpwatch.view.run_view import Extent

BAR_MIN_COLUMNS: Final = 12
BAR_STEADY_SHARE: Final = 0.25
"""Of a table whose widths do not change the bars take at least so much: they are what one looks at."""
BAR_MAX_COLUMNS: Final = 120
BAR: Final = "ONE STEP"
HOST_KEEP: Final = 9
GPU_DATA_KEEP: Final = 8
"""Where GPUs are read, their memory matters more than the wait for data, which the bar shows."""
ROOMY_COLUMNS: Final = 100
"""From here on columns stand two blanks apart, and every rank shows its host and pid."""
EDGE_FROM_COLUMNS: Final = 60
"""On narrower screens every column counts."""
_STATE_COLUMNS: Final = (20, 30)
"""The last column takes a fifth of the width, within these bounds."""
_STATE_MAX_COLUMNS: Final = 24
_HOST_MAX_COLUMNS: Final = 20


@dataclass(frozen=True)
class Plan:
    """Which columns there are, how wide, and the scale of the bars."""

    left: tuple[Column, ...]
    right: tuple[Column, ...]
    widths: dict[str, int]
    columns: int
    gap: int
    bar_columns: int
    full_ns: float
    """The step that fills a bar."""

    @property
    def titles(self) -> list[str]:
        """What can be sorted by, from left to right."""
        return [column.title for column in (*self.left, *self.right)]


def plan(rows: Sequence[Row], columns: int, *, show_host: bool, steady: Extent | None = None) -> Plan:
    """Share the width out. `steady` = widths do not depend on what the cells hold, so that nothing jumps about; the
    rows are then not looked at.
    """
    roomy = columns >= ROOMY_COLUMNS
    gap = 2 if roomy else 1
    extent = steady or extent_of(rows)
    wanted = {"HOST": roomy or show_host, "PID": roomy, **dict.fromkeys(GPU_TITLES, extent.has_gpus)}
    chosen = [column for column in (*LEFT, *RIGHT) if wanted.get(column.title, True)]
    if steady:
        widths = _steady_columns(chosen, steady, columns)
    else:
        widths = {column.title: _natural_columns(column, rows) for column in chosen}
    # Where there are several hosts, which one it is matters more than most of the phases.
    keeps = {"HOST": HOST_KEEP} if show_host else {}
    if extent.has_gpus:
        keeps = {title: keep + 1 for title, keep in keeps.items()} | {"data": GPU_DATA_KEEP}
    bar_least = max(BAR_MIN_COLUMNS, round(columns * BAR_STEADY_SHARE)) if steady else BAR_MIN_COLUMNS
    # The last column stays clear of the edge.
    room = columns - 1 if columns >= EDGE_FROM_COLUMNS else columns
    while len(chosen) > 1 and sum(widths.values()) + gap * len(widths) + bar_least > room:
        least = min(chosen, key=lambda column: keeps.get(column.title, column.keep))
        if least.keep == ALWAYS:
            break
        chosen.remove(least)
        del widths[least.title]
    bar_columns = max(0, min(room - sum(widths.values()) - gap * len(widths), BAR_MAX_COLUMNS))
    return Plan(
        tuple(column for column in chosen if column in LEFT),
        tuple(column for column in chosen if column in RIGHT),
        widths,
        columns,
        gap,
        bar_columns,
        extent.full_ns,
    )


def heading(layout: Plan, sorted_by: str = "", *, backwards: bool = False) -> Line:
    """The titles; a click sorts by one. The one sorted by is marked: `▴` = from the smallest up, `▾` = from the largest
    down.
    """

    def title(column: Column) -> Cell:
        marked = column.title == sorted_by
        text = f"{column.title}{arrow(rises=column.rises != backwards)}" if marked else column.title
        return Cell(text, Level.STRONG if marked else Level.DIM, f"sort('{column.title}')")

    return _line(
        layout,
        [title(column) for column in layout.left],
        [Cell(pad(BAR, layout.bar_columns), Level.DIM)],
        [title(column) for column in layout.right],
    )


def rank_line(layout: Plan, row: Row) -> Line:
    """One rank, exactly as wide as the heading."""
    if row.figures:
        bar = phase_bar(row.figures, layout.full_ns, layout.bar_columns)
    else:
        bar = [Cell(" " * layout.bar_columns)]
    return _line(
        layout, [column.read(row) for column in layout.left], bar, [column.read(row) for column in layout.right]
    )


def rank_table(rows: Sequence[Row], columns: int, *, show_host: bool) -> list[Line]:
    """The heading and one line a row, none wider than `columns`. All bars have one scale: the longest step."""
    layout = plan(rows, columns, show_host=show_host)
    return [heading(layout), *(rank_line(layout, row) for row in rows)]


def _steady_columns(chosen: Sequence[Column], extent: Extent, columns: int) -> dict[str, int]:
    # One more than the title, for the mark of the one that is sorted by.
    widths = {column.title: max(column.columns, len(column.title) + 1) for column in chosen}
    widths["RANK"] = max(widths["RANK"], extent.rank_columns)
    least, most = _STATE_COLUMNS
    widths["STATE"] = min(max(columns // 5, least), most)
    if "HOST" in widths:
        widths["HOST"] = max(len("HOST▾"), min(extent.host_columns, _HOST_MAX_COLUMNS))
    return widths


def _natural_columns(column: Column, rows: Sequence[Row]) -> int:
    longest = max((columns_of(column.read(row).text) for row in rows), default=0)
    limit = {"STATE": _STATE_MAX_COLUMNS, "HOST": _HOST_MAX_COLUMNS}.get(column.title, longest)
    # Four at least, the length of any time: the table must not jitter when 99.9 becomes 100.
    return max(columns_of(column.title), min(longest, limit), 4 if column.right else 0)


def _line(layout: Plan, left: Sequence[Cell], bar: Line, right: Sequence[Cell]) -> Line:
    line: Line = []
    for cell, column in zip(left, layout.left, strict=True):
        line += [_padded(cell, column, layout), Cell(" " * layout.gap)]
    line += bar
    for cell, column in zip(right, layout.right, strict=True):
        line += [Cell(" " * layout.gap), _padded(cell, column, layout)]
    return fit(line, layout.columns)


def _padded(cell: Cell, column: Column, layout: Plan) -> Cell:
    return cell._replace(text=pad(cell.text, layout.widths[column.title], right=column.right))


BY_RANK_UP_TO: Final = 16
"""So many ranks keep their places; of more, those that need a look come first."""
_RANK: Final = re.compile(r"r?\d+")
"""A word that means one rank, and not every rank or host that has the digit in it."""
_BY_TITLE: Final = {column.title: column for column in (*LEFT, *RIGHT)}
SORTABLE: Final = tuple(_BY_TITLE)


@dataclass(frozen=True)
class Ordering:
    """How the person wants to see the ranks."""

    column: str = ""
    """Title of the column that is sorted by; empty = by rank, or what needs a look first where there are many."""
    backwards: bool = False
    wanted: str = ""
    """Only ranks whose number, host, state or finding holds all these words."""
    follow_worst: bool = False
    """The rank that needs a look most is at the top, with the cursor on it."""

    def by(self, column: str) -> Ordering:
        """Sorted by a column; once more by the same one turns it round."""
        return replace(self, column=column, backwards=column == self.column and not self.backwards, follow_worst=False)

    def by_next(self, titles: Sequence[str]) -> Ordering:
        """Sorted by the column after this one among `titles`; after the last, by none."""
        order = ["", *titles]
        place = order.index(self.column) if self.column in order else 0
        return replace(self, column=order[(place + 1) % len(order)], backwards=False, follow_worst=False)

    def turned(self) -> Ordering:
        """The other way round."""
        return replace(self, backwards=not self.backwards, follow_worst=False)

    def following(self) -> Ordering:
        """The worst on top, or as it was before that."""
        return replace(self, follow_worst=not self.follow_worst)

    @property
    def marked(self) -> str:
        """The column that the heading marks; empty = none is sorted by."""
        return "" if self.follow_worst else self.column

    def unfollowed(self) -> Ordering:
        """With a cursor that stays where it is put."""
        return replace(self, follow_worst=False) if self.follow_worst else self


def arrange(rows: Sequence[Row], urgent: Sequence[Row], ordering: Ordering) -> Sequence[Row]:
    """The rows that are wanted, in their order. `urgent` are the same, those that need a look first."""
    worst_first = ordering.follow_worst or (not ordering.column and len(rows) > BY_RANK_UP_TO)
    shown: Sequence[Row] = urgent if worst_first else rows
    if words := ordering.wanted.casefold().split():
        shown = [row for row in shown if _has(row, words)]
    if ordering.column and not ordering.follow_worst:
        return sorted(shown, key=_BY_TITLE[ordering.column].order, reverse=ordering.backwards)
    if ordering.backwards and not ordering.follow_worst:
        return shown[::-1]
    # Those that the others wait for in a hang come first, in sight of whoever opens a small window.
    return shown if worst_first else sorted(shown, key=lambda row: not row.waited_for)


def _has(row: Row, words: Sequence[str]) -> bool:
    number = str(row.state.rank)
    text = f"{row.state.host} {row.condition} {badge(row).text} {row.finding.rule if row.finding else ''}".casefold()
    return all(word.removeprefix("r") == number if _RANK.fullmatch(word) else word in text for word in words)
