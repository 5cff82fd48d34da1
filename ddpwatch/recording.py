"""A run on disk: the very frames that came, in one SQLite file. Shared by who writes it (outputs) and who reads it
(sources).

    attempt       a run that was recorded: its `run.json` without addresses. A restarted job is the next attempt
    block         about a second of frames of up to 64 ranks, compressed; found by time and by rank. Blocks that were
                  written together are one `portion`
    checkpoint    messages that bring an empty state to a moment, so that a reader can begin there
    alert         each change of an alert, as it was judged when it happened
    writer        the process that records now, if one does

Times are Unix nanoseconds of the recorder's host at its start, carried on by its monotonic clock: they never jump.
Frames are numbered in the order in which they came (`position`), across all blocks of an attempt.

What is read here may have been written by anybody: it is bounded and typed, like what comes off the wire.
"""

from __future__ import annotations

import sqlite3
import stat
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple
from urllib.parse import quote

import msgspec
import zstandard
from msgspec import Meta, Struct

from ddpwatch.errors import NoSuchRun, UsageError
from ddpwatch.wire import MAX_FRAME_BYTES, MAX_TOPIC_BYTES, Count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SCHEMA: Final = 1
APPLICATION_ID: Final = 0x64647077
"""`ddpw`: tells a recording from any other SQLite file."""
SUFFIX: Final = ".ddpw"
SHARD_RANKS: Final = 64
"""Ranks whose frames share a block."""
NO_RANK: Final = -1
"""The shard of what is about no rank: lines of log files, and what could not be read."""
MAX_BLOCK_BYTES: Final = 64 << 20
"""No block is larger than this when it is unpacked; one that claims to be is not read."""
_LEVEL: Final = 6
_MAGIC: Final = b"SQLite format 3\x00"

TABLES: Final = """
CREATE TABLE attempt (id INTEGER PRIMARY KEY, run BLOB NOT NULL, began_ns INTEGER NOT NULL);
CREATE TABLE block (
    id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, portion INTEGER NOT NULL, shard INTEGER NOT NULL,
    first_ns INTEGER NOT NULL, last_ns INTEGER NOT NULL, frames INTEGER NOT NULL, data BLOB NOT NULL);
CREATE INDEX block_by_time ON block (attempt, last_ns, first_ns, portion, shard);
CREATE INDEX block_by_rank ON block (attempt, shard, last_ns, first_ns, portion);
CREATE TABLE checkpoint (
    id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, at_ns INTEGER NOT NULL, position INTEGER NOT NULL,
    data BLOB NOT NULL);
CREATE INDEX checkpoint_by_time ON checkpoint (attempt, at_ns);
CREATE TABLE alert (
    id INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, at_ns INTEGER NOT NULL, kind TEXT NOT NULL, event BLOB NOT NULL);
CREATE TABLE writer (node TEXT NOT NULL, pid INTEGER NOT NULL, pid_created_s REAL NOT NULL);
"""


class Entry(NamedTuple):
    """One frame as it is kept."""

    position: int
    at_ns: int
    topic: bytes
    payload: bytes


class NoRecording(NoSuchRun):
    """There is no such file, or nothing is in it."""


class Unreadable(UsageError):
    """A file is no recording, or cannot be read by this version."""


class Damaged(Exception):
    """A part of a recording cannot be read; the others can. Counted, never shown as an error."""


class _Block(Struct, array_like=True):
    """Frames by columns: what is alike stands together, which is what a compressor looks for."""

    positions: list[Count]
    """The first one, then differences."""
    times_ns: list[int]
    topics: list[Annotated[bytes, Meta(max_length=MAX_TOPIC_BYTES)]]
    payloads: list[Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]]


_encoder: Final = msgspec.msgpack.Encoder()
_block_decoder: Final = msgspec.msgpack.Decoder(_Block)
_messages_decoder: Final = msgspec.msgpack.Decoder(list[Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]])


def pack(entries: Sequence[Entry]) -> bytes:
    """Frames as the data of a block; in the order of their positions."""
    positions, times_ns, position, at_ns = [], [], 0, 0
    for entry in entries:
        positions.append(entry.position - position)
        times_ns.append(entry.at_ns - at_ns)
        position, at_ns = entry.position, entry.at_ns
    return squeeze(
        _encoder.encode(_Block(positions, times_ns, [entry.topic for entry in entries], [e.payload for e in entries]))
    )


def unpack(data: bytes) -> list[Entry]:
    """The frames of a block. Raises `Damaged`."""
    try:
        block = _block_decoder.decode(unsqueeze(data))
    except (msgspec.DecodeError, RecursionError) as error:
        raise Damaged(str(error)) from None
    if not len(block.positions) == len(block.times_ns) == len(block.topics) == len(block.payloads):
        raise Damaged("columns of different length")
    entries, position, at_ns = [], 0, 0
    for step, passed_ns, topic, payload in zip(
        block.positions, block.times_ns, block.topics, block.payloads, strict=True
    ):
        position += step
        at_ns += passed_ns
        entries.append(Entry(position, at_ns, topic, payload))
    return entries


def pack_messages(payloads: Sequence[bytes]) -> bytes:
    """Messages as the data of a checkpoint."""
    return squeeze(_encoder.encode(payloads))


def unpack_messages(data: bytes) -> list[bytes]:
    """The messages of a checkpoint. Raises `Damaged`."""
    try:
        return _messages_decoder.decode(unsqueeze(data))
    except (msgspec.DecodeError, RecursionError) as error:
        raise Damaged(str(error)) from None


def squeeze(data: bytes) -> bytes:
    """Compressed. Its context is made each time: it is small, and belongs to no thread."""
    return zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(data)


def unsqueeze(data: bytes) -> bytes:
    """What was compressed, unless it claims to be larger than any block is. Raises `Damaged`."""
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_BLOCK_BYTES:
            raise Damaged(f"a block of {size} bytes")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise Damaged(str(error)) from None


def connect(path: Path, *, write: bool = False) -> sqlite3.Connection:
    """Open a recording that is there. Raises `NoRecording` or `Unreadable` with the reason in words."""
    _check_file(path)
    uri = f"file:{quote(str(path.absolute()))}?mode={'rw' if write else 'ro'}"
    try:
        connection = sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None, check_same_thread=False)
        _check_contents(connection, path)
    except sqlite3.Error as error:
        raise Unreadable(f"{path} cannot be read as a recording: {error}") from None
    return connection


def _check_file(path: Path) -> None:
    try:
        # Opening a pipe that nobody writes to would wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            what = "a directory; name the recording in it" if path.is_dir() else "no regular file"
            raise Unreadable(f"{path} is {what}")
        with path.open("rb") as file:
            beginning = file.read(len(_MAGIC))
    except FileNotFoundError:
        raise NoRecording(f"no recording {path}: there is no such file") from None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None
    if not beginning:
        raise NoRecording(f"{path} is empty: nothing was recorded")
    if beginning != _MAGIC:
        raise Unreadable(f"{path} is no recording of ddpwatch; `ddpwatch record -o FILE` makes one")


def _check_contents(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        connection.close()
        raise Unreadable(f"{path} is a database of another program, and no recording of ddpwatch")
    if schema > SCHEMA:
        connection.close()
        raise Unreadable(f"{path} was written by a newer ddpwatch (schema {schema}); this one reads up to {SCHEMA}")
