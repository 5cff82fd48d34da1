"""Reads a recording that SQLite cannot read any more: one that was cut off, or written over in parts.

The tables of a SQLite file are trees of pages. Its rows are in the leaves, and each leaf can be read by itself; so
whatever has become of the rest, the rows in the leaves that are left can be had, and they go into a new database.
https://www.sqlite.org/fileformat2.html says how pages, cells and records are made.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpwatch.recording import MAX_BLOCK_BYTES, PAGE_BYTES, TABLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Value = int | float | bytes | str | None

LEAF: Final = 0x0D
FILE_HEADER_BYTES: Final = 100
LOCAL_MOST: Final = PAGE_BYTES - 35
LOCAL_LEAST: Final = (PAGE_BYTES - 12) * 32 // 255 - 23
OVERFLOW_BYTES: Final = PAGE_BYTES - 4
WAL_HEADER_BYTES: Final = 32
FRAME_HEADER_BYTES: Final = 24
ALL_READ: Final = 4
"""So many times the size of the file is read at the most: rows that claim each other's pages are no rows of ours."""
INT_BYTES: Final = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
INSERTS: Final = {
    "nbi": "INSERT OR IGNORE INTO attempt VALUES (?, ?, ?)",
    "ni": "INSERT OR IGNORE INTO span VALUES (?, ?)",
    "niiiiiiib": "INSERT OR IGNORE INTO block VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "niiib": "INSERT OR IGNORE INTO checkpoint VALUES (?, ?, ?, ?, ?)",
    "niii": "INSERT OR IGNORE INTO gap VALUES (?, ?, ?, ?)",
    "niitb": "INSERT OR IGNORE INTO alert VALUES (?, ?, ?, ?, ?)",
}
"""Each of our tables can be told by the kinds of its columns: n = the row's own number, i a number, b bytes, t text."""


def salvage(path: Path) -> tuple[sqlite3.Connection, int]:
    """What is left, in a database of its own that goes when it is closed; and how many rows could not be had."""
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    for statement in TABLES:
        database.execute(statement)
    lost = 0
    database.execute("BEGIN")
    with contextlib.closing(_Pages(path)) as pages:
        for number, row in pages.rows():
            if row is None:
                lost += 1
                continue
            insert = INSERTS.get("".join(map(_kind, row)))
            if insert is not None:
                database.execute(insert, (number, *row[1:]))
    database.execute("COMMIT")
    return database, lost


def cut_off(path: Path) -> float:
    """Part of the file that is missing at its end, by the number of pages that its header tells; 0 = none."""
    with path.open("rb") as file:
        header = file.read(FILE_HEADER_BYTES)
    # Who does not write that number does not count up the one that goes with it.
    if len(header) < FILE_HEADER_BYTES or header[24:28] != header[92:96]:
        return 0.0
    whole = int.from_bytes(header[28:32], "big") * PAGE_BYTES
    return max(0.0, 1 - path.stat().st_size / whole) if whole else 0.0


def _kind(value: Value) -> str:
    if value is None:
        return "n"
    return {int: "i", bytes: "b", str: "t"}.get(type(value), "f")


class _Pages:
    """The pages of a file, as far as they are there; those that were still in its log as they are there."""

    def __init__(self, path: Path) -> None:
        self._files = [os.open(path, os.O_RDONLY | os.O_CLOEXEC)]
        size = os.fstat(self._files[0]).st_size
        self.count = size // PAGE_BYTES
        self._places: dict[int, int] = {}
        """By page, where it is in the log."""
        with contextlib.suppress(OSError):
            self._files.append(os.open(Path(f"{path}-wal"), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
            size += self._read_log(self._files[1])
        self._left = ALL_READ * size

    def close(self) -> None:
        for handle in self._files:
            os.close(handle)

    def rows(self) -> Iterator[tuple[int, Sequence[Value] | None]]:
        """Number and values of every row in every leaf; None where they cannot be had."""
        for page in range(1, max([self.count, *self._places]) + 1):
            data = self._page(page)
            start = FILE_HEADER_BYTES if page == 1 else 0
            if len(data) == PAGE_BYTES and data[start] == LEAF:
                cells = min(int.from_bytes(data[start + 3 : start + 5], "big"), PAGE_BYTES // 4)
                for cell in range(cells):
                    at = start + 8 + 2 * cell
                    yield self._row(data, int.from_bytes(data[at : at + 2], "big"))

    def _row(self, data: bytes, at: int) -> tuple[int, Sequence[Value] | None]:
        try:
            size, at = _varint(data, at)
            number, at = _varint(data, at)
            if number >= 2**63:
                return 0, None
            return number, _record(self._payload(data, at, size))
        except (IndexError, ValueError):
            return 0, None

    def _payload(self, data: bytes, at: int, size: int) -> bytes:
        if size > MAX_BLOCK_BYTES:
            raise ValueError("larger than any row of ours")
        if size <= LOCAL_MOST:
            return data[at : at + size]
        local = LOCAL_LEAST + (size - LOCAL_LEAST) % OVERFLOW_BYTES
        local = local if local <= LOCAL_MOST else LOCAL_LEAST
        parts = [data[at : at + local]]
        page = int.from_bytes(data[at + local : at + local + 4], "big")
        left = size - local
        while left > 0:
            data = self._page(page)
            self._left -= PAGE_BYTES
            if len(data) < PAGE_BYTES or self._left < 0:
                raise ValueError("its pages are not there")
            parts.append(data[4 : 4 + left])
            left -= OVERFLOW_BYTES
            page = int.from_bytes(data[:4], "big")
        return b"".join(parts)

    def _page(self, page: int) -> bytes:
        at = self._places.get(page)
        if at is not None:
            return os.pread(self._files[1], PAGE_BYTES, at)
        return os.pread(self._files[0], PAGE_BYTES, (page - 1) * PAGE_BYTES) if 0 < page <= self.count else b""

    def _read_log(self, handle: int) -> int:
        """Find the pages in the log that belong to transactions that were completed; its size."""
        header = os.pread(handle, WAL_HEADER_BYTES, 0)
        salt, at = header[16:24], WAL_HEADER_BYTES
        found: dict[int, int] = {}
        while len(frame := os.pread(handle, FRAME_HEADER_BYTES, at)) == FRAME_HEADER_BYTES and frame[8:16] == salt:
            at += FRAME_HEADER_BYTES
            found[int.from_bytes(frame[:4], "big")] = at
            at += PAGE_BYTES
            if any(frame[4:8]):
                self._places.update(found)
                found = {}
        return at


def _record(payload: bytes) -> list[Value]:
    """The values of a row."""
    header_bytes, at = _varint(payload, 0)
    kinds = []
    while at < header_bytes:
        kind, at = _varint(payload, at)
        kinds.append(kind)
        if len(kinds) > 16:
            raise ValueError("more columns than any table of ours")
    values: list[Value] = []
    for kind in kinds:
        value, size = _value(kind, payload, at)
        at += size
        values.append(value)
    if at > len(payload):
        raise ValueError("cut off")
    return values


def _value(kind: int, payload: bytes, at: int) -> tuple[Value, int]:
    if kind in INT_BYTES:
        size = INT_BYTES[kind]
        return int.from_bytes(payload[at : at + size], "big", signed=True), size
    if kind >= 12:
        size = (kind - 12) // 2
        data = payload[at : at + size]
        return (data if kind % 2 == 0 else data.decode("utf-8", "replace")), size
    return {0: (None, 0), 7: (0.0, 8), 8: (0, 0), 9: (1, 0)}.get(kind, (None, 0))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of one to nine bytes, and where it ends."""
    value = 0
    for place in range(9):
        byte = data[at + place]
        if place == 8:
            return (value << 8) | byte, at + 9
        value = (value << 7) | (byte & 0x7F)
        if byte < 0x80:
            return value, at + place + 1
    raise AssertionError("unreachable")
