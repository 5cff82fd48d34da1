"""The form that every known line has: a literal to find it by, and patterns to read it with.

A line is found by its literal, at the first place in the text only, and read from there: forward by `tail`, and
backward by `head` over the characters before it. So no line costs more than a walk through it, whatever is in it.

A recognised line.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

REACH_CHARS: Final = 400
"""How far before its literal a pattern looks."""
FAR_CHARS: Final = 16_384
"""The same where a list of ranks stands there."""
INT: Final = r"-?\d{1,20}"
RANK: Final = r"(?P<rank>\d{1,7})"
RANKS: Final = r"(?P<ranks>\d{1,7}(?:, ?\d{1,7}){0,9999})"


class Shape(NamedTuple):
    """One kind of line."""

    kind: str
    severity: Severity
    hint: str
    """Stands in every such line."""
    tail: re.Pattern[str]
    """Matches from the hint on; named groups become fields."""
    head: re.Pattern[str] | None = None
    """Has to match right before the hint."""
    about: bool = False
    """Its rank is the one the line is about, whoever wrote it."""
    detail: str = ""
    """Becomes the field `detail`, where one kind has several lines."""
    reach_chars: int = REACH_CHARS

    def fields_in(self, line: str) -> dict[str, str] | None:
        """What the line says in this shape; None if it does not have it."""
        at = line.find(self.hint)
        tail = self.tail.match(line, at) if at >= 0 else None
        if tail is None:
            return None
        found = tail.groupdict()
        if self.head is not None:
            head = self.head.search(line, max(0, at - self.reach_chars), at)
            if head is None:
                return None
            found |= head.groupdict()
        if self.detail:
            found["detail"] = self.detail
        return {name: value for name, value in found.items() if value is not None}


def shape(
    kind: str,
    severity: Severity,
    hint: str,
    tail: str = "",
    *,
    head: str = "",
    about: bool = False,
    detail: str = "",
) -> Shape:
    """A shape; `tail` goes on behind the hint, `head` ends before it."""
    before = re.compile(rf"(?:{head})\Z") if head else None
    reach_chars = FAR_CHARS if RANKS in head else REACH_CHARS
    return Shape(kind, severity, hint, re.compile(re.escape(hint) + tail), before, about, detail, reach_chars)


LINE_CHARS: Final = 500
"""How much of a line is kept to be shown."""

Severity: TypeAlias = Literal["info", "warning", "error"]
Value: TypeAlias = int | float | str


class Mark(msgspec.Struct, frozen=True):
    """What one line says. Text in it is tame."""

    kind: str
    """A stable word; `patterns.SHAPES` has them, and `exception`, `interrupt`, `peer-error`."""
    severity: Severity
    text: str
    """The line as it may be shown."""
    rank: int | None = None
    """Global rank of whoever wrote it, or of whom it is about where the kind says so."""
    rank_sure: bool = False
    """Whether the rank is global beyond doubt; a launcher's or NCCL's own numbering may be another one."""
    group: str = ""
    """The process group, if told."""
    fields: dict[str, Value] = {}
    """What was in it, units in the names. What was not told, or cannot be true, is not in it."""

    def number(self, name: str) -> int | None:
        """A field that is a whole number; None if it was not told."""
        value = self.fields.get(name)
        return value if isinstance(value, int) else None

    def word(self, name: str) -> str:
        """A field that is text; empty if it was not told."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""

    def ranks(self) -> tuple[int, ...]:
        """The ranks that the line names as those to blame, in order."""
        return tuple(sorted({int(each) for each in self.word("ranks").replace(",", " ").split() if each.isdecimal()}))
