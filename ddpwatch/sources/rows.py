"""The rows of a recording that is read, as they are asked for: those that are not what they should be are counted.

Where SQLite itself gives up, the rows that can be recovered (`salvage`) are asked from then on.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

from ddpwatch.opening import connect
from ddpwatch.recording import LATEST_NS, Torn, Unreadable
from ddpwatch.sources.salvage import cut_off, recover

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


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
