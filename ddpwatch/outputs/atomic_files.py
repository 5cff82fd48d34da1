"""Atomic output files: complete or absent, and never over an existing file unless forced."""

from __future__ import annotations

import errno
import gzip
import io
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

STDOUT: Final = Path("-")
_GZIP_LEVEL: Final = 5
"""Compression level of gzip, from 1 to 9."""
_LOCKED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def atomic_output(path: Path, source: Path, *, force: bool) -> Iterator[IO[str]]:
    """Open a text file that appears only when it is complete; gzip for `.gz`, stdout for `-`.

    An existing file is replaced only if forced, and `source`, the recording that is read, never.
    """
    if path == STDOUT:
        yield sys.stdout
        return
    if path.exists() and not path.is_file() and not path.is_dir():
        # A pipe or a device cannot be replaced.
        with path.open("wb") as raw, _compressed(raw, path) as file:
            yield file
        return
    if path.is_dir():
        raise UsageError(f"{path} is a directory; name a file in it")
    if path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"{path} is the recording itself; write to another file")
    if path.exists() and not force:
        raise UsageError(f"{path} exists; --force overwrites it")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: no directory {path.parent}; create it or choose another with -o")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as raw, _compressed(raw, path) as file:
            yield file
        part.replace(path)
    except OSError as error:
        if error.filename == str(part) and error.errno in _LOCKED:
            raise UsageError(
                f"cannot write {path}: {path.parent.absolute()} is not writable; choose another place with -o"
            ) from None
        if error.filename == str(part):
            # The name that the user gave, not the temporary one.
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        # In a read-only directory unlink fails too, which must not hide the first error.
        with suppress(OSError):
            part.unlink()


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
