"""All-reduce screen: its share of the step, split into wire and waiting, and the gradient buckets of one backward."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core import rule_names as rules
from ddpwatch.core.metrics.live_metrics import backward_ns_of, timings_of
from ddpwatch.core.metrics.sync_points import EVERY_STEP
from ddpwatch.core.model_kinds import kind_name, sync_name
from ddpwatch.core.units import UNPROVEN, count, ms, percent, plural, ranks_text, size, wire_and_waiting
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.cells import Cell, Level, fit, pad
from ddpwatch.view.charts.chart import SOLID, Band, Mark, chart
from ddpwatch.view.charts.phase_bar import PIECES, UNSPLIT
from ddpwatch.view.layout import paragraph
from ddpwatch.view.run_view import no_figures_reason
from ddpwatch.view.scaling import scaling_doubt, scaling_sentence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.core.metrics.live_metrics import Figures, Timing
    from ddpwatch.core.metrics.sync_points import SyncPointFigures
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.view.cells import Line
    from ddpwatch.view.charts.phase_bar import Piece
    from ddpwatch.view.run_view import RunView

HIDDEN: Final = Cell("━", Level.WIRE)
EXPOSED: Final = Cell("█", Level.WARN)
UNSEEN: Final = Cell("┄", Level.DIM)
BEFORE: Final = Cell("·", Level.DIM)
BACKWARD_END: Final = Cell("╎", Level.STRONG)
# Bounds of the width of the bars of buckets, in terminal cells; with less room there are none.
MIN_BAR_COLUMNS: Final = 10
MAX_BAR_COLUMNS: Final = 120
ROWS_FOR_LEGEND: Final = 6
"""Min. number of rows for the legend of the buckets."""
MEASURED: Final = frozenset({"buckets", "hook"})
"""Kinds of communication timing (`Hello.comm`) that include bucket times."""
# Titles and widths, in terminal cells, of the columns left and right of the bars.
TITLES: Final = (("#", 4), ("SIZE", 5), ("READY", 6), ("TOOK", 6))
FIGURES: Final = (("HIDDEN", 6), ("GB/s", 6))
POINT_TITLES: Final = (("MS", 8), ("STEP%", 8), ("wire", 8), ("waiting", 9), ("STEPS", 8))
"""Titles and widths, in terminal cells, of the columns of sync points."""
MIN_POINT_SHARE: Final = 0.01
"""Sync points with a smaller fraction of all sync are left out."""
HOW: Final = (
    'Bucket timing is off. To turn it on: ddpwatch.agent.install(model, comm="buckets")',
    "It adds a communication hook to DDP: some microseconds per bucket. One registered by your script is timed anyway.",
)
NOT_DDP: Final = (
    "{kind}: gradient buckets, their overlap and buffer broadcasts are parts of DDP and are not measured. What is "
    "measured is the time in which a rank waits in a collective."
)
MIN_CHART_ROWS: Final = 3
"""Min. number of rows for the chart of the share."""
ROWS_FOR_GAP: Final = 12
"""Min. number of rows for a blank line between the text and the chart."""
LABEL_COLUMNS: Final = 12
"""Width of labels, in terminal cells."""
_PIECE: Final = {piece.name: piece for piece in PIECES}


def waited_for(run_view: RunView) -> tuple[tuple[int, ...], float | None]:
    """The ranks that the others wait for, and their share of the job's time; empty if no rank stands out.

    Taken from the straggler alert; without one, the costliest rank if it exceeds the rule's threshold.
    """
    for alert in run_view.fresh:
        if alert.finding.rule == rules.STRAGGLER and alert.finding.ranks:
            return alert.finding.ranks, alert.finding.cost
    ranks = run_view.figures.ranks.values() if run_view.figures else ()
    costs = {rank.rank: rank.straggler_cost_share for rank in ranks if rank.straggler_cost_share is not None}
    worst = max(costs, key=costs.__getitem__, default=None)
    if worst is None or costs[worst] < run_view.limits.straggler.share:
        return (), None
    return (worst,), costs[worst]


def share_mark(run_view: RunView) -> str:
    """Text of the mark beside the all-reduce share; empty = none.

    It follows the alert, so that the two never contradict each other. Before the rule has enough steps, it follows the
    threshold. For a share above the threshold without an alert, see `share_lately`.
    """
    figures, limit = run_view.figures, run_view.limits.comm_share.share
    if figures is None:
        return ""
    over = figures.share > limit
    is_open = any(alert.finding.rule == rules.COMM_SHARE for alert in run_view.fresh)
    if not is_open and not (over and run_view.too_early):
        return ""
    # Hysteresis: an alert stays open until the share is clearly below the threshold.
    return f"▲ over {percent(limit)}" if over else f"▲ was over {percent(limit)}"


def share_lately(run_view: RunView) -> str:
    """Text for a share above the threshold without an alert, whose rule evaluates other steps; empty = not so."""
    figures, limit = run_view.figures, run_view.limits.comm_share.share
    if figures is None or run_view.state.world_size < 2 or figures.share <= limit or share_mark(run_view):
        return ""
    return f"over {percent(limit)} recently"


def share_lines(run_view: RunView, columns: int, rows: int) -> list[Line]:
    """Text on the current share, then a chart of it over time if there is room."""
    words = [fit(line, columns) for line in _words(run_view, columns)[: max(rows, 0)]]
    if rows >= ROWS_FOR_GAP:
        words.append([])
    room = rows - len(words)
    return [*words, *_share_chart(run_view, columns, room)] if room >= MIN_CHART_ROWS else words


def _words(run_view: RunView, columns: int) -> list[Line]:
    figures = run_view.figures
    if run_view.state.world_size < 2:
        return [[_label(sync_name(run_view.state)), Cell("none: there is only one rank", Level.DIM)]]
    if figures is None:
        return [[_label(sync_name(run_view.state)), Cell(f"unknown: {no_figures_reason(run_view.state)}", Level.WARN)]]
    scaled: list[Line] = []
    if run_view.scaling:
        scaled = paragraph(scaling_sentence(run_view.scaling), columns, lead=[_label("scaling")])
        if doubt := scaling_doubt(run_view.scaling):
            scaled += paragraph(f"▲ {doubt}", columns, Level.WARN, lead=[_label("")])
    return [_headline(run_view, figures), _rank_text(run_view, figures), _overlap(run_view, figures), *scaled]


def _headline(run_view: RunView, figures: Figures) -> Line:
    mark = share_mark(run_view)
    line = [
        _label(sync_name(run_view.state)),
        Cell(percent(figures.share), Level.WARN if mark else Level.STRONG),
        Cell(" of the step"),
    ]
    if figures.wire_share is None:
        line.append(Cell("; wire and waiting are unknown: no data from some ranks"))
    else:
        wire, waiting = wire_and_waiting(figures.share, figures.wire_share)
        line += [
            Cell(" = "),
            Cell(f"wire {wire}%", Level.WIRE),
            Cell(" + "),
            Cell(f"waiting {waiting}%", Level.WAITING),
        ]
    if mark:
        rating = Cell(mark, Level.WARN)
    elif lately := share_lately(run_view):
        rating = Cell(lately)
    else:
        rating = Cell(f"✓ under {percent(run_view.limits.comm_share.share)}", Level.OK)
    return [*line, Cell("   "), rating]


def _rank_text(run_view: RunView, figures: Figures) -> Line:
    ranks, cost = waited_for(run_view)
    if ranks:
        reported = "" if cost is None else f", which costs {percent(cost)} of the job's time"
        finding = run_view.worst.get(ranks[0])
        level = Level.WARN if finding is None else MARKS[finding.severity].level
        return [_label("waiting for"), Cell(ranks_text(ranks), level), Cell(reported)]
    why = "no rank in particular" if figures.complete else "unknown: no data from some ranks"
    return [_label("waiting for"), Cell(why, Level.DIM)]


def _overlap(run_view: RunView, figures: Figures) -> Line:
    if figures.overlap is None:
        other = kind_name(run_view.state)
        why = f"not measured: {other} has no DDP buckets" if other else "unknown: bucket timing is off"
        return [_label("overlap"), Cell(why, Level.DIM)]
    line = [
        _label("overlap"),
        Cell(percent(figures.overlap), Level.STRONG),
        Cell(" of the gradient all-reduce is hidden behind backward"),
    ]
    if figures.bus_bytes_s is not None:
        line.append(Cell(f" · {figures.bus_bytes_s / 1e9:.3g} GB/s bus bandwidth"))
    return line


def _share_chart(run_view: RunView, columns: int, rows: int) -> list[Line]:
    timeline = run_view.timeline
    steps = timeline.steps()
    step_ns = np.maximum(timeline.series("step_ns", steps), 1.0)
    wire, waiting, sync = (timeline.series(name, steps) / step_ns * 100 for name in ("wire_ns", "wait_ns", "sync_ns"))
    unsplit = np.where(np.isfinite(wire), np.nan, sync)
    limit = run_view.limits.comm_share.share
    return chart(
        # The topmost band is solid, so that its edge is exact.
        [_band(_PIECE["wire"], wire), replace(_band(_PIECE["waiting"], waiting), glyph=SOLID), _band(UNSPLIT, unsplit)],
        steps,
        columns,
        rows,
        unit="%",
        marks=[Mark(limit * 100, f"threshold {percent(limit)}")],
        cursor=run_view.at,
    )


def _band(piece: Piece, values: NDArray[np.float64]) -> Band:
    return Band(piece.name, values, piece.level, piece.glyph)


def _label(text: str) -> Cell:
    return Cell(text.ljust(LABEL_COLUMNS), Level.DIM)


def sync_point_lines(run_view: RunView, columns: int, rows: int) -> list[Line]:
    """Sync points of a step with their call sites, the longest first; empty if the script calls no collective."""
    figures = run_view.figures
    if figures is None or not run_view.state.has_sync_points:
        return []
    points = figures.aggregate.sync_points(run_view.state)
    total = sum(point.share for point in points)
    name_columns = max(columns - sum(width for _, width in POINT_TITLES), MIN_BAR_COLUMNS)
    titles = "".join(pad(title, width, right=True) for title, width in POINT_TITLES)
    lines: list[Line] = [[Cell(pad("SYNC POINT", name_columns) + titles, Level.DIM)]]
    lines += [_point_line(point, name_columns) for point in points if point.share >= MIN_POINT_SHARE * total]
    return [fit(line, columns) for line in lines[: max(rows, 0)]]


def _point_line(point: SyncPointFigures, name_columns: int) -> Line:
    interrupts = f" in {point.phase}" if point.phase and point.phase != "other" else ""
    texts = [
        ms(point.mean_ns),
        percent(point.share),
        percent(point.wire_share),
        percent(point.wait_share),
        "" if point.steps_share >= EVERY_STEP else percent(point.steps_share),
    ]
    levels = (Level.PLAIN, Level.STRONG, Level.WIRE, Level.WAITING, Level.DIM)
    cells = [
        Cell(pad(text, width, right=True), level)
        for text, (_, width), level in zip(texts, POINT_TITLES, levels, strict=True)
    ]
    return [Cell(pad(f"{point.label}{interrupts}", name_columns)), *cells]


def bucket_lines(run_view: RunView, columns: int, rows: int, *, rank: int | None = None) -> list[Line]:
    """Timing of the latest buckets of one rank: `rank`, else the one that the others wait for, else the first.

    Only one, because times of different hosts are not comparable. Without any, the text explains how to enable them.
    """
    if columns < 1:
        return []
    chosen, why = _choose(run_view, rank)
    if chosen is None or chosen.buckets is None:
        texts = [line for text in _without_buckets(run_view, rank) for line in textwrap.wrap(text, columns)]
        return [[Cell(text, Level.DIM)] for text in texts[: max(rows, 0)]]
    backward_ns = backward_ns_of(chosen, chosen.buckets.step)
    timings = timings_of(chosen.buckets.buckets, backward_ns, run_view.state.world_size)
    heading = [
        Cell(f"rank {chosen.rank}", Level.STRONG),
        Cell(f"{why} · step {count(chosen.buckets.step)} · {plural(len(timings), 'bucket')}"),
        Cell(f", {size(sum(timing.bucket.bytes for timing in timings))} · times in ms"),
    ]
    bottom = [_legend(backward_ns)] if rows >= ROWS_FOR_LEGEND else []
    room = rows - 2 - len(bottom)
    shown = timings if len(timings) <= room else timings[: max(room - 1, 0)]
    full_ns = max([1, backward_ns or 0, *(max(timing.bucket.done_ns, timing.bucket.ready_ns) for timing in timings)])
    bar_columns = columns - sum(width + 2 for _, width in (*TITLES, *FIGURES))
    bar_columns = min(bar_columns, MAX_BAR_COLUMNS) if bar_columns >= MIN_BAR_COLUMNS else 0
    lines = [heading, _titles(bar_columns), *(_line(timing, backward_ns, full_ns, bar_columns) for timing in shown)]
    if len(shown) < len(timings):
        lines.append([Cell(f"… {len(timings) - len(shown)} more", Level.DIM)])
    return [fit(line, columns) for line in [*lines, *bottom][: max(rows, 0)]]


def _choose(run_view: RunView, rank: int | None) -> tuple[RankState | None, str]:
    """The rank whose buckets are shown, and why. Not the slowest, which changes all the time among equal ranks."""
    ranks = {row.state.rank: row.state for row in run_view.rows}
    if rank is not None:
        return ranks.get(rank), ""
    for slow in waited_for(run_view)[0]:
        if slow in ranks and ranks[slow].buckets is not None:
            return ranks[slow], ", which the others wait for"
    return next((state for state in ranks.values() if state.buckets is not None), None), ""


def _without_buckets(run_view: RunView, rank: int | None) -> tuple[str, ...]:
    states = {row.state.rank: row.state for row in run_view.rows}
    asked = states.values() if rank is None else filter(None, [states.get(rank)])
    if any(state.hello is not None and state.hello.comm in MEASURED for state in asked):
        return ("Bucket timing is on; times arrive with the next step.",)
    if other := kind_name(run_view.state):
        return (NOT_DDP.format(kind=other),)
    return HOW


def _titles(bar_columns: int) -> Line:
    bar = pad("SINCE START OF BACKWARD", bar_columns) + "  " if bar_columns else ""
    left = "".join(pad(title, width, right=True) + "  " for title, width in TITLES)
    right = "".join(pad(title, width, right=True) + "  " for title, width in FIGURES)
    return [Cell((left + bar + right).rstrip(), Level.DIM)]


def _line(timing: Timing, backward_ns: int | None, full_ns: int, bar_columns: int) -> Line:
    bucket = timing.bucket
    texts = (str(bucket.index), size(bucket.bytes), ms(bucket.ready_ns), ms(timing.took_ns))
    line = [Cell(pad(text, width, right=True) + "  ") for text, (_, width) in zip(texts, TITLES, strict=True)]
    if bar_columns:
        line += [*_bar(timing, backward_ns, full_ns, bar_columns), Cell("  ")]
    return [
        *line,
        Cell(pad(percent(timing.hidden), FIGURES[0][1], right=True) + "  ", _dim_unless(timing.hidden)),
        Cell(pad(speed_text(timing.gb_per_s), FIGURES[1][1], right=True), _dim_unless(timing.gb_per_s)),
    ]


def _bar(timing: Timing, backward_ns: int | None, full_ns: int, columns: int) -> Line:
    """Gantt bar of a bucket's all-reduce, exactly `columns` wide."""
    ready = min(timing.bucket.ready_ns * columns // full_ns, columns - 1)
    done = max(min(-(-max(timing.bucket.done_ns, timing.bucket.ready_ns) * columns // full_ns), columns), ready + 1)
    computed = columns if backward_ns is None else min(backward_ns * columns // full_ns, columns)
    cells = [BEFORE] * ready
    for column in range(ready, done):
        cells.append(UNSEEN if timing.took_ns is None else HIDDEN if column < computed else EXPOSED)
    cells += [Cell(" ")] * (columns - done)
    if computed < columns and cells[computed].text == " ":
        cells[computed] = BACKWARD_END
    return [Cell("".join(cell.text for cell in run), level) for level, run in groupby(cells, key=attrgetter("level"))]


def _legend(backward_ns: int | None) -> Line:
    if backward_ns is None:
        return [HIDDEN, Cell(" in flight   ", Level.DIM), UNSEEN, Cell(" end not observed", Level.DIM)]
    return [
        HIDDEN,
        Cell(" hidden behind backward   ", Level.DIM),
        EXPOSED,
        Cell(" exposed   ", Level.DIM),
        BACKWARD_END,
        Cell(" backward ends", Level.DIM),
    ]


def speed_text(gb_per_s: float | None) -> str:
    """Format GB/s in at most five characters."""
    if gb_per_s is None:
        return UNPROVEN
    if gb_per_s >= 9999.5:
        return ">9999"
    return f"{gb_per_s:.2f}" if gb_per_s < 9.995 else f"{gb_per_s:.1f}" if gb_per_s < 99.95 else f"{gb_per_s:.0f}"


def _dim_unless(known: object) -> Level:
    return Level.DIM if known is None else Level.PLAIN
