"""What is said in the end, and the lines it stands on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.logs.attribution import Entry

MOST_EVIDENCE: Final = 12


class Evidence(msgspec.Struct, frozen=True):
    """One line of a log, fit to be shown."""

    source: str
    line: int
    text: str
    rank: int | None = None


class Verdict(msgspec.Struct, frozen=True):
    """Who or what ended the job."""

    culprits: tuple[int, ...]
    """Ranks that began it; empty where the logs do not tell."""
    cause: str
    """A stable word."""
    text: str
    """One or two sentences: who, and why."""
    victims: tuple[int, ...] = ()
    """Ranks whose complaints follow from it."""
    evidence: tuple[Evidence, ...] = ()
    certain: bool = False
    """Whether the logs prove it; else it is the likeliest reading of them."""


def evidence_of(*groups: Sequence[Entry]) -> tuple[Evidence, ...]:
    """The lines, those of the first group first, none twice and not too many."""
    chosen: dict[tuple[str, int], Evidence] = {}
    for group in groups:
        for entry in group:
            told = Evidence(entry.source, entry.line, entry.mark.text, entry.rank)
            chosen.setdefault((entry.source, entry.line), told)
    return tuple(chosen.values())[:MOST_EVIDENCE]
