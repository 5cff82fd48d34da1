"""The resident memory of a rank now and then, for an hour: sixteen bytes a moment, since there may be thousands."""

from __future__ import annotations

from array import array
from typing import Final

KEPT: Final = 360
EVERY_NS: Final = 10_000_000_000


class Resident:
    """Bytes at some moments of the viewer's clock, oldest first. Takes one now and then, and passes the others over."""

    __slots__ = ("_told", "due_ns")

    def __init__(self) -> None:
        self._told = array("q")
        """Time and bytes by turns."""
        self.due_ns = 0
        """Before this no moment is taken."""

    def __len__(self) -> int:
        """How many moments are known."""
        return len(self._told) // 2

    def copy(self) -> Resident:
        """Another one, which takes its own moments from now on."""
        other = Resident()
        other._told, other.due_ns = self._told[:], self.due_ns
        return other

    def put(self, now_ns: int, resident_bytes: int) -> None:
        """Take a moment, if it is time for another one. None of them is zero."""
        if now_ns < self.due_ns or not resident_bytes:
            return
        self.due_ns = now_ns + EVERY_NS
        if len(self) == KEPT:
            # Into another one: somebody may be looking at this.
            self._told = self._told[2:]
        self._told.extend((now_ns, resident_bytes))

    @property
    def span(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """The first and the last moment, each as time and bytes; None = there are not two."""
        told = self._told
        return ((told[0], told[1]), (told[-2], told[-1])) if len(told) > 2 else None

    def spread(self, about: int) -> tuple[list[int], list[int]]:
        """Times and bytes of about so many moments, evenly spread and the last among them."""
        told = self._told
        every = max(len(told) // 2 // about, 1)
        first = (len(told) // 2 - 1) % every
        return told[2 * first :: 2 * every].tolist(), told[2 * first + 1 :: 2 * every].tolist()
