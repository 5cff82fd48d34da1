"""The gradient buckets of one backward pass: how large, when ready, how long under way, and how much of that hidden."""

from __future__ import annotations

import textwrap
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from ddpwatch.core.buckets import backward_ns_of, timings_of
from ddpwatch.core.numbers import UNPROVEN, count, ms, percent, plural, size
from ddpwatch.view.cells import Cell, Level, fit, pad
from ddpwatch.view.waited_for import waited_for

if TYPE_CHECKING:
    from ddpwatch.core.buckets import Timing
    from ddpwatch.core.rank import RankState
    from ddpwatch.view.cells import Line
    from ddpwatch.view.picture import Picture

HIDDEN: Final = Cell("━", Level.WIRE)
EXPOSED: Final = Cell("█", Level.WARN)
UNSEEN: Final = Cell("┄", Level.DIM)
BEFORE: Final = Cell("·", Level.DIM)
BACKWARD_END: Final = Cell("╎", Level.STRONG)
MIN_BAR_COLUMNS: Final = 10
MAX_BAR_COLUMNS: Final = 120
ROWS_FOR_LEGEND: Final = 6
MEASURED: Final = frozenset({"buckets", "hook"})
"""Ways of measuring communication that give bucket times."""
TITLES: Final = (("#", 4), ("SIZE", 5), ("READY", 6), ("TOOK", 6))
FIGURES: Final = (("HIDDEN", 6), ("GB/s", 6))
HOW: Final = (
    'Bucket times are off. To have them: ddpwatch.agent.install(model, comm="buckets")',
    "It adds a communication hook, some microseconds a bucket. A hook of your own is timed as it is, without asking.",
)


def bucket_lines(picture: Picture, columns: int, rows: int, *, rank: int | None = None) -> list[Line]:
    """The buckets of the latest step that told them: of `rank`, or of whom the others wait for, or of the first.

    One rank only: times of different hosts are not compared. Without any it says how to have them.
    """
    if columns < 1:
        return []
    chosen, why = _choose(picture, rank)
    if chosen is None or chosen.buckets is None:
        texts = [line for text in _without(picture, rank) for line in textwrap.wrap(text, max(columns, 1))]
        return [[Cell(text, Level.DIM)] for text in texts[: max(rows, 0)]]
    backward_ns = backward_ns_of(chosen, chosen.buckets.step)
    timings = timings_of(chosen.buckets.buckets, backward_ns, picture.state.world_size)
    heading = [
        Cell(f"rank {chosen.rank}", Level.STRONG),
        Cell(f"{why} · step {count(chosen.buckets.step)} · {plural(len(timings), 'bucket')}"),
        Cell(f", {size(sum(timing.bucket.bytes for timing in timings))} · times in ms"),
    ]
    bottom = [_legend(backward_ns)] if rows >= ROWS_FOR_LEGEND else []
    room = rows - 2 - len(bottom)
    shown = timings if len(timings) <= room else timings[: max(room - 1, 0)]
    full_ns = max([1, backward_ns or 0, *(max(timing.bucket.done_ns, timing.bucket.ready_ns) for timing in timings)])
    bar_columns = _bar_columns(columns)
    lines = [heading, _titles(bar_columns), *(_line(timing, backward_ns, full_ns, bar_columns) for timing in shown)]
    if len(shown) < len(timings):
        lines.append([Cell(f"… {len(timings) - len(shown)} more", Level.DIM)])
    return [fit(line, columns) for line in [*lines, *bottom][: max(rows, 0)]]


def _choose(picture: Picture, rank: int | None) -> tuple[RankState | None, str]:
    """Whose buckets, and why. Not the slowest of the moment: among equals that would change with every look."""
    ranks = {row.state.rank: row.state for row in picture.rows}
    if rank is not None:
        return ranks.get(rank), ""
    for slow in waited_for(picture)[0]:
        if slow in ranks and ranks[slow].buckets is not None:
            return ranks[slow], ", whom the others wait for"
    return next((state for state in ranks.values() if state.buckets is not None), None), ""


def _without(picture: Picture, rank: int | None) -> tuple[str, ...]:
    states = {row.state.rank: row.state for row in picture.rows}
    asked = states.values() if rank is None else filter(None, [states.get(rank)])
    if any(state.hello is not None and state.hello.comm in MEASURED for state in asked):
        return ("Buckets are timed; they come with the next step.",)
    return HOW


def _bar_columns(columns: int) -> int:
    """What the bar gets; 0 = there is no room for one."""
    room = columns - sum(width + 2 for _, width in (*TITLES, *FIGURES))
    return min(room, MAX_BAR_COLUMNS) if room >= MIN_BAR_COLUMNS else 0


def _titles(bar_columns: int) -> Line:
    bar = pad("SINCE BACKWARD BEGAN", bar_columns) + "  " if bar_columns else ""
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
    """When the bucket was under way, exactly `columns` wide."""
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
        return [HIDDEN, Cell(" under way   ", Level.DIM), UNSEEN, Cell(" its end could not be seen", Level.DIM)]
    return [
        HIDDEN,
        Cell(" hidden behind backward   ", Level.DIM),
        EXPOSED,
        Cell(" the step waits for it   ", Level.DIM),
        BACKWARD_END,
        Cell(" own backward ends", Level.DIM),
    ]


def speed_text(gb_per_s: float | None) -> str:
    """Gigabytes in a second, in at most five characters."""
    if gb_per_s is None:
        return UNPROVEN
    if gb_per_s >= 9999.5:
        return ">9999"
    return f"{gb_per_s:.2f}" if gb_per_s < 9.995 else f"{gb_per_s:.1f}" if gb_per_s < 99.95 else f"{gb_per_s:.0f}"


def _dim_unless(known: object) -> Level:
    return Level.DIM if known is None else Level.PLAIN
