"""Pattern of a known log line (`LinePattern`), and the result of a match (`Mark`).

A line is found by the first occurrence of a literal, then read forward by `tail` and backward by `head`. Matching is
linear in the length of the line, for any input.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

REACH_CHARS: Final = 400
"""Characters before the literal that `head` may match."""
FAR_CHARS: Final = 16_384
"""Characters before the literal that `head` may match where it is a list of ranks."""
INT: Final = r"-?\d{1,20}"
RANK: Final = r"(?P<rank>\d{1,7})"
REST: Final = ".{0,400}"
RANKS: Final = r"(?P<ranks>\d{1,7}(?:, ?\d{1,7}){0,9999})"


class LinePattern(NamedTuple):
    """Pattern of one kind of line."""

    kind: str
    severity: Severity
    hint: str
    """Literal that occurs in every such line."""
    tail: re.Pattern[str]
    """Matches from the hint on; named groups become fields."""
    head: re.Pattern[str] | None = None
    """Must match directly before the hint."""
    about: bool = False
    """Whether the rank in the line is its subject and not its writer."""
    detail: str = ""
    """Value of the field `detail`, for kinds with several patterns."""
    reach_chars: int = REACH_CHARS

    def fields_in(self, line: str) -> dict[str, str] | None:
        """Fields of a line that matches; None if it does not."""
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


def line_pattern(
    severity: Severity, kind: str, hint: str, tail: str = "", *, head: str = "", about: bool = False, detail: str = ""
) -> LinePattern:
    """Build a `LinePattern`; `tail` starts after the hint, `head` ends before it."""
    before = re.compile(rf"(?:{head})\Z") if head else None
    reach_chars = FAR_CHARS if RANKS in head else REACH_CHARS
    return LinePattern(kind, severity, hint, re.compile(re.escape(hint) + tail), before, about, detail, reach_chars)


info = partial(line_pattern, "info")
warning = partial(line_pattern, "warning")
error = partial(line_pattern, "error")

LINE_CHARS: Final = 500
"""Max characters of a line that are kept for display."""

Severity: TypeAlias = Literal["info", "warning", "error"]
Value: TypeAlias = int | float | str


class Mark(msgspec.Struct, frozen=True):
    """What was recognized in one line. Its text is sanitized."""

    kind: str
    """Stable name: one of `parser.LINE_PATTERNS`, or `exception`, `interrupt`, `peer-error`."""
    severity: Severity
    text: str
    """The line for display."""
    rank: int | None = None
    """Global rank of the writer, or of the line's subject where the kind says so."""
    rank_sure: bool = False
    """Whether the rank is certainly global; launchers and NCCL may number ranks differently."""
    group: str = ""
    """Name of the process group; empty = not in the line."""
    fields: dict[str, Value] = {}
    """Values in the line, with units in the names; absent and impossible values are left out."""

    def number(self, name: str) -> int | None:
        """A field that is an integer; None if absent."""
        value = self.fields.get(name)
        return value if isinstance(value, int) else None

    def word(self, name: str) -> str:
        """A field that is text; empty if absent."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""

    def ranks(self) -> tuple[int, ...]:
        """Ranks that the line itself names as missing or failed, in order."""
        return tuple(sorted({int(each) for each in self.word("ranks").replace(",", " ").split() if each.isdecimal()}))
