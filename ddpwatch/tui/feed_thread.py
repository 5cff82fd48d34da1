"""The thread of the feed: neither rules nor a thousand ranks keep the keyboard waiting.

Only this thread uses the feed; other threads submit calls here.
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
"""Seconds after a key in which no frames are processed, so that the response comes first."""
KEY_POLL_S: Final = 0.01
"""Longest sleep in seconds before it is checked whether another key was pressed."""
MAX_FOR_KEYS_S: Final = 0.6
"""Longest time in seconds that a series of keys holds frames back."""
MAX_INGEST_S: Final = 0.2
"""Longest time in seconds spent on frames before the dashboard is updated."""

ResultT = TypeVar("ResultT")
Given = ParamSpec("Given")


class FeedThread:
    """Advances a feed in its thread, then updates the dashboard."""

    def __init__(self, feed: Feed, update: Callable[[bool], Awaitable[None]], is_running: Callable[[], bool]) -> None:
        """Call `update` with whether anything was received, as long as the dashboard `is_running`."""
        self._feed = feed
        self._update = update
        self._is_running = is_running
        self._thread = ThreadPoolExecutor(1, "ddpwatch-intake")
        self._submitted: list[Future[Any]] = []
        self._busy = False
        self._pending = 0
        """How many callers wait for this thread, the tick among them."""
        # Not 0: the monotonic clock may begin with the machine, just now.
        self._pressed_s = self._ingest_s = -math.inf

    def key_pressed(self) -> None:
        """Let the response to a key go first."""
        self._pressed_s = time.monotonic()

    async def tick(self) -> None:
        """Process what has been received and update the dashboard, unless the last tick is still under way."""
        now_s = time.monotonic()
        if self._busy or self._keys_go_first(now_s):
            return
        self._busy = True
        try:
            self._ingest_s = now_s
            came = await self.ask(self._ingest, now_s)
            while self._submitted:
                self._submitted.pop(0).result()
            if self._is_running():
                await self._update(came)
        finally:
            self._busy = False

    async def ask(self, what: Callable[Given, ResultT], *given: Given.args, **named: Given.kwargs) -> ResultT:
        """Run a call in the thread, after all calls before it."""
        return await self.begin(what, *given, **named)

    def begin(
        self, what: Callable[Given, ResultT], *given: Given.args, **named: Given.kwargs
    ) -> asyncio.Future[ResultT]:
        """The same, to be awaited later."""
        self._pending += 1
        coming = asyncio.wrap_future(self._thread.submit(what, *given, **named))
        coming.add_done_callback(self._done)
        return coming

    def _done(self, _: asyncio.Future[Any]) -> None:
        self._pending -= 1

    def submit(self, what: Callable[..., Any], *given: Any) -> None:
        """The same, without waiting; an error is raised in the next tick."""
        self._submitted.append(self._thread.submit(what, *given))

    def close(self) -> None:
        """End the thread; the feed is the caller's again."""
        self._thread.shutdown(cancel_futures=True)

    def _keys_go_first(self, now_s: float) -> bool:
        return now_s < self._pressed_s + FOR_KEYS_S and now_s < self._ingest_s + MAX_FOR_KEYS_S

    def _yield_to_keys(self) -> None:
        """Called during long computations: yields to a key that was pressed meanwhile."""
        until_s = min(self._pressed_s + FOR_KEYS_S, self._ingest_s + MAX_FOR_KEYS_S)
        # A call that waits for this thread is most likely the response to the key.
        while self._pending <= 1 and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, KEY_POLL_S))

    def _ingest(self, now_s: float) -> bool:
        self._feed.between_rules(self._yield_to_keys)
        came = self._feed.advance()
        while self._feed.more and now_s >= self._pressed_s and time.monotonic() < now_s + MAX_INGEST_S:
            came |= self._feed.advance()
        return came
