"""What a recording holds: its attempts, their frames by time, the moments to begin at, and the alerts that were told.

Reads while somebody else writes. A part that cannot be read is passed over and counted.
"""

from __future__ import annotations

import sqlite3
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ddpwatch.recording import Damaged, NoRecording, Unreadable, connect, unpack, unpack_messages
from ddpwatch.rundir import RunFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddpwatch.recording import Entry


class Attempt(NamedTuple):
    """One run in the recording."""

    id: int
    run: RunFile
    first_ns: int
    last_ns: int


class Checkpoint(NamedTuple):
    """A moment from which one can go on."""

    at_ns: int
    position: int
    """The frames up to this one are in it."""
    payloads: list[bytes]
    """To be applied to an empty state, in this order."""


class AlertRow(NamedTuple):
    """A change of an alert, as it was told."""

    attempt: int
    at_ns: int
    kind: str
    event: bytes
    """JSON of a `core.alerts.AlertEvent`."""


class Recorded:
    """A recording that is read. Belongs to one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Open it; raises `NoRecording` or `Unreadable`."""
        self.path = path
        self._database = connect(path)
        self.damaged = 0
        """Parts that could not be read so far."""
        try:
            self.attempts = self._attempts()
        except sqlite3.Error as error:
            raise Unreadable(f"{path} cannot be read as a recording: {error}") from None
        if not self.attempts:
            raise NoRecording(f"nothing that can be read was recorded in {path}")

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
        with _tolerant(self):
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
            "SELECT at_ns, position, data FROM checkpoint WHERE attempt = ? AND at_ns <= ? ORDER BY at_ns DESC, id DESC"
        )
        with _tolerant(self):
            for found_ns, position, data in self._database.execute(query, (attempt.id, at_ns)):
                try:
                    return Checkpoint(found_ns, position, unpack_messages(data))
                except Damaged:
                    self.damaged += 1
        return None

    def alerts(self) -> list[AlertRow]:
        """Everything that was told, in order."""
        rows: list[AlertRow] = []
        with _tolerant(self):
            query = "SELECT attempt, at_ns, kind, event FROM alert ORDER BY id"
            rows.extend(AlertRow(*row) for row in self._database.execute(query))
        return rows

    def frames(self, attempt: Attempt) -> int:
        """How many frames there are, to say how much is done."""
        with _tolerant(self):
            (count,) = self._database.execute(
                "SELECT coalesce(sum(frames), 0) FROM block WHERE attempt = ?", (attempt.id,)
            ).fetchone()
            return int(count)
        return 0

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def _attempts(self) -> list[Attempt]:
        found = []
        for number, text, began_ns in self._database.execute("SELECT id, run, began_ns FROM attempt ORDER BY id"):
            try:
                run = msgspec.json.decode(text, type=RunFile)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self.damaged += 1
                continue
            first_ns, last_ns = self._span(number)
            found.append(Attempt(number, run, began_ns if first_ns is None else first_ns, last_ns or began_ns))
        return found

    def _span(self, attempt: int) -> tuple[int | None, int | None]:
        with _tolerant(self):
            query = "SELECT {} FROM block WHERE attempt = ? ORDER BY last_ns {} LIMIT 1"
            first = self._database.execute(query.format("first_ns", "ASC"), (attempt,)).fetchone()
            last = self._database.execute(query.format("last_ns", "DESC"), (attempt,)).fetchone()
            return (first[0] if first else None), (last[0] if last else None)
        return None, None

    def _blocks(
        self, attempt: Attempt, from_ns: int | None, upto_ns: int | None, shard: int | None
    ) -> Iterator[tuple[int, int]]:
        """Their ids and portions, in order."""
        query = "SELECT id, portion FROM block WHERE attempt = ?"
        values: list[int] = [attempt.id]
        for condition, value in (("last_ns > ?", from_ns), ("first_ns <= ?", upto_ns), ("shard = ?", shard)):
            if value is not None:
                query += f" AND {condition}"
                values.append(value)
        rows: list[tuple[int, int]] = []
        with _tolerant(self):
            # Row by row: what was read before an error counts.
            rows.extend(iter(self._database.execute(f"{query} ORDER BY last_ns, id", values)))
        yield from sorted(rows, key=lambda row: (row[1], row[0]))

    def _unpacked(self, block: int) -> list[Entry]:
        with _tolerant(self):
            row = self._database.execute("SELECT data FROM block WHERE id = ?", (block,)).fetchone()
            return unpack(row[0]) if row else []
        return []


class _tolerant:  # noqa: N801 - reads as a word
    """Counts what cannot be read, and goes on."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, (sqlite3.Error, Damaged)):
            self._recorded.damaged += 1
            return True
        return False
