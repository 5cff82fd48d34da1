"""Heat map of ranks over time: how far each rank's own work was above that of the median rank.

It takes the same few milliseconds for 8 ranks and for 8192, because arrays are folded before a line is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.metrics.window import NOT_KNOWN
from ddpwatch.core.units import count
from ddpwatch.view.cells import Cell, Level, columns_of, fit, line_columns, pad
from ddpwatch.view.charts.chart import fold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.state.step_store import IntArray
    from ddpwatch.view.cells import Line
    from ddpwatch.view.charts.chart import Folding

HEAT: Final = (
    (0, "·", Level.DIM),
    (5, "░", Level.HEAT_1),
    (10, "▒", Level.HEAT_2),
    (20, "▓", Level.HEAT_3),
    (40, "█", Level.HEAT_4),
)
"""Glyphs by percent of the step above the median rank; 5% is the default threshold of a straggler."""
CALM_STEPS: Final = 8
"""Where ranks share a line, a glyph is the mean of at least this many steps: one of many ranks always has a hiccup."""
ROWS_FOR_NOTE: Final = 3
"""Min. number of rows for the note on folding below the map."""
MAX_HOST_COLUMNS: Final = 16
"""Max. width of a host's name, in terminal cells."""
MIN_MAP_COLUMNS: Final = 8
"""With fewer columns than this for the map, the labels are left out."""
_BLANK: Final = len(HEAT)
_GLYPHS: Final = (*((glyph, level) for _, glyph, level in HEAT), (" ", Level.PLAIN))
_FROM: Final = np.array([percent for percent, _, _ in HEAT[1:]])


@dataclass(frozen=True)
class Rows:
    """Which ranks share a line."""

    starts: IntArray
    labels: list[str]
    notes: tuple[str, ...] = ("",)
    """What is folded, in a long and a short version."""


def heat_map(
    excess: NDArray[np.uint8],
    ranks: Sequence[int],
    steps: IntArray,
    columns: int,
    rows: int,
    *,
    hosts: Sequence[str] | None = None,
) -> list[Line]:
    """The map of `Timeline.excess` (rank, step), with the newest step at the right. Blank = not known.

    Steps that share a column show their mean, which a rank that is slow in every fourth step raises and a single hiccup
    hardly does. Ranks that share a line show the worst of them; each host gets a line if `hosts` names one for every
    rank and there is room. The last line describes the folding.
    """
    if columns < 1 or rows < 1 or not len(ranks) or not len(steps):
        return []
    note_rows = 1 if rows >= ROWS_FOR_NOTE else 0
    grouping = rows_of(ranks, rows - note_rows, hosts)
    label_columns = max(map(columns_of, grouping.labels)) + 1
    if columns - label_columns < MIN_MAP_COLUMNS:
        label_columns = 0
    folding = fold(steps, columns - label_columns)
    if folding is None:
        return []
    heat = _heat(excess[:, folding.kept], folding, grouping.starts)
    lines: list[Line] = []
    for label, row in zip(grouping.labels, heat, strict=True):
        lines.append([Cell(pad(label, label_columns), Level.DIM)] if label_columns else [])
        lines[-1] += _cells(row)
    if note_rows:
        lines.append([Cell(_note(steps[folding.kept], folding, grouping.notes, columns), Level.DIM)])
    return lines


def heat_legend(columns: int) -> Line:
    """The legend in one line, with as many words as fit."""
    glyphs: Line = []
    for percent, glyph, level in HEAT[1:]:
        glyphs += [Cell(f" {glyph}", level), Cell(f" {percent}%", Level.DIM)]
    for words in ("of the step above the median rank: ", "above the median rank: ", "above:"):
        line = [Cell(words, Level.DIM), *glyphs]
        if line_columns(line) <= columns:
            return line
    return fit(glyphs, columns)


def rows_of(ranks: Sequence[int], rows: int, hosts: Sequence[str] | None) -> Rows:
    """Map ranks to at most `rows` lines: one rank each, one host each, or groups of equal size."""
    if len(ranks) <= rows:
        return Rows(np.arange(len(ranks)), _aligned([f"r{rank}" for rank in ranks]))
    if hosts is not None and (by_host := _by_host(hosts, rows)):
        return by_host
    # Powers of two match the usual sizes of hosts and racks.
    per_line = 1 << (-(-len(ranks) // rows) - 1).bit_length()
    starts = np.arange(0, len(ranks), per_line)
    ends = [*starts[1:].tolist(), len(ranks)]
    labels = [
        f"r{ranks[start]}-{ranks[end - 1]}" if end - start > 1 else f"r{ranks[start]}"
        for start, end in zip(starts.tolist(), ends, strict=True)
    ]
    notes = (f"each line = the worst of {per_line} ranks", f"worst of {per_line} ranks a line")
    return Rows(starts, _aligned(labels), notes)


def _by_host(hosts: Sequence[str], rows: int) -> Rows | None:
    """One line per host; None if there are too many hosts, or the ranks of one are not contiguous."""
    starts = [place for place, host in enumerate(hosts) if not place or hosts[place - 1] != host]
    names = [hosts[start] for start in starts]
    if len(starts) > rows or len(set(names)) < len(names) or not all(names):
        return None
    labels = [pad(name, min(columns_of(name), MAX_HOST_COLUMNS)) for name in names]
    return Rows(np.array(starts), labels, ("each line = the worst rank of a host", "worst rank of each host"))


def _aligned(labels: list[str]) -> list[str]:
    width = max(map(len, labels))
    return [label.rjust(width) for label in labels]


def _heat(excess: NDArray[np.uint8], folding: Folding, row_starts: IntArray) -> NDArray[np.int64]:
    """Index into `_GLYPHS` for each line and column."""
    # The timeline stores the ranks of a step contiguously: sums along them are by far the fastest.
    by_step = np.ascontiguousarray(excess.T)
    calm_steps = CALM_STEPS if len(row_starts) < by_step.shape[1] else 1
    worst = np.empty((len(row_starts), len(folding.starts)), dtype=np.float32)
    ends = [*folding.starts[1:].tolist(), len(by_step)]
    for place, (start, end) in enumerate(zip(folding.starts.tolist(), ends, strict=True)):
        # The last column is filling up: it borrows steps of the one before, or a single step would flare up in it.
        min_steps = max(calm_steps, folding.per_column if place == len(ends) - 1 else 1)
        begin = max(0, min(start, end - min_steps))
        worst[:, place] = np.maximum.reduceat(_means(by_step[begin : max(end, calm_steps)]), row_starts)
    heat = np.full((len(row_starts), folding.columns), _BLANK)
    heat[:, folding.places] = np.where(worst < 0, _BLANK, np.searchsorted(_FROM, worst, side="right"))
    return heat


def _means(by_step: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Mean of every rank; -1 for a rank without any of the steps, so that every other rank is worse."""
    sums = np.add.reduce(by_step, axis=0, dtype=np.uint32)
    if by_step.max() < NOT_KNOWN:
        all_means: NDArray[np.float32] = sums.astype(np.float32) / np.float32(len(by_step))
        return all_means
    unknown = np.add.reduce(by_step == NOT_KNOWN, axis=0, dtype=np.uint32)
    known = len(by_step) - unknown
    known_sums = sums - unknown * np.uint32(NOT_KNOWN)
    means: NDArray[np.float32] = known_sums.astype(np.float32) / np.maximum(known, 1).astype(np.float32)
    means[known == 0] = -1.0
    return means


def _cells(row: NDArray[np.int64]) -> Line:
    begins = np.flatnonzero(np.diff(row, prepend=-1)).tolist()
    ends = [*begins[1:], len(row)]
    runs = ((_GLYPHS[row[begin]], end - begin) for begin, end in zip(begins, ends, strict=True))
    return [Cell(glyph * length, level) for (glyph, level), length in runs]


def _note(steps: IntArray, folding: Folding, notes: Sequence[str], columns: int) -> str:
    """The folding and the range of steps, in as many words as fit."""
    first, last = count(int(steps[0])), count(int(steps[-1]))
    whole, short = notes[0], notes[-1]
    folded = folding.per_column > 1
    column, few = (f"1 column = {folding.per_column} steps", f"{folding.per_column}/column") if folded else ("", "")
    for parts in (
        (whole, f"steps {first} to {last}", column),
        (short, f"steps {first} to {last}", column),
        (short, f"steps {first}-{last}", few),
        (short, f"{first}-{last}", few),
        (short, f"{first}-{last}"),
        (f"{first}-{last}",),
    ):
        text = " · ".join(part for part in parts if part)
        if columns_of(text) <= columns:
            return text
    return ""
