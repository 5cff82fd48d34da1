"""Recovery of a damaged recording by rowid ranges: SQLite reads every row that its tables still lead to.

The damaged file is copied, and the copy gets the first page of an empty recording: header and tables are then ours,
whatever has become of them. Its rows go one by one, in the order of their ids, into a new database; ids that SQLite
cannot read are passed over. What is lost with a page of a table's tree are the rows below it.

How many frames of a damaged recording are missing, told from the numbers of those that are there.

The rows of a recording that is read, as they are asked for: those that are not what they should be are counted.

Where SQLite itself gives up, the rows that can be recovered (`salvage`) are asked from then on.
"""

from __future__ import annotations

import sqlite3
import tempfile
from bisect import bisect_left, bisect_right
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddpwatch.recording.database import HEADER_BYTES, connect, copy_with_log, create_tables
from ddpwatch.recording.schema import LATEST_NS, MAX_BLOCK_BYTES, PAGE_BYTES, TABLES, Torn, Unreadable

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


class Block(NamedTuple):
    """What a block says of its frames, of which only `sound` ones can be read: their data has a checksum. The numbers
    beside it have none.
    """

    portion: int
    last: int
    """Position of its last frame."""
    frames: int
    sound: bool


def missing_frames(blocks: Iterable[Block], checkpoints: Sequence[int]) -> tuple[int, int]:
    """Frames that are missing between the first and the last that are known of, and those that are there. Blocks come
    in the order of their portions; `checkpoints` are positions of the last frame before each of them.

    What was before the first checkpoint may have been let go on purpose.
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
            # Before a first checkpoint, or with none: nothing tells from where on they should be there.
            missing += hurt
        else:
            missing += max(last - reached - read, 0)
        reached, there, hurt, read = max(last, reached or 0), there + read, 0, 0
    furthest = max(checkpoints, default=-1)
    after = max(furthest - reached, 0) if reached is not None else 0
    return missing + (max(after - read, 0) if after else hurt), there + read


def _rising(numbers: Sequence[int]) -> list[bool]:
    """Which of these are in the longest part of them that never falls: one that was changed by damage is not."""
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
    """A file that is open, and what is known to be wrong with it. Belongs to one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Open it; raises `NoRecording` or `Unreadable`."""
        self._path = path
        self.cut = 0.0
        """Part of the file that is not there any more, as far as its beginning tells."""
        self.recovered = False
        """Whether rows of any table may be missing without a trace."""
        self._damage: dict[tuple[object, ...], int] = {}
        """By what it was, how many parts of it could not be read: each counts once, however often it is tried."""
        try:
            self._database = connect(path)
        except Torn as error:
            self._recover(error)
        self._opened = self.version

    @property
    def version(self) -> int:
        """Another number each time that somebody else has written."""
        return next((number for (number,) in self.ask("PRAGMA data_version", (), "i")), 0)

    @property
    def written_since(self) -> bool:
        """Whether somebody has written since it was opened."""
        return self.version != self._opened

    @property
    def damaged(self) -> int:
        """Parts that could not be read so far."""
        return sum(self._damage.values())

    def count(self, what: tuple[object, ...], parts: int = 1) -> None:
        """So many parts of this could not be read."""
        self._damage[what] = parts

    def counted(self, what: tuple[object, ...]) -> int:
        """How many parts of this could not be read so far."""
        return self._damage.get(what, 0)

    def ask(self, query: str, values: Sequence[Any], kinds: str) -> list[tuple[Any, ...]]:
        """The rows that are what they should be: i a number, t text, b bytes. Others count under query and values."""
        asked = (query, *values)
        while True:
            try:
                found = self._database.execute(query, values).fetchall()
                break
            except sqlite3.OperationalError:
                # Text that is none, or a file that cannot be had just now: no reason to recover all of it.
                self._damage[asked] = 1
                return []
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if self.recovered:
                    self._damage[asked] = 1
                    return []
                self._database.close()
                self._recover(error)
        rows = [row for row in found if all(map(_is_kind, row, kinds))]
        if len(found) > len(rows):
            self._damage[asked] = len(found) - len(rows)
        return rows

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def _recover(self, error: Exception) -> None:
        self.recovered = True
        try:
            self._database, lost = recover(self._path)
            self.cut = cut_off(self._path)
        except (OSError, sqlite3.Error, UnicodeDecodeError):
            raise Unreadable(f"{self._path} cannot be read as a recording: {error}") from None
        self._damage["recovered",] = 1 + lost


def _is_kind(value: object, kind: str) -> bool:
    if kind == "i":
        return isinstance(value, int) and -LATEST_NS < value < LATEST_NS
    return isinstance(value, str if kind == "t" else bytes)
