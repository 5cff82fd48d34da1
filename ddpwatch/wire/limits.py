"""Limits of messages and their fields, which encoder and decoder keep, as types of fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterable

WIRE_VERSION: Final = 2
NO_MESSAGE: Final = b"\xc1"
"""First byte of a step table in a recording; msgpack never uses it, so no message begins with it."""
# Upper bounds of messages and of the lists in them: senders cut to them, and the decoder refuses what exceeds them.
MAX_FRAME_BYTES: Final = 1 << 20
MAX_TOPIC_BYTES: Final = 64
MAX_SNAP_STEPS: Final = 600
"""Steps in one snapshot."""
MAX_STEPS: Final = 4096
"""Steps in one message."""
MAX_FRAMES: Final = 48
"""Frames of one stack."""
MAX_THREADS: Final = 32
"""Threads of one process."""
MAX_COLLECTIVES: Final = 16
"""Collectives of one rank."""
MAX_PATHS: Final = 32
"""Sequences of sync points that one rank describes."""
MAX_QUEUED: Final = 64
"""Moments of CPU starvation in one snapshot, about two a second."""
MAX_ENVIRONMENT: Final = 64
"""Environment variables in one hello."""
MAX_LOG_LINES: Final = 256
"""Lines in one message."""
MAX_LOG_CHARS: Final = 2000
"""Characters of one line."""

# The largest integer that fits numpy's int64 on the viewer's side.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=2**20)]
Name: TypeAlias = Annotated[str, Meta(max_length=200)]
Text: TypeAlias = Annotated[str, Meta(max_length=4000)]


def fit(text: str, max_chars: int = 200) -> str:
    """Text cut to the limit of a field, as valid Unicode even if a file name was not."""
    return text[:max_chars].encode("utf-8", "replace").decode("utf-8")


def ranges(ranks: Iterable[int], max_chars: int = 200) -> str:
    """Ranks as compact ranges: `0-3,8`. Empty if that is still too long."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return text if len(text) <= max_chars else ""
