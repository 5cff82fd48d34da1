"""The watched log files: what they say together, and their last lines with those marked that say something."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from ddpwatch.core.units import count, plural
from ddpwatch.view.cells import Cell, Level, columns_of, fit, pad
from ddpwatch.view.layout import heading, paragraph, wrap

if TYPE_CHECKING:
    from collections.abc import Collection

    from ddpwatch.core.logs.log_state import LogEntry
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

MARKED_PART: Final = 3
"""Recognised lines take one part in so many of the room, where there are that many."""
MAX_NAME_COLUMNS: Final = 24
HEAD_CHARS: Final = 8
HOW: Final = (
    "No log is watched. Start with --log 'logs/**/*.log' (torchrun --log-dir logs --redirects 3 writes such files): "
    "what torch, NCCL, gloo, the launcher and the kernel say about a failure is then recognised, and who began it is "
    "named."
)
_LEVELS: Final = {"error": ("✖", Level.BAD), "warning": ("▲", Level.WARN), "info": ("·", Level.DIM)}


def log_lines(run_view: RunView, columns: int, rows: int) -> list[Line]:
    """As much as there is room for, the latest at the bottom."""
    book = run_view.logs
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
    names = _names({entry.source for entry in (*book.marked, *book.entries)})
    room = max(0, rows - len(lines))
    marked = book.marked[-max(1, room // MARKED_PART) :] if room > MARKED_PART else ()
    if marked:
        lines += [heading("what says something", columns), *(_line(entry, names, columns) for entry in marked)]
    last = max(0, rows - len(lines) - 1)
    if last:
        lines += [heading("last lines", columns), *(_line(entry, names, columns) for entry in book.entries[-last:])]
    return lines[:rows]


def _names(sources: Collection[str]) -> dict[str, str]:
    """By file, as much of the end of its path as tells it from the others, all equally wide."""
    names: dict[str, str] = {}
    parts = 1
    left = list(sources)
    while left:
        tails = {source: "/".join(PurePath(source).parts[-parts:]) for source in left}
        often = Counter(tails.values())
        whole = {source for source in left if len(PurePath(source).parts) <= parts}
        names |= {source: tails[source] for source in left if often[tails[source]] == 1 or source in whole}
        left = [source for source in left if source not in names]
        parts += 1
    columns = min(max(map(columns_of, names.values()), default=0), MAX_NAME_COLUMNS)
    return {source: pad(_shortened(name, columns), columns) for source, name in names.items()}


def _shortened(name: str, columns: int) -> str:
    """Without its middle, if it is too wide: the folder that tells it apart comes first, and the file last."""
    if columns_of(name) <= columns:
        return name
    first, rest = name[:HEAD_CHARS], name[HEAD_CHARS:]
    while rest and columns_of(f"{first}…{rest}") > columns:
        rest = rest[1:]
    return f"{first}…{rest}"


def _line(entry: LogEntry, names: dict[str, str], columns: int) -> Line:
    mark, level = _LEVELS[entry.mark.severity] if entry.mark is not None else (" ", Level.PLAIN)
    name = names[entry.source]
    where = name if columns > 3 * columns_of(name) else ""
    number = "" if entry.number is None else str(entry.number)
    return fit([Cell(f"{mark} ", level), Cell(f"{where} {number:>6} ", Level.DIM), Cell(entry.text, level)], columns)
