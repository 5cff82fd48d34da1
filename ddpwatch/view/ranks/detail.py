"""One rank's own page: how it does, what is found about it, where its time goes against the others, and who it is.

The own work of one rank over its last steps, and how much of it is beyond the middle rank's.

Where a rank is in the script, as its own page shows it.
"""

from __future__ import annotations

from pathlib import PurePath
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ddpwatch.core import rules
from ddpwatch.core.alerts.hangs import is_suspect
from ddpwatch.core.diagnosis.stacks import is_library, training_thread
from ddpwatch.core.limits import StragglerLimits
from ddpwatch.core.metrics.window import NOT_KNOWN
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize
from ddpwatch.core.units import UNPROVEN, count, duration, ms, percent, plural
from ddpwatch.view.alerts.format import mark_of, message_of
from ddpwatch.view.cells import Cell, Level, fit, line_columns, pad
from ddpwatch.view.charts.phase_bar import PIECES
from ddpwatch.view.charts.sparkline import EIGHTHS
from ddpwatch.view.layout import beside, capped, heading, paragraph
from ddpwatch.view.ranks.columns import badge
from ddpwatch.view.ranks.facts import rank_facts
from ddpwatch.view.run_view import no_figures_reason
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.alerts.model import Alert, Finding
    from ddpwatch.core.metrics.figures import RankFigures
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.view.cells import Line
    from ddpwatch.view.ranks.columns import Row
    from ddpwatch.view.run_view import RunView
    from ddpwatch.wire import StackFrame

STRIP_ROWS: Final = 4
MAX_STEPS: Final = 150
BASE: Final = "░"
ROOM_ABOVE: Final = 4 / 3
"""The usual step leaves a quarter of the height free."""
_LABEL_COLUMNS: Final = 8
_PER_ROW: Final = 8
"""Heights that a cell can show."""


def rank_strip(run_view: RunView, row: Row, columns: int) -> list[Line]:
    """One column a step, the newest at the right; nothing where there are no steps to show.

    Up to the middle rank's work a column is shaded, beyond it solid, so that it reads without colour.
    """
    self_ns, median_ns = _series(run_view, row, min(columns - _LABEL_COLUMNS - 1, MAX_STEPS))
    if not len(self_ns):
        return []
    most_ns = float(max(self_ns.max(), np.median(self_ns) * ROOM_ABOVE, 1.0))
    eighths = STRIP_ROWS * _PER_ROW
    heights = np.rint(self_ns / most_ns * eighths).astype(np.int64)
    medians = np.rint(median_ns / most_ns * eighths).astype(np.int64)
    title = f"own work, last {plural(len(self_ns), 'step')}"
    lines = [heading(title, columns, f"{BASE} up to the middle rank's, █ beyond")]
    for place in reversed(range(STRIP_ROWS)):
        label = {STRIP_ROWS - 1: f"{ms(most_ns)} ms", 0: "0"}.get(place, "")
        lines.append([Cell(f"{label:>{_LABEL_COLUMNS}} ", Level.DIM), *_cells(heights, medians, place * _PER_ROW)])
    last = run_view.last_step
    if last is not None and len(self_ns) >= _LABEL_COLUMNS * 2:
        at = f"step {count(last)}"
        lines.append([Cell(" " * (_LABEL_COLUMNS + 1) + at.rjust(len(self_ns)), Level.DIM)])
    return lines


def _series(run_view: RunView, row: Row, most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Own work of the rank and of the middle one in the last steps that both have."""
    timeline, rank = run_view.timeline, row.state
    nothing = np.empty(0)
    if rank.rank not in timeline.ranks or run_view.last_step is None or most < 1:
        return nothing, nothing
    steps = timeline.steps(run_view.last_step, most)
    excess = timeline.excess(steps)[timeline.ranks.index(rank.rank)]
    known = rank.steps.holds(steps) & (excess != NOT_KNOWN)
    steps, excess = steps[known], excess[known]
    self_ns = np.zeros(len(steps))
    for phase in PHASES:
        if phase != "sync":
            self_ns += rank.steps.column(f"{phase}_ns", steps)
    # Less than would count as slow is shown as none: noise is not to be looked at.
    counts = excess >= run_view.limits.straggler.share * 100.0
    return self_ns, np.where(counts, timeline.series("median_ns", steps), self_ns)


def _cells(heights: NDArray[np.int64], medians: NDArray[np.int64], floor: int) -> Line:
    """One row of the strip: runs of columns that mean the same."""
    line: Line = []
    for height, median_height in zip(heights.tolist(), medians.tolist(), strict=True):
        filled = min(max(height - floor, 0), _PER_ROW)
        beyond = height > median_height and floor + filled > median_height
        glyph = EIGHTHS[filled] if beyond else BASE if filled > _PER_ROW // 2 else " "
        level = Level.WARN if beyond and filled else Level.PLAIN
        if line and line[-1].level is level:
            line[-1] = line[-1]._replace(text=line[-1].text + glyph)
        else:
            line.append(Cell(glyph, level))
    return line


MAX_FRAMES: Final = 16
MAX_COLLECTIVES: Final = 4
NONE_YET: Final = "It was asked for its stack and has not answered: it is stopped, or something holds Python's lock."


def stack_lines(rank: RankState, columns: int, *, asked: bool) -> list[Line]:
    """The calls that the training thread is in, the innermost first; the script's own stand out.

    `asked` = somebody wants to know, so no answer says something, too.
    """
    thread = training_thread(rank.stack)
    if rank.stack is None or thread is None:
        return [heading("stack", columns), *paragraph(NONE_YET, columns, Level.DIM)] if asked else []
    age_s = max(0, (rank.beat.mono_ns if rank.beat is not None else 0) - rank.stack.mono_ns) / 1e9
    note = "now" if age_s < 2 else f"{duration(age_s)} ago"
    lines = [heading("stack", columns, f"{thread.name}, {note}, innermost first")]
    lines += [fit(_frame(frame), columns) for frame in thread.frames[:MAX_FRAMES]]
    if len(thread.frames) > MAX_FRAMES:
        lines.append([Cell(f"… {len(thread.frames) - MAX_FRAMES} more calls", Level.DIM)])
    if rank.stack.collectives:
        lines += [[], heading("last collectives", columns)]
        for collective in reversed(rank.stack.collectives[-MAX_COLLECTIVES:]):
            state = Cell("done", Level.DIM) if collective.done else Cell("waits", Level.WARN)
            what = f"{collective.op} #{collective.seq} {collective.shape}".rstrip()
            lines.append(fit([Cell(f"{what}, group {collective.group}: "), state], columns))
    return lines


def _frame(frame: StackFrame) -> Line:
    level = Level.DIM if is_library(frame) else Level.STRONG
    mark = "  " if is_library(frame) else "▸ "
    return [Cell(f"{mark}{frame.function}", level), Cell(f"  {PurePath(frame.file).name}:{frame.line}", Level.DIM)]


WIDE_COLUMNS: Final = 110
"""From here on the figures and the facts stand beside each other."""
MAX_TIMES: Final = 9.99
"""A difference of more times the others' time is told in milliseconds only."""
_MIN_BAR_COLUMNS: Final = 8
_NAME_COLUMNS: Final = 11
_PIECES: Final = {piece.name: piece for piece in PIECES}


class _Part(NamedTuple):
    """A line of the table: how to read it, and the glyph and level of its bar."""

    name: str
    read: Callable[[RankFigures], float]
    glyph: str
    level: Level
    own: bool
    """Whether it is the rank's own work, so that more of it holds the others up."""


def rank_page(run_view: RunView, rank: int, columns: int, rows: int) -> list[Line]:
    """All about one rank, the important first. At most `rows` lines; what is left out is announced."""
    row = next((row for row in run_view.rows if row.state.rank == rank), None)
    if row is None:
        return [fit([Cell(f"There is no rank {rank} in this run.", Level.DIM)], columns)][: max(rows, 0)]
    alerts = [alert for alert in run_view.alerts if rank in alert.finding.ranks]
    findings = [alert.finding for alert in alerts]
    is_stuck = any(map(is_suspect, findings))
    stack = stack_lines(row.state, columns, asked=is_stuck)
    # Where it is stuck says more than all else.
    stuck_at = [*stack, []] if is_stuck else []
    reported = [*_last_words(row, findings, columns), *_alerts(alerts, columns)]
    top = [*_title(row, columns), *stuck_at, *reported, []]
    if columns >= WIDE_COLUMNS:
        left_columns = columns * 3 // 5 - 2
        left = [*_figures(run_view, row, left_columns), [], *rank_strip(run_view, row, left_columns)]
        lines = beside(left, rank_facts(run_view, row, columns - left_columns - 3), left_columns)
    else:
        figures, strip = _figures(run_view, row, columns), rank_strip(run_view, row, columns)
        about = rank_facts(run_view, row, columns)
        # Half a strip says nothing: where it does not fit as a whole, the facts come first.
        fits = sum(map(bool, [*top, *figures, *strip])) < rows
        blocks = (figures, strip, about) if fits else (figures, about, strip)
        lines = [line for block in blocks for line in ([], *block)][1:]
    if stack and not is_stuck:
        lines += [[], *stack]
    return capped([fit(line, columns) for line in [*top, *lines]], rows)


def _title(row: Row, columns: int) -> list[Line]:
    rank = row.state
    state = badge(row)
    lead = [Cell(f"rank {rank.rank}", Level.STRONG), Cell("  "), state._replace(text=sanitize(state.text, NAME_CHARS))]
    where = " · ".join(
        part
        for part in (
            sanitize(rank.host, NAME_CHARS),
            f"pid {rank.pid}" if rank.pid else "",
            f"{'now at ' if row.then else ''}step {count(rank.step)}" if rank.step is not None else "no step yet",
        )
        if part
    )
    return paragraph(where, columns, Level.DIM, lead=[*lead, Cell("   ")])


def _last_words(row: Row, findings: Sequence[Finding], columns: int) -> list[Line]:
    """What the rank said when it left, unless a finding says it."""
    bye = row.state.bye
    if bye is None or not bye.text or any(finding.rule == rules.RANK_FAILED for finding in findings):
        return []
    return paragraph(sanitize(bye.text, NOTE_CHARS), columns, Level.BAD if row.condition == "failed" else Level.DIM)


def _alerts(alerts: Sequence[Alert], columns: int) -> list[Line]:
    """What names this rank, with what to do about it; of stale alerts only since when."""
    lines: list[Line] = []
    for alert in alerts:
        finding = alert.finding
        mark, level, _ = mark_of(alert)
        lead = [Cell(f"{mark} {finding.rule}  ", level)]
        lines += paragraph(message_of(alert), columns, Level.DIM if alert.stale else Level.PLAIN, lead=lead)
        if finding.advice and not alert.stale:
            indent = [Cell(" " * line_columns(lead))]
            lines += paragraph(sanitize(finding.advice, NOTE_CHARS), columns, Level.DIM, lead=indent)
    return lines


def _figures(run_view: RunView, row: Row, columns: int) -> list[Line]:
    """The phases of the rank against the middle of the others, and what it costs them."""
    figures, mine = run_view.figures, row.figures
    if figures is None or mine is None:
        why = no_figures_reason(run_view.state) if figures is None else "its steps cannot be compared"
        return [heading("where a step goes", columns), *paragraph(f"{UNPROVEN} unproven: {why}", columns, Level.DIM)]
    others = [other for number, other in figures.ranks.items() if number != mine.rank]
    note = f"ms, medians of {plural(figures.steps, 'step')} to {count(figures.last_step)}"
    lines = [heading("where a step goes", columns, note), *_table(run_view, mine, others, columns)]
    return [*lines, *_cost(run_view, row, mine, len(others), columns)]


def _parts(mine: RankFigures) -> list[_Part]:
    """The order of a step; then the sums, which have no glyph of their own."""

    def part(name: str, read: Callable[[RankFigures], float], *, own: bool) -> _Part:
        piece = _PIECES[name]
        return _Part(name.partition(",")[0], read, piece.glyph, piece.level, own)

    own = [
        part("data", lambda figures: figures.data_ns, own=True),
        part("forward", lambda figures: figures.forward_ns, own=True),
        part("backward", lambda figures: figures.backward_ns, own=True),
        part("optimizer", lambda figures: figures.optimizer_ns, own=True),
        part("other", lambda figures: figures.other_ns, own=True),
        _Part("= self", lambda figures: figures.self_ns, "━", Level.STRONG, own=True),
    ]
    if mine.wait_ns is None:
        sync = [part("sync, not told apart", lambda figures: figures.sync_ns, own=False)]
    else:
        sync = [
            part("waiting", lambda figures: figures.wait_ns or 0.0, own=False),
            part("wire", lambda figures: max(figures.sync_ns - (figures.wait_ns or 0.0), 0.0), own=False),
        ]
    return [*own, *sync, _Part("= step", lambda figures: figures.step_ns, "━", Level.DIM, own=False)]


def _table(run_view: RunView, mine: RankFigures, others: Sequence[RankFigures], columns: int) -> list[Line]:
    parts = _parts(mine)
    full_ns = max(mine.step_ns, max((other.step_ns for other in others), default=0.0), 1.0)
    # A column more for each of these, as long as there is room.
    widths = {"name": _NAME_COLUMNS, "mine": 6, "others": 9, "diff": 9, "percent": 9}
    if not others:
        widths = {"name": _NAME_COLUMNS, "mine": 6}
    while len(widths) > 2 and sum(widths.values()) > columns:
        widths.popitem()
    bar_columns = columns - sum(widths.values()) - 3
    if bar_columns < _MIN_BAR_COLUMNS:
        bar_columns = 0
    titles = {"name": "", "mine": "THIS", "others": "OTHERS" if len(others) > 1 else "OTHER", "diff": "DIFF"}
    heads = [Cell(pad(titles.get(name, ""), width, right=name != "name"), Level.DIM) for name, width in widths.items()]
    if bar_columns and others:
        heads.append(
            Cell("  " + pad("│ marks the others" if len(others) > 1 else "│ marks the other", bar_columns), Level.DIM)
        )
    worth_ns = run_view.limits.straggler.share * mine.step_ns
    lines: list[Line] = [heads]
    for part in parts:
        mine_ns = part.read(mine)
        others_ns = median(part.read(other) for other in others) if others else None
        lines.append(_line(part, mine_ns, others_ns, widths, worth_ns))
        if bar_columns:
            lines[-1] += [Cell("  "), *_marked_bar(part, mine_ns / full_ns, others_ns, full_ns, bar_columns)]
    return lines


def _line(part: _Part, mine_ns: float, others_ns: float | None, widths: dict[str, int], worth_ns: float) -> Line:
    more_ns = 0.0 if others_ns is None else mine_ns - others_ns
    stands_out = part.own and more_ns >= worth_ns
    level = Level.WARN if stands_out else Level.STRONG if part.name.startswith("=") else Level.PLAIN
    sign = "+" if more_ns >= 0 else "-"
    texts = {
        "name": f"{'▲' if stands_out else ' '} {part.name}",
        "mine": ms(mine_ns),
        "others": ms(others_ns),
        "diff": f"{sign}{ms(abs(more_ns))}",
        "percent": _percent(more_ns, others_ns),
    }
    quiet = {"others"} if abs(more_ns) >= worth_ns else {"others", "diff", "percent"}
    return [
        Cell(pad(texts[name], width, right=name != "name"), Level.DIM if name in quiet else level)
        for name, width in widths.items()
    ]


def _percent(more_ns: float, others_ns: float | None) -> str:
    """Nothing where it would be no more than noise of rounding, or a number without a meaning."""
    if not others_ns or abs(more_ns) > MAX_TIMES * others_ns:
        return ""
    shown = percent(abs(more_ns) / others_ns)
    return shown if shown == percent(0) else f"{'+' if more_ns >= 0 else '-'}{shown}"


def _marked_bar(part: _Part, share: float, others_ns: float | None, full_ns: float, columns: int) -> Line:
    """The rank's time as a bar in the glyph of its phase, with a stroke where the bar of the others would end."""
    length = min(round(share * (columns - 1)), columns - 1)
    if others_ns is None:
        return [Cell(part.glyph * length, part.level)]
    mark = min(round(others_ns / full_ns * (columns - 1)), columns - 1)
    before = Cell((part.glyph * min(length, mark)).ljust(mark), part.level)
    return [before, Cell("│", Level.DIM), Cell(part.glyph * max(length - mark, 0), part.level)]


def _cost(run_view: RunView, row: Row, mine: RankFigures, others: int, columns: int) -> list[Line]:
    """In these steps: an alert looks at more of them and may name another number. Below its limit nobody is blamed."""
    if not others or run_view.figures is None:
        return []
    who, steps = "the other rank" if others == 1 else "the others", run_view.figures.steps
    limit = run_view.limits.straggler.share
    level = Level.PLAIN
    if mine.straggler_cost_share is None:
        text, level = "What it costs the job is unproven: not all ranks are heard.", Level.DIM
    elif not row.stands_out and StragglerLimits.MIN_COST_SHARE <= mine.straggler_cost_share < limit:
        cost = percent(mine.straggler_cost_share)
        less = f"below the {percent(limit)} of a straggler"
        text = f"Was the last now and then: {cost} of the job's time in these {plural(steps, 'step')}, {less}."
    elif mine.straggler_cost_share >= StragglerLimits.MIN_COST_SHARE:
        cost = percent(mine.straggler_cost_share)
        text = f"▲ Cost the job {cost} of its time in these {plural(steps, 'step')}: {who} waited."
        level = Level.WARN
    else:
        wait_ns = mine.wait_ns or 0.0
        part = percent(wait_ns / max(mine.step_ns, 1.0))
        text = f"Holds nobody up. Waits {ms(wait_ns)} ms a step for {who}: {part}."
    return paragraph(text, columns, level, lead=[Cell("  ")])
