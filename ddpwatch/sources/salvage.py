"""Recovery of a damaged recording by rowid ranges: SQLite reads every row that its tables still lead to.

The damaged file is copied, and the copy gets the first page of an empty recording: header and tables are then ours,
whatever has become of them. Its rows go one by one, in the order of their ids, into a new database; ids that SQLite
cannot read are passed over. What is lost with a page of a table's tree are the rows below it.
"""

from __future__ import annotations

import sqlite3
import tempfile
from bisect import bisect_left
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpwatch.opening import HEADER_BYTES, copy_with_log, create_tables
from ddpwatch.recording import LATEST_NS, MAX_BLOCK_BYTES, PAGE_BYTES, TABLES

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST: Final = {
    "attempt": "run",
    "span": "until_ns",
    "block": "data",
    "checkpoint": "data",
    "gap": "frames",
    "alert": "event",
}
"""The tables that are recovered, each with its largest column; a row in which that exceeds `MAX_BLOCK_BYTES` is not
read."""
MAX_READ: Final = 4
"""Rows are read up to this multiple of the file's size: hostile ones may share pages, and add up to any size."""
NEAR_IDS: Final = 4096
"""Each of this many ids behind unreadable ones is tried; further on, ids at doubling distances."""
UNREADABLE: Final = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What reading a damaged row raises; the latter where SQLite's own message quotes it."""


def recover(path: Path) -> tuple[sqlite3.Connection, int]:
    """A temporary database with the rows that can be read, and how many ranges of ids could not be."""
    recovered = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    for statement in TABLES:
        recovered.execute(statement)
    with tempfile.TemporaryDirectory(prefix="ddpwatch-") as folder:
        copy = copy_with_log(path, Path(folder))
        _replace_first_page(copy)
        with closing(sqlite3.connect(copy, isolation_level=None)) as database, suppress(sqlite3.Error):
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        # The log may have brought a first page of its own.
        _replace_first_page(copy)
        with closing(sqlite3.connect(copy, isolation_level=None)) as database:
            recovered.execute("BEGIN")
            lost = sum(_copy_rows(database, recovered, table, MAX_READ * copy.stat().st_size) for table in LARGEST)
            recovered.execute("COMMIT")
    return recovered, lost


def cut_off(path: Path) -> float:
    """Fraction of the file that is missing at its end, by the number of pages in its header; 0 = none."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    # A writer that does not keep that number leaves the change counter beside it behind.
    if len(header) < HEADER_BYTES or header[24:28] != header[92:96]:
        return 0.0
    whole = int.from_bytes(header[28:32], "big") * PAGE_BYTES
    return max(0.0, 1 - path.stat().st_size / whole) if whole else 0.0


def _replace_first_page(path: Path) -> None:
    """Give a file the header and the tables of an empty recording, and the number of pages that it has."""
    empty = path.with_name("empty")
    with closing(sqlite3.connect(empty, isolation_level=None)) as database:
        create_tables(database)
    page = empty.read_bytes()[:PAGE_BYTES]
    pages = path.stat().st_size // PAGE_BYTES
    with path.open("r+b") as file:
        file.write(page[:28] + pages.to_bytes(4, "big") + page[32:])


def _copy_rows(damaged: sqlite3.Connection, recovered: sqlite3.Connection, table: str, max_bytes: int) -> int:
    """Copy the rows of a table that can be read; returns how many ranges of ids could not be."""
    column = LARGEST[table]
    # One at a time: Python's cursor reads one row ahead, and loses the row before one that cannot be read.
    query = (
        f"SELECT length({column}), * FROM {table} NOT INDEXED "  # noqa: S608 - our own names
        f"WHERE rowid > ? AND length({column}) <= {MAX_BLOCK_BYTES} ORDER BY rowid LIMIT 1"
    )

    def can_read_after(row_id: int) -> bool:
        try:
            damaged.execute(query, (row_id,)).fetchone()
        except UNREADABLE:
            return False
        return True

    lost, after = 0, -1
    while max_bytes > 0 and after < LATEST_NS:
        try:
            row = damaged.execute(query, (after,)).fetchone()
        except UNREADABLE:
            lost += 1
            after = _first_readable(can_read_after, after)
            continue
        if row is None:
            break
        size, after, *_ = row
        max_bytes -= size
        recovered.execute(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row[1:]))})", row[1:])  # noqa: S608
    return lost


def _first_readable(can_read_after: Callable[[int], bool], after: int) -> int:
    """The first id behind `after` where rows can be read again; `LATEST_NS`, which is no id, if there is none."""
    for near in range(after + 1, after + NEAR_IDS):
        if can_read_after(near):
            return near
    distance = NEAR_IDS
    while not can_read_after(after + distance):
        distance *= 2
        if after + distance > LATEST_NS:
            return LATEST_NS
    return bisect_left(range(after + distance), True, lo=after + distance // 2, key=can_read_after)
