"""Cells as text for a terminal, coloured where that is wanted."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from ddpwatch.view.cells import Level, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.view.cells import Cell, Line

# Told apart by brightness as well as by hue, for eyes that see fewer hues.
STYLES: Final[dict[Level, dict[str, Any]]] = {
    Level.PLAIN: {},
    Level.DIM: {"dim": True},
    Level.STRONG: {"bold": True},
    Level.OK: {"fg": "green"},
    Level.WARN: {"fg": "yellow", "bold": True},
    Level.BAD: {"fg": "red", "bold": True},
    Level.DATA: {"fg": "magenta"},
    Level.FORWARD: {"fg": "cyan"},
    Level.BACKWARD: {"fg": "blue"},
    Level.WAITING: {"fg": "yellow"},
    Level.WIRE: {"fg": "bright_yellow"},
    Level.OPTIMIZER: {"fg": "green"},
    Level.OTHER: {"dim": True},
    Level.KEY: {"bold": True},
    Level.TITLE: {"bold": True},
    Level.HEAT_1: {"dim": True},
    Level.HEAT_2: {"fg": "yellow"},
    Level.HEAT_3: {"fg": "bright_yellow"},
    Level.HEAT_4: {"fg": "red"},
}
_HOME: Final = "\x1b[H"
_CLEAR_LINE: Final = "\x1b[K"
_CLEAR_BELOW: Final = "\x1b[J"
_WIDTH_WITHOUT_TERMINAL: Final = 120


def is_terminal() -> bool:
    """Whether a person is looking."""
    return sys.stdout.isatty()


def terminal_size() -> tuple[int, int | None]:
    """Columns and rows to fill; without a terminal there is no limit to the rows."""
    size = shutil.get_terminal_size(fallback=(_WIDTH_WITHOUT_TERMINAL, 24))
    return size.columns, size.lines if is_terminal() else None


def show(lines: Sequence[Line]) -> None:
    """Print the lines."""
    click.echo("".join(f"{text}\n" for text in _texts(lines)), nl=False, color=_coloured())


def redraw(lines: Sequence[Line], *, first: bool) -> None:
    """Draw over what was drawn before, in one write and without clearing first, so that nothing flickers."""
    start = "\x1b[2J" if first else ""
    body = "".join(f"{text}{_CLEAR_LINE}\n" for text in _texts(lines))
    click.echo(f"{start}{_HOME}{body}{_CLEAR_BELOW}", nl=False, color=True)


def _texts(lines: Sequence[Line]) -> list[str]:
    if not _coloured():
        return [plain(line) for line in lines]
    return ["".join(_styled(cell) for cell in line) for line in lines]


def _styled(cell: Cell) -> str:
    style = STYLES[cell.level]
    return click.style(cell.text, **style) if style else cell.text


def _coloured() -> bool:
    return is_terminal() and not os.environ.get("NO_COLOR")
