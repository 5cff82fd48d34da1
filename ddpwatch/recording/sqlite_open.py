"""Opening the SQLite file of a recording for reading or writing; rejects other files and reports damage."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import tempfile
from pathlib import Path
from typing import Final
from urllib.parse import quote

from ddpwatch.recording.schema import APPLICATION_ID, PAGE_BYTES, SCHEMA, TABLES, DamagedFile, NoRecording, Unreadable

# Layout of the header of an SQLite file (https://www.sqlite.org/fileformat.html); offsets and sizes are in bytes.
MAGIC: Final = b"SQLite format 3\x00"
HEADER_BYTES: Final = 100
WRITE_VERSION_AT: Final = 18
WAL: Final = 2
"""Write version of a database in WAL mode."""
SCHEMA_AT: Final = 60
APPLICATION_AT: Final = 68
MAX_SCHEMAS: Final = 1000
"""Schema numbers from here on are damage."""
OUR_SIGNS: Final = (b'"world_size":', b"\x28\xb5\x2f\xfd")
"""Part of a run's description, and the magic number of Zstandard: every recording begins with both."""
SEARCHED_BYTES: Final = 1 << 20
"""Bytes at the beginning of a damaged file that are searched for these signs."""


def connect(path: Path, *, write: bool = False) -> sqlite3.Connection:
    """Open an existing recording. Raises `NoRecording` or `Unreadable` with the reason."""
    check_file(path)
    try:
        if not write and _is_wal(path) and not _wal(path).exists():
            # Otherwise SQLite would create a WAL and leave it behind.
            return _connect(path, "mode=ro&immutable=1")
        return _connect(path, "mode=rw" if write else "mode=ro")
    except sqlite3.OperationalError as error:
        if write or os.access(path.parent, os.W_OK):
            raise DamagedFile(f"{path} cannot be read as a recording: {error}") from None
    try:
        if _wal(path).exists() and _wal(path).stat().st_size:
            return _connect_copy(path)
        # In a read-only directory no process writes, so SQLite need not lock.
        return _connect(path, "mode=ro&immutable=1")
    except sqlite3.Error as error:
        raise DamagedFile(f"{path} cannot be read as a recording: {error}") from None


def lacks_wal(path: Path) -> bool:
    """Whether the file needs a WAL that is missing: its recorder was killed, or it was copied while it was written."""
    # Without a claim all of the WAL was moved into the file, even if another reader kept it in WAL mode.
    return _is_wal(path) and not _wal(path).exists() and _is_claimed(path)


def _is_wal(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError:
        return False
    return len(header) == HEADER_BYTES and header.startswith(MAGIC) and header[WRITE_VERSION_AT] == WAL


def _is_claimed(path: Path) -> bool:
    """Whether a recorder is registered as its writer; also if that cannot be read."""
    try:
        with contextlib.closing(_connect(path, "mode=ro&immutable=1")) as database:
            return database.execute("SELECT 1 FROM writer LIMIT 1").fetchone() is not None
    except (sqlite3.Error, Unreadable):
        return True


def check_file(path: Path) -> None:
    """Reject a file that is not a recording by its first bytes, without blocking."""
    try:
        # Opening a pipe without a writer would block forever.
        if not stat.S_ISREG(path.stat().st_mode):
            what = "a directory; name the recording in it" if path.is_dir() else "not a regular file"
            raise Unreadable(f"{path} is {what}")
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise NoRecording(f"no recording {path}: no such file") from None
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not header:
        raise NoRecording(f"{path} is empty: nothing was recorded")
    schema, application = (int.from_bytes(header[at : at + 4], "big") for at in (SCHEMA_AT, APPLICATION_AT))
    if len(header) < HEADER_BYTES and header.startswith(MAGIC):
        raise NoRecording(f"{path} ends before anything was recorded")
    if header.startswith(MAGIC) and application == APPLICATION_ID and schema <= SCHEMA:
        return
    if schema >= MAX_SCHEMAS or application != APPLICATION_ID or not header.startswith(MAGIC):
        _refuse_if_foreign(path, header)
        raise DamagedFile(f"{path} cannot be read as a recording: its beginning is damaged")
    raise Unreadable(f"{path} was written by a newer ddpwatch (schema {schema}); this one reads up to {SCHEMA}")


def _refuse_if_foreign(path: Path, header: bytes) -> None:
    """Reject a file with another header, unless the content after it is that of a recording."""
    try:
        with path.open("rb") as file:
            beginning = file.read(SEARCHED_BYTES)
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror or error}") from None
    if all(sign in beginning for sign in OUR_SIGNS):
        return
    if header.startswith(MAGIC):
        raise Unreadable(f"{path} is a database of another program, not a ddpwatch recording")
    raise Unreadable(f"{path} is not a ddpwatch recording; make one with `ddpwatch record -o FILE`")


def _connect(path: Path, how: str) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.absolute()))}?{how}"
    database = sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA trusted_schema = OFF")
        right = _has_our_tables(database)
    except sqlite3.OperationalError:
        database.close()
        raise
    except (sqlite3.Error, UnicodeDecodeError) as error:
        # UnicodeDecodeError if SQLite's own message quotes damaged bytes.
        database.close()
        reason = "it is damaged" if isinstance(error, UnicodeDecodeError) else error
        raise DamagedFile(f"{path} cannot be read as a recording: {reason}") from None
    if not right:
        database.close()
        raise DamagedFile(f"{path} cannot be read as a recording: its tables are different")
    return database


def _connect_copy(path: Path) -> sqlite3.Connection:
    """Open a temporary copy, unlinked while open: SQLite reads a WAL only in a writable directory."""
    try:
        with tempfile.TemporaryDirectory(prefix="ddpwatch-") as folder:
            return _connect(copy_with_wal(path, Path(folder)), "mode=ro")
    except OSError as error:
        reason = error.strerror or error
        raise Unreadable(
            f"{path} continues in {_wal(path).name}, which cannot be read in a read-only directory, and no temporary "
            f"copy could be made: {reason}; copy both files to a writable directory"
        ) from None


def copy_with_wal(path: Path, folder: Path) -> Path:
    """Copy a recording, and its WAL if it has one, into a folder. Raises `OSError`."""
    copy = folder / path.name
    shutil.copyfile(path, copy)
    if _wal(path).exists():
        shutil.copyfile(_wal(path), _wal(copy))
    return copy


def create_tables(database: sqlite3.Connection) -> None:
    """Make an empty database a recording; does nothing if it has tables already."""
    database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    database.execute("PRAGMA auto_vacuum = INCREMENTAL")
    database.execute("BEGIN IMMEDIATE")
    if not database.execute("PRAGMA schema_version").fetchone()[0]:
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute(f"PRAGMA user_version = {SCHEMA}")
        for statement in TABLES:
            database.execute(statement)
    database.execute("COMMIT")


def _wal(path: Path) -> Path:
    return Path(f"{path}-wal")


def _has_our_tables(database: sqlite3.Connection) -> bool:
    (size,) = database.execute("SELECT coalesce(sum(length(sql)), 0) FROM sqlite_master").fetchone()
    if size != sum(map(len, TABLES)):
        return False
    return {sql for (sql,) in database.execute("SELECT sql FROM sqlite_master")} == set(TABLES)
