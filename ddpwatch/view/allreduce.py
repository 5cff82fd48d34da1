"""The all-reduce: what share of the step it takes, whether that is the wire or waiting, and how that came about."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.numbers import percent, ranks_text, wire_and_waiting
from ddpwatch.view.buckets import bucket_lines
from ddpwatch.view.cells import Cell, Level, fit
from ddpwatch.view.chart import Band, Mark, chart
from ddpwatch.view.phasebar import PIECES, UNSPLIT
from ddpwatch.view.plot import SOLID
from ddpwatch.view.prose import paragraph
from ddpwatch.view.scaling import scaling_doubt, scaling_sentence
from ddpwatch.view.sharemark import share_lately, share_mark
from ddpwatch.view.unmeasured import why_none
from ddpwatch.view.waited_for import waited_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.core.figures import Figures
    from ddpwatch.view.cells import Line
    from ddpwatch.view.phasebar import Piece
    from ddpwatch.view.picture import Picture

__all__ = ["bucket_lines", "share_lines"]

MIN_CHART_ROWS: Final = 3
ROWS_FOR_GAP: Final = 12
"""From here on a blank line stands between the words and the chart."""
LABEL_COLUMNS: Final = 12
_PIECE: Final = {piece.name: piece for piece in PIECES}


def share_lines(picture: Picture, columns: int, rows: int) -> list[Line]:
    """The share now in words, then over time as a chart; the words go first where there is little room."""
    words = [fit(line, columns) for line in _words(picture, columns)[: max(rows, 0)]]
    if rows >= ROWS_FOR_GAP:
        words.append([])
    room = rows - len(words)
    return [*words, *_share_chart(picture, columns, room)] if room >= MIN_CHART_ROWS else words


def _words(picture: Picture, columns: int) -> list[Line]:
    figures = picture.figures
    if picture.state.world_size < 2:
        return [[_label("all-reduce"), Cell("none: one rank has nobody to meet", Level.DIM)]]
    if figures is None:
        return [[_label("all-reduce"), Cell(f"unproven: {why_none(picture.state)}", Level.WARN)]]
    scaled: list[Line] = []
    if picture.scaling:
        scaled = paragraph(scaling_sentence(picture.scaling), columns, lead=[_label("scaling")])
        if doubt := scaling_doubt(picture.scaling):
            scaled += paragraph(f"▲ {doubt}", columns, Level.WARN, lead=[_label("")])
    return [_headline(picture, figures), _who(picture, figures), _overlap(figures), *scaled]


def _headline(picture: Picture, figures: Figures) -> Line:
    mark = share_mark(picture)
    line = [
        _label("all-reduce"),
        Cell(percent(figures.share), Level.WARN if mark else Level.STRONG),
        Cell(" of the step"),
    ]
    if figures.wire_share is None:
        line.append(Cell("; wire or waiting is unproven: not all ranks are heard"))
    else:
        wire, waiting = wire_and_waiting(figures.share, figures.wire_share)
        line += [
            Cell(" = "),
            Cell(f"wire {wire} %", Level.WIRE),
            Cell(" + "),
            Cell(f"waiting {waiting} %", Level.WAITING),
        ]
    limit = picture.limits.comm_share.share
    if mark:
        line += [Cell("   "), Cell(mark, Level.WARN)]
    elif lately := share_lately(picture):
        line += [Cell("   "), Cell(lately)]
    else:
        line += [Cell("   "), Cell(f"✓ under {percent(limit)}", Level.OK)]
    return line


def _who(picture: Picture, figures: Figures) -> Line:
    ranks, cost = waited_for(picture)
    if ranks:
        told = "" if cost is None else f", which costs the job {percent(cost)} of its time"
        return [_label("waiting for"), Cell(ranks_text(ranks), Level.WARN), Cell(told)]
    why = "nobody: no rank stands out" if figures.complete else "unproven: not all ranks are heard"
    return [_label("waiting for"), Cell(why, Level.DIM)]


def _overlap(figures: Figures) -> Line:
    if figures.overlap is None:
        return [_label("overlap"), Cell("unproven: the buckets are not timed", Level.DIM)]
    line = [
        _label("overlap"),
        Cell(percent(figures.overlap), Level.STRONG),
        Cell(" of the gradient all-reduce is hidden behind computing"),
    ]
    if figures.bus_bytes_s is not None:
        line.append(Cell(f" · {figures.bus_bytes_s / 1e9:.3g} GB/s bus bandwidth"))
    return line


def _share_chart(picture: Picture, columns: int, rows: int) -> list[Line]:
    timeline = picture.timeline
    steps = timeline.steps()
    step_ns = np.maximum(timeline.series("step_ns", steps), 1.0)
    wire, waiting, sync = (timeline.series(name, steps) / step_ns * 100 for name in ("wire_ns", "wait_ns", "sync_ns"))
    unsplit = np.where(np.isfinite(wire), np.nan, sync)
    limit = picture.limits.comm_share.share
    return chart(
        # What is on top is solid here, so that its edge can be told exactly.
        [_band(_PIECE["wire"], wire), replace(_band(_PIECE["waiting"], waiting), glyph=SOLID), _band(UNSPLIT, unsplit)],
        steps,
        columns,
        rows,
        unit="%",
        marks=[Mark(limit * 100, f"limit {percent(limit)}")],
        cursor=picture.at,
    )


def _band(piece: Piece, values: NDArray[np.float64]) -> Band:
    return Band(piece.name, values, piece.level, piece.glyph)


def _label(text: str) -> Cell:
    return Cell(text.ljust(LABEL_COLUMNS), Level.DIM)
