"""A recognised line."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

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
