"""Text layout in terminal columns: wrapping, headings, blocks side by side, bars, and cutting to a number of rows."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from ddpwatch.core.units import plural, size
from ddpwatch.view.cells import Cell, Level, clip, columns_of, fit, line_columns, pad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.view.cells import Line

MIN_TEXT_COLUMNS: Final = 16
"""Min. width of text beside its label, in columns; narrower text goes below the label."""
FACT_COLUMNS: Final = 13
"""Width of the name before a fact, in terminal cells."""
UNITS: Final = frozenset({"%", "ms", "s", "µs"})
"""Units that no line begins with: a number and its unit stay together."""
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
HOUR_S: Final = 3600.0
MINUTE_S: Final = 60.0


def wrap(text: str, columns: int) -> list[str]:
    """Wrap the text by terminal columns (`textwrap` counts characters), and split only words that are too long."""
    columns = max(columns, 2)
    lines: list[str] = []
    for word in _words(text):
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and columns_of(joined) <= columns:
            lines[-1] = joined
        else:
            lines += _pieces(word, columns)
    return lines or [""]


def paragraph(text: str, columns: int, level: Level = Level.PLAIN, *, lead: Sequence[Cell] = ()) -> list[Line]:
    """Wrap the text after `lead` with a hanging indent, or below `lead` if there is little room beside it."""
    first = list(lead)
    indent = line_columns(first)
    if indent and columns - indent < MIN_TEXT_COLUMNS:
        return [fit(first, columns), *([Cell("  "), Cell(line, level)] for line in wrap(text, columns - 2))]
    shown = wrap(text, columns - indent)
    blank = [Cell(" " * indent)] if indent else []
    return [[*(blank if place else first), Cell(line, level)] for place, line in enumerate(shown)]


def facts(pairs: Sequence[tuple[str, str]], columns: int, level: Level = Level.PLAIN) -> list[Line]:
    """Lay out names and their texts in two columns; names should be short."""
    lines: list[Line] = []
    for name, text in pairs:
        lines += paragraph(text, columns, level, lead=[Cell(pad(name, FACT_COLUMNS), Level.DIM)])
    return lines


def heading(title: str, columns: int, note: str = "") -> Line:
    """Title on a horizontal rule, with a note where it fits."""
    line = [Cell("── ", Level.DIM), Cell(clip(title, max(columns - 4, 1)), Level.TITLE)]
    if note and line_columns(line) + columns_of(note) + 4 <= columns:
        line.append(Cell(f" · {note}", Level.DIM))
    return fit([*line, Cell(" " + "─" * max(columns - line_columns(line) - 1, 0), Level.DIM)], columns)


def capped(lines: list[Line], rows: int) -> list[Line]:
    """Cut to `rows` lines: without blank ones first, then without the last ones, whose number is shown."""
    if len(lines) <= rows:
        return lines
    lines = [line for line in lines if line]
    if len(lines) <= rows:
        return lines
    kept = max(rows - 1, 0)
    return [*lines[:kept], [Cell(f"… {plural(len(lines) - kept, 'more line')}", Level.DIM)]][: max(rows, 0)]


def beside(left: Sequence[Line], right: Sequence[Line], left_columns: int, gap: int = 3) -> list[Line]:
    """Set two blocks side by side. The left one must not be wider than `left_columns`."""
    empty: Line = []
    return [
        [*one, Cell(" " * (left_columns + gap - line_columns(one))), *other] if other else list(one)
        for one, other in zip_longest(left, right, fillvalue=empty)
    ]


def bar(share: float, columns: int) -> str:
    """Bar of exactly `columns`, filled to `share` of them in steps of an eighth."""
    whole, eighths = divmod(round(min(max(share, 0.0), 1.0) * columns * 8), 8)
    return ("█" * whole + (_EIGHTHS[eighths] if eighths else "")).ljust(columns)


def _words(text: str) -> list[str]:
    """Split into words, with each number and its unit as one."""
    words: list[str] = []
    for word in text.split():
        if words and word.rstrip(".,:;") in UNITS and words[-1][-1].isdigit():
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


def _pieces(word: str, columns: int) -> list[str]:
    pieces = [""]
    for char in word:
        if columns_of(pieces[-1] + char) > columns:
            pieces.append("")
        pieces[-1] += char
    return pieces


def spelled_size(count_bytes: float) -> str:
    """Bytes with a spelled binary unit: 812 MiB, 1.4 GiB."""
    text = size(count_bytes)
    return f"{text[:-1]} {text[-1].removesuffix('B')}{'' if text[-1] == 'B' else 'i'}B"


def machine_time(seconds: float, what: str) -> str:
    """Machine time such as `2.3 GPU-hours`; short times in minutes or seconds."""
    if seconds >= 0.1 * HOUR_S:
        return f"{seconds / HOUR_S:,.1f} {what}-hours"
    if seconds >= MINUTE_S:
        return f"{seconds / MINUTE_S:.1f} {what}-minutes"
    return f"{seconds:.1f} {what}-seconds"
