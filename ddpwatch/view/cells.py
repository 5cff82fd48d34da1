"""Text with a meaning: what every front end draws, each in its own colours."""

from __future__ import annotations

import unicodedata
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, TypeAlias


class Level(Enum):
    """What a piece of text means. A front end may colour it, but the text must say it without."""

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
    """A key that can be pressed."""
    TITLE = "title"
    HEAT_1 = "heat-1"
    """How far above the others: from a little …"""
    HEAT_2 = "heat-2"
    HEAT_3 = "heat-3"
    HEAT_4 = "heat-4"
    """… to a lot."""


class Cell(NamedTuple):
    """A piece of a line."""

    text: str
    level: Level = Level.PLAIN
    action: str = ""
    """What a click on it does, where there is a mouse; a front end without one leaves it out."""


Line: TypeAlias = list[Cell]


def columns_of(text: str) -> int:
    """How many terminal columns the text takes: wide characters two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(map(_char_columns, text))


def clip(text: str, columns: int) -> str:
    """The text cut to at most so many columns; a cut shows as an ellipsis."""
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
    """The text clipped or filled up to exactly so many columns; `right` = aligned to the right."""
    clipped = clip(text, columns)
    space = " " * (columns - columns_of(clipped))
    return space + clipped if right else clipped + space


def fit(line: Line, columns: int) -> Line:
    """The line cut to at most so many columns."""
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
    """How many terminal columns the line takes."""
    return sum(columns_of(cell.text) for cell in line)


def plain(line: Line) -> str:
    """The line without its levels."""
    return "".join(cell.text for cell in line).rstrip()


@lru_cache(maxsize=4096)
def _char_columns(char: str) -> int:
    if unicodedata.category(char) in {"Mn", "Me"}:
        return 0
    return 2 if unicodedata.east_asian_width(char) in {"W", "F"} else 1
