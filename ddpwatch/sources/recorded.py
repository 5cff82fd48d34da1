"""What a recording holds: its attempts, their frames by time, the moments to begin at, and the alerts that were told.

Reads while somebody else writes. A part that cannot be read is passed over and counted; where SQLite itself gives up,
what is left is read page by page.
"""

from __future__ import annotations

import contextlib
import sqlite3
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from ddpwatch.errors import WireError
from ddpwatch.recording import (
    LATEST_NS,
    MAX_BLOCK_BYTES,
    Damaged,
    NoRecording,
    Torn,
    Unreadable,
    connect,
    unpack,
    unpack_messages,
)
from ddpwatch.rundir import RunFile
from ddpwatch.sources.salvage import salvage
from ddpwatch.wire import Hello, Snap, decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ddpwatch.recording import Entry

MOST_ATTEMPTS: Final = 10_000
MOST_ALERTS: Final = 100_000
"""More are not read: nobody could look at them."""
MAX_EVENT_BYTES: Final = 1 << 20
PAGE_ROWS: Final = 512
"""Rows that are asked for at once. A query that stays open would keep the recorder from clearing its log."""
LONGEST_NS: Final = 60_000_000_000
"""A block spans a second or two; none reaches further back than this."""
LOOKED_AT: Final = 4096
"""Frames in which the description of a run is looked for, where its own is damaged."""


class Attempt(NamedTuple):
    """One run in the recording."""

    id: int
    run: RunFile
    first_ns: int
    last_ns: int
    """How far it was followed: up to its last frame, or the silence after it."""


class Checkpoint(NamedTuple):
    """A moment from which one can go on."""

    at_ns: int
    position: int
    """The frames up to this one are in it."""
    payloads: list[bytes]
    """To be applied to an empty state, in this order …"""
    times_ns: list[int]
    """… each at its own time: what a rank has said last is as old as it was."""


class AlertRow(NamedTuple):
    """A change of an alert, as it was told."""

    attempt: int
    at_ns: int
    kind: str
    event: bytes
    """JSON of a `core.alerts.AlertEvent`."""


class Gap(NamedTuple):
    """Frames that came and could not be written."""

    attempt: int
    at_ns: int
    frames: int


class Recorded:
    """A recording that is read. Belongs to one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Open it; raises `NoRecording` or `Unreadable`."""
        self.path = path
        self.damaged = 0
        """Parts that could not be read so far."""
        self._salvaged = False
        try:
            self._database = connect(path)
        except Torn as error:
            self._salvage(error)
        self.attempts = self._attempts()
        if not self.attempts:
            self.close()
            if self.damaged:
                raise Unreadable(f"{path} is damaged, and nothing in it can be read")
            raise NoRecording(f"nothing was recorded in {path}")

    @property
    def first_ns(self) -> int:
        """When the first frame came."""
        return min(attempt.first_ns for attempt in self.attempts)

    @property
    def last_ns(self) -> int:
        """When the last one came."""
        return max(attempt.last_ns for attempt in self.attempts)

    def attempt_at(self, at_ns: int) -> Attempt:
        """The one that was under way, or the last before; the first, if there is none."""
        begun = [attempt for attempt in self.attempts if attempt.first_ns <= at_ns]
        return begun[-1] if begun else self.attempts[0]

    def refresh(self) -> None:
        """Look again how far it goes: somebody may be writing."""
        self.attempts = self._attempts() or self.attempts

    def entries(
        self,
        attempt: Attempt,
        *,
        from_ns: int | None = None,
        upto_ns: int | None = None,
        after: int = -1,
        shard: int | None = None,
    ) -> Iterator[Entry]:
        """Frames in the order in which they came: those later than `from_ns` and up to `upto_ns`, and `after` a
        position; of all ranks, or of one `shard` of them.
        """
        for _, blocks in groupby(self._blocks(attempt, from_ns, upto_ns, shard), lambda block: block[1]):
            together: list[Entry] = []
            for block, _ in blocks:
                together.extend(self._unpacked(block))
            together.sort()
            for entry in together:
                if (
                    entry.position > after
                    and (from_ns is None or entry.at_ns > from_ns)
                    and (upto_ns is None or entry.at_ns <= upto_ns)
                ):
                    yield entry

    def checkpoint(self, attempt: Attempt, at_ns: int) -> Checkpoint | None:
        """The last one up to a moment that can be read; None = begin with the first frame."""
        query = (
            "SELECT id, at_ns, position FROM checkpoint WHERE attempt = ? AND at_ns <= ? "
            "ORDER BY at_ns DESC, id DESC LIMIT ?"
        )
        for number, found_ns, position in self._rows(query, (attempt.id, at_ns, PAGE_ROWS), "iii"):
            try:
                messages = unpack_messages(self._data("checkpoint", number))
            except Damaged:
                self.damaged += 1
                continue
            times_ns = [min(told_ns, found_ns) for told_ns, _ in messages]
            return Checkpoint(found_ns, position, [payload for _, payload in messages], times_ns)
        return None

    def alerts(self) -> list[AlertRow]:
        """Everything that was told, in order."""
        query = f"SELECT attempt, at_ns, kind, event FROM alert WHERE length(event) <= {MAX_EVENT_BYTES} ORDER BY id LIMIT ?"  # noqa: S608, E501 - our own number
        return [AlertRow(*row) for row in self._rows(query, (MOST_ALERTS,), "iitb")]

    def gaps(self) -> list[Gap]:
        """Where frames are missing because the disk was full, in order."""
        query = "SELECT attempt, at_ns, frames FROM gap ORDER BY id LIMIT ?"
        return [Gap(*row) for row in self._rows(query, (MOST_ALERTS,), "iii")]

    def frames(self, attempt: Attempt) -> int:
        """How many frames there are, to say how much is done."""
        query = "SELECT coalesce(sum(frames), 0) FROM block WHERE attempt = ?"
        return sum(count for (count,) in self._rows(query, (attempt.id,), "i"))

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def _attempts(self) -> list[Attempt]:
        rows = self._rows(
            "SELECT id, began_ns, run FROM attempt WHERE length(run) <= ? ORDER BY id LIMIT ?",
            (MAX_BLOCK_BYTES, MOST_ATTEMPTS),
            "iib",
        )
        described = {number: (began_ns, text) for number, began_ns, text in rows}
        # A description may be lost, and what it describes may not.
        there = {
            number for (number,) in self._rows("SELECT DISTINCT attempt FROM block LIMIT ?", (MOST_ATTEMPTS,), "i")
        }
        found = []
        for number in sorted(there | described.keys()):
            began_ns, text = described.get(number, (None, b""))
            run = _run(text) or self._run_of_frames(number)
            if run is None:
                self.damaged += 1
                continue
            first_ns, last_ns = self._span(number, began_ns)
            found.append(Attempt(number, run, first_ns, max(first_ns, last_ns)))
        return found

    def _span(self, attempt: int, began_ns: int | None) -> tuple[int, int]:
        query = "SELECT first_ns, last_ns FROM block WHERE attempt = ? ORDER BY last_ns {} LIMIT 1"
        first = self._rows(query.format("ASC"), (attempt,), "ii")
        last = self._rows(query.format("DESC"), (attempt,), "ii")
        until = self._rows("SELECT until_ns FROM span WHERE attempt = ?", (attempt,), "i")
        first_ns = first[0][0] if first else began_ns or 0
        return first_ns, max([last[0][1] if last else first_ns, *(until_ns for (until_ns,) in until)])

    def _run_of_frames(self, attempt: int) -> RunFile | None:
        """The run as its ranks describe it."""
        nobody = RunFile(1, "0" * 8, "", "", 0, 1, 0.0, [])
        unknown = Attempt(attempt, nobody, 0, LATEST_NS)
        for number, entry in enumerate(self.entries(unknown)):
            with contextlib.suppress(WireError, msgspec.ValidationError):
                message = decode(entry.payload)
                hello = message.hello if isinstance(message, Snap) else message
                if isinstance(hello, Hello):
                    fields = {"id": hello.run_id, "name": hello.run_name, "world_size": hello.world_size}
                    return msgspec.convert({**msgspec.to_builtins(nobody), **fields}, RunFile)
            if number >= LOOKED_AT:
                break
        return None

    def _blocks(
        self, attempt: Attempt, from_ns: int | None, upto_ns: int | None, shard: int | None
    ) -> Iterator[tuple[int, int]]:
        """Their ids and portions, in order."""
        query = "SELECT id, portion, last_ns, shard FROM block WHERE attempt = ?"
        values: list[int] = [attempt.id]
        if upto_ns is not None:
            query += " AND first_ns <= ? AND last_ns <= ?"
            values += [upto_ns, min(upto_ns + LONGEST_NS, LATEST_NS)]
        if shard is not None:
            query += " AND shard = ?"
            values.append(shard)
        query += " AND (last_ns, portion, shard) > (?, ?, ?) ORDER BY last_ns, portion, shard LIMIT ?"
        after = (-LATEST_NS, 0, 0) if from_ns is None else (from_ns, LATEST_NS, 0)
        while rows := self._rows(query, (*values, *after, PAGE_ROWS), "iiii"):
            yield from ((block, portion) for block, portion, _, _ in rows)
            _, portion, last_ns, in_shard = rows[-1]
            after = last_ns, portion, in_shard

    def _unpacked(self, block: int) -> list[Entry]:
        try:
            return unpack(self._data("block", block))
        except Damaged:
            self.damaged += 1
            return []

    def _data(self, table: str, number: int) -> bytes:
        query = f"SELECT data FROM {table} WHERE id = ? AND length(data) <= {MAX_BLOCK_BYTES}"  # noqa: S608 - our own names
        rows = self._rows(query, (number,), "b")
        if not rows:
            raise Damaged("it is not there, or too large")
        data: bytes = rows[0][0]
        return data

    def _rows(self, query: str, values: Sequence[Any], kinds: str) -> list[tuple[Any, ...]]:
        """The rows that are what they should be; the others are counted."""
        while True:
            try:
                found = self._database.execute(query, values).fetchall()
                break
            except sqlite3.OperationalError:
                # Text that is none, or a file that cannot be had just now: no reason to read it page by page.
                self.damaged += 1
                return []
            except sqlite3.DatabaseError as error:
                if self._salvaged:
                    self.damaged += 1
                    return []
                self._database.close()
                self._salvage(error)
        rows = [row for row in found if all(map(_is_kind, row, kinds))]
        self.damaged += len(found) - len(rows)
        return rows

    def _salvage(self, error: Exception) -> None:
        self._salvaged = True
        try:
            self._database, lost = salvage(self.path)
        except (OSError, sqlite3.Error):
            raise Unreadable(f"{self.path} cannot be read as a recording: {error}") from None
        self.damaged += 1 + lost


def _is_kind(value: object, kind: str) -> bool:
    if kind == "i":
        return isinstance(value, int) and -LATEST_NS < value < LATEST_NS
    return isinstance(value, str if kind == "t" else bytes)


def _run(text: bytes) -> RunFile | None:
    try:
        return msgspec.json.decode(text, type=RunFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
