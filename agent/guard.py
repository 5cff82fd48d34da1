"""Fail open: a bug in ddpwatch costs a missing row, never a training run."""

from __future__ import annotations

import contextlib
import functools
import sys
from threading import Lock
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    T = TypeVar("T")


class Switch:
    """On until the first error inside ddpwatch; then off for good, and said once on stderr."""

    __slots__ = ("_once", "cost_ns", "label", "on", "reason", "timed")

    def __init__(self, label: str = "") -> None:
        self.on = True
        self.reason = ""
        self.label = label
        """Tells which rank speaks."""
        self.timed = False
        """Whether hooks are timed just now. Looking at the clock twice a hook is a tenth of what they cost."""
        self.cost_ns = 0
        """What guarded hooks have cost the training thread while they were timed."""
        self._once = Lock()

    def trip(self, where: str, error: BaseException) -> None:
        """Switch off because of `error`. Takes no hook away: torch may be walking the list of hooks right now."""
        # The training thread and the agent's may both come here; the lock is taken once and never given back.
        if not self.on or not self._once.acquire(blocking=False):
            return
        self.reason = _explain(where, error)
        self.on = False
        # Without a stderr `print` would turn to stdout, which is the script's.
        if sys.stderr is not None:
            with contextlib.suppress(Exception):
                sys.stderr.write(f"ddpwatch{self.label}: switched off, training goes on ({self.reason})\n")
                sys.stderr.flush()


def _explain(where: str, error: BaseException) -> str:
    try:
        what = " ".join(str(error).split())[:300]
    except Exception:  # noqa: BLE001 - an exception class of the user's may fail to describe itself
        what = ""
    return f"{where}: {type(error).__name__}: {what}" if what else f"{where}: {type(error).__name__}"


class Guarded(Protocol):
    """Anything whose methods may be `@guarded`."""

    switch: Switch


def guarded(method: Callable[..., T]) -> Callable[..., T | None]:
    """Run a hook only while the switch is on, and let no error of its own reach the training.

    What it costs is measured in the steps that are `timed`.

    KeyboardInterrupt and SystemExit pass: they are the user's, wherever they arrive.
    """

    @functools.wraps(method)
    def run(self: Guarded, *args: Any) -> T | None:
        switch = self.switch
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
