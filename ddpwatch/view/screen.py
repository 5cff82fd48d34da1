"""The text screen of `ddpwatch status`: header, figures, rank table, and what a person should know."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from ddpwatch.core.slowest import slowest
from ddpwatch.view.cells import Cell, Level, fit, line_columns
from ddpwatch.view.numbers import count, ms, percent, plural
from ddpwatch.view.phasebar import legend
from ddpwatch.view.remarks import remarks
from ddpwatch.view.status import backend, host_count
from ddpwatch.view.table import Row, rank_table

if TYPE_CHECKING:
    from ddpwatch.core.figures import Figures
    from ddpwatch.core.state import RunCondition, RunState
    from ddpwatch.view.cells import Line

COMM_SHARE_LIMIT: Final = 0.10
"""An all-reduce share above this is marked."""
RANK_ORDER_UP_TO: Final = 16
"""More ranks than this are sorted, slowest first."""
FEW_RANKS: Final = 4
"""So many ranks are shown before a low window gets a legend and blank lines."""
MIN_COLUMNS: Final = 40
_LABEL_COLUMNS: Final = 14

_RUN_MARKS: Final[dict[RunCondition, Cell]] = {
    "waiting": Cell("… no rank heard yet", Level.WARN),
    "live": Cell("● live", Level.OK),
    "silent": Cell("▲ silent", Level.WARN),
    "ended": Cell("■ ended", Level.DIM),
}


def status_screen(state: RunState, figures: Figures | None, columns: int, rows: int | None = None) -> list[Line]:
    """The whole screen, no line wider than `columns`. With `rows`, ranks are left out until it is no taller."""
    columns = max(columns, MIN_COLUMNS)
    top = [_header(state, figures, columns), [], *_figure_lines(state, figures), []]
    bottom = [[], legend(), *_remark_lines(state, columns)]
    table_rows = _ordered(state, figures)
    if rows is not None and len(top) + len(bottom) + 1 + min(len(table_rows), FEW_RANKS) > rows:
        # A low window: ranks before ornament.
        top, bottom = [line for line in top if line], [line for line in bottom[2:] if line]
    room = len(table_rows) if rows is None else max(1, rows - len(top) - len(bottom) - 1)
    shown = table_rows
    if len(table_rows) > room:
        shown = sorted(table_rows, key=_urgency)[: max(1, room - 1)]
    table = rank_table(shown, columns, show_host=host_count(state) > 1)
    if len(shown) < len(table_rows):
        table.append([Cell(f"… {len(table_rows) - len(shown)} more", Level.DIM)])
    return [fit(line, columns) for line in [*top, *table, *bottom]]


def _header(state: RunState, figures: Figures | None, columns: int) -> Line:
    facts = [
        backend(state) or "backend not known",
        f"{plural(state.world_size, 'rank')} on {plural(host_count(state), 'host')}",
    ]
    if state.step is not None:
        facts.append(f"step {count(state.step)}")
    if figures and figures.effective_batch is not None:
        facts.append(f"batch {count(figures.effective_batch)}")
    mark = _RUN_MARKS[state.run_condition()]
    line = [Cell(state.name or state.run_id, Level.STRONG), Cell(" · " + " · ".join(facts))]
    line = fit(line, columns - line_columns([mark]) - 2)
    return [*line, Cell(" " * (columns - line_columns(line) - line_columns([mark]))), mark]


def _figure_lines(state: RunState, figures: Figures | None) -> list[Line]:
    if figures is None:
        why = "no step yet that all ranks have finished" if state.step is not None else "no step seen yet"
        return [[_label("figures"), Cell(f"unproven: {why}", Level.WARN)]]
    basis = f" · all times in ms, medians of {plural(figures.steps, 'step')}"
    step_time = [_label("step time"), Cell(f"{ms(figures.step_ns)} ms", Level.STRONG), Cell(basis, Level.DIM)]
    lines = [step_time, _throughput(state, figures)]
    if state.world_size > 1:
        lines += [_allreduce(figures), _slowest(figures)]
    return [line for line in lines if line]


def _throughput(state: RunState, figures: Figures) -> Line:
    if figures.samples_per_s is None:
        why = "the batch size could not be told" if figures.complete else "not all ranks are heard"
        return [_label("throughput"), Cell(f"unproven: {why}", Level.DIM)]
    line = [_label("throughput"), Cell(f"{count(figures.samples_per_s)} samples/s", Level.STRONG)]
    if state.world_size > 1:
        line.append(Cell(f" · {count(figures.samples_per_s / state.world_size)} a rank"))
    return line


def _allreduce(figures: Figures) -> Line:
    over = figures.share > COMM_SHARE_LIMIT
    line = [_label("all-reduce"), Cell(percent(figures.share), Level.WARN if over else Level.STRONG)]
    if figures.wire_share is None:
        line.append(Cell(" of the step; wire or waiting is unproven: not all ranks are heard"))
    else:
        # From the rounded numbers, so that the sum on the screen is right.
        waiting = round(figures.share * 100) - round(figures.wire_share * 100)
        line.append(Cell(f" = wire {percent(figures.wire_share)} + waiting {waiting} %"))
    if over:
        line.append(Cell(f"  ▲ over {percent(COMM_SHARE_LIMIT)}", Level.WARN))
    if figures.overlap is not None:
        line.append(Cell(f"  · {percent(figures.overlap)} overlapped"))
    return line


def _slowest(figures: Figures) -> Line:
    if not figures.complete:
        return []
    found = slowest(figures)
    if found is None:
        return [_label("slowest rank"), Cell("none stands out", Level.DIM)]
    return [
        _label("slowest rank"),
        Cell(f"rank {found.rank}", Level.WARN),
        Cell(f": self {ms(found.self_ns)} ms, others {ms(found.others_self_ns)}"),
        Cell(f" · {found.phase} +{ms(found.excess_ns)} ms"),
    ]


def _label(text: str) -> Cell:
    return Cell(text.ljust(_LABEL_COLUMNS), Level.DIM)


def _ordered(state: RunState, figures: Figures | None) -> list[Row]:
    measured = figures.ranks if figures else {}
    named = slowest(figures) if figures else None
    rows = [
        Row(rank, state.condition(rank), measured.get(rank.rank), named is not None and named.rank == rank.rank)
        for rank in state.ranks.values()
    ]
    if len(rows) > RANK_ORDER_UP_TO:
        rows.sort(key=_urgency)
    return rows


def _urgency(row: Row) -> float:
    """Ranks without figures come first, then the slowest: they are the ones to look at."""
    return -row.figures.self_ns if row.figures else float("-inf")


def _remark_lines(state: RunState, columns: int) -> list[Line]:
    lines: list[Line] = []
    for remark in remarks(state):
        wrapped = textwrap.wrap(remark.text, max(columns - 2, 20), break_long_words=True) or [""]
        lines.append([Cell("▲ ", remark.level), Cell(wrapped[0])])
        lines += [[Cell(f"  {rest}")] for rest in wrapped[1:]]
    return [[], *lines] if lines else []
