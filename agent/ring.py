"""The hand-over from the training thread to the agent's thread."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Ring(Generic[T]):
    """A bounded queue that never blocks: when it is full the oldest record is overwritten and counted."""

    __slots__ = ("_records", "dropped")

    def __init__(self, size: int) -> None:
        self._records: deque[T] = deque(maxlen=size)
        self.dropped = 0

    def push(self, record: T) -> None:
        """Add a record; called by the training thread only."""
        if len(self._records) == self._records.maxlen:
            self.dropped += 1
        self._records.append(record)

    def drain(self, most: int) -> list[T]:
        """Take up to `most` records, oldest first; called by the agent's thread only."""
        taken: list[T] = []
        while len(taken) < most:
            try:
                taken.append(self._records.popleft())
            except IndexError:
                break
        return taken
