"""What the fields of messages are made of: their types, and the limits of what is read and written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterable

WIRE_VERSION: Final = 2
NO_MESSAGE: Final = b"\xc1"
"""What begins with this is no message: msgpack never does. In a recording it is a table of steps."""
MAX_FRAME_BYTES: Final = 1 << 20
MAX_TOPIC_BYTES: Final = 64
MAX_SNAP_STEPS: Final = 600
MAX_STEPS: Final = 4096
"""In one message."""
MAX_FRAMES: Final = 48
MAX_THREADS: Final = 32
MAX_COLLECTIVES: Final = 16
MAX_ENVIRONMENT: Final = 64
MAX_LOG_LINES: Final = 256
MAX_LOG_CHARS: Final = 2000

# The largest integer that fits numpy's int64 on the viewer's side.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=2**20)]
Name: TypeAlias = Annotated[str, Meta(max_length=200)]
Text: TypeAlias = Annotated[str, Meta(max_length=4000)]


def fit(text: str, most: int = 200) -> str:
    """Text of the sender's own as it may go onto the wire: bounded, and valid Unicode whatever a file name held."""
    return text[:most].encode("utf-8", "replace").decode("utf-8")


def ranges(ranks: Iterable[int], most: int = 200) -> str:
    """Ranks in few letters: `0-3,8`. Empty if even that is too long."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return text if len(text) <= most else ""
