"""Which of one rank's numbered messages have come, and how many are missing."""

from __future__ import annotations

from typing import Final

WINDOW: Final = 1024
"""How far back a late message is still told from a duplicate."""
_MASK: Final = (1 << WINDOW) - 1


class Sequence:
    """Counts gaps in a stream of sequence numbers that may arrive doubled or out of order.

    Bit k of `_seen` stands for the number `_newest - _in_order - k`, so memory and cost do not grow with the stream;
    numbers that came in order since are only counted, which nearly all do.
    """

    __slots__ = ("_covered", "_first", "_in_order", "_newest", "_seen", "lost")

    def __init__(self) -> None:
        """Begin with whichever number comes first."""
        self._newest: int | None = None
        self._first = 0
        self._seen = 0
        self._in_order = 0
        self._covered = -1
        self.lost = 0
        """Numbers missing since the last snapshot, or since the first message if there was none."""

    @property
    def newest(self) -> int:
        """The largest number so far; 0 = none has come."""
        return self._newest or 0

    def take(self, seq: int) -> bool:
        """Whether this message is to be used: it is no duplicate and no snapshot covers it."""
        # What a snapshot covers is never newer than the newest.
        if self._newest is not None and seq == self._newest + 1:
            self._newest = seq
            self._in_order += 1
            return True
        if seq <= self._covered:
            return False
        if self._newest is None:
            self._newest, self._first, self._seen = seq, seq, 1
            return True
        self._count_in_order()
        ahead = seq - self._newest
        if ahead > 0:
            self.lost += ahead - 1
            self._seen = ((self._seen << ahead) | 1) & _MASK if ahead < WINDOW else 1
            self._newest = seq
            return True
        return self._take_late(seq, 1 << -ahead if -ahead < WINDOW else 0)

    def _take_late(self, seq: int, bit: int) -> bool:
        if not bit or self._seen & bit:
            return False
        self._seen |= bit
        if seq > self._first:
            self.lost -= 1
        else:
            self.lost += self._first - seq - 1
            self._first = seq
        return True

    def _count_in_order(self) -> None:
        came, self._in_order = self._in_order, 0
        self._seen = ((self._seen << came) | ((1 << came) - 1)) & _MASK if came < WINDOW else _MASK

    def cover(self, seq: int) -> None:
        """A snapshot holds everything up to `seq`: what is missing before it was not lost after all."""
        if seq <= self._covered:
            return
        self._count_in_order()
        self._covered = self._first = seq
        if self._newest is None or seq >= self._newest:
            self._newest, self._seen, self.lost = seq, 1, 0
            return
        span = min(self._newest - seq, WINDOW)
        self.lost = span - (self._seen & ((1 << span) - 1)).bit_count()
