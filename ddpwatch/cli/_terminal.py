"""Terminal output of the commands: styled lines, messages on stderr, and the start of the dashboard."""

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

# Levels differ in brightness as well as in hue, for color-blind readers.
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
_CLEAR_SCREEN: Final = "\x1b[2J"
_CLEAR_LINE: Final = "\x1b[K"
_CLEAR_BELOW: Final = "\x1b[J"
_WIDTH_WITHOUT_TERMINAL: Final = 120
"""Width of the text, in terminal cells, where stdout is not a terminal."""
_MAX_MESSAGE_CHARS: Final = 1000
"""Max. length of a message on stderr, in characters."""
THEME: Final = "DDPWATCH_THEME"
_LIMITED_COLORS: Final = frozenset({None, "standard", "windows"})
"""rich's color systems of at most 16 colors, to which a theme's colors would be mapped by chance."""
_DUMB: Final = frozenset({"", "dumb", "unknown"})
"""Values of TERM for which control sequences would appear as text."""
SWITCH_S: Final = 0.001
"""Interval, in seconds, at which a thread gives up the GIL. The drawing thread often waits for it, and the user too."""
# Parameters of glibc's mallopt, as in malloc.h.
_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3
_MMAP_BYTES: Final = 1 << 20
"""Allocations of at least this size, in bytes, are mapped separately, and unmapped as soon as they are freed."""


def terminal_size() -> tuple[int, int | None]:
    """Columns and rows to fill; rows are None (no bound) without a terminal."""
    size = shutil.get_terminal_size(fallback=(_WIDTH_WITHOUT_TERMINAL, 24))
    return size.columns, size.lines if sys.stdout.isatty() else None


def show(lines: Sequence[Line]) -> None:
    """Print the lines, with colors on a terminal."""
    click.echo("".join(f"{text}\n" for text in _texts(lines)), nl=False, color=_colored())


def redraw(lines: Sequence[Line], *, first: bool) -> None:
    """Draw over the lines drawn before, in one write and without clearing the screen, which would flicker."""
    start = _CLEAR_SCREEN if first else ""
    body = "".join(f"{text}{_CLEAR_LINE}\n" for text in _texts(lines))
    click.echo(f"{start}{_HOME}{body}{_CLEAR_BELOW}", nl=False, color=True)


def say(text: str) -> None:
    """Print a line on stderr, sanitized: names of runs and hosts may be in it."""
    from ddpwatch.core.state.sanitize import sanitize

    # stderr may be closed, and sinks and recorders call this from threads of their own.
    with suppress(OSError):
        click.echo(sanitize(text, _MAX_MESSAGE_CHARS), err=True)


def _texts(lines: Sequence[Line]) -> list[str]:
    if not _colored():
        return [plain(line) for line in lines]
    return ["".join(_styled(cell) for cell in line) for line in lines]


def _styled(cell: Cell) -> str:
    style = STYLES[cell.level]
    return click.style(cell.text, **style) if style else cell.text


def _colored() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def refusal() -> str:
    """Why the dashboard cannot be drawn here, as text for the user; empty = it can."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return "the dashboard needs a terminal"
    kind = os.environ.get("TERM", "")
    if kind in _DUMB:
        return f"the dashboard cannot draw on this terminal ({f'TERM={kind}' if kind else 'TERM is not set'})"
    return ""


def check_theme(name: str) -> None:
    """Refuse an unknown theme."""
    from ddpwatch.tui.themes import theme_names

    if name not in theme_names():
        raise UsageError(f"unknown theme {name!r}; choose from: {', '.join(theme_names())}")


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
    """Run the dashboard until the user quits, and close the feed. Refuses a terminal that it cannot draw on."""
    from ddpwatch.tui.app import Dashboard
    from ddpwatch.tui.replay_app import ReplayDashboard
    from ddpwatch.tui.replay_feed import ReplayFeed
    from ddpwatch.tui.themes import DEFAULT, SIXTEEN

    _limit_malloc()
    sys.setswitchinterval(SWITCH_S)
    with closing(feed):
        if why := refusal():
            raise UsageError(f"{why}; use `ddpwatch status` or `ddpwatch watch` instead")
        app = ReplayDashboard(feed) if isinstance(feed, ReplayFeed) else Dashboard(feed)
        default = SIXTEEN if app.console.color_system in _LIMITED_COLORS else DEFAULT
        chosen = theme or os.environ.get(THEME) or default
        check_theme(chosen)
        app.theme = chosen
        app.run()
        if app.return_code:
            raise SystemExit(app.return_code)
