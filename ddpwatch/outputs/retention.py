"""Lets go of the oldest part of a recording, by age or by size, and gives its room back.

What stays begins at a checkpoint, so that it can be read from its first frame on.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from typing import Final

from ddpwatch.recording import ALERTS

CLEAR_S: Final = 10.0
"""It is looked so often what must go."""
ROOM: Final = 0.97
"""When there is too much, so much of what is allowed is kept."""
SPARE: Final = 0.1
"""Part of the file that may be empty: it is filled again soon. What is more goes back to the disk …"""
AT_ONCE_PAGES: Final = 16_384
"""… but no more than this at a time."""


class Retention:
    """Of one file, for the thread that writes it."""

    def __init__(self, database: sqlite3.Connection, *, keep_s: float | None, max_bytes: int | None) -> None:
        """Without limits nothing ever goes."""
        self._database = database
        self._keep_s, self._max_bytes = keep_s, max_bytes
        self._due_s = 0.0

    def clear(self) -> None:
        """Look what must go, if it is time to."""
        now_s = time.monotonic()
        if (self._keep_s is None and self._max_bytes is None) or now_s < self._due_s:
            return
        self._due_s = now_s + CLEAR_S
        # A disk that is full now may not be later: what could not be cleared away is looked for again.
        with contextlib.suppress(sqlite3.Error):
            if self._keep_s is not None:
                (until_ns,) = self._database.execute("SELECT max(until_ns) FROM span").fetchone()
                self._forget_before((until_ns or 0) - int(self._keep_s * 1e9))
            if self._max_bytes is not None and self._used_bytes() > self._max_bytes:
                self._shrink(int(ROOM * self._max_bytes))
            self._give_back()

    def _forget_before(self, at_ns: int) -> None:
        """Let everything go that no reader needs who begins at that time."""
        query = "SELECT id, attempt, at_ns, position FROM checkpoint WHERE at_ns <= ? ORDER BY at_ns DESC LIMIT 1"
        row = self._database.execute(query, (at_ns,)).fetchone()
        if row is not None:
            self._begin_at(*row)

    def _shrink(self, upto_bytes: int) -> None:
        """Let the oldest go until the rest fits."""
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
        # Checkpoints before that go as well, so this is a little too much, and never too little.
        query = (
            "SELECT id, attempt, at_ns, position FROM checkpoint WHERE (attempt, at_ns) >= (?, ?) "
            "ORDER BY attempt, at_ns LIMIT 1"
        )
        row = self._database.execute(query, oldest[:2]).fetchone()
        if row is not None:
            self._begin_at(*row)

    def _begin_at(self, checkpoint: int, attempt: int, at_ns: int, position: int) -> None:
        """What was before this checkpoint goes. Alerts of the same attempt stay: some of them may be open yet."""
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            for table in ("attempt", "span", "block", "checkpoint", "gap", "alert"):
                column = "id" if table == "attempt" else "attempt"
                database.execute(f"DELETE FROM {table} WHERE {column} < ?", (attempt,))  # noqa: S608 - our own names
            # By time first, for which there is an index.
            database.execute(
                "DELETE FROM block WHERE attempt = ? AND last_ns <= ? AND position <= ? AND shard <> ?",
                (attempt, at_ns, position, ALERTS),
            )
            # How alerts read at the checkpoint was written after it, with the same time.
            database.execute(
                "DELETE FROM block WHERE attempt = ? AND last_ns < ? AND shard = ?", (attempt, at_ns, ALERTS)
            )
            database.execute(
                "DELETE FROM checkpoint WHERE attempt = ? AND at_ns <= ? AND id < ?", (attempt, at_ns, checkpoint)
            )
            database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise

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
