"""The form that every known line has: a literal to find it by, and patterns to read it with.

A line is found by its literal, at the first place in the text only, and read from there: forward by `tail`, and
backward by `head` over the characters before it. So no line costs more than a walk through it, whatever is in it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from ddpwatch.core.logs.mark import Severity

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
