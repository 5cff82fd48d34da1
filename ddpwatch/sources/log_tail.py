"""Tail log files through growth, rotation, truncation and late creation.

Polled, without threads and without blocking. Files are untrusted: they may hold invalid UTF-8 or endless lines, so
memory and bytes per poll are bounded.
"""

from __future__ import annotations

import glob
import os
import stat
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOK_BACK_BYTES: Final = 64 * 1024
"""Bytes of existing content that are read with `from_end`."""
COUNTED_BYTES: Final = 64 * 1024 * 1024
"""Max skipped bytes in which lines are counted."""
FILE_BYTES: Final = 2 * 1024 * 1024
"""Max bytes read from one file per poll."""
POLL_BYTES: Final = 16 * 1024 * 1024
"""Max bytes read from all files per poll."""
LINE_BYTES: Final = 64 * 1024
"""Max bytes of a line; the rest of it is skipped."""
MAX_FILES: Final = 512
"""Max files followed. They are held open, so that nothing is lost when they are rotated."""
MAX_REMEMBERED: Final = 1024
"""Closed files whose position is remembered in case they come back under another name."""

Identity: TypeAlias = tuple[int, int]
"""Device and inode, which a rename does not change."""


class Lines(NamedTuple):
    """Complete lines of one file."""

    source: str
    first_line: int
    """Number of the first line, from 1."""
    texts: list[str]
    """Lines without line ends. Invalid UTF-8 is replaced; control characters are kept."""
    skipped: int
    """Bytes skipped before or in these lines: before the starting point, or in lines that were too long."""
    counted: bool = True
    """Whether line numbers count from the beginning of the file; otherwise from the starting point."""


class _Place(NamedTuple):
    offset: int
    line: int
    counted: bool = True


class _File:
    def __init__(self, path: str, fd: int, start: _Place) -> None:
        self.path = path
        self.fd = fd
        self.identity = _identity(os.fstat(fd))
        self.offset, self.line, self.counted = start
        self.skipped = 0
        self.begins_within_a_line = False
        """Whether reading started within a line; the rest of that line is skipped."""
        self._rest = b""

    def read(self, most_bytes: int) -> Lines | None:
        """The next complete lines; None if there are none."""
        if os.fstat(self.fd).st_size < self.offset:
            # The file was truncated: its content is gone, and reading restarts.
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
        """Continue at this offset. The skipped lines are counted, unless that would take long."""
        self.offset = self.skipped = offset
        self.counted = offset <= COUNTED_BYTES
        try:
            for at in range(0, offset if self.counted else 0, FILE_BYTES):
                self.line += os.pread(self.fd, min(FILE_BYTES, offset - at), at).count(b"\n")
        except OSError:
            self.counted = False  # a persistent read error shows up at the next read

    def last(self) -> Lines | None:
        """The text after the last line end, as a line of its own: nothing will follow it."""
        taken, self._rest = self._rest, b""
        return self._lines(taken) if taken else None

    def at_end(self) -> bool:
        """Whether the whole file was read."""
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
        lines = Lines(self.path, self.line, texts, self.skipped, self.counted)
        self.line += len(texts)
        self.skipped = 0
        return lines


class Tail:
    """Follows every regular file that matches; rejects pipes, devices and directories without blocking.

    A renamed file is read to its end, and followed under its new name if that matches too.
    """

    def __init__(self, globs: Sequence[str], *, from_end: bool = False, since_unix_s: float = 0.0) -> None:
        """With `from_end`, existing files are read from near their end; if older than `since_unix_s`, from the end."""
        self._since_unix_s = since_unix_s
        self._globs = tuple(globs)
        self._from_end = from_end
        self._files: dict[str, _File] = {}
        self._moved: dict[Identity, _Place] = {}
        self._turn = 0
        self._reported: set[str] = set()
        self.errors: list[str] = []
        """Paths that cannot be followed, with the reason, each once. File names are not sanitized."""
        self.older = 0
        """Number of files last modified before `since_unix_s`, which are followed from their end."""
        self.caught_up = False
        """Whether the last poll reached the end of every file."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Paths of the files that are followed."""
        return tuple(self._files)

    def poll(self) -> list[Lines]:
        """New lines of each file since the last poll, up to `POLL_BYTES`; the rest follows at the next poll."""
        present = self._paths()
        paths = [*(path for path in self._files if path not in present), *present]
        self._turn %= max(1, len(paths))
        found: list[Lines] = []
        left_bytes = POLL_BYTES
        self.caught_up = True
        for path in (*paths[self._turn :], *paths[: self._turn]):
            if left_bytes <= 0:
                # Files that were not reached come first at the next poll.
                self._turn = paths.index(path)
                self.caught_up = False
                break
            left_bytes -= self._look(path, min(left_bytes, FILE_BYTES), found)
        self._from_end = False
        return found

    def finish(self) -> list[Lines]:
        """Return the last lines without a line end, and stop following."""
        found = self.unfinished()
        self.close()
        return found

    def unfinished(self) -> list[Lines]:
        """The last lines without a line end so far, as lines of their own."""
        return [lines for file in self._files.values() if (lines := file.last()) is not None]

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()

    def _paths(self) -> dict[str, None]:
        """Matching paths in order, without duplicates."""
        paths: dict[str, None] = {}
        for pattern in self._globs:
            # A file name may contain glob characters.
            matches = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
            paths |= dict.fromkeys(matches)
        if len(paths) > MAX_FILES:
            self._report("", f"{len(paths)} files match; the first {MAX_FILES} are followed")
        return dict.fromkeys([*paths][:MAX_FILES])

    def _look(self, path: str, most_bytes: int, found: list[Lines]) -> int:
        """Continue reading one file and return the number of bytes; closes a file that was replaced."""
        file = self._files.get(path) or self._open(path)
        if file is None:
            return 0
        before = file.offset
        try:
            lines = file.read(most_bytes)
        except OSError as error:
            self._report(path, f"{path} cannot be read anymore: {error.strerror}")
            self._leave(file)
            return 0
        read_bytes = max(0, file.offset - before)
        found += [lines] if lines is not None else []
        if not file.at_end():
            self.caught_up = False
        elif _identity_at(path) != file.identity:
            found += [lines] if (lines := file.last()) is not None else []
            self._leave(file)
            # Its successor may exist already.
            self.caught_up = False
        return read_bytes

    def _open(self, path: str) -> _File | None:
        try:
            # Checked before opening, because opening a device may have side effects.
            mode = os.stat(path).st_mode  # noqa: PTH116 - as everywhere here: one call, one answer
            if not stat.S_ISREG(mode):
                self._report(path, f"{path} is {_name_of(mode)}; only regular files are read")
                return None
            # O_NONBLOCK: if it has become a pipe meanwhile, opening does not wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            self._report(path, f"{path} cannot be read: {error.strerror}")
            return None
        status = os.fstat(fd)
        identity = _identity(status)
        # The same file may be followed under another path, through a link or a rename.
        if not stat.S_ISREG(status.st_mode) or any(each.identity == identity for each in self._files.values()):
            os.close(fd)
            return None
        place = self._moved.pop(identity, None)
        file = _File(path, fd, place if place is not None and place.offset <= status.st_size else _Place(0, 1))
        if self._from_end and status.st_mtime < self._since_unix_s:
            file.skip_to(status.st_size)
            self.older += 1
        elif self._from_end and status.st_size > LOOK_BACK_BYTES:
            file.skip_to(status.st_size - LOOK_BACK_BYTES)
            file.begins_within_a_line = True
        self._files[path] = file
        return file

    def _leave(self, file: _File) -> None:
        """Remember the position of a renamed file; the inode of a deleted one may be reused."""
        if os.fstat(file.fd).st_nlink:
            self._moved[file.identity] = _Place(file.offset, file.line, file.counted)
            if len(self._moved) > MAX_REMEMBERED:
                del self._moved[next(iter(self._moved))]
        os.close(file.fd)
        del self._files[file.path]

    def _report(self, path: str, error: str) -> None:
        if path not in self._reported and len(self._reported) < MAX_FILES:
            self._reported.add(path)
            self.errors.append(error)


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
