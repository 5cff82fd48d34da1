"""Fail open: the first error inside ddpwatch switches it off, and the training continues."""

from __future__ import annotations

import contextlib
import functools
import sys
from threading import Lock
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    T = TypeVar("T")


class Switch:
    """On until the first error inside ddpwatch, which is printed once on stderr; then off for good."""

    __slots__ = ("_once", "cost_ns", "label", "on", "reason", "timed")

    def __init__(self, label: str = "") -> None:
        self.on = True
        self.reason = ""
        self.label = label
        """Names the rank on stderr."""
        self.timed = False
        """Whether hooks are timed in this step. Reading the clock twice per hook is a tenth of their cost."""
        self.cost_ns = 0
        """Time of guarded hooks on the training thread, in the steps that were timed."""
        self._once = Lock()

    def trip(self, where: str, error: BaseException) -> None:
        """Switch off because of `error`. Removes no hook: torch may be iterating over the list of hooks."""
        # The training thread and the agent's may both call this; the lock is acquired once and never released.
        if not self.on or not self._once.acquire(blocking=False):
            return
        self.reason = _explain(where, error)
        self.on = False
        # Without a stderr `print` would write to stdout, which is the script's.
        if sys.stderr is not None:
            with contextlib.suppress(Exception):
                sys.stderr.write(f"ddpwatch{self.label}: switched off, training goes on ({self.reason})\n")
                sys.stderr.flush()


def _explain(where: str, error: BaseException) -> str:
    try:
        what = " ".join(str(error).split())[:300]
    except Exception:  # noqa: BLE001 - the user's exception class may fail to format itself
        what = ""
    return f"{where}: {type(error).__name__}: {what}" if what else f"{where}: {type(error).__name__}"


def guarded(method: Callable[..., T]) -> Callable[..., T | None]:
    """Decorator of hooks: run only while `self.switch` is on, and let no error reach the training.

    Measures the cost in steps that are `timed`. KeyboardInterrupt and SystemExit pass: they are the user's.
    """

    @functools.wraps(method)
    def run(self: Any, *args: Any) -> T | None:
        switch: Switch = self.switch
        if not switch.on:
            return None
        began_ns = perf_counter_ns() if switch.timed else 0
        try:
            return method(self, *args)
        except Exception as error:  # noqa: BLE001 - whatever it is, training must not see it
            switch.trip(method.__qualname__, error)
            return None
        finally:
            if began_ns:
                switch.cost_ns += perf_counter_ns() - began_ns

    return run
