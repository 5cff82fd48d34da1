"""The help screen: every key and every number, in a sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from ddpwatch.tui.keys import all_keys
from ddpwatch.tui.widgets import Plain
from ddpwatch.view.help import help_lines

if TYPE_CHECKING:
    from textual.app import ComposeResult


class Help(ModalScreen[None]):
    """A page over the screen until a key closes it; `replayed` = with the keys of a replay."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,h,q,enter", "close", "close", show=False),
    ]

    def __init__(self, *, replayed: bool = False) -> None:
        super().__init__()
        self._replayed = replayed

    def compose(self) -> ComposeResult:
        """One page that scrolls."""
        keys = all_keys(replayed=self._replayed)
        page = Plain(lambda columns, _rows: help_lines(keys, columns), title="help", focus=True)
        page.border_subtitle = "esc closes · ↑ ↓ scroll"
        yield page

    def on_mount(self) -> None:
        """Focus the page."""
        self.query_one(Plain).focus()

    def action_close(self) -> None:
        """Close the page."""
        self.dismiss()
