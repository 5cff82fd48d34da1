"""Help screen: keys, glyphs of the step bar, and the glossary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.view.cells import Cell, Level, columns_of, fit, pad
from ddpwatch.view.charts.phase_bar import PIECES
from ddpwatch.view.glossary import GLOSSARY
from ddpwatch.view.layout import heading, paragraph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.view.cells import Line

# Widths in terminal cells: longest line, explained terms, and the gap between columns of keys.
MAX_TEXT_COLUMNS: Final = 100
_TERM_COLUMNS: Final = 18
_KEY_GAP: Final = 3
_PIECE_TEXTS: Final = {
    "data": "blocked in the DataLoader: the next batch was not ready.",
    "forward": "the model's forward pass.",
    "backward": "the backward pass, without exposed all-reduce.",
    "waiting": "in the all-reduce, waiting for slower ranks: the rank with the least of it is the slow one.",
    "wire": "in the all-reduce, transferring data: even the last rank to arrive spends this time.",
    "sync, not split": "in the all-reduce; without data from every rank, it cannot be split into waiting and wire.",
    "optimizer": "optimizer.step().",
    "other": "the rest of the step: loss, clipping, logging, evaluation, checkpoints, Python.",
}


def help_lines(keys: Sequence[tuple[str, str]], columns: int) -> list[Line]:
    """Explain these keys, the glyphs of the step bar, and the terms of the glossary."""
    columns_used = min(columns, MAX_TEXT_COLUMNS)
    lines = [heading("keys", columns), *_keys(keys, columns), []]
    lines += [heading("the step bar", columns, "length = time; all bars of a table share one scale")]
    for piece in PIECES:
        name = pad(piece.name.partition(",")[0], _TERM_COLUMNS - 3)
        lead = [Cell(f"{piece.glyph * 2} ", piece.level), Cell(name, Level.STRONG)]
        lines += paragraph(_PIECE_TEXTS[piece.name], columns_used, lead=lead)
    for title, terms in GLOSSARY.items():
        lines += [[], heading(title, columns)]
        for term, text in terms.items():
            lines += paragraph(text, columns_used, lead=[Cell(pad(term, _TERM_COLUMNS), Level.STRONG)])
    return [fit(line, columns) for line in lines]


def _keys(keys: Sequence[tuple[str, str]], columns: int) -> list[Line]:
    """Lay out the keys in as many columns as fit, to be read from top to bottom."""
    if not keys:
        return []
    key_columns = max(columns_of(key) for key, _ in keys) + 2
    entry_columns = key_columns + max(columns_of(text) for _, text in keys) + _KEY_GAP
    if entry_columns - _KEY_GAP > columns:
        return [
            line
            for key, text in keys
            for line in paragraph(text, columns, lead=[Cell(pad(key, key_columns), Level.KEY)])
        ]
    beside = max((columns + _KEY_GAP) // entry_columns, 1)
    height = -(-len(keys) // beside)
    lines: list[Line] = []
    for row in range(height):
        line: Line = []
        for key, text in keys[row::height]:
            line += [Cell(pad(key, key_columns), Level.KEY), Cell(pad(text, entry_columns - key_columns))]
        # Trailing blanks may be wider than the room.
        lines.append([*line[:-1], line[-1]._replace(text=line[-1].text.rstrip())])
    return lines
