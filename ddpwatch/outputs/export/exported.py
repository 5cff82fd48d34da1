"""What is exported: the aligned steps of one attempt, all or a part of them, and how it is written to a file."""

from __future__ import annotations

import gzip
import io
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from ddpwatch.errors import UsageError
from ddpwatch.outputs.readout import Readout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpwatch.core.window import Window
    from ddpwatch.sources.recorded import Attempt, Recorded

STDOUT: Final = Path("-")
LAST_STEP: Final = 2**62
_GZIP_LEVEL: Final = 5


class Exported:
    """One attempt on its way out."""

    def __init__(
        self,
        recorded: Recorded,
        attempt: Attempt,
        steps: tuple[int, int] = (0, LAST_STEP),
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """From the first to the last of `steps`, both included."""
        self.recorded, self.attempt = recorded, attempt
        self.readout = Readout(recorded, attempt, progress)
        self.state = self.readout.state
        self.number = recorded.attempts.index(attempt) + 1
        """Of the attempt, counted from 1."""
        self.count = 0
        """Steps that went out so far."""
        self._first, self._last = steps
        self.whole = steps == (0, LAST_STEP)
        """Whether all steps were asked for."""

    def windows(self, *, unusual: bool = True) -> Iterator[Window]:
        """Those steps, with unusual ones among them or without."""
        for window in self.readout.windows(unusual=unusual):
            wanted = (window.indices >= self._first) & (window.indices <= self._last)
            if not wanted.all():
                window = replace(window, indices=window.indices[wanted], table=window.table[:, :, wanted])  # noqa: PLW2901
            self.count += len(window)
            if len(window):
                yield window


def steps_of(text: str) -> tuple[int, int]:
    """First and last step of `100-200`, `100-` or `-200`, or one step."""
    first, dash, last = text.partition("-")
    try:
        span = int(first or 0), int(last) if last else LAST_STEP if dash else int(first)
    except ValueError:
        span = (0, -1)
    if not 0 <= span[0] <= span[1] <= LAST_STEP:
        raise UsageError(f"{text!r} is no range of steps such as 100-200, 100- or -200")
    return span


@contextmanager
def written(path: Path, source: Path, *, force: bool) -> Iterator[IO[str]]:
    """Text that goes to a file, compressed if its name ends in `.gz`; to stdout if it is `-`.

    The file is there when all of it is: who breaks off leaves none. One that is there stays, unless forced; the
    recording that is read, `source`, stays in any case.
    """
    if path == STDOUT:
        yield sys.stdout
        return
    if path.is_dir() or (path.exists() and not force):
        raise UsageError(f"{path} is a directory" if path.is_dir() else f"{path} is there already; --force replaces it")
    if path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"{path} is the recording itself; write to another file")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as raw, _compressed(raw, path) as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _compressed(raw: IO[bytes], path: Path) -> Iterator[IO[str]]:
    if path.suffix == ".gz":
        with gzip.GzipFile(path.stem, "wb", _GZIP_LEVEL, raw, mtime=0) as packed, _text(packed) as file:
            yield file
    else:
        with _text(raw) as file:
            yield file


def _text(raw: IO[bytes] | gzip.GzipFile) -> IO[str]:
    return io.TextIOWrapper(raw, encoding="utf-8", newline="")
