"""Log files as a source of frames, so that they reach the state and a recording like everything else.

Lines that match a pattern become frames, and of the others the last ones of each poll, for people to read: nobody reads
ten thousand lines a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.logs.parser import parse_line
from ddpwatch.core.units import plural
from ddpwatch.sources.frames import Frame
from ddpwatch.sources.log_tail import Tail
from ddpwatch.wire import MAX_LOG_CHARS, MAX_LOG_LINES, TOPICS, LogLine, LogLines, encode, fit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpwatch.sources.log_tail import Lines

LAST_LINES: Final = 40
"""Max lines without a match that are sent per poll of a file."""
POLL_NS: Final = 200_000_000
"""Interval of polls in ns."""


class LogFrames:
    """Follows log files and makes frames of their lines. To be closed."""

    def __init__(self, globs: Sequence[str], since_unix_s: float = 0.0) -> None:
        """Follow every file that matches, from near its end, and those that appear later from their beginning.

        The content of files last written before `since_unix_s` belongs to another run, and is skipped.
        """
        self._globs = globs
        self._tail = Tail(globs, from_end=True, since_unix_s=since_unix_s)
        self._due_ns = 0
        self._reported: int | None = None
        """Number of problems that were sent; None = no frame was sent yet."""

    def poll(self, now_ns: int) -> Iterator[Frame]:
        """New lines as frames, at most every `POLL_NS`."""
        if now_ns < self._due_ns:
            return
        self._due_ns = now_ns + POLL_NS
        for lines in self._tail.poll():
            yield from _frames(lines, now_ns)
        if self._reported is None or len(self._tail.errors) > self._reported:
            # A frame without a file reports that logs are watched, and which of them cannot be.
            texts = self._tail.errors[self._reported or 0 :]
            if self._reported is None and (older := self._tail.older):
                end = "its end, because it was" if older == 1 else "their end, because they were"
                texts = [f"{plural(older, 'file')} followed from {end} written before the run", *texts]
            if self._reported is None and not self._tail.sources:
                texts = [*texts, f"no file matches {' or '.join(self._globs)} yet"]
            news = [LogLine(0, fit(text, MAX_LOG_CHARS)) for text in texts]
            self._reported = len(self._tail.errors)
            own = LogLines(rank=0, seq=0, source="", lines=news[:MAX_LOG_LINES])
            yield Frame(TOPICS[LogLines], encode(own), now_ns)

    def last(self, now_ns: int) -> Iterator[Frame]:
        """All remaining lines as frames, including a last one without a line end."""
        while True:
            for lines in self._tail.poll():
                yield from _frames(lines, now_ns)
            if self._tail.caught_up:
                break
        for lines in self._tail.unfinished():
            yield from _frames(lines, now_ns)

    def close(self) -> None:
        """Close the files."""
        self._tail.close()


def _frames(lines: Lines, now_ns: int) -> Iterator[Frame]:
    last = len(lines.texts) - LAST_LINES
    chosen = [
        LogLine(lines.first_line + place, fit(text, MAX_LOG_CHARS))
        for place, text in enumerate(lines.texts)
        if place >= last or parse_line(text) is not None
    ]
    skipped = len(lines.texts) - len(chosen)
    for first in range(0, len(chosen), MAX_LOG_LINES):
        message = LogLines(
            rank=0, seq=0, source=fit(lines.source[-200:]), lines=chosen[first : first + MAX_LOG_LINES],
            skipped=skipped, counted=lines.counted,
        )  # fmt: skip
        skipped = 0
        yield Frame(TOPICS[LogLines], encode(message), now_ns)
