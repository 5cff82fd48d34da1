"""The recorder's SQLite file: creation, writing in transactions, and retention by age and size.

Used by one thread at a time. What retention keeps begins at a checkpoint, so that it can be read from its first frame.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from ddpwatch import rundir
from ddpwatch.core.alerts.model import AlertEvent, Moment
from ddpwatch.core.alerts.recorded import read_event
from ddpwatch.errors import UsageError
from ddpwatch.recording.schema import ALERTS, LATEST_NS, Unreadable, describe, pack, pack_messages
from ddpwatch.recording.sqlite_open import check_file, connect, create_tables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.recording.schema import RecordedBy
    from ddpwatch.recording.writer import Portion

CLEAR_S: Final = 10.0
"""Seconds between two runs of retention."""
ROOM: Final = 0.97
"""Fraction of the size limit that is kept when it is exceeded."""
SPARE: Final = 0.1
"""Fraction of the file's pages that may stay free for reuse; more are returned to the file system."""
AT_ONCE_PAGES: Final = 16_384
"""Max pages that are returned to the file system at a time."""
FRESH_S: Final = 30.0
"""Seconds since the last write of a recorder on another host in which it counts as running."""
LAST_WAIT_MS: Final = 200
"""Max milliseconds to wait for readers when the file is closed."""


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise


class Retention:
    """Removes the oldest part of a recording, by age or by size. Used by the thread that writes it."""

    def __init__(self, database: sqlite3.Connection, *, keep_s: float | None, max_bytes: int | None) -> None:
        self._database = database
        self._keep_s, self._max_bytes = keep_s, max_bytes
        self._due_s = 0.0

    def clear(self) -> None:
        """Remove what exceeds the limits, at most every `CLEAR_S`."""
        now_s = time.monotonic()
        if (self._keep_s is None and self._max_bytes is None) or now_s < self._due_s:
            return
        self._due_s = now_s + CLEAR_S
        # On a full disk it fails, and is tried again later.
        with contextlib.suppress(sqlite3.Error):
            if self._keep_s is not None:
                (until_ns,) = self._database.execute("SELECT max(until_ns) FROM span").fetchone()
                self._forget_before((until_ns or 0) - int(self._keep_s * 1e9))
            if self._max_bytes is not None and self._used_bytes() > self._max_bytes:
                self._shrink(int(ROOM * self._max_bytes))
            self._give_back()

    def _forget_before(self, at_ns: int) -> None:
        """Remove everything that a reader that starts at that time does not need."""
        query = "SELECT id, attempt, at_ns, position FROM checkpoint WHERE at_ns <= ? ORDER BY at_ns DESC LIMIT 1"
        row = self._database.execute(query, (at_ns,)).fetchone()
        if row is not None:
            self._begin_at(*row)

    def _shrink(self, upto_bytes: int) -> None:
        too_much = self._used_bytes() - upto_bytes
        sizes = self._database.execute(
            "SELECT attempt, last_ns, length(data) FROM block ORDER BY attempt, last_ns, portion, shard"
        )
        oldest = None
        for row in sizes:
            oldest = row
            too_much -= row[2]
            if too_much <= 0:
                break
        sizes.close()
        if oldest is None:
            return
        # Earlier checkpoints are removed too, so this is slightly more than necessary, and never less.
        query = (
            "SELECT id, attempt, at_ns, position FROM checkpoint WHERE (attempt, at_ns) >= (?, ?) "
            "ORDER BY attempt, at_ns LIMIT 1"
        )
        row = self._database.execute(query, oldest[:2]).fetchone()
        if row is not None:
            self._begin_at(*row)

    def _begin_at(self, checkpoint: int, attempt: int, at_ns: int, position: int) -> None:
        """Remove what was before a checkpoint, except alerts of the same attempt: some may still be open."""
        database = self._database
        with _transaction(database):
            for table in ("attempt", "span", "block", "checkpoint", "gap", "alert"):
                column = "id" if table == "attempt" else "attempt"
                database.execute(f"DELETE FROM {table} WHERE {column} < ?", (attempt,))  # noqa: S608 - our own names
            # By time first, for which there is an index.
            database.execute(
                "DELETE FROM block WHERE attempt = ? AND last_ns <= ? AND position <= ? AND shard <> ?",
                (attempt, at_ns, position, ALERTS),
            )
            # The texts of alerts at the checkpoint were written after it, with the same time.
            database.execute(
                "DELETE FROM block WHERE attempt = ? AND last_ns < ? AND shard = ?", (attempt, at_ns, ALERTS)
            )
            database.execute(
                "DELETE FROM checkpoint WHERE attempt = ? AND at_ns <= ? AND id < ?", (attempt, at_ns, checkpoint)
            )

    def _give_back(self) -> None:
        spare = int(SPARE * self._number("page_count"))
        if self._max_bytes is not None:
            allowed = self._max_bytes // self._number("page_size")
            spare = min(spare, max(0, allowed - (self._number("page_count") - self._number("freelist_count"))))
        too_many = min(self._number("freelist_count") - spare, AT_ONCE_PAGES)
        if too_many > 0:
            self._database.execute(f"PRAGMA incremental_vacuum({too_many})").fetchall()

    def _used_bytes(self) -> int:
        return (self._number("page_count") - self._number("freelist_count")) * self._number("page_size")

    def _number(self, name: str) -> int:
        return int(self._database.execute(f"PRAGMA {name}").fetchone()[0])


class RecordingFile:
    """A recording that is open for writing."""

    def __init__(self, path: Path, *, keep_s: float | None, max_bytes: int | None) -> None:
        """Open or create the file. Rejects one that is not a recording, or that another process writes."""
        self.path = path
        made = _is_missing(path)
        self._was_there = made and path.exists()
        """Whether there was an empty file, which stays empty if nothing is recorded."""
        if made:
            _make(path)
        self._database = connect(path, write=True)
        try:
            self._claim()
            self._read()
        except sqlite3.Error as error:
            self._database.close()
            raise UsageError(f"{path} cannot be written: {error}; record into another file") from None
        except UsageError:
            self._database.close()
            raise
        self._retention = Retention(self._database, keep_s=keep_s, max_bytes=max_bytes)
        self._identity = path.stat()
        self._unused = made

    def _read(self) -> None:
        """Continue after the existing content."""
        database = self._database
        self.next_position = self.next_portion = self.last_ns = 0
        # From the rows of the newest portion: the maximum over all rows would scan the table.
        newest = "SELECT position, portion, last_ns FROM block ORDER BY id DESC LIMIT 65536"
        for position, portion, last_ns in database.execute(newest):
            if portion < self.next_portion - 1:
                break
            self.next_position = max(self.next_position, position + 1)
            self.next_portion = max(self.next_portion, portion + 1)
            self.last_ns = max(self.last_ns, last_ns)
        row = database.execute("SELECT position, at_ns FROM checkpoint ORDER BY id DESC LIMIT 1").fetchone()
        if row is not None:
            self.next_position, self.last_ns = max(self.next_position, row[0] + 1), max(self.last_ns, row[1])
        (until_ns,) = database.execute("SELECT max(until_ns) FROM span").fetchone()
        self.last_ns = max(self.last_ns, until_ns or 0)
        if self.last_ns >= LATEST_NS:
            raise UsageError(f"{self.path} holds impossible times; record into another file")
        self._attempts: dict[str, tuple[int, bytes, int]] = {}
        """By run id: number of the attempt, its description, and its number of ranks."""
        for number, text in database.execute("SELECT id, run FROM attempt"):
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                run = msgspec.json.decode(text, type=rundir.RunFile)
                self._attempts[run.id] = number, text, len(run.endpoints)
        self._latest: tuple[rundir.RunFile, RecordedBy, int] | None = None
        """Run, recorder and number of the attempt of the last portion."""
        self._left = {number for number, _, _ in self._attempts.values()}
        """Attempts of earlier recorders that were not continued yet."""

    def put(self, portion: Portion) -> None:
        """Write a portion in one transaction. Raises what SQLite raises, or `OSError` if the file was removed."""
        self._check_place()
        attempts = dict(self._attempts)
        try:
            with _transaction(self._database):
                attempt = self._attempt(portion)
                if attempt in self._left:
                    self._close_alerts(attempt)
                self._put(portion, attempt)
        except BaseException:
            self._attempts = attempts
            raise
        self._latest = portion.run, portion.recorded_by, attempt
        self._left.discard(attempt)
        self._unused = False
        self._retention.clear()

    def close(self) -> None:
        """Leave a single file without a WAL, if disk and readers permit; none if nothing was recorded."""
        for statement in (
            f"PRAGMA busy_timeout = {LAST_WAIT_MS}",
            "DELETE FROM writer",
            "PRAGMA wal_checkpoint(TRUNCATE)",
            "PRAGMA journal_mode = DELETE",
        ):
            with contextlib.suppress(sqlite3.Error):
                self._database.execute(statement).fetchall()
        self._database.close()
        if self._unused:
            with contextlib.suppress(OSError):
                self._check_place()
                if self._was_there:
                    os.truncate(self.path, 0)
                else:
                    # The file that was created, and not an existing link to it.
                    self.path.resolve().unlink()

    def _put(self, portion: Portion, attempt: int) -> None:
        database = self._database
        until_ns = portion.until_ns
        shards = {**portion.shards, ALERTS: portion.texts} if portion.texts.positions else portion.shards
        for shard, frames in sorted(shards.items()):
            first_ns, last_ns, position = frames.times_ns[0], frames.times_ns[-1], frames.positions[-1]
            until_ns = max(until_ns, last_ns)
            database.execute(
                "INSERT INTO block (attempt, portion, shard, first_ns, last_ns, position, frames, data) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    attempt, portion.number, shard, first_ns, last_ns, position, len(frames.positions), pack(frames),
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
        if portion.missed:
            database.execute(
                "INSERT INTO gap (attempt, at_ns, frames) VALUES (?, ?, ?)", (attempt, until_ns, portion.missed)
            )
        database.execute(
            "INSERT INTO span VALUES (?, ?) ON CONFLICT DO UPDATE SET until_ns = max(until_ns, excluded.until_ns)",
            (attempt, until_ns or portion.began_ns),
        )

    def _attempt(self, portion: Portion) -> int:
        if self._latest is not None and self._latest[0] is portion.run and self._latest[1] is portion.recorded_by:
            # Nearly always: saves encoding the description of a thousand ranks to compare it.
            return self._latest[2]
        text, ranks = describe(portion.run, portion.recorded_by), len(portion.run.endpoints)
        number, before, known = self._attempts.get(portion.run.id, (0, b"", 0))
        if not number:
            row = self._database.execute(
                "INSERT INTO attempt (run, began_ns) VALUES (?, ?) RETURNING id", (text, portion.began_ns)
            ).fetchone()
            number = int(row[0])
        elif text != before and ranks >= known:
            # More ranks registered, or thresholds changed. A recorder that attaches again knows no fewer ranks.
            self._database.execute("UPDATE attempt SET run = ? WHERE id = ?", (text, number))
        else:
            return number
        self._attempts[portion.run.id] = number, text, ranks
        return number

    def _close_alerts(self, attempt: int) -> None:
        """Close the alerts that were open when the last recorder ended; the next one evaluates anew."""
        database = self._database
        still_open: dict[tuple[str, str], Alert] = {}
        for (text,) in database.execute("SELECT event FROM alert WHERE attempt = ? ORDER BY id", (attempt,)):
            event = read_event(text) if isinstance(text, bytes) else None
            if event is not None and event.kind != "closed":
                still_open[event.alert.key] = event.alert
            elif event is not None:
                still_open.pop(event.alert.key, None)
        row = database.execute("SELECT until_ns FROM span WHERE attempt = ?", (attempt,)).fetchone()
        for alert in still_open.values():
            last = alert.last
            until_ns = last.now_ns if row is None else max(row[0], last.now_ns)
            unix_ns = last.unix_ns + until_ns - last.now_ns if last.unix_ns else 0
            # `core.alerts.recorded.RejoinedAlerts` recognizes such an end by its missing step.
            ended = replace(alert, closed=Moment(None, until_ns, unix_ns))
            database.execute(
                "INSERT INTO alert (attempt, at_ns, kind, event) VALUES (?, ?, ?, ?)",
                (attempt, until_ns, "closed", msgspec.json.encode(AlertEvent("closed", ended))),
            )

    def _claim(self) -> None:
        """Register this process as the writer, unless another one is."""
        database = self._database
        # In WAL mode readers are not blocked, and commits survive a kill.
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        with _transaction(database):
            self._refuse_if_written()
            database.execute("DELETE FROM writer")
            pid = os.getpid()
            ours = (rundir.node_id(), pid, rundir.created_s(pid) or 0.0)
            database.execute("INSERT INTO writer VALUES (?, ?, ?)", ours)
        # Into the file itself, so that a copy without the WAL shows that it was not closed.
        database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _refuse_if_written(self) -> None:
        (until_ns,) = self._database.execute("SELECT max(until_ns) FROM span").fetchone()
        is_fresh = time.time_ns() - (until_ns or 0) < FRESH_S * 1e9
        for node, pid, created_s in self._database.execute("SELECT node, pid, pid_created_s FROM writer").fetchall():
            if not (isinstance(node, str) and isinstance(pid, int) and isinstance(created_s, float)):
                continue
            if rundir.runs_here(node, pid, created_s) if node == rundir.node_id() else is_fresh:
                raise UsageError(f"{self.path} is being written by process {pid}; record into another file")

    def _check_place(self) -> None:
        """Raise `OSError` if the path leads to another file: what is written into an unlinked one is lost."""
        found = self.path.stat()
        if (found.st_dev, found.st_ino) != (self._identity.st_dev, self._identity.st_ino):
            raise OSError(0, "another file has taken its place")


def _is_missing(path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return True
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path} cannot be used: {getattr(error, 'strerror', None) or error}") from None
    return stat.S_ISREG(found.st_mode) and not found.st_size


def _make(path: Path) -> None:
    """Create an empty recording that only its owner may read: it holds names, paths and stacks.

    Atomic: a killed process leaves an empty file, and concurrent ones find the tables created.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.fchmod(handle, 0o600)
        finally:
            os.close(handle)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
            create_tables(database)
    except (OSError, sqlite3.Error) as error:
        raise UsageError(f"cannot create {path}: {getattr(error, 'strerror', error)}") from None
    check_file(path)
