"""The rank table: which columns fit, which ranks it shows, and in which order."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddpwatch.view.cells import Cell, columns_of
from ddpwatch.view.charts.phase_bar import phase_bar
from ddpwatch.view.columns import ALWAYS, lay_out
from ddpwatch.view.ranks.columns import BAR, COLUMNS, GPU_TITLES, SORT_KEYS, badge
from ddpwatch.view.run_view import extent_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.view.cells import Line
    from ddpwatch.view.columns import Column, Layout, Ordering
    from ddpwatch.view.ranks.columns import Row
    from ddpwatch.view.run_view import Extent

BAR_MIN_COLUMNS: Final = 12
"""Min. width of the bars, in terminal cells."""
BAR_STEADY_SHARE: Final = 0.25
"""The bars take at least this share of a table whose widths do not depend on its content."""
HOST_KEEP: Final = 9
"""`keep` of the host where there are several."""
GPU_DATA_KEEP: Final = 8
"""`keep` of the wait for data where GPUs are read: their memory matters more, and the bar shows the wait."""
ROOMY_COLUMNS: Final = 100
"""From this width on, columns are two blanks apart and every rank shows its host and pid."""
EDGE_FROM_COLUMNS: Final = 60
"""From this width on, the last column stays clear of the edge."""
_STEADY_STATE_COLUMNS: Final = (20, 30)
"""Bounds, in terminal cells, of STATE where widths do not depend on the content: it takes a fifth of the table."""
# Max. widths, in terminal cells, of columns that are as wide as their content.
_STATE_MAX_COLUMNS: Final = 24
_HOST_MAX_COLUMNS: Final = 20
BY_RANK_UP_TO: Final = 16
"""Up to this number, ranks keep their places; of more, the urgent ones come first."""
_RANK: Final = re.compile(r"r?\d+")
"""A word of the filter that means one rank, and not every rank or host with the digit in it."""


def rank_layout(rows: Sequence[Row], columns: int, *, show_host: bool, steady: Extent | None = None) -> Layout[Row]:
    """Fit the columns. With `steady`, widths do not depend on the content of cells, so that nothing moves during a run,
    and the rows are not looked at.
    """
    roomy = columns >= ROOMY_COLUMNS
    gap = 2 if roomy else 1
    room = columns - 1 if columns >= EDGE_FROM_COLUMNS else columns
    extent = steady or extent_of(rows)
    shown = {"HOST": roomy or show_host, "PID": roomy, **dict.fromkeys(GPU_TITLES, extent.has_gpus)}
    chosen = [column for column in COLUMNS if shown.get(column.title, True)]
    widths = _steady_widths(chosen, steady, columns) if steady else {c.title: _natural_width(c, rows) for c in chosen}
    # A bar gets its least width before optional columns do, but not before those that are never dropped.
    always = [widths[column.title] + gap for column in chosen if column.keep == ALWAYS and column.title != BAR]
    least = max(BAR_MIN_COLUMNS, round(columns * BAR_STEADY_SHARE)) if steady else BAR_MIN_COLUMNS
    widths[BAR] = max(0, min(least, room - sum(always)))
    # Where there are several hosts, the host matters more than most of the phases.
    keeps = {"HOST": HOST_KEEP + extent.has_gpus} if show_host else {}
    if extent.has_gpus:
        keeps["data"] = GPU_DATA_KEEP

    def draw_bar(row: Row, width: int) -> Line:
        return phase_bar(row.figures, extent.full_ns, width) if row.figures else [Cell(" " * width)]

    fitted = [
        replace(
            column,
            width=widths[column.title],
            keep=keeps.get(column.title, column.keep),
            draw=draw_bar if column.title == BAR else None,
        )
        for column in chosen
    ]
    return lay_out(fitted, room, gap)


def rank_table(rows: Sequence[Row], columns: int, *, show_host: bool) -> list[Line]:
    """The heading and one line per row, none wider than `columns`. All bars have one scale: the longest step."""
    layout = rank_layout(rows, columns, show_host=show_host)
    return [layout.heading(), *map(layout.line, rows)]


def _steady_widths(chosen: Sequence[Column[Row]], extent: Extent, columns: int) -> dict[str, int]:
    # One more than the title, for the mark of the sorted column.
    widths = {column.title: max(column.width, len(column.title) + 1) for column in chosen}
    least, most = _STEADY_STATE_COLUMNS
    return widths | {
        "RANK": max(widths["RANK"], extent.rank_columns),
        "HOST": max(len("HOST▾"), min(extent.host_columns, _HOST_MAX_COLUMNS)),
        "STATE": min(max(columns // 5, least), most),
    }


def _natural_width(column: Column[Row], rows: Sequence[Row]) -> int:
    longest = max((columns_of(column.read(row).text) for row in rows), default=0) if column.read else 0
    limit = {"STATE": _STATE_MAX_COLUMNS, "HOST": _HOST_MAX_COLUMNS}.get(column.title, longest)
    # At least four, the length of any time, so that the table does not jitter when 99.9 becomes 100.
    return max(columns_of(column.title), min(longest, limit), 4 if column.right else 0)


def arrange(rows: Sequence[Row], urgent: Sequence[Row], ordering: Ordering) -> Sequence[Row]:
    """Filter and sort the ranks. `urgent` has the same rows, the most urgent first."""
    worst_first = ordering.follow_worst or (not ordering.column and len(rows) > BY_RANK_UP_TO)
    shown: Sequence[Row] = urgent if worst_first else rows
    if words := ordering.wanted.casefold().split():
        shown = [row for row in shown if _has(row, words)]
    if ordering.column and not ordering.follow_worst:
        return sorted(shown, key=SORT_KEYS[ordering.column], reverse=ordering.backwards)
    if ordering.backwards and not ordering.follow_worst:
        return shown[::-1]
    # Ranks that the others wait for in a hang come first, so that a small window shows them.
    return shown if worst_first else sorted(shown, key=lambda row: not row.waited_for)


def _has(row: Row, words: Sequence[str]) -> bool:
    number = str(row.state.rank)
    text = f"{row.state.host} {row.condition} {badge(row).text} {row.finding.rule if row.finding else ''}".casefold()
    return all(word.removeprefix("r") == number if _RANK.fullmatch(word) else word in text for word in words)
