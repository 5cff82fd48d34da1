"""What a person should know besides the figures and the alerts: who has not come, and notes of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.numbers import plural, ranks_text
from ddpwatch.view.cells import Cell, Level

if TYPE_CHECKING:
    from ddpwatch.core.state import RunState

MAX_NOTES: Final = 8
"""Most notes shown, the newest."""
MAX_REASONS: Final = 3
"""Most reasons told why ranks are not heard."""


def remarks(state: RunState) -> list[Cell]:
    """One cell a remark, without a mark in front. Ranks that say the same share one. What was lost is an alert."""
    return [*_not_come(state), *_out_of_reach(state), *_notes(state), *_unknown_kinds(state)]


def _not_come(state: RunState) -> list[Cell]:
    """Ranks that have not even told where they listen."""
    ranks = [rank.rank for rank in state.ranks.values() if not rank.pid and state.condition(rank) == "missing"]
    if not ranks or len(ranks) == state.world_size:
        return []
    verb = "has" if len(ranks) == 1 else "have"
    return [Cell(f"{ranks_text(ranks)} {verb} not come: does every rank call ddpwatch.agent.install?", Level.WARN)]


def _out_of_reach(state: RunState) -> list[Cell]:
    """Ranks that were never heard, by the reason that is known for it."""
    by_reason: dict[str, list[int]] = {}
    for rank, why in sorted(state.out_of_reach.items()):
        if rank in state.ranks and state.condition(state.ranks[rank]) == "missing":
            by_reason.setdefault(why, []).append(rank)
    told = list(by_reason.items())[:MAX_REASONS]
    cells = [
        Cell(f"nothing is heard of {ranks_text(ranks)}: {'it' if len(ranks) == 1 else 'each'} {why}", Level.WARN)
        for why, ranks in told
    ]
    more = sum(map(len, by_reason.values())) - sum(len(ranks) for _, ranks in told)
    return [*cells, Cell(f"nor of {plural(more, 'more rank')}", Level.WARN)] if more else cells


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
