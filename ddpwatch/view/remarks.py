"""What a person should know besides the figures: notes of the ranks, and everything that did not arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.numbers import plural, ranks_text
from ddpwatch.view.cells import Cell, Level

if TYPE_CHECKING:
    from ddpwatch.core.state import RunState

MAX_NOTES: Final = 8
"""Most notes shown, the newest."""


def remarks(state: RunState) -> list[Cell]:
    """One cell a remark, without a mark in front. Ranks that say the same share one."""
    return [*_unknown(state), *_notes(state), *_goodbyes(state), *_losses(state)]


def _unknown(state: RunState) -> list[Cell]:
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


def _goodbyes(state: RunState) -> list[Cell]:
    """Agents that switched themselves off: training goes on, and nobody measures it."""
    reasons: dict[str, list[int]] = {}
    for rank in state.ranks.values():
        if rank.bye is not None and rank.bye.reason == "off":
            reasons.setdefault(rank.bye.text, []).append(rank.rank)
    return [
        Cell(f"{ranks_text(ranks)}: ddpwatch switched itself off: {text}", Level.BAD) for text, ranks in reasons.items()
    ]


def _losses(state: RunState) -> list[Cell]:
    cells = []
    ranks = list(state.ranks.values())
    if lost := {rank.rank: rank.lost for rank in ranks if rank.lost}:
        cells.append(Cell(f"{plural(sum(lost.values()), 'message')} lost on the way ({ranks_text(lost)})", Level.WARN))
    if dropped := {rank.rank: rank.dropped for rank in ranks if rank.dropped}:
        total = plural(sum(dropped.values()), "record")
        cells.append(Cell(f"{total} dropped by the agent before sending ({ranks_text(dropped)})", Level.WARN))
    if state.bad:
        blamed = {rank.rank for rank in ranks if rank.bad}
        where = f" ({ranks_text(blamed)})" if blamed else ""
        why = f": {state.bad_reason}" if state.bad_reason else ""
        cells.append(Cell(f"{plural(state.bad, 'unreadable message')}{where}{why}", Level.WARN))
    if state.unknown:
        cells.append(
            Cell(f"{plural(state.unknown, 'message')} of a kind this version does not know: upgrade it", Level.DIM)
        )
    return cells
