"""Finished steps as one piece of bytes, which a viewer of thousands of ranks takes in without an object for each."""

from __future__ import annotations

import struct
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from ddpwatch.wire.parts import Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

STEP_COLUMNS: Final = tuple(name for name in Step.__struct_fields__ if name != "values")
"""The numbers of a step, in their order."""
_row: Final = struct.Struct(f"<{len(STEP_COLUMNS)}q")
STEP_BYTES: Final = _row.size
_numbers: Final = attrgetter(*STEP_COLUMNS)


def pack_steps(steps: Iterable[Step]) -> bytes:
    """The numbers of each step, eight bytes each, the lowest first. What the script logged is not among them."""
    return b"".join([_row.pack(*_numbers(step)) for step in steps])


def unpack_steps(table: bytes) -> Iterator[tuple[int, ...]]:
    """Each step as its `STEP_COLUMNS`. Whether it can be one is for who takes it to say; what is left over is not
    looked at.
    """
    return _row.iter_unpack(memoryview(table)[: len(table) // STEP_BYTES * STEP_BYTES])
