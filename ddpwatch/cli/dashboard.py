"""Run the dashboard on this terminal, and leave it as it was."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Final

from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from ddpwatch.tui.feed import Feed

THEME: Final = "DDPWATCH_THEME"
_FEW: Final = frozenset({None, "standard", "windows"})
"""Kinds of terminals on which other colours than their own sixteen would become some of those by chance."""
SWITCH_S: Final = 0.001
"""So long one thread waits for Python's lock while another works. What draws waits often, and a person with it."""
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


def open_dashboard(feed: Feed, *, theme: str | None = None) -> None:
    """Show the feed until the person leaves. Refuses to draw where nobody can look."""
    from ddpwatch.tui.app import Dashboard
    from ddpwatch.tui.memory import keep_small
    from ddpwatch.tui.replayfeed import ReplayFeed
    from ddpwatch.tui.replaying import ReplayDashboard
    from ddpwatch.tui.themes import DEFAULT, SIXTEEN

    keep_small()
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
