"""Write the pictures in this folder from real runs. `make screenshots`."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ddpwatch.cli.looking import moments
from ddpwatch.cli.paint import STYLES
from ddpwatch.cli.training import training
from ddpwatch.core.figures import measure
from ddpwatch.view.screen import status_screen

if TYPE_CHECKING:
    from ddpwatch.view.cells import Line

HERE = Path(__file__).parent
STEPS_WANTED = 60
SIZES = ((80, 24), (120, 40))


def status() -> None:
    """`ddpwatch status` of four CPU ranks, one of them slow in backward."""
    with training(ranks=4, slow_rank=2, seconds=300) as run:
        for watch in moments(run, timeout_s=5.0, every_s=1.0):
            figures = measure(watch.state)
            if figures is not None and watch.state.step is not None and watch.state.step > STEPS_WANTED:
                break
        for columns, rows in SIZES:
            _save(f"status-{columns}x{rows}", columns, status_screen(watch, figures, columns, rows - 1))


def _save(name: str, columns: int, lines: list[Line]) -> None:
    console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        text = Text()
        for cell in line:
            text.append(cell.text, _rich_style(STYLES[cell.level]))
        console.print(text, no_wrap=True, overflow="crop")
    svg = console.export_svg(title="ddpwatch status", unique_id=name)
    # No font from the network: a picture in a README must not call anybody.
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    (HERE / f"{name}.svg").write_text(svg.replace("Fira Code", "DejaVu Sans Mono"))


def _rich_style(style: dict[str, Any]) -> str:
    words = [word for word in ("bold", "dim") if style.get(word)]
    return " ".join([*words, *([style["fg"]] if "fg" in style else [])])


if __name__ == "__main__":
    status()
