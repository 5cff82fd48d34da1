"""The file behind a recorder: makes it, writes portions into it, and lets go of what is too old or too much.

Used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from typing import TYPE_CHECKING, Final

import msgspec

from ddpwatch import rundir
from ddpwatch.errors import UsageError
from ddpwatch.recording import APPLICATION_ID, SCHEMA, TABLES, connect, pack, pack_messages

if TYPE_CHECKING:
    from pathlib import Path

    from ddpwatch.outputs.recorder import Portion

CLEAR_S: Final = 10.0
"""It is looked so often what must go."""
ROOM: Final = 0.95
"""When there is too much, so much of what is allowed is kept."""
FRESH_S: Final = 30.0
"""A recorder on another host has written within this time, or it does no more."""


class Shelf:
    """A recording that is written."""

    def __init__(self, path: Path, *, keep_s: float | None, max_bytes: int | None) -> None:
        """Open it, or make it. Refuses a file that is something else, or that another process writes."""
        self.path = path
        self._keep_s, self._max_bytes = keep_s, max_bytes
        self._clear_due_s = 0.0
        made = not path.exists() or not path.stat().st_size
        if made:
            _make(path)
        self._database = connect(path, write=True)
        try:
            self._claim()
        except sqlite3.Error as error:
            self._database.close()
            raise UsageError(f"{path} cannot be written: {error}") from None
        except UsageError:
            self._database.close()
            raise
        self.next_portion = self._largest("portion", "block") + 1
        # Of the last portion all frames are looked at by its reader; far enough is enough.
        self.next_position = self._largest("position", "checkpoint") + 1 + self._frames_since()
        self._attempts: dict[str, int] = {}
        for number, text in self._database.execute("SELECT id, run FROM attempt"):
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                self._attempts[msgspec.json.decode(text, type=rundir.RunFile).id] = number

    def put(self, portion: Portion) -> None:
        """Write it, wholly or not at all. Raises what SQLite raises."""
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            attempt = self._attempt(portion)
            for shard, entries in sorted(portion.shards.items()):
                database.execute(
                    "INSERT INTO block (attempt, portion, shard, first_ns, last_ns, frames, data) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        attempt, portion.number, shard, entries[0].at_ns, entries[-1].at_ns, len(entries),
                        pack(entries),
                    ),
                )  # fmt: skip
            if portion.checkpoint is not None:
                at_ns, position, messages = portion.checkpoint
                database.execute(
                    "INSERT INTO checkpoint (attempt, at_ns, position, data) VALUES (?, ?, ?, ?)",
                    (attempt, at_ns, position, pack_messages(messages)),
                )
            database.executemany(
                "INSERT INTO alert (attempt, at_ns, kind, event) VALUES (?, ?, ?, ?)",
                [(attempt, at_ns, event.kind, msgspec.json.encode(event)) for at_ns, event in portion.alerts],
            )
            database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            self._attempts.pop(portion.run.id, None)
            raise
        self._clear()

    def close(self) -> None:
        """Leave one file that can be copied, if the disk lets us."""
        with contextlib.suppress(sqlite3.Error):
            self._database.execute("DELETE FROM writer")
        with contextlib.suppress(sqlite3.Error):
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with contextlib.suppress(sqlite3.Error):
            self._database.execute("PRAGMA journal_mode = DELETE")
        self._database.close()

    def _claim(self) -> None:
        """Say that we write it, unless somebody else does."""
        database = self._database
        # Readers go on while we write, and what was committed survives our end.
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("BEGIN IMMEDIATE")
        try:
            self._refuse_if_written()
            database.execute("DELETE FROM writer")
            pid = os.getpid()
            ours = (rundir.node_id(), pid, rundir.created_s(pid) or 0.0)
            database.execute("INSERT INTO writer VALUES (?, ?, ?)", ours)
            database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise

    def _refuse_if_written(self) -> None:
        for node, pid, created_s in self._database.execute("SELECT node, pid, pid_created_s FROM writer").fetchall():
            if self._writes(node, pid, created_s):
                raise UsageError(f"{self.path} is being written by process {pid}; record into another file")

    def _writes(self, node: str, pid: int, created_s: float) -> bool:
        if node == rundir.node_id():
            found_s = rundir.created_s(pid)
            return pid != os.getpid() and found_s is not None and abs(found_s - created_s) < 0.1
        return time.time_ns() - self._largest("last_ns", "block") < FRESH_S * 1e9

    def _attempt(self, portion: Portion) -> int:
        number = self._attempts.get(portion.run.id)
        text = msgspec.json.encode(portion.run)
        if number is None:
            row = self._database.execute(
                "INSERT INTO attempt (run, began_ns) VALUES (?, ?) RETURNING id", (text, portion.began_ns)
            ).fetchone()
            number = self._attempts[portion.run.id] = int(row[0])
        return number

    def _largest(self, column: str, table: str) -> int:
        (value,) = self._database.execute(f"SELECT max({column}) FROM {table}").fetchone()  # noqa: S608 - our own names
        return -1 if value is None else int(value)

    def _frames_since(self) -> int:
        """At most so many frames came after the last checkpoint."""
        (at_ns,) = self._database.execute("SELECT max(at_ns) FROM checkpoint").fetchone()
        (count,) = self._database.execute(
            "SELECT coalesce(sum(frames), 0) FROM block WHERE last_ns >= ?", (at_ns or 0,)
        ).fetchone()
        return int(count)

    def _clear(self) -> None:
        now_s = time.monotonic()
        if now_s < self._clear_due_s:
            return
        self._clear_due_s = now_s + CLEAR_S
        # A disk that is full now may not be later: what could not be cleared away is looked for again.
        with contextlib.suppress(sqlite3.Error):
            if self._keep_s is not None:
                self._forget_before(self._largest("last_ns", "block") - int(self._keep_s * 1e9))
            if self._max_bytes is not None and self._used_bytes() > self._max_bytes:
                self._shrink(int(ROOM * self._max_bytes))
            self._database.execute("PRAGMA incremental_vacuum").fetchall()

    def _shrink(self, upto_bytes: int) -> None:
        """Let the oldest go until the rest fits."""
        too_much = self._used_bytes() - upto_bytes
        query = "SELECT last_ns, length(data) FROM block ORDER BY last_ns"
        for last_ns, size in self._database.execute(query).fetchall():
            too_much -= size
            if too_much <= 0:
                self._forget_before(last_ns + 1)
                return

    def _forget_before(self, at_ns: int) -> None:
        for statement in ("DELETE FROM block WHERE last_ns < ?", "DELETE FROM checkpoint WHERE at_ns < ?"):
            self._database.execute(statement, (at_ns,))

    def _used_bytes(self) -> int:
        pages, free, size = (
            int(self._database.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size


def _make(path: Path) -> None:
    """A new and empty recording, which only its owner may read: it holds names, paths and stacks."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.close(handle)
    except OSError as error:
        raise UsageError(f"cannot make {path}: {error.strerror}") from None
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("PRAGMA auto_vacuum = INCREMENTAL")
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {SCHEMA}")
            database.executescript(TABLES)
    except sqlite3.Error as error:
        raise UsageError(f"cannot make {path}: {error}") from None
