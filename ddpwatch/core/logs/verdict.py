"""The casebook: recognised lines of all logs of a job go in, in any order; who ended it, and why, comes out."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING, Final

from ddpwatch.core.logs.case import case_of
from ddpwatch.core.logs.failures import by_failure
from ddpwatch.core.logs.progress import by_progress
from ddpwatch.core.logs.reports import by_barrier, by_desync_report, by_heartbeat, by_mismatch, by_what_is_left
from ddpwatch.core.logs.ruling import Evidence, Verdict
from ddpwatch.core.text import tame

if TYPE_CHECKING:
    from ddpwatch.core.logs.mark import Mark

__all__ = ["Casebook", "Evidence", "Verdict"]

ENDS: Final = 8
"""Of lines that say the same kind of thing about the same rank, so many from either end of a file are kept."""
MOST_KINDS: Final = 20_000
"""Files times ranks times kinds that are kept at all; what comes on top of them is only counted."""
SOURCE_CHARS: Final = 300

_EXPLANATIONS: Final = (
    by_mismatch, by_failure, by_desync_report, by_barrier, by_progress, by_heartbeat, by_what_is_left,
)  # fmt: skip
"""From what explains the rest to what explains nothing but itself."""


class Casebook:
    """Collects what is recognised. Bounded, whatever it is fed."""

    def __init__(self) -> None:
        self.marks = 0
        """How many were added."""
        self.dropped = 0
        """How many of them were of too many kinds to be kept."""
        self._sources: set[str] = set()
        self._kept: dict[tuple[str, str, int | None, str], list[tuple[int, int, Mark]]] = {}

    def read(self, source: str) -> None:
        """A file was read, whether or not anything in it is recognised."""
        if len(self._sources) < MOST_KINDS:
            self._sources.add(source)

    def add(self, source: str, line: int, mark: Mark) -> None:
        """Take in one recognised line."""
        self.marks += 1
        key = (source, mark.kind, mark.rank, mark.group)
        if key not in self._kept and len(self._kept) >= MOST_KINDS:
            self.dropped += 1
            return
        kept = self._kept.setdefault(key, [])
        # The count settles the order of what has the same line number, so that marks are never compared.
        insort(kept, (line, self.marks, mark))
        if len(kept) > 2 * ENDS:
            del kept[ENDS]

    def verdict(self) -> Verdict | None:
        """Who is to blame and why; None if nothing that was added tells of trouble."""
        found = (
            (tame(source, SOURCE_CHARS), line, mark)
            for (source, *_), kept in self._kept.items()
            for line, _, mark in kept
        )
        case = case_of(found, [tame(source, SOURCE_CHARS) for source in self._sources])
        return next((verdict for explain in _EXPLANATIONS if (verdict := explain(case)) is not None), None)
