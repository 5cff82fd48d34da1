"""Follow log files as they grow, are rotated, truncated, or appear later.

Whoever asks gets what has come since the last time; nothing here waits, and there are no threads. A file may hold
anything: bytes that are no text, lines without an end. What is read at once, and what is kept, is bounded.
"""

from __future__ import annotations

import glob
import os
import stat
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOK_BACK_BYTES: Final = 64 * 1024
"""How much of what was there before is read with `from_end`."""
COUNTED_BYTES: Final = 64 * 1024 * 1024
"""Of more that is not read, the lines are not counted either."""
FILE_BYTES: Final = 2 * 1024 * 1024
"""Most that is read of one file at a time."""
POLL_BYTES: Final = 16 * 1024 * 1024
"""Most that is read of all files at a time."""
LINE_BYTES: Final = 64 * 1024
"""Longest line; the rest of it is skipped."""
MAX_FILES: Final = 512
"""They are held open, so that nothing is lost when they are rotated."""
MAX_REMEMBERED: Final = 1024

Identity: TypeAlias = tuple[int, int]
"""Device and inode: what stays the same when a file is renamed."""


class Lines(NamedTuple):
    """Whole lines of one file."""

    source: str
    """Its path."""
    first_line: int
    """Number of the first of them, from 1."""
    texts: list[str]
    """Without their ends. What is no UTF-8 is replaced; controls are still in them."""
    skipped: int
    """Bytes left out before or in these lines: before the start, or of lines that were too long."""
    counted: bool = True
    """Whether numbers count from the beginning of the file; else from where reading began."""


class _Place(NamedTuple):
    """How far a file was read that has another name by now."""

    offset: int
    line: int
    counted: bool = True


class _File:
    """One open file and how far it was read."""

    def __init__(self, path: str, fd: int, start: _Place) -> None:
        self.path = path
        self.fd = fd
        self.identity = _identity(os.fstat(fd))
        self.offset, self.line, self.counted = start
        self.skipped = 0
        self.begins_within_a_line = False
        """Reading began somewhere; what comes before the first line's end is left out."""
        self._rest = b""

    def read(self, most_bytes: int) -> Lines | None:
        """The next whole lines; None if there are none."""
        if os.fstat(self.fd).st_size < self.offset:
            # It was truncated: what it held is gone, and it begins anew.
            self.offset, self.line, self.counted, self._rest, self.begins_within_a_line = 0, 1, True, b"", False
        data = os.pread(self.fd, most_bytes, self.offset)
        self.offset += len(data)
        whole, newline, rest = data.rpartition(b"\n")
        taken, self._rest = (self._rest + whole, b"") if newline else (b"", self._rest)
        room = max(0, LINE_BYTES - len(self._rest))
        self._rest += rest[:room]
        self.skipped += max(0, len(rest) - room)
        return self._lines(taken) if newline else None

    def skip_to(self, offset: int) -> None:
        """Go on from there: what is before is not read, but its lines are counted, unless that would take long."""
        self.offset = self.skipped = offset
        self.counted = offset <= COUNTED_BYTES
        try:
            for at in range(0, offset if self.counted else 0, FILE_BYTES):
                self.line += os.pread(self.fd, min(FILE_BYTES, offset - at), at).count(b"\n")
        except OSError:
            self.counted = False  # whether the rest can be read is found when it is

    def last(self) -> Lines | None:
        """What stands behind the last line's end, as a line of its own: nothing will follow it."""
        taken, self._rest = self._rest, b""
        return self._lines(taken) if taken else None

    def at_end(self) -> bool:
        """Whether all that is there was read."""
        return os.fstat(self.fd).st_size <= self.offset

    def _lines(self, taken: bytes) -> Lines | None:
        texts = taken.decode("utf-8", "replace").split("\n")
        if self.begins_within_a_line:
            self.begins_within_a_line = False
            self.skipped += len(texts.pop(0))
            self.line += 1
        for index, text in enumerate(texts):
            if len(text) > LINE_BYTES:
                self.skipped += len(text) - LINE_BYTES
                texts[index] = text[:LINE_BYTES]
            elif text.endswith("\r"):
                texts[index] = text[:-1]
        if not texts:
            return None
        reported = Lines(self.path, self.line, texts, self.skipped, self.counted)
        self.line += len(texts)
        self.skipped = 0
        return reported


class Tail:
    """Follows every regular file that matches; refuses pipes, devices and directories without waiting for them.

    A file that is renamed is read to its end, and goes on under its new name if that matches, too.
    """

    def __init__(self, globs: Sequence[str], *, from_end: bool = False, since_unix_s: float = 0.0) -> None:
        """Read files from their beginning, or those that are there from near their end. Of files that nobody has
        written into since then, only what comes.
        """
        self._since_unix_s = since_unix_s
        self._globs = tuple(globs)
        self._from_end = from_end
        self._files: dict[str, _File] = {}
        self._moved: dict[Identity, _Place] = {}
        self._turn = 0
        self._reported: set[str] = set()
        self.troubles: list[str] = []
        """What cannot be followed and why, each said once. Holds file names as they are."""
        self.older = 0
        """Files that nobody has written into since then, and that are followed from their end."""
        self.caught_up = False
        """Whether the last look came to the end of every file."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The files that are followed."""
        return tuple(self._files)

    def poll(self) -> list[Lines]:
        """What has come since the last time, file by file. Of very much the rest comes the next time."""
        present = self._paths()
        paths = [*(path for path in self._files if path not in present), *present]
        self._turn %= max(1, len(paths))
        found: list[Lines] = []
        left_bytes = POLL_BYTES
        self.caught_up = True
        for path in (*paths[self._turn :], *paths[: self._turn]):
            if left_bytes <= 0:
                # Whoever has had no turn is first the next time.
                self._turn = paths.index(path)
                self.caught_up = False
                break
            left_bytes -= self._look(path, min(left_bytes, FILE_BYTES), found)
        self._from_end = False
        return found

    def finish(self) -> list[Lines]:
        """The last lines that have no end; nothing is followed any more."""
        found = self.unfinished()
        self.close()
        return found

    def unfinished(self) -> list[Lines]:
        """The last lines that have no end yet, as lines of their own."""
        return [lines for file in self._files.values() if (lines := file.last()) is not None]

    def close(self) -> None:
        """Let go of all files."""
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()

    def _paths(self) -> dict[str, None]:
        """The names that match, in order and none twice."""
        paths: dict[str, None] = {}
        for pattern in self._globs:
            # A name may hold characters that mean something in a pattern.
            matches = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
            paths |= dict.fromkeys(matches)
        if len(paths) > MAX_FILES:
            self._tell("", f"{len(paths)} files match; the first {MAX_FILES} are followed")
        return dict.fromkeys([*paths][:MAX_FILES])

    def _look(self, path: str, most_bytes: int, found: list[Lines]) -> int:
        """Read on in one file and say how many bytes that were; lets go of it when it was replaced."""
        file = self._files.get(path) or self._open(path)
        if file is None:
            return 0
        before = file.offset
        try:
            lines = file.read(most_bytes)
        except OSError as error:
            self._tell(path, f"{path} cannot be read any more: {error.strerror}")
            self._leave(file)
            return 0
        read_bytes = max(0, file.offset - before)
        found += [lines] if lines is not None else []
        if not file.at_end():
            self.caught_up = False
        elif _identity_at(path) != file.identity:
            found += [lines] if (lines := file.last()) is not None else []
            self._leave(file)
            # Its successor may be there already.
            self.caught_up = False
        return read_bytes

    def _open(self, path: str) -> _File | None:
        try:
            # Asked before it is opened, because opening a device may do something.
            mode = os.stat(path).st_mode  # noqa: PTH116 - as everywhere here: one call, one answer
            if not stat.S_ISREG(mode):
                self._tell(path, f"{path} is {_name_of(mode)}; only files are read")
                return None
            # If it has become a pipe meanwhile, opening does not wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            self._tell(path, f"{path} cannot be read: {error.strerror}")
            return None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or self._has(_identity(status)):
            os.close(fd)
            return None
        file = _File(path, fd, self._start(status))
        if self._from_end and status.st_mtime < self._since_unix_s:
            file.skip_to(status.st_size)
            self.older += 1
        elif self._from_end and status.st_size > LOOK_BACK_BYTES:
            file.skip_to(status.st_size - LOOK_BACK_BYTES)
            file.begins_within_a_line = True
        self._files[path] = file
        return file

    def _start(self, status: os.stat_result) -> _Place:
        place = self._moved.pop(_identity(status), None)
        return place if place is not None and place.offset <= status.st_size else _Place(0, 1)

    def _has(self, identity: Identity) -> bool:
        """Whether it is followed under another name, by a link or because it was just renamed."""
        return any(file.identity == identity for file in self._files.values())

    def _leave(self, file: _File) -> None:
        """Remember how far a renamed file was read; one that was deleted may leave its inode to another."""
        if os.fstat(file.fd).st_nlink:
            self._moved[file.identity] = _Place(file.offset, file.line, file.counted)
            if len(self._moved) > MAX_REMEMBERED:
                del self._moved[next(iter(self._moved))]
        os.close(file.fd)
        del self._files[file.path]

    def _tell(self, what: str, trouble: str) -> None:
        if what not in self._reported and len(self._reported) < MAX_FILES:
            self._reported.add(what)
            self.troubles.append(trouble)


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def _identity_at(path: str) -> Identity | None:
    try:
        return _identity(os.stat(path))  # noqa: PTH116 - as above
    except OSError:
        return None


def _name_of(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a directory"
    return "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
