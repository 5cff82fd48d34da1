"""Takes in what has come, in a thread of its own: neither judging nor a thousand ranks keep the keyboard waiting.

The feed belongs to that thread. Whoever else wants something of it asks for it here.

Keeps the dashboard small where it follows a thousand ranks. Asks the C library; where that is another, does nothing.

Tables of all ranks come and go with every look. Left to itself, glibc learns to keep the room for them, and more so
the more threads there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ddpwatch.tui.feed import Feed

M_ARENA_MAX: Final = -8
M_MMAP_THRESHOLD: Final = -3
LARGE_BYTES: Final = 1 << 20
"""What is larger goes back to the system as soon as it is let go of."""


def keep_small() -> None:
    """From now on. To be called before threads are started."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(M_ARENA_MAX, 1)


def give_back() -> None:
    """What is not used: histories of a thousand ranks have passed through at once."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


FOR_KEYS_S: Final = 0.15
"""So long after a key nothing is taken in: what it asks for goes first …"""
KEY_POLL_S: Final = 0.01
MOST_FOR_KEYS_S: Final = 0.6
"""… but not if keys come without an end."""
MOST_TAKEN_S: Final = 0.2
"""Longest time that portions follow each other before there is a look."""
COLLECT_YOUNG_S: Final = 1.0
"""So often what came since the last time is searched for garbage: most of it is gone by then without a search …"""
COLLECT_S: Final = 20.0
"""… and so often all that has come since the start …"""
MOST_COLLECT_S: Final = 300.0
"""… but for so long not while somebody presses keys …"""
QUIET_S: Final = 2.0
"""… which is over when no key has been pressed for so long."""
GIVE_BACK_S: Final = 10.0
"""So often memory that is free goes back to the system."""

ResultT = TypeVar("ResultT")
Given = ParamSpec("Given")


class Intake:
    """Has a feed advance, and then lets the dashboard look."""

    def __init__(
        self,
        feed: Feed,
        look: Callable[[bool], Awaitable[None]],
        goes_on: Callable[[], bool],
        owns_process: Callable[[], bool],
    ) -> None:
        """Call `look` with whether something has come, as long as the dashboard `goes_on`. Garbage is looked for only
        in a process that is the dashboard's own.
        """
        self._owns_process = owns_process
        self._feed = feed
        self._look = look
        self._goes_on = goes_on
        self._thread = ThreadPoolExecutor(1, "ddpwatch-intake")
        self._told: list[Future[Any]] = []
        self._busy = False
        self._asked = 0
        """How many wait for this thread, the tick among them."""
        # Never yet: the clock begins with the machine, which may have been switched on just now.
        self._pressed_s = self._took_in_s = -math.inf
        self._collect_due_s = self._young_due_s = self._give_back_due_s = 0.0

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
            while self._told:
                self._told.pop(0).result()
            if self._goes_on():
                await self._look(came)
                if self._owns_process():
                    self._clear_up()
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
        self._told.append(self._thread.submit(what, *given))

    def close(self) -> None:
        """End the thread; the feed belongs to the caller from now on."""
        self._thread.shutdown(cancel_futures=True)
        if self._collect_due_s:
            gc.unfreeze()
            gc.enable()

    def _keys_go_first(self, now_s: float) -> bool:
        return now_s < self._pressed_s + FOR_KEYS_S and now_s < self._took_in_s + MOST_FOR_KEYS_S

    def _let_keys_go(self) -> None:
        """Called while something that takes long is under way: a key that was pressed meanwhile goes first."""
        until_s = min(self._pressed_s + FOR_KEYS_S, self._took_in_s + MOST_FOR_KEYS_S)
        # What waits for this thread is most likely what the key has asked for.
        while self._asked <= 1 and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, KEY_POLL_S))

    def _take_in(self, now_s: float) -> bool:
        self._feed.between_rules(self._let_keys_go)
        came = self._feed.advance()
        while self._feed.more and now_s >= self._pressed_s and time.monotonic() < now_s + MOST_TAKEN_S:
            came |= self._feed.advance()
        return came

    def _clear_up(self) -> None:
        """Look for garbage now, when nobody waits. Python's own choice of the moment would be as good as any other, and
        takes as long as drawing takes; nor does it know that what is there after the history has come will stay.
        """
        now_s = time.monotonic()
        if not self._collect_due_s:
            if self._feed.ready:
                gc.disable()
                gc.collect()
                gc.freeze()
                self._collect_due_s = now_s + COLLECT_S
        elif now_s >= self._collect_due_s + (0.0 if now_s > self._pressed_s + QUIET_S else MOST_COLLECT_S):
            self._collect_due_s = now_s + COLLECT_S
            gc.collect()
        elif now_s >= self._young_due_s:
            self._young_due_s = now_s + COLLECT_YOUNG_S
            gc.collect(0)
            if now_s >= self._give_back_due_s and now_s > self._pressed_s + QUIET_S:
                self._give_back_due_s = now_s + GIVE_BACK_S
                # There, since it takes a while, and Python's lock is not needed for it.
                self.tell(give_back)
