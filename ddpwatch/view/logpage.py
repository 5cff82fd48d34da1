"""The watched log files: what they say together, and their last lines with those marked that say something."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from ddpwatch.core.numbers import count, plural
from ddpwatch.view.cells import Cell, Level, columns_of, fit, pad
from ddpwatch.view.prose import heading, paragraph, wrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.logs.book import LogEntry
    from ddpwatch.view.cells import Line
    from ddpwatch.view.picture import Picture

MARKED_PART: Final = 3
"""Recognised lines take one part in so many of the room, where there are that many."""
MOST_NAME_COLUMNS: Final = 24
HOW: Final = (
    "No log is watched. Start with --log 'logs/**/*.log' (torchrun --log-dir logs --redirects 3 writes such files): "
    "what torch, NCCL, gloo, the launcher and the kernel say about a failure is then recognised, and who began it is "
    "named."
)
_LEVELS: Final = {"error": ("✖", Level.BAD), "warning": ("▲", Level.WARN), "info": ("·", Level.DIM)}


def log_lines(picture: Picture, columns: int, rows: int) -> list[Line]:
    """As much as there is room for, the latest at the bottom."""
    book = picture.logs
    if not book.watched:
        return [[Cell(text, Level.DIM)] for text in wrap(HOW, columns)]
    lines: list[Line] = [
        fit([Cell(f"{plural(book.lines, 'line')} of {plural(book.files, 'file')} read"), Cell(
            f" · {count(len(book.marked))} of them say something", Level.DIM)], columns)
    ]  # fmt: skip
    lines += [fit([Cell(f"▲ {trouble}", Level.WARN)], columns) for trouble in book.troubles[:2]]
    if book.verdict is not None:
        certain = "" if book.verdict.certain else "most likely: "
        lines += paragraph(certain + book.verdict.text, columns, Level.STRONG, lead=[Cell("✖ ", Level.BAD)])
    names = _name_columns([*book.marked, *book.entries])
    room = max(0, rows - len(lines))
    marked = book.marked[-max(1, room // MARKED_PART) :] if room > MARKED_PART else ()
    if marked:
        lines += [heading("what says something", columns), *(_line(entry, names, columns) for entry in marked)]
    last = max(0, rows - len(lines) - 1)
    if last:
        lines += [heading("last lines", columns), *(_line(entry, names, columns) for entry in book.entries[-last:])]
    return lines[:rows]


def _name_columns(entries: Sequence[LogEntry]) -> int:
    names = {_name(entry) for entry in entries}
    return min(max((columns_of(name) for name in names), default=0), MOST_NAME_COLUMNS)


def _name(entry: LogEntry) -> str:
    return PurePath(entry.source).name


def _line(entry: LogEntry, name_columns: int, columns: int) -> Line:
    mark, level = _LEVELS[entry.mark.severity] if entry.mark is not None else (" ", Level.PLAIN)
    where = pad(_name(entry), name_columns) if columns > 3 * name_columns else ""
    return fit(
        [Cell(f"{mark} ", level), Cell(f"{where} {entry.number:>6} ", Level.DIM), Cell(entry.text, level)], columns
    )
