"""Encode messages as msgpack, and decode payloads from outside with every type and limit checked."""

from __future__ import annotations

from typing import Final, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from ddpwatch.errors import BadFrame, UnknownMessage
from ddpwatch.wire.limits import MAX_FRAME_BYTES, WIRE_VERSION
from ddpwatch.wire.messages import Beat, Hello, Message
from ddpwatch.wire.step_table import STEP_COLUMNS, fit_table


class _Tag(Struct):
    t: str


class _Claim(Struct):
    rank: int


_KNOWN_TAGS: Final = frozenset(kind.__struct_config__.tag for kind in get_args(Message))
_COLUMNS: Final = len(STEP_COLUMNS)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)
_tag_decoder: Final = msgspec.msgpack.Decoder(_Tag)
_claim_decoder: Final = msgspec.msgpack.Decoder(_Claim)


def encode(message: Message) -> bytes:
    """One message as the payload of a frame."""
    return _encoder.encode(message)


def decode(payload: bytes | memoryview) -> Message:
    """The message in a payload from outside. Raises `BadFrame` or `UnknownMessage`, and nothing else."""
    if len(payload) > MAX_FRAME_BYTES:
        raise BadFrame(f"frame of {len(payload)} bytes; at most {MAX_FRAME_BYTES} are read")
    try:
        message: Message = _decoder.decode(payload)
    except _UNREADABLE as error:
        raise _why_unreadable(payload, error) from None
    if type(message) is Beat:
        if message.table_columns != _COLUMNS:
            force_setattr(message, "table", fit_table(message.table, message.table_columns))
            force_setattr(message, "table_columns", _COLUMNS)
    elif isinstance(message, Hello) and (version := message.wire_version) > WIRE_VERSION:
        raise BadFrame(f"wire version {version}; this ddpwatch reads up to {WIRE_VERSION}: upgrade the viewer")
    return message


def claimed_rank(payload: bytes | memoryview) -> int | None:
    """The rank that a payload claims to come from, even if the rest cannot be read; None = it names none."""
    try:
        return _claim_decoder.decode(payload).rank
    except _UNREADABLE:
        return None


def _why_unreadable(payload: bytes | memoryview, error: Exception) -> BadFrame | UnknownMessage:
    try:
        tag = _tag_decoder.decode(payload).t
    except _UNREADABLE:
        return BadFrame(str(error))
    return BadFrame(str(error)) if tag in _KNOWN_TAGS else UnknownMessage(f"message kind {tag[:40]!r} is not known")
