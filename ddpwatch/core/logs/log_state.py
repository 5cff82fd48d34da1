"""What the watched logs of a run have said so far: the last lines to look at, and the case that the others make."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpwatch.core.logs.pattern import LINE_CHARS
from ddpwatch.core.state.sanitize import NAME_CHARS, tame

if TYPE_CHECKING:
    from ddpwatch.core.logs.diagnose import Casebook
    from ddpwatch.core.logs.pattern import Mark
    from ddpwatch.core.logs.verdict import Verdict
    from ddpwatch.wire import LogLines

KEPT_LINES: Final = 1000
MOST_SOURCES: Final = 512
MOST_TROUBLES: Final = 16


@dataclass(frozen=True)
class LogEntry:
    """One line that may be shown."""

    source: str
    number: int | None
    """In its file; None = not known."""
    text: str
    mark: Mark | None
    """What it says; None = nothing about a failure."""


@dataclass(frozen=True)
class LogShot:
    """A log book at one moment, which stays as it is while the book goes on."""

    watched: bool
    lines: int
    files: int
    entries: tuple[LogEntry, ...]
    marked: tuple[LogEntry, ...]
    troubles: tuple[str, ...]
    verdict: Verdict | None


class LogBook:
    """Takes lines in and keeps the last of them; bounded, whatever it is fed."""

    def __init__(self) -> None:
        """Begin with none."""
        self.entries: deque[LogEntry] = deque(maxlen=KEPT_LINES)
        self.marked: deque[LogEntry] = deque(maxlen=KEPT_LINES)
        """Those of them that were recognised, for longer than the others."""
        self.lines = 0
        """How many were read, those that were not told included."""
        self.sources: Counter[str] = Counter()
        """Lines by file."""
        self.troubles: list[str] = []
        """Files that cannot be followed, and why."""
        self.watched = False
        """Whether anybody watches logs at all."""
        self._book: Casebook | None = None
        self._judged = 0
        self._verdict: Verdict | None = None

    def take(self, told: LogLines) -> None:
        """Keep these lines. Those without a file are the watcher's own words."""
        self.watched = True
        if not told.source:
            room = MOST_TROUBLES - len(self.troubles)
            self.troubles += [tame(line.text, LINE_CHARS) for line in told.lines[:room]]
            return
        # Not before there is a log: the patterns of all versions take longer to load than the rest of the state.
        from ddpwatch.core.logs.diagnose import Casebook
        from ddpwatch.core.logs.parser import recognise

        self._book = self._book or Casebook()
        source = tame(told.source, 2 * NAME_CHARS)
        self._book.read(source)
        self.lines += told.skipped + len(told.lines)
        if source in self.sources or len(self.sources) < MOST_SOURCES:
            self.sources[source] += told.skipped + len(told.lines)
        for line in told.lines:
            mark = recognise(line.text)
            number = line.number if told.counted else None
            entry = LogEntry(source, number, tame(line.text, LINE_CHARS), mark)
            self.entries.append(entry)
            if mark is not None:
                self.marked.append(entry)
                self._book.add(source, line.number, mark)

    def shot(self) -> LogShot:
        """As it is now."""
        return LogShot(
            self.watched, self.lines, len(self.sources), tuple(self.entries), tuple(self.marked), tuple(self.troubles),
            self.verdict,
        )  # fmt: skip

    @property
    def verdict(self) -> Verdict | None:
        """Who ended the job, and why, if the logs tell; worked out anew when something was recognised."""
        if self._book is not None and self._judged != self._book.marks:
            self._judged = self._book.marks
            self._verdict = self._book.verdict()
        return self._verdict
