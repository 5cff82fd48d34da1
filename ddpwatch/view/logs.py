"""Log screen: diagnosis of the watched log files, their recognized lines, and their last lines."""

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
"""Recognized lines take at most one row in this many."""
MAX_NAME_COLUMNS: Final = 24
"""Max. width of a log's name, in terminal cells."""
HEAD_CHARS: Final = 8
"""Characters kept at the start of a name that is cut."""
HOW: Final = (
    "No log is watched. Start with --log 'logs/**/*.log' (torchrun --log-dir logs --redirects 3 writes such files): "
    "failures that torch, NCCL, gloo, the launcher and the kernel report are then recognized, and the root cause "
    "is named."
)
_LEVELS: Final = {"error": ("✖", Level.BAD), "warning": ("▲", Level.WARN), "info": ("·", Level.DIM)}


def log_lines(run_view: RunView, columns: int, rows: int) -> list[Line]:
    """Log screen of at most `rows` lines, with the latest at the bottom."""
    logs = run_view.logs
    if not logs.watched:
        return [[Cell(text, Level.DIM)] for text in wrap(HOW, columns)]
    read = Cell(f"{plural(logs.lines, 'line')} of {plural(logs.files, 'file')} read")
    lines = [fit([read, Cell(f" · {count(len(logs.marked))} recognized", Level.DIM)], columns)]
    lines += [fit([Cell(f"▲ {notice}", Level.WARN)], columns) for notice in logs.notices[:2]]
    if logs.verdict is not None:
        certain = "" if logs.verdict.certain else "most likely: "
        lines += paragraph(certain + logs.verdict.text, columns, Level.STRONG, lead=[Cell("✖ ", Level.BAD)])
    names = _names({entry.source for entry in (*logs.marked, *logs.entries)})
    room = rows - len(lines)
    if room > MARKED_PART and (marked := logs.marked[-(room // MARKED_PART) :]):
        lines += [heading("recognized lines", columns), *(_line(entry, names, columns) for entry in marked)]
    if (last := rows - len(lines) - 1) > 0:
        lines += [heading("last lines", columns), *(_line(entry, names, columns) for entry in logs.entries[-last:])]
    return lines[:rows]


def _names(sources: Collection[str]) -> dict[str, str]:
    """Shortest ends of the paths that differ from each other, padded to one width."""
    names: dict[str, str] = {}
    parts = 1
    left = list(sources)
    while left:
        tails = {source: "/".join(PurePath(source).parts[-parts:]) for source in left}
        uses = Counter(tails.values())
        whole = {source for source in left if len(PurePath(source).parts) <= parts}
        names |= {source: tails[source] for source in left if uses[tails[source]] == 1 or source in whole}
        left = [source for source in left if source not in names]
        parts += 1
    columns = min(max(map(columns_of, names.values()), default=0), MAX_NAME_COLUMNS)
    return {source: pad(_shortened(name, columns), columns) for source, name in names.items()}


def _shortened(name: str, columns: int) -> str:
    """Cut the middle out of a name that is too wide: its first folder distinguishes it, and the file comes last."""
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
