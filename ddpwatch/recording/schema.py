"""Format of a recording: one SQLite file with the original frames of a run in compressed blocks.

    attempt       a recorded run: its `run.json` without addresses. A restarted job is the next attempt
    span          time up to which an attempt was followed, including silence after its last frame
    block         about a second of frames of up to 64 ranks, compressed; indexed by time and by rank. Blocks that were
                  written together are one `portion`. Blocks of shard `ALERTS` hold the texts of open alerts
    checkpoint    messages that bring an empty state to a moment, so that reading can start there; payloads that begin
                  with `wire.NO_MESSAGE` are step tables (`core.state.step_codec`)
    gap           frames that were received and could not be written, because the disk was full
    alert         each change of an alert, as it was reported when it happened
    writer        the process that is recording, if any

Times are Unix nanoseconds of the recorder's host at its start, continued by its monotonic clock: they never jump.
Frames are numbered in the order of arrival (`position`), across all blocks of a recording.

Files are untrusted: what is read is bounded and typed, like what comes off the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, TypeVar

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
"""SQLite application id `ddpw` of recordings."""
SUFFIX: Final = ".ddpw"
PAGE_BYTES: Final = 4096
"""Page size of the database in bytes."""
SHARD_RANKS: Final = 64
"""Ranks whose frames share a block."""
NO_RANK: Final = -1
"""Shard of frames without a rank: lines of log files, and unreadable frames."""
ALERTS: Final = -2
"""Shard of the texts of open alerts. It holds no frames of the run, and its positions do not count."""
ALERTS_TOPIC: Final = b"alerts"
MAX_BLOCK_BYTES: Final = 64 << 20
"""Max bytes of a block when decompressed; one that claims more is not read."""
LATEST_NS: Final = 2**62
"""Exclusive upper bound of times in Unix nanoseconds: the year 2116."""
LEVEL: Final = 1
"""Zstandard compression level. Higher levels gain nothing: what is left are the last digits of times."""
MAX_LIMITS: Final = 64
"""Groups of changed thresholds, and thresholds in a group, that a recording may list."""

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
"""Exact SQL of the tables; a file with any other is not queried.

`block.position` is that of the last frame in it; `checkpoint.position` that of the last frame before it.
"""


class Entry(NamedTuple):
    """One recorded frame."""

    position: int
    at_ns: int
    topic: bytes
    payload: bytes


@dataclass(slots=True)
class Columns:
    """Frames of a block by columns, in the order of their positions.

    Lists of plain values, because Python's garbage collector would visit thousands of tuples a second.
    """

    positions: list[int] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    topics: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)


class NoRecording(NoSuchRun):
    """The file does not exist, or nothing was recorded in it."""


class Unreadable(UsageError):
    """A file is not a recording, or this version cannot read it."""


class DamagedFile(Unreadable):
    """A damaged recording that SQLite cannot read, or only in part."""


class DamagedPart(Exception):
    """One part of a recording cannot be read. Counted, never shown as an error."""


class _Block(Struct, array_like=True):
    """Frames by columns, which compress better than rows."""

    positions: list[Count]
    """Delta-encoded, like the times."""
    times_ns: list[int]
    topics: list[Annotated[bytes, Meta(max_length=MAX_TOPIC_BYTES)]]
    payloads: list[Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]]


class _Messages(Struct, array_like=True):
    times_ns: list[Annotated[int, Meta(ge=0, lt=LATEST_NS)]]
    payloads: list[Annotated[bytes, Meta(max_length=MAX_BLOCK_BYTES)]]


_Decoded = TypeVar("_Decoded")
_block_decoder: Final = msgspec.msgpack.Decoder(_Block)
_messages_decoder: Final = msgspec.msgpack.Decoder(_Messages)


def pack(frames: Columns) -> bytes:
    """Encode frames as the data of a block."""
    block = _Block(_deltas(frames.positions), _deltas(frames.times_ns), frames.topics, frames.payloads)
    return _compressed(block)


def unpack(data: bytes, wanted: Callable[[bytes], bool] | None = None) -> list[Entry]:
    """Decode the frames of a block: all, or those whose topic is wanted. Raises `DamagedPart`."""
    block = _decompressed(data, _block_decoder)
    if not len(block.positions) == len(block.times_ns) == len(block.topics) == len(block.payloads):
        raise DamagedPart("columns of different length")
    times_ns = list(accumulate(block.times_ns))
    if times_ns and not (min(times_ns) >= 0 and max(times_ns) < LATEST_NS):
        raise DamagedPart("a time outside of the bounds")
    columns = zip(accumulate(block.positions), times_ns, block.topics, block.payloads, strict=True)
    if wanted is None:
        return list(map(Entry._make, columns))
    topics = set(filter(wanted, set(block.topics)))
    return [Entry._make(frame) for frame in columns if frame[2] in topics]


def _deltas(numbers: Sequence[int]) -> list[int]:
    return [*numbers[:1], *[later - earlier for earlier, later in pairwise(numbers)]]


def pack_messages(messages: Sequence[tuple[int, bytes]]) -> bytes:
    """Encode messages, each with its time, as the data of a checkpoint."""
    return _compressed(_Messages([at_ns for at_ns, _ in messages], [payload for _, payload in messages]))


def unpack_messages(data: bytes) -> list[tuple[int, bytes]]:
    """Decode the messages of a checkpoint. Raises `DamagedPart`."""
    messages = _decompressed(data, _messages_decoder)
    if len(messages.times_ns) != len(messages.payloads):
        raise DamagedPart("columns of different length")
    return list(zip(messages.times_ns, messages.payloads, strict=True))


def _compressed(message: _Block | _Messages) -> bytes:
    """Encode and compress with a checksum. A context per call, because contexts are not thread-safe."""
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=True)
    return compressor.compress(msgspec.msgpack.encode(message))


def _decompressed(data: bytes, decoder: msgspec.msgpack.Decoder[_Decoded]) -> _Decoded:
    """Decompress up to `MAX_BLOCK_BYTES` and decode. Raises `DamagedPart`."""
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_BLOCK_BYTES:
            raise DamagedPart(f"a block of {size} bytes")
        return decoder.decode(zstandard.ZstdDecompressor().decompress(data))
    except (zstandard.ZstdError, MemoryError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedPart(str(error)) from None


class RecordedBy(Struct):
    """Version of the recorder and its thresholds, a part of a run's description."""

    recorder: str = ""
    """Version of ddpwatch; empty = unknown."""
    limits: dict[str, dict[str, float]] = {}
    """Thresholds that differed from the defaults of that version."""


_RUN_FIELDS: Final = ("schema", "id", "name", "job", "attempt", "world_size", "started_unix_s")
_ENDPOINT_FIELDS: Final = ("rank", "host", "node", "pid", "pid_created_s")


def describe(run: RunFile, recorded_by: RecordedBy | None = None) -> bytes:
    """Encode the fields of a run file that may be passed on to others: no addresses, no keys."""
    described = {name: getattr(run, name) for name in _RUN_FIELDS}
    described["endpoints"] = [
        {name: getattr(endpoint, name) for name in _ENDPOINT_FIELDS} | {"address": ""} for endpoint in run.endpoints
    ]
    return msgspec.json.encode(described | msgspec.structs.asdict(recorded_by or RecordedBy()))


def run_of(description: bytes) -> RunFile | None:
    """Decode the description of a run; None = unreadable."""
    try:
        return msgspec.json.decode(description, type=RunFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def recorded_by_of(description: bytes) -> RecordedBy:
    """Decode the version of the recorder and its thresholds; defaults if unreadable."""
    try:
        recorded_by = msgspec.json.decode(description, type=RecordedBy)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return RecordedBy()
    possible = max([len(recorded_by.limits), *map(len, recorded_by.limits.values())]) <= MAX_LIMITS
    return recorded_by if possible else RecordedBy(recorded_by.recorder)
