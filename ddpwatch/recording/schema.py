"""A run on disk: the very frames that came, in one SQLite file. Shared by who writes it (outputs) and who reads it
(sources).

    attempt       a run that was recorded: its `run.json` without addresses. A restarted job is the next attempt
    span          how far an attempt was followed: silence after its last frame counts, too
    block         about a second of frames of up to 64 ranks, compressed; found by time and by rank. Blocks that were
                  written together are one `portion`. Those of `ALERTS` hold how open alerts read, as their text changed
    checkpoint    messages that bring an empty state to a moment, so that a reader can begin there; what begins with
                  `wire.NO_MESSAGE` is a table of steps (`core.tables`), older recordings have them in the messages
    gap           frames that came and could not be written, because the disk was full
    alert         each change of an alert that was told, as it was judged when it happened
    writer        the process that records now, if one does

Times are Unix nanoseconds of the recorder's host at its start, carried on by its monotonic clock: they never jump.
Frames are numbered in the order in which they came (`position`), across all blocks of a recording.

What is read here may have been written by anybody: it is bounded and typed, like what comes off the wire.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
import zstandard
from msgspec import Meta, Struct

from ddpwatch.errors import NoSuchRun, UsageError
from ddpwatch.rundir import RunFile
from ddpwatch.wire import MAX_FRAME_BYTES, MAX_TOPIC_BYTES, Count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCHEMA: Final = 1
APPLICATION_ID: Final = 0x64647077
"""`ddpw`: tells a recording from any other SQLite file."""
SUFFIX: Final = ".ddpw"
PAGE_BYTES: Final = 4096
SHARD_RANKS: Final = 64
"""Ranks whose frames share a block."""
NO_RANK: Final = -1
"""The shard of what is about no rank: lines of log files, and what could not be read."""
ALERTS: Final = -2
"""The shard of how open alerts read at a moment. It has no frames of the run in it, and its positions count nothing."""
ALERTS_TOPIC: Final = b"alerts"
MAX_BLOCK_BYTES: Final = 64 << 20
"""No block is larger than this when it is unpacked; one that claims to be is not read."""
LATEST_NS: Final = 2**62
"""In the year 2116. A time outside of these bounds was never written by us."""
LEVEL: Final = 1
"""Of compression. Higher ones find nothing more: what is left are the last digits of times."""
MAX_LIMITS: Final = 64

_OF_ATTEMPT: Final = "id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL"
TABLES: Final = (
    "CREATE TABLE attempt (id INTEGER PRIMARY KEY, run BLOB NOT NULL, began_ns INTEGER NOT NULL)",
    "CREATE TABLE span (attempt INTEGER PRIMARY KEY, until_ns INTEGER NOT NULL)",
    f"""CREATE TABLE block ({_OF_ATTEMPT}, portion INTEGER NOT NULL, shard INTEGER NOT NULL,
    first_ns INTEGER NOT NULL, last_ns INTEGER NOT NULL, position INTEGER NOT NULL, frames INTEGER NOT NULL,
    data BLOB NOT NULL)""",
    "CREATE INDEX block_by_time ON block (attempt, last_ns, portion, shard, first_ns)",
    "CREATE INDEX block_by_rank ON block (attempt, shard, last_ns, portion, first_ns)",
    f"CREATE TABLE checkpoint ({_OF_ATTEMPT}, at_ns INTEGER NOT NULL, position INTEGER NOT NULL, data BLOB NOT NULL)",
    "CREATE INDEX checkpoint_by_time ON checkpoint (attempt, at_ns)",
    f"CREATE TABLE gap ({_OF_ATTEMPT}, at_ns INTEGER NOT NULL, frames INTEGER NOT NULL)",
    f"CREATE TABLE alert ({_OF_ATTEMPT}, at_ns INTEGER NOT NULL, kind TEXT NOT NULL, event BLOB NOT NULL)",
    "CREATE TABLE writer (node TEXT NOT NULL, pid INTEGER NOT NULL, pid_created_s REAL NOT NULL)",
)
"""As they stand in the file, word by word: a file with others in it is not asked anything.

`block.position` is that of the last frame in it; `checkpoint.position` that of the last one before it.
"""


class Entry(NamedTuple):
    """One frame as it is kept."""

    position: int
    at_ns: int
    topic: bytes
    payload: bytes


class Columns:
    """Frames that are collected for a block, in the order of their positions. Plain lists of plain values: there are
    thousands a second, and Python's garbage collector would look at each tuple of them.
    """

    __slots__ = ("payloads", "positions", "times_ns", "topics")

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.times_ns: list[int] = []
        self.topics: list[bytes] = []
        self.payloads: list[bytes] = []


class NoRecording(NoSuchRun):
    """There is no such file, or nothing is in it."""


class Unreadable(UsageError):
    """A file is no recording, or cannot be read by this version."""


class Torn(Unreadable):
    """A recording that SQLite cannot read any more, or only in part."""


class Damaged(Exception):
    """A part of a recording cannot be read; the others can. Counted, never shown as an error."""


class _Block(Struct, array_like=True):
    """Frames by columns: what is alike stands together, which is what a compressor looks for."""

    positions: list[Count]
    """The first one, then differences."""
    times_ns: list[int]
    topics: list[Annotated[bytes, Meta(max_length=MAX_TOPIC_BYTES)]]
    payloads: list[Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]]


class _Messages(Struct, array_like=True):
    times_ns: list[Annotated[int, Meta(ge=0, lt=LATEST_NS)]]
    payloads: list[Annotated[bytes, Meta(max_length=MAX_BLOCK_BYTES)]]


_encoder: Final = msgspec.msgpack.Encoder()
_block_decoder: Final = msgspec.msgpack.Decoder(_Block)
_messages_decoder: Final = msgspec.msgpack.Decoder(_Messages)


def pack(frames: Columns) -> bytes:
    """Frames as the data of a block."""
    block = _Block(_steps(frames.positions), _steps(frames.times_ns), frames.topics, frames.payloads)
    return squeeze(_encoder.encode(block))


def unpack(data: bytes, wanted: Callable[[bytes], bool] | None = None) -> list[Entry]:
    """Decode the frames of a block: all, or those whose topic is wanted. Raises `Damaged`."""
    try:
        block = _block_decoder.decode(unsqueeze(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(str(error)) from None
    if not len(block.positions) == len(block.times_ns) == len(block.topics) == len(block.payloads):
        raise Damaged("columns of different length")
    times_ns = list(accumulate(block.times_ns))
    if times_ns and not (min(times_ns) >= 0 and max(times_ns) < LATEST_NS):
        raise Damaged("a time outside of the bounds")
    columns = zip(accumulate(block.positions), times_ns, block.topics, block.payloads, strict=True)
    if wanted is None:
        return list(map(Entry._make, columns))
    topics = set(filter(wanted, set(block.topics)))
    return [Entry._make(frame) for frame in columns if frame[2] in topics]


def _steps(numbers: Sequence[int]) -> list[int]:
    return [*numbers[:1], *[later - earlier for earlier, later in pairwise(numbers)]]


def pack_messages(messages: Sequence[tuple[int, bytes]]) -> bytes:
    """Messages, each with the time that it counts from, as the data of a checkpoint."""
    return squeeze(_encoder.encode(_Messages([at_ns for at_ns, _ in messages], [payload for _, payload in messages])))


def unpack_messages(data: bytes) -> list[tuple[int, bytes]]:
    """The messages of a checkpoint. Raises `Damaged`."""
    try:
        messages = _messages_decoder.decode(unsqueeze(data))
        return list(zip(messages.times_ns, messages.payloads, strict=True))
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise Damaged(str(error)) from None


def squeeze(data: bytes) -> bytes:
    """Compressed, with a checksum. Its context is made each time: it is small, and belongs to no thread."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=True).compress(data)


def unsqueeze(data: bytes) -> bytes:
    """What was compressed, unless it claims to be larger than any block is. Raises `Damaged`."""
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_BLOCK_BYTES:
            raise Damaged(f"a block of {size} bytes")
        return zstandard.ZstdDecompressor().decompress(data)
    except (zstandard.ZstdError, MemoryError) as error:
        raise Damaged(str(error)) from None


class RecordedBy(Struct):
    """Who recorded a run, and by which limits it was judged meanwhile. Stands in its description."""

    recorder: str = ""
    """Version of ddpwatch; empty = not told."""
    limits: dict[str, dict[str, float]] = {}
    """Those that were not the ones of that version."""


def describe(run: RunFile, judged: RecordedBy | None = None) -> bytes:
    """What is kept of a run file. Field by field: addresses and keys are nobody's business who is given the file."""
    return msgspec.json.encode(
        {
            "schema": run.schema,
            "id": run.id,
            "name": run.name,
            "job": run.job,
            "attempt": run.attempt,
            "world_size": run.world_size,
            "started_unix_s": run.started_unix_s,
            "endpoints": [
                {
                    "rank": endpoint.rank,
                    "host": endpoint.host,
                    "node": endpoint.node,
                    "pid": endpoint.pid,
                    "pid_created_s": endpoint.pid_created_s,
                    "address": "",
                }
                for endpoint in run.endpoints
            ],
            **msgspec.structs.asdict(judged or RecordedBy()),
        }
    )


def run_of(description: bytes) -> RunFile | None:
    """The run that a recording describes; None = that cannot be read."""
    try:
        return msgspec.json.decode(description, type=RunFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def recorded_by_of(description: bytes) -> RecordedBy:
    """By whom it was recorded and by which limits it was judged, as far as that can be read."""
    try:
        judged = msgspec.json.decode(description, type=RecordedBy)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return RecordedBy()
    possible = max([len(judged.limits), *map(len, judged.limits.values())]) <= MAX_LIMITS
    return judged if possible else RecordedBy(judged.recorder)
