"""The screen while no run is followed: waiting for one, or choosing between several."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Final

from textual.binding import Binding, BindingType
from textual.geometry import clamp
from textual.message import Message

from ddpwatch import rundir
from ddpwatch.sources.find_run import skipped_places
from ddpwatch.tui.widgets import Plain
from ddpwatch.view.cells import Cell, Level, pad
from ddpwatch.view.layout import wrap
from ddpwatch.view.run_picker import picker_lines, row_of, waiting_lines

if TYPE_CHECKING:
    from ddpwatch.rundir import RunFile
    from ddpwatch.view.cells import Line

LOBBY: Final = "lobby"
"""Name of the screen while no run is followed."""


class RunPicker(Plain):
    """A list of runs to choose from; while there is none, how to start one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("enter", "choose", "attach", show=False),
    ]

    class Chosen(Message):
        """A run was chosen."""

        def __init__(self, run: RunFile) -> None:
            super().__init__()
            self.run = run

    def __init__(self, attaching: str = "") -> None:
        super().__init__(self._draw_picker, focus=True, id=LOBBY)
        self.runs: list[RunFile] = []
        self.search_error = ""
        self.attaching = attaching
        """Text while a run is being attached to; empty = none is."""
        self.back = ""
        """Name of the run to go back to; empty = none."""
        self._selected = ""
        """Id of the selected run, which stays selected when the list changes."""
        self._since_s = time.monotonic()

    def begin(self, run_id: str) -> None:
        """Begin a new choice, with this run selected."""
        self._selected = run_id
        self._since_s = time.monotonic()

    def show(self, runs: list[RunFile], search_error: str, attaching: str, back: str) -> None:
        """Draw the choice with the run to go `back` to, or the run being attached to."""
        self.runs, self.search_error, self.attaching, self.back = runs, search_error, attaching, back
        self.repaint()

    def action_move(self, by: int) -> None:
        """Select another run."""
        if self.runs:
            self._selected = self.runs[clamp(self._place() + by, 0, len(self.runs) - 1)].id
            self.repaint()

    def action_choose(self) -> None:
        """Attach to the selected run."""
        if self.runs:
            self.post_message(self.Chosen(self.runs[self._place()]))

    def _place(self) -> int:
        return next((place for place, run in enumerate(self.runs) if run.id == self._selected), 0)

    def _draw_picker(self, columns: int, rows: int) -> list[Line]:
        if self.attaching:
            centered = " " * ((columns - len(self.attaching)) // 2) + self.attaching
            return [*([] for _ in range(rows // 3)), [Cell(pad(centered, columns))]]
        if self.runs:
            now_s = time.time()
            runs = [row_of(run, now_s) for run in self.runs]
            return picker_lines(runs, columns, rows, selected=self._place(), back=self.back)
        warnings = [self.search_error] if self.search_error else skipped_places()
        error = [[Cell(text, Level.WARN)] for warning in warnings for text in wrap(warning, columns)]
        waited_s = time.monotonic() - self._since_s
        places = list(map(str, rundir.places()))
        return [*error, *waiting_lines(columns, rows - len(error), places=places, seconds=waited_s)]
