"""Open the SQLite file of a recording for reading or writing. Other files are refused, damage is reported."""

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

from ddpwatch.recording.schema import APPLICATION_ID, PAGE_BYTES, SCHEMA, TABLES, NoRecording, Torn, Unreadable

MAGIC: Final = b"SQLite format 3\x00"
HEADER_BYTES: Final = 100
WRITE_VERSION_AT: Final = 18
WITH_LOG: Final = 2
SCHEMA_AT: Final = 60
APPLICATION_AT: Final = 68
MAX_SCHEMAS: Final = 1000
"""There will never be so many: a file that claims it is damaged."""
OUR_SIGNS: Final = (b'"world_size":', b"\x28\xb5\x2f\xfd")
"""The description of a run, and compressed data: both are in the beginning of every recording."""
LOOKED_AT_BYTES: Final = 1 << 20


def connect(path: Path, *, write: bool = False) -> sqlite3.Connection:
    """Open a recording that is there. Raises `NoRecording` or `Unreadable` with the reason in words."""
    check_file(path)
    try:
        if not write and _goes_by_log(path) and not _log(path).exists():
            # SQLite would make one, and leave it behind.
            return _connect(path, "mode=ro&immutable=1")
        return _connect(path, "mode=rw" if write else "mode=ro")
    except sqlite3.OperationalError as error:
        if write or os.access(path.parent, os.W_OK):
            raise Torn(f"{path} cannot be read as a recording: {error}") from None
    try:
        if _log_bytes(path):
            return _connect_copy(path)
        # Where nothing may be written, nobody writes: SQLite need not look whether somebody does.
        return _connect(path, "mode=ro&immutable=1")
    except sqlite3.Error as error:
        raise Torn(f"{path} cannot be read as a recording: {error}") from None


def lacks_its_log(path: Path) -> bool:
    """Whether it was left by a recorder that did not come to close it, or copied while it was written, and what that
    had written last is not beside it.
    """
    # SQLite empties a log, or takes it away, when all of it is in the file. That is so of one that somebody else read
    # while it was closed, which still goes by a log.
    return _goes_by_log(path) and not _log(path).exists() and _is_claimed(path)


def _goes_by_log(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError:
        return False
    return len(header) == HEADER_BYTES and header.startswith(MAGIC) and header[WRITE_VERSION_AT] == WITH_LOG


def _is_claimed(path: Path) -> bool:
    """Whether a recorder has said in it that it writes it, and has not taken that back; also where that cannot be
    read.
    """
    try:
        with contextlib.closing(_connect(path, "mode=ro&immutable=1")) as database:
            return database.execute("SELECT 1 FROM writer LIMIT 1").fetchone() is not None
    except (sqlite3.Error, Unreadable):
        return True


def check_file(path: Path) -> None:
    """Refuse what is no recording by its first bytes, without waiting for anything."""
    try:
        # Opening a pipe that nobody writes to would wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            what = "a directory; name the recording in it" if path.is_dir() else "no regular file"
            raise Unreadable(f"{path} is {what}")
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise NoRecording(f"no recording {path}: there is no such file") from None
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
        raise Torn(f"{path} cannot be read as a recording: its beginning is damaged")
    raise Unreadable(f"{path} was written by a newer ddpwatch (schema {schema}); this one reads up to {SCHEMA}")


def _refuse_if_foreign(path: Path, header: bytes) -> None:
    """What begins otherwise than a recording does is none, unless the rest of it is as in one."""
    try:
        with path.open("rb") as file:
            beginning = file.read(LOOKED_AT_BYTES)
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror or error}") from None
    if all(sign in beginning for sign in OUR_SIGNS):
        return
    if header.startswith(MAGIC):
        raise Unreadable(f"{path} is a database of another program, and no recording of ddpwatch")
    raise Unreadable(f"{path} is no recording of ddpwatch; `ddpwatch record -o FILE` makes one")


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
        # The latter where SQLite's own words hold a part of what it could not read.
        database.close()
        reason = "it is damaged" if isinstance(error, UnicodeDecodeError) else error
        raise Torn(f"{path} cannot be read as a recording: {reason}") from None
    if not right:
        database.close()
        raise Torn(f"{path} cannot be read as a recording: its tables are not those of one")
    return database


def _connect_copy(path: Path) -> sqlite3.Connection:
    """SQLite reads what is still in the log only where it may write beside it. The copy has no name any more when it
    is open, so that nothing of it is left, however this ends.
    """
    log = _log(path)
    try:
        with tempfile.TemporaryDirectory(prefix="ddpwatch-") as folder:
            return _connect(copy_with_log(path, Path(folder)), "mode=ro")
    except OSError as error:
        reason = error.strerror or error
        raise Unreadable(
            f"{path} goes on in {log.name}, which is read in a copy where nothing may be written beside it, and none "
            f"could be made: {reason}; copy both to where you may write"
        ) from None


def copy_with_log(path: Path, folder: Path) -> Path:
    """A copy of a recording and of its log, if there is one, in a folder. Raises `OSError`."""
    copy = folder / path.name
    shutil.copyfile(path, copy)
    if _log(path).exists():
        shutil.copyfile(_log(path), _log(copy))
    return copy


def create_tables(database: sqlite3.Connection) -> None:
    """Make an empty database a recording; leaves one alone that has tables already."""
    database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    database.execute("PRAGMA auto_vacuum = INCREMENTAL")
    database.execute("BEGIN IMMEDIATE")
    if not database.execute("PRAGMA schema_version").fetchone()[0]:
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute(f"PRAGMA user_version = {SCHEMA}")
        for statement in TABLES:
            database.execute(statement)
    database.execute("COMMIT")


def _log(path: Path) -> Path:
    return Path(f"{path}-wal")


def _log_bytes(path: Path) -> int:
    try:
        return _log(path).stat().st_size
    except OSError:
        return 0


def _has_our_tables(database: sqlite3.Connection) -> bool:
    (size,) = database.execute("SELECT coalesce(sum(length(sql)), 0) FROM sqlite_master").fetchone()
    if size != sum(map(len, TABLES)):
        return False
    return {sql for (sql,) in database.execute("SELECT sql FROM sqlite_master")} == set(TABLES)
