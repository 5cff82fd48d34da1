"""State of the watched logs: the last lines for display, and the recognized ones for the verdict."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpwatch.core.logs.pattern import LINE_CHARS
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize

if TYPE_CHECKING:
    from ddpwatch.core.logs.diagnose import LogDiagnosis
    from ddpwatch.core.logs.pattern import Mark
    from ddpwatch.core.logs.verdict import Verdict
    from ddpwatch.wire import LogLines

KEPT_LINES: Final = 1000
"""Latest lines that are kept, of all files together; recognized lines are kept apart, in the same number."""
MAX_SOURCES: Final = 512
"""Files whose lines are counted."""
MAX_NOTICES: Final = 16
"""Notices about files that are kept."""


@dataclass(frozen=True)
class LogEntry:
    """One log line for display."""

    source: str
    number: int | None
    """Line number in its file; None = unknown."""
    text: str
    mark: Mark | None
    """What was recognized in it; None = nothing."""


@dataclass(frozen=True)
class LogSnapshot:
    """Immutable snapshot of a `LogState`, for paused views."""

    watched: bool
    lines: int
    files: int
    entries: tuple[LogEntry, ...]
    marked: tuple[LogEntry, ...]
    notices: tuple[str, ...]
    verdict: Verdict | None


class LogState:
    """Bounded state of all watched logs."""

    def __init__(self) -> None:
        """Start empty."""
        self.entries: deque[LogEntry] = deque(maxlen=KEPT_LINES)
        self.marked: deque[LogEntry] = deque(maxlen=KEPT_LINES)
        """Recognized lines, kept longer than the others."""
        self.lines = 0
        """Number of lines read, including those that were not sent."""
        self.sources: Counter[str] = Counter()
        """Lines by file."""
        self.notices: list[str] = []
        """Files that cannot be followed or are not read whole, each with the reason."""
        self.watched = False
        """Whether any log is watched."""
        self._diagnosis: LogDiagnosis | None = None
        self._diagnosed_marks = 0
        self._verdict: Verdict | None = None

    def add(self, message: LogLines) -> None:
        """Add these lines. A message without a source has the watcher's own remarks."""
        self.watched = True
        if not message.source:
            room = MAX_NOTICES - len(self.notices)
            self.notices += [sanitize(line.text, LINE_CHARS) for line in message.lines[:room]]
            return
        # Imported on the first line of a log: compiling the patterns takes longer than loading the rest of the state.
        from ddpwatch.core.logs.diagnose import LogDiagnosis
        from ddpwatch.core.logs.parser import parse_line

        self._diagnosis = self._diagnosis or LogDiagnosis()
        source = sanitize(message.source, 2 * NAME_CHARS)
        self._diagnosis.read(source)
        self.lines += message.skipped + len(message.lines)
        if source in self.sources or len(self.sources) < MAX_SOURCES:
            self.sources[source] += message.skipped + len(message.lines)
        for line in message.lines:
            mark = parse_line(line.text)
            number = line.number if message.counted else None
            entry = LogEntry(source, number, sanitize(line.text, LINE_CHARS), mark)
            self.entries.append(entry)
            if mark is not None:
                self.marked.append(entry)
                self._diagnosis.add(source, line.number, mark)

    def snapshot(self) -> LogSnapshot:
        """Snapshot of the current state."""
        return LogSnapshot(
            self.watched, self.lines, len(self.sources), tuple(self.entries), tuple(self.marked), tuple(self.notices),
            self.verdict,
        )  # fmt: skip

    @property
    def verdict(self) -> Verdict | None:
        """Root cause by the logs, cached until another line is recognized."""
        if self._diagnosis is not None and self._diagnosed_marks != self._diagnosis.marks:
            self._diagnosed_marks = self._diagnosis.marks
            self._verdict = self._diagnosis.verdict()
        return self._verdict
