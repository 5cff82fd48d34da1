"""One step of one rank as a bar: each phase has its own glyph, so the bar reads without colour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ddpwatch.view.cells import Cell, Level

if TYPE_CHECKING:
    from ddpwatch.core.figures import RankFigures
    from ddpwatch.view.cells import Line


class Piece(NamedTuple):
    """One kind of time in the bar."""

    name: str
    glyph: str
    level: Level


PIECES: Final = (
    Piece("data", "▚", Level.DATA),
    Piece("forward", "▓", Level.FORWARD),
    Piece("backward", "█", Level.BACKWARD),
    Piece("waiting", "░", Level.WAITING),
    Piece("wire", "▒", Level.WIRE),
    Piece("sync, not told apart", "▤", Level.WAITING),
    Piece("optimizer", "▞", Level.OPTIMIZER),
    Piece("other", "·", Level.OTHER),
)
"""In the order of a step. `sync` shows as waiting for others, then the wire itself, or as what cannot be split."""
UNSPLIT: Final = PIECES[5]


def phase_bar(figures: RankFigures, full_ns: float, columns: int) -> Line:
    """The bar, where `full_ns` takes all the columns. Exactly `columns` wide."""
    # Medians are taken apart from each other: a wait may exceed the median sync by a hair.
    wait_ns = None if figures.wait_ns is None else min(figures.wait_ns, figures.sync_ns)
    times_ns = (
        figures.data_ns,
        figures.forward_ns,
        figures.backward_ns,
        wait_ns or 0.0,
        0.0 if wait_ns is None else figures.sync_ns - wait_ns,
        figures.sync_ns if wait_ns is None else 0.0,
        figures.optimizer_ns,
        figures.other_ns,
    )
    # For the same reason the phases may add up to more than the step; they are then shrunk to fit.
    full_ns = max(full_ns, sum(times_ns), 1.0)
    lengths = _lengths([time_ns / full_ns * columns for time_ns in times_ns])
    bar = [Cell(piece.glyph * length, piece.level) for piece, length in zip(PIECES, lengths, strict=True) if length]
    return [*bar, Cell(" " * (columns - sum(lengths)))]


def legend(*, split: bool = True) -> Line:
    """What the glyphs stand for, where `sync` is split into waiting and wire, or where it cannot be."""
    line: Line = []
    for piece in PIECES:
        if piece.name in ({UNSPLIT.name} if split else {"waiting", "wire"}):
            continue
        line += [Cell(piece.glyph, piece.level), Cell(f" {piece.name}  ", Level.DIM)]
    return line


def _lengths(exact: list[float]) -> list[int]:
    """Whole columns for each piece, with their sum right: the largest remainders are rounded up."""
    lengths = [int(value) for value in exact]
    spare = round(sum(exact)) - sum(lengths)
    by_remainder = sorted(range(len(exact)), key=lambda place: lengths[place] - exact[place])
    for place in by_remainder[:spare]:
        lengths[place] += 1
    return lengths
