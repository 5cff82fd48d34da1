"""The command palette, and what leaves the dashboard: a copied alert, and the screen as an SVG file."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final

from textual.app import SystemCommand

from ddpwatch.tui.keys import TABS
from ddpwatch.tui.screens import local_zone
from ddpwatch.view.alerts.page import alert_text
from ddpwatch.view.alerts.panel import stuck_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from textual.app import App

    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.tui.app import Dashboard

FONT: Final = "DejaVu Sans Mono, Menlo, Consolas"


def screen_svg(app: App[None], title: str) -> str:
    """The screen as SVG."""
    return clean_svg(app.export_screenshot(title=title))


def clean_svg(svg: str) -> str:
    """Remove the fonts that the SVG would load from the network."""
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code", FONT)


KEPT: Final = frozenset({"Theme", "Quit"})
"""Commands of Textual that are offered too."""


def commands(app: Dashboard, offered: Iterable[SystemCommand]) -> Iterator[SystemCommand]:
    """Commands of the dashboard, and some of Textual."""
    for name, title in TABS:
        yield SystemCommand(f"Go to {title}", f"Show the {title} screen", lambda name=name: app.action_show(name))
    yield SystemCommand("Pause", "Pause the screen while the run continues", app.action_pause)
    yield SystemCommand("Live", "Return to the live view", app.action_live)
    if app.run_view is not None and stuck_rank(app.run_view) is not None:
        yield SystemCommand("Stuck rank", "Open the page of the rank that the others wait for", app.action_open_stuck)
    if app.feed.choosable:
        yield SystemCommand("Runs", "Choose another run", app.action_runs)
    yield SystemCommand("Export", "Save this screen as an SVG file", app.action_export)
    yield SystemCommand("Help", "Explain the figures on the screen", app.action_help)
    yield from (command for command in offered if command.title in KEPT)


def copy_alert(app: Dashboard, alert: Alert | None) -> None:
    """Copy an alert to the clipboard as text."""
    if alert is None:
        return
    app.copy_to_clipboard(alert_text(alert, zone=local_zone()))
    app.notify("Alert copied, if the terminal allows clipboard access.", markup=False)


def export_screen(app: Dashboard, folder: Path | None) -> None:
    """Write the screen into a folder, by default the current one, and notify the user."""
    # A notification would be in the file.
    app.clear_notifications()
    app.call_after_refresh(_export, app, folder)


def _export(app: Dashboard, folder: Path | None) -> None:
    moment = datetime.now(tz=timezone.utc).astimezone()
    try:
        path = (folder or Path.cwd()) / f"ddpwatch-{moment:%Y%m%d-%H%M%S-%f}.svg"
        # Never over an existing file.
        with path.open("x", encoding="utf-8") as file:
            file.write(screen_svg(app, "ddpwatch"))
    except OSError as error:
        where = "the current directory" if folder is None else folder
        app.notify(f"Cannot write to {where}: {error.strerror}", severity="error", markup=False)
    else:
        app.notify(f"Saved as {path.name}", markup=False)
