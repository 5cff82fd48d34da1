"""A screen as a picture that shows the same everywhere and calls nobody."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from textual.app import App

FONT: Final = "DejaVu Sans Mono, Menlo, Consolas"


def screen_svg(app: App[None], title: str) -> str:
    """What the app shows, as SVG."""
    return clean_svg(app.export_screenshot(title=title))


def clean_svg(svg: str) -> str:
    """The same without fonts from the network: a picture must not call anybody."""
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code", FONT)


def save_svg(app: App[None], title: str, folder: Path) -> Path:
    """Write it under a name of its own; never over something that is there."""
    moment = datetime.now(tz=timezone.utc).astimezone()
    path = folder / f"ddpwatch-{moment:%Y%m%d-%H%M%S-%f}.svg"
    with path.open("x", encoding="utf-8") as file:
        file.write(screen_svg(app, title))
    return path
