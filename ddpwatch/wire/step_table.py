"""Steps packed as rows of integers, which a viewer of thousands of ranks reads without creating objects.

Sender and reader may be of different versions: the sender states its number of columns, and `fit_table` converts the
rows. New columns are appended, so a shorter row lacks the newest ones and a longer row has some unknown ones.
"""

from __future__ import annotations

import struct
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from ddpwatch.wire.message_parts import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

STEP_COLUMNS: Final = tuple(name for name in Step.__struct_fields__ if name != "values")
"""The integer fields of a step, in their order."""
UNSTATED_COLUMNS: Final = 17
"""Columns of a table whose sender states no number. Never changes: agents and recordings without it exist."""
MIN_COLUMNS: Final = sum(field.required for field in msgspec.structs.fields(Step))
"""A row with fewer columns lacks a phase and is not a step."""
MAX_COLUMNS: Final = 64
"""A table that claims more columns is refused."""
STEP_DEFAULTS: Final = tuple(
    field.default if isinstance(field.default, int) else 0
    for field in msgspec.structs.fields(Step)
    if field.name != "values"
)
"""By column, the value for rows of a sender that lacks it."""
_row: Final = struct.Struct(f"<{len(STEP_COLUMNS)}q")
STEP_BYTES: Final = _row.size
_numbers: Final = attrgetter(*STEP_COLUMNS)
_new_step: Callable[..., Step] = Step


def pack_steps(steps: Iterable[Step]) -> bytes:
    """Rows of `STEP_COLUMNS`, eight little-endian bytes per number, without the values that the script logged."""
    return b"".join([_row.pack(*_numbers(step)) for step in steps])


def unpack_steps(table: bytes) -> Iterator[tuple[int, ...]]:
    """Rows of `STEP_COLUMNS`, unchecked. An incomplete row at the end is ignored."""
    return _row.iter_unpack(memoryview(table)[: len(table) // STEP_BYTES * STEP_BYTES])


def step_of(row: Sequence[int]) -> Step:
    """The step in one row of `STEP_COLUMNS`."""
    return _new_step(**dict(zip(STEP_COLUMNS, row, strict=True)))


def fit_table(table: bytes, columns: int) -> bytes:
    """Convert a table of a sender with another number of columns to this version's columns.

    Columns this version does not know are dropped, missing ones get their defaults. An incomplete row at the end stays
    incomplete, so that it is counted as damage.
    """
    theirs = struct.Struct(f"<{columns}q")
    whole = len(table) // theirs.size * theirs.size
    missing = STEP_DEFAULTS[columns:]
    rows = theirs.iter_unpack(memoryview(table)[:whole])
    fitted = b"".join([_row.pack(*row[: len(STEP_COLUMNS)], *missing) for row in rows])
    return fitted + table[whole:][: STEP_BYTES - 1]
