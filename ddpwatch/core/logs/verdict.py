"""Verdict on a failed job, with the log lines that support it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.logs.rank_attribution import Entry

MAX_EVIDENCE: Final = 12
"""Log lines that are shown as evidence of a verdict."""


class Evidence(msgspec.Struct, frozen=True):
    """One log line for display."""

    source: str
    line: int
    text: str
    rank: int | None = None


class Verdict(msgspec.Struct, frozen=True):
    """Root cause of a failed job."""

    culprits: tuple[int, ...]
    """Ranks that failed first; empty if the logs do not show them."""
    cause: str
    """Stable name of the cause."""
    text: str
    """One or two sentences: which ranks, and why."""
    victims: tuple[int, ...] = ()
    """Ranks with secondary failures."""
    evidence: tuple[Evidence, ...] = ()
    certain: bool = False
    """Whether the logs prove it; otherwise it is the likeliest explanation."""


def evidence_of(*groups: Sequence[Entry]) -> tuple[Evidence, ...]:
    """Unique lines in the order of the groups, at most `MAX_EVIDENCE`."""
    chosen: dict[tuple[str, int], Evidence] = {}
    for group in groups:
        for entry in group:
            shown = Evidence(entry.source, entry.line, entry.mark.text, entry.rank)
            chosen.setdefault((entry.source, entry.line), shown)
    return tuple(chosen.values())[:MAX_EVIDENCE]
