"""Lines of cells: text with levels of meaning, which each front end draws in its own colors."""

from __future__ import annotations

import unicodedata
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, TypeAlias


class Level(Enum):
    """Meaning of a piece of text. Front ends may color it, but the text must be clear without color."""

    PLAIN = "plain"
    DIM = "dim"
    STRONG = "strong"
    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    WAITING = "waiting"
    WIRE = "wire"
    OPTIMIZER = "optimizer"
    OTHER = "other"
    KEY = "key"
    """Key on the keyboard."""
    TITLE = "title"
    HEAT_1 = "heat-1"
    """Lowest of the four levels of a heatmap."""
    HEAT_2 = "heat-2"
    HEAT_3 = "heat-3"
    HEAT_4 = "heat-4"


class Cell(NamedTuple):
    """Piece of a line with one level."""

    text: str
    level: Level = Level.PLAIN
    action: str = ""
    """Action of the front end for a mouse click on it; empty = none."""


Line: TypeAlias = list[Cell]


def columns_of(text: str) -> int:
    """Width of a text in terminal columns: two for wide characters, none for combining marks."""
    if text.isascii():
        return len(text)
    return sum(map(_char_columns, text))


def clip(text: str, columns: int) -> str:
    """Cut the text to at most `columns`, with an ellipsis."""
    if columns_of(text) <= columns:
        return text
    kept, used = "", 0
    for char in text:
        used += _char_columns(char)
        if used > columns - 1:
            break
        kept += char
    return (kept + "…") if columns > 0 else ""


def pad(text: str, columns: int, *, right: bool = False) -> str:
    """Clip or fill the text to exactly `columns`; `right` = aligned to the right."""
    clipped = clip(text, columns)
    space = " " * (columns - columns_of(clipped))
    return space + clipped if right else clipped + space


def fit(line: Line, columns: int) -> Line:
    """Cut the line to at most `columns`."""
    fitted: Line = []
    left = columns
    for cell in line:
        cell_columns = columns_of(cell.text)
        if cell_columns > left:
            if left > 0:
                fitted.append(cell._replace(text=clip(cell.text, left)))
            break
        fitted.append(cell)
        left -= cell_columns
    return fitted


def line_columns(line: Line) -> int:
    """Width of a line in terminal columns."""
    return sum(columns_of(cell.text) for cell in line)


def plain(line: Line) -> str:
    """Text of a line, without levels and trailing blanks."""
    return "".join(cell.text for cell in line).rstrip()


@lru_cache(maxsize=4096)
def _char_columns(char: str) -> int:
    if unicodedata.category(char) in {"Mn", "Me"}:
        return 0
    return 2 if unicodedata.east_asian_width(char) in {"W", "F"} else 1
