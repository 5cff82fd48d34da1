"""Takes in what has come without keeping the keyboard waiting."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.tui.feed import Feed

FOR_KEYS_S: Final = 0.15
"""So long after a key nothing is taken in: what it asks for goes first …"""
MOST_FOR_KEYS_S: Final = 0.6
"""… but not if keys come without an end."""
MOST_TAKEN_S: Final = 0.2
"""Longest time that portions follow each other before there is a look."""


class Intake:
    """Has a feed advance in small portions, and then lets the dashboard look."""

    def __init__(self, feed: Feed, look: Callable[[bool], None], goes_on: Callable[[], bool]) -> None:
        """Call `look` with whether something has come, as long as the dashboard `goes_on`."""
        self._feed = feed
        self._look = look
        self._goes_on = goes_on
        self._busy = False
        self._pressed_s = self._took_in_s = 0.0

    def key_pressed(self) -> None:
        """Somebody waits for an answer."""
        self._pressed_s = time.monotonic()

    async def tick(self) -> None:
        """Whoever presses a key meanwhile waits for one portion at most."""
        now_s = time.monotonic()
        if self._busy or (now_s < self._pressed_s + FOR_KEYS_S and now_s < self._took_in_s + MOST_FOR_KEYS_S):
            return
        self._busy = True
        try:
            self._took_in_s = now_s
            came = self._goes_on() and self._feed.advance()
            while self._feed.more and now_s >= self._pressed_s and time.monotonic() < now_s + MOST_TAKEN_S:
                await asyncio.sleep(0)
                came |= self._goes_on() and self._feed.advance()
            await asyncio.sleep(0)
            if self._goes_on():
                self._look(came)
        finally:
            self._busy = False
