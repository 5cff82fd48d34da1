"""What a person should know besides the figures and the alerts: who has not come, and notes of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.numbers import plural, ranks_text
from ddpwatch.view.cells import Cell, Level

if TYPE_CHECKING:
    from ddpwatch.core.state import RunState

MAX_NOTES: Final = 8
"""Most notes shown, the newest."""


def remarks(state: RunState) -> list[Cell]:
    """One cell a remark, without a mark in front. Ranks that say the same share one. What was lost is an alert."""
    return [*_not_come(state), *_notes(state), *_unknown_kinds(state)]


def _not_come(state: RunState) -> list[Cell]:
    """Ranks that have not even told where they listen."""
    ranks = [rank.rank for rank in state.ranks.values() if not rank.pid and state.condition(rank) == "missing"]
    if not ranks or len(ranks) == state.world_size:
        return []
    verb = "has" if len(ranks) == 1 else "have"
    return [Cell(f"{ranks_text(ranks)} {verb} not come: does every rank call ddpwatch.agent.install?", Level.WARN)]


def _notes(state: RunState) -> list[Cell]:
    speakers: dict[str, list[int]] = {}
    for rank in state.ranks.values():
        for note in sorted(rank.notes.values(), key=lambda note: note.mono_ns):
            speakers.setdefault(note.text, []).append(rank.rank)
    cells = [Cell(f"{ranks_text(ranks)}: {text}", Level.WARN) for text, ranks in speakers.items()]
    return cells[-MAX_NOTES:]


def _unknown_kinds(state: RunState) -> list[Cell]:
    if not state.unknown:
        return []
    return [Cell(f"{plural(state.unknown, 'message')} of a kind this version does not know: upgrade it", Level.DIM)]
