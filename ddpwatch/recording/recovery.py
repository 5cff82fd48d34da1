"""Queries on a recording that count damage, and recovery of a damaged file by rowid ranges.

`Rows` checks and counts the rows that it reads. If SQLite gives up, it continues on a recovered copy: the copy gets the
first page of an empty recording, so that header and tables are valid, and its rows go one by one, in the order of their
ids, into a new database; ids that SQLite cannot read are skipped. A lost page of a table's B-tree loses the rows below
it. `missing_frames` counts lost frames by their positions.
"""

from __future__ import annotations

import sqlite3
import tempfile
from bisect import bisect_left, bisect_right
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddpwatch.recording.schema import LATEST_NS, MAX_BLOCK_BYTES, PAGE_BYTES, TABLES, DamagedFile, Unreadable
from ddpwatch.recording.sqlite_open import HEADER_BYTES, connect, copy_with_wal, create_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

LARGEST: Final = {
    "attempt": "run",
    "span": "until_ns",
    "block": "data",
    "checkpoint": "data",
    "gap": "frames",
    "alert": "event",
}
"""Recovered tables, each with its largest column; rows in which that exceeds `MAX_BLOCK_BYTES` are skipped."""
MAX_READ: Final = 4
"""Max bytes read, as a multiple of the file's size: hostile rows may share pages and add up to any size."""
NEAR_IDS: Final = 256
"""Number of ids after an unreadable one that are tried one by one; further ids at doubling distances."""
UNREADABLE: Final = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What reading a damaged row raises; UnicodeDecodeError if SQLite's own message quotes it."""


def recover(path: Path) -> tuple[sqlite3.Connection, int]:
    """Copy the readable rows into a temporary database; also returns the number of unreadable ranges of ids."""
    recovered = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    for statement in TABLES:
        recovered.execute(statement)
    with tempfile.TemporaryDirectory(prefix="ddpwatch-") as folder:
        copy = copy_with_wal(path, Path(folder))
        _replace_first_page(copy)
        with closing(sqlite3.connect(copy, isolation_level=None)) as database, suppress(sqlite3.Error):
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        # The WAL may have contained a first page too.
        _replace_first_page(copy)
        with closing(sqlite3.connect(copy, isolation_level=None)) as database:
            recovered.execute("BEGIN")
            lost = sum(_copy_rows(database, recovered, table, MAX_READ * copy.stat().st_size) for table in LARGEST)
            recovered.execute("COMMIT")
    return recovered, lost


def cut_off(path: Path) -> float:
    """Fraction of the file that is missing at its end, by the page count in its header."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    # The page count is valid only if the change counter matches its copy.
    if len(header) < HEADER_BYTES or header[24:28] != header[92:96]:
        return 0.0
    whole = int.from_bytes(header[28:32], "big") * PAGE_BYTES
    return max(0.0, 1 - path.stat().st_size / whole) if whole else 0.0


def _replace_first_page(path: Path) -> None:
    """Give a file the header and tables of an empty recording, with its own page count."""
    empty = path.with_name("empty")
    with closing(sqlite3.connect(empty, isolation_level=None)) as database:
        create_tables(database)
    page = empty.read_bytes()[:PAGE_BYTES]
    pages = path.stat().st_size // PAGE_BYTES
    with path.open("r+b") as file:
        file.write(page[:28] + pages.to_bytes(4, "big") + page[32:])


def _copy_rows(damaged: sqlite3.Connection, recovered: sqlite3.Connection, table: str, max_bytes: int) -> int:
    """Copy the readable rows of a table; returns the number of unreadable ranges of ids."""
    column = LARGEST[table]
    # One row per query: Python's cursor reads one row ahead, and loses the row before an unreadable one.
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
    """The first id after `after` from which rows can be read, by exponential and binary search; `LATEST_NS` = none."""
    for near in range(after + 1, after + NEAR_IDS):
        if can_read_after(near):
            return near
    distance = NEAR_IDS
    while not can_read_after(after + distance):
        distance *= 2
        if after + distance > LATEST_NS:
            return LATEST_NS
    return bisect_left(range(after + distance), True, lo=after + distance // 2, key=can_read_after)


class Block(NamedTuple):
    """Metadata of a block. It has no checksum; the data has, and is readable if `sound`."""

    portion: int
    last: int
    frames: int
    sound: bool


def missing_frames(blocks: Iterable[Block], checkpoints: Sequence[int]) -> tuple[int, int]:
    """Number of frames missing between the first and the last known one, and number of frames that are there.

    Blocks come in the order of their portions; `checkpoints` are the positions of the last frames before them. Frames
    before the first checkpoint may have been removed by retention.
    """
    portions = [list(together) for _, together in groupby(blocks, lambda block: block.portion)]
    sound = [[block for block in portion if block.sound] for portion in portions]
    lasts = [max(block.last for block in kept) for kept in sound if kept]
    believed = iter(_rising([*lasts, max(checkpoints, default=max(lasts, default=0))]))
    reached = min(checkpoints, default=None)
    early = -1 if reached is None else reached
    missing = sum(block.frames for portion in portions for block in portion if not block.sound and block.last <= early)
    there = hurt = read = 0
    for portion, kept in zip(portions, sound, strict=True):
        hurt += sum(block.frames for block in portion if not block.sound and block.last > early)
        if not kept:
            continue
        read += sum(block.frames for block in kept)
        if not next(believed):
            continue
        last = max(block.last for block in kept)
        if reached is None or last - read < reached:
            # Before the first checkpoint it is unknown which frames should be there.
            missing += hurt
        else:
            missing += max(last - reached - read, 0)
        reached, there, hurt, read = max(last, reached or 0), there + read, 0, 0
    furthest = max(checkpoints, default=-1)
    after = max(furthest - reached, 0) if reached is not None else 0
    return missing + (max(after - read, 0) if after else hurt), there + read


def _rising(numbers: Sequence[int]) -> list[bool]:
    """Members of the longest non-decreasing subsequence; a number changed by damage is not in it."""
    ends: list[int] = []
    places: list[int] = []
    before: list[int] = []
    for place, number in enumerate(numbers):
        length = bisect_right(ends, number)
        before.append(places[length - 1] if length else -1)
        ends[length : length + 1] = [number]
        places[length : length + 1] = [place]
    rising = [False] * len(numbers)
    place = places[-1] if places else -1
    while place >= 0:
        rising[place] = True
        place = before[place]
    return rising


class Rows:
    """An open file, and a count of its damage. Belongs to one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises `NoRecording` or `Unreadable`."""
        self._path = path
        self.cut = 0.0
        """Fraction of the file that is missing at its end, by its header."""
        self.recovered = False
        """Whether rows of any table may be missing without being counted."""
        self._damage: dict[tuple[object, ...], int] = {}
        """Number of unreadable parts by what was read: each counts once, however often it is tried."""
        try:
            self._database = connect(path)
        except DamagedFile as error:
            self._recover(error)
        self._opened = self.version

    @property
    def version(self) -> int:
        """SQLite's data version, which changes when another process writes."""
        return next((number for (number,) in self.select("PRAGMA data_version", (), "i")), 0)

    @property
    def written_since(self) -> bool:
        """Whether another process has written since it was opened."""
        return self.version != self._opened

    @property
    def damaged(self) -> int:
        """Number of unreadable parts found so far."""
        return sum(self._damage.values())

    def count(self, what: tuple[object, ...], parts: int = 1) -> None:
        """Set the number of unreadable parts of this."""
        self._damage[what] = parts

    def counted(self, what: tuple[object, ...]) -> int:
        """Number of unreadable parts of this found so far."""
        return self._damage.get(what, 0)

    def select(self, query: str, values: Sequence[Any], kinds: str) -> list[tuple[Any, ...]]:
        """Rows whose values are of these kinds: i integer, t text, b bytes, ? anything. Others count as damage."""
        asked = (query, *values)
        while True:
            try:
                found = self._database.execute(query, values).fetchall()
                break
            except sqlite3.OperationalError:
                # Invalid text, or a locked file: no reason to recover all of it.
                self._damage[asked] = 1
                return []
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if self.recovered:
                    self._damage[asked] = 1
                    return []
                self._database.close()
                self._recover(error)
        rows = [row for row in found if fits(row, kinds)]
        if len(found) > len(rows):
            self._damage[asked] = len(found) - len(rows)
        return rows

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _recover(self, error: Exception) -> None:
        self.recovered = True
        try:
            self._database, lost = recover(self._path)
            self.cut = cut_off(self._path)
        except (OSError, sqlite3.Error, UnicodeDecodeError):
            raise Unreadable(f"{self._path} cannot be read as a recording: {error}") from None
        self._damage["recovered",] = 1 + lost


_KINDS: Final = {"i": int, "t": str, "b": bytes, "?": object}


def fits(row: Sequence[Any], kinds: str) -> bool:
    """Whether the values of a row are of these kinds, as in `Rows.select`, and integers within the bounds of times."""
    return all(
        isinstance(value, _KINDS[kind]) and not (isinstance(value, int) and kind == "i" and abs(value) >= LATEST_NS)
        for value, kind in zip(row, kinds, strict=True)
    )
