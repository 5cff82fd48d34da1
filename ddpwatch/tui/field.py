"""A field to type in, in the last line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.widgets import Input

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual import events

OPEN: Final = "open"


class Field(Input):
    """Closed until it is asked for. What is typed goes in at once, key by key, and so does what ends it: keys that come
    in one burst with those that open or end it must neither get lost nor be taken for commands.
    """

    def __init__(self, submitted: Callable[[str], None], *, asks: str, name: str) -> None:
        """Call `submitted` with the text when Enter is pressed; the empty field says what it `asks` for."""
        super().__init__(placeholder=asks, id=name)
        self._submitted = submitted

    @property
    def is_open(self) -> bool:
        """Whether it is to be seen."""
        return self.has_class(OPEN)

    def open(self) -> None:
        """Be seen, and have the keys from the very next one on."""
        self.add_class(OPEN)
        self.screen.set_focus(self)

    def close(self) -> None:
        """Be seen no longer; who has the keys then is for the caller to say."""
        self.remove_class(OPEN)

    async def put(self, event: events.Key) -> bool:
        """Put a character in; whether it is one."""
        if event.is_printable:
            await self._on_key(event)
        return event.is_printable

    async def action_submit(self) -> None:
        """Hand the text over."""
        self._submitted(self.value)
