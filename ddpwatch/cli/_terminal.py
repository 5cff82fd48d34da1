"""Cells as text for a terminal, coloured where that is wanted.

Run the dashboard on this terminal, and leave it as it was.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final

import click

from ddpwatch.errors import UsageError
from ddpwatch.view.cells import Level, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.tui.feed import Feed
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


THEME: Final = "DDPWATCH_THEME"
_FEW: Final = frozenset({None, "standard", "windows"})
"""Kinds of terminals on which other colours than their own sixteen would become some of those by chance."""
SWITCH_S: Final = 0.001
"""So long one thread waits for Python's lock while another works. What draws waits often, and a person with it."""
_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3
_MMAP_BYTES: Final = 1 << 20
"""Allocations of at least this many bytes are mapped one by one, and unmapped as soon as they are freed."""
_DUMB: Final = frozenset({"", "dumb", "unknown"})


def has_terminal() -> bool:
    """Whether a person is there to look and to press keys, on a terminal that can be drawn on."""
    return not refusal()


def refusal() -> str:
    """Why the dashboard cannot be drawn here, in words; empty = it can.

    A terminal that calls itself dumb, or nothing at all, would show control sequences as text.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return "the dashboard needs a terminal"
    kind = os.environ.get("TERM", "")
    if kind in _DUMB:
        return f"the dashboard cannot draw on this terminal ({f'TERM={kind}' if kind else 'TERM is not set'})"
    return ""


def check_theme(wanted: str) -> None:
    """Refuse one that is not there."""
    from ddpwatch.tui.themes import theme_names

    if wanted not in theme_names():
        raise UsageError(f"no theme {wanted!r}; there are: {', '.join(theme_names())}")


def _limit_malloc() -> None:
    """Keep glibc from retaining freed tables; does nothing with another C library. Call before threads are started.

    Tables of all ranks come and go with every repaint. By default glibc raises its mmap threshold and gives each thread
    an arena, and a dashboard of 1024 ranks is 10 to 13 MiB larger.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        library.mallopt(_M_ARENA_MAX, 1)


def open_dashboard(feed: Feed, *, theme: str | None = None) -> None:
    """Show the feed until the person leaves. Refuses to draw where nobody can look."""
    from ddpwatch.tui.app import Dashboard
    from ddpwatch.tui.replay_app import ReplayDashboard
    from ddpwatch.tui.replay_feed import ReplayFeed
    from ddpwatch.tui.themes import DEFAULT, SIXTEEN

    _limit_malloc()
    sys.setswitchinterval(SWITCH_S)

    with closing(feed):
        if why := refusal():
            raise UsageError(f"{why}; `ddpwatch status` and `ddpwatch watch` work without")
        app = ReplayDashboard(feed) if isinstance(feed, ReplayFeed) else Dashboard(feed)
        wanted = theme or os.environ.get(THEME) or (SIXTEEN if app.console.color_system in _FEW else DEFAULT)
        check_theme(wanted)
        app.theme = wanted
        app.run()
        if app.return_code:
            raise SystemExit(app.return_code)
