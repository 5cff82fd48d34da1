"""Turns text from outside into text that is safe to show. All text enters the state through here.

Host names, model names, notes and error texts come from the training job, or from an imitation of one.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import msgspec.inspect

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

NAME_CHARS: Final = 80
"""Maximum length of host, model, run and group names, in characters."""
NOTE_CHARS: Final = 1000
"""Maximum length of notes and reasons, in characters."""

_ESCAPE_SEQUENCES: Final = re.compile(
    r"""
      (?: \x1b\[ | \x9b ) [0-?]* [ -/]* [@-~]?                                              # CSI: colors, cursor
    | (?: \x1b[\]PX^_] | [\x90\x98\x9d-\x9f] ) .*? (?: \x07 | \x1b\\ | \x9c | \Z )          # OSC, DCS: titles, links
    | \x1b [ -/]* [0-~]?
    """,
    re.VERBOSE | re.DOTALL,
)
# Controls, format characters (bidi overrides, zero width), surrogates, private use, unassigned.
_DROPPED_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


def is_sanitized(text: str, limit: int) -> bool:
    """Fast check for text that needs no change: printable ASCII within the limit."""
    return text.isascii() and text.isprintable() and len(text) <= limit


def are_sanitized(texts: Collection[str], limit: int) -> bool:
    """Whether all texts pass `is_sanitized`, in one check of the joined text."""
    text = "".join(texts)
    return text.isascii() and text.isprintable() and (len(text) <= limit or max(map(len, texts)) <= limit)


def sanitize(text: str, limit: int) -> str:
    """Reduce text to one printable line of `limit` characters at most: no controls, escape sequences or bidi marks."""
    if not (text.isascii() and text.isprintable()):
        shown = (
            char
            for char in _ESCAPE_SEQUENCES.sub("", text)
            if char.isspace() or unicodedata.category(char) not in _DROPPED_CATEGORIES
        )
        text = unicodedata.normalize("NFC", " ".join("".join(shown).split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def sanitized(message: MessageT, limit: int) -> MessageT:
    """The message with its own text fields sanitized, nested messages excepted."""
    names, values = _text_fields(type(message))
    texts = [text or "" for text in values(message)]
    if are_sanitized(texts, limit):
        return message
    changed = {
        name: sanitize(text, limit) for name, text in zip(names, texts, strict=True) if not is_sanitized(text, limit)
    }
    return msgspec.structs.replace(message, **changed)


@cache
def _text_fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, ...], Callable[[msgspec.Struct], tuple[Any, ...]]]:
    """Names of the fields that can hold text, and their getter. Cached, because a thousand ranks send these all the
    time.
    """
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    names = tuple(field.name for field in info.fields if _holds_text(field.type))
    if len(names) > 1:
        return names, attrgetter(*names)
    return names, lambda message: tuple(getattr(message, name) for name in names)


def _holds_text(kind: msgspec.inspect.Type) -> bool:
    if isinstance(kind, msgspec.inspect.Metadata):
        return _holds_text(kind.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        return any(map(_holds_text, kind.types))
    return isinstance(kind, (msgspec.inspect.StrType, msgspec.inspect.AnyType))
