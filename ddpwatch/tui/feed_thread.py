"""Takes in what has come, in a thread of its own: neither judging nor a thousand ranks keep the keyboard waiting.

The feed belongs to that thread. Whoever else wants something of it asks for it here.
"""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ddpwatch.tui.feed import Feed

FOR_KEYS_S: Final = 0.15
"""So long after a key nothing is taken in: what it asks for goes first …"""
KEY_POLL_S: Final = 0.01
MAX_FOR_KEYS_S: Final = 0.6
"""… but not if keys come without an end."""
MAX_TAKEN_S: Final = 0.2
"""Longest time that portions follow each other before there is a look."""

ResultT = TypeVar("ResultT")
Given = ParamSpec("Given")


class FeedThread:
    """Has a feed advance, and then lets the dashboard look."""

    def __init__(self, feed: Feed, look: Callable[[bool], Awaitable[None]], goes_on: Callable[[], bool]) -> None:
        """Call `look` with whether something has come, as long as the dashboard `goes_on`."""
        self._feed = feed
        self._look = look
        self._goes_on = goes_on
        self._thread = ThreadPoolExecutor(1, "ddpwatch-intake")
        self._reported: list[Future[Any]] = []
        self._busy = False
        self._asked = 0
        """How many wait for this thread, the tick among them."""
        # Never yet: the clock begins with the machine, which may have been switched on just now.
        self._pressed_s = self._took_in_s = -math.inf

    def key_pressed(self) -> None:
        """Somebody waits for an answer."""
        self._pressed_s = time.monotonic()

    async def tick(self) -> None:
        """Take in what has come since, and have a look; or not, while the last one is under way."""
        now_s = time.monotonic()
        if self._busy or self._keys_go_first(now_s):
            return
        self._busy = True
        try:
            self._took_in_s = now_s
            came = await self.ask(self._take_in, now_s)
            while self._reported:
                self._reported.pop(0).result()
            if self._goes_on():
                await self._look(came)
        finally:
            self._busy = False

    async def ask(self, what: Callable[Given, ResultT], *given: Given.args, **named: Given.kwargs) -> ResultT:
        """Do something with the feed, after all that was asked for before."""
        return await self.begin(what, *given, **named)

    def begin(
        self, what: Callable[Given, ResultT], *given: Given.args, **named: Given.kwargs
    ) -> asyncio.Future[ResultT]:
        """The same, for whoever has something else to do before it waits."""
        self._asked += 1
        coming = asyncio.wrap_future(self._thread.submit(what, *given, **named))
        coming.add_done_callback(self._answered)
        return coming

    def _answered(self, _: asyncio.Future[Any]) -> None:
        self._asked -= 1

    def tell(self, what: Callable[..., Any], *given: Any) -> None:
        """The same, for whoever does not wait for it."""
        self._reported.append(self._thread.submit(what, *given))

    def close(self) -> None:
        """End the thread; the feed belongs to the caller from now on."""
        self._thread.shutdown(cancel_futures=True)

    def _keys_go_first(self, now_s: float) -> bool:
        return now_s < self._pressed_s + FOR_KEYS_S and now_s < self._took_in_s + MAX_FOR_KEYS_S

    def _let_keys_go(self) -> None:
        """Called while something that takes long is under way: a key that was pressed meanwhile goes first."""
        until_s = min(self._pressed_s + FOR_KEYS_S, self._took_in_s + MAX_FOR_KEYS_S)
        # What waits for this thread is most likely what the key has asked for.
        while self._asked <= 1 and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, KEY_POLL_S))

    def _take_in(self, now_s: float) -> bool:
        self._feed.between_rules(self._let_keys_go)
        came = self._feed.advance()
        while self._feed.more and now_s >= self._pressed_s and time.monotonic() < now_s + MAX_TAKEN_S:
            came |= self._feed.advance()
        return came
