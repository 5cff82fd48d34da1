"""One rank's own page: its state, its alerts, its step against the others, its history, its stack and its facts."""

from __future__ import annotations

from pathlib import PurePath
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.hang_alerts import is_suspect
from ddpwatch.core.diagnosis.stacks import is_library, training_thread
from ddpwatch.core.limits import StragglerLimits
from ddpwatch.core.metrics.window import NOT_KNOWN
from ddpwatch.core.state.sanitize import NOTE_CHARS, sanitize
from ddpwatch.core.units import UNPROVEN, count, duration_text, ms, percent, plural
from ddpwatch.view.alerts.format import mark_of, message_of
from ddpwatch.view.cells import Cell, Level, fit, line_columns
from ddpwatch.view.charts.phase_bar import PIECES, UNSPLIT
from ddpwatch.view.charts.sparkline import EIGHTHS
from ddpwatch.view.columns import Column, lay_out
from ddpwatch.view.layout import beside, capped, heading, paragraph
from ddpwatch.view.ranks.columns import badge
from ddpwatch.view.ranks.detail_facts import rank_facts
from ddpwatch.view.run_view import no_figures_reason
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.alerts.model import Alert, Finding
    from ddpwatch.core.metrics.live_metrics import RankFigures
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.view.cells import Line
    from ddpwatch.view.ranks.columns import Row
    from ddpwatch.view.run_view import RunView
    from ddpwatch.wire import StackFrame

WIDE_COLUMNS: Final = 110
"""From this width on, figures and facts stand beside each other."""


def rank_page(run_view: RunView, rank: int, columns: int, rows: int) -> list[Line]:
    """All about one rank, the most important first. At most `rows` lines; what is left out is announced."""
    row = next((row for row in run_view.rows if row.state.rank == rank), None)
    if row is None:
        return [fit([Cell(f"This run has no rank {rank}.", Level.DIM)], columns)][: max(rows, 0)]
    alerts = [alert for alert in run_view.alerts if rank in alert.finding.ranks]
    findings = [alert.finding for alert in alerts]
    is_stuck = any(map(is_suspect, findings))
    stack = stack_lines(row.state, columns, asked=is_stuck)
    # Where a stuck rank is matters more than all else.
    stuck_at = [*stack, []] if is_stuck else []
    top = [*_title(row, columns), *stuck_at, *_last_words(row, findings, columns), *_alerts(alerts, columns), []]
    if columns >= WIDE_COLUMNS:
        left_columns = columns * 3 // 5 - 2
        left = [*_figures(run_view, row, left_columns), [], *rank_strip(run_view, row, left_columns)]
        lines = beside(left, rank_facts(run_view, row, columns - left_columns - 3), left_columns)
    else:
        figures, strip = _figures(run_view, row, columns), rank_strip(run_view, row, columns)
        about = rank_facts(run_view, row, columns)
        # Half a strip shows nothing: where it does not fit as a whole, the facts come first.
        fits = sum(map(bool, [*top, *figures, *strip])) < rows
        blocks = (figures, strip, about) if fits else (figures, about, strip)
        lines = [line for block in blocks for line in ([], *block)][1:]
    if stack and not is_stuck:
        lines += [[], *stack]
    return capped([fit(line, columns) for line in [*top, *lines]], rows)


def _title(row: Row, columns: int) -> list[Line]:
    rank = row.state
    lead = [Cell(f"rank {rank.rank}", Level.STRONG), Cell("  "), badge(row)]
    parts = (
        rank.host,
        f"pid {rank.pid}" if rank.pid else "",
        f"{'now at ' if row.then else ''}step {count(rank.step)}" if rank.step is not None else "no step yet",
    )
    return paragraph(" · ".join(filter(None, parts)), columns, Level.DIM, lead=[*lead, Cell("   ")])


def _last_words(row: Row, findings: Sequence[Finding], columns: int) -> list[Line]:
    """The text of the rank's exit message, unless a finding has it."""
    bye = row.state.bye
    if bye is None or not bye.text or any(finding.rule == rules.RANK_FAILED for finding in findings):
        return []
    return paragraph(bye.text, columns, Level.BAD if row.condition == "failed" else Level.DIM)


def _alerts(alerts: Sequence[Alert], columns: int) -> list[Line]:
    """Alerts that name this rank; advice only if they are not stale."""
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


MAX_TIMES: Final = 9.99
"""A difference of more than this many times the others' time is shown in milliseconds only."""
_MIN_BAR_COLUMNS: Final = 8
"""Min. width of the compared bars, in terminal cells."""
_PIECES: Final = {piece.name: piece for piece in PIECES}
_OWN: Final = frozenset({"data", "forward", "backward", "optimizer", "other", "= self"})
"""The rank's own work, which holds the others up if it takes longer."""


class _Compared(NamedTuple):
    """A part of the step, or a sum of parts: this rank's time against the median of the others."""

    name: str
    mine_ns: float
    others_ns: float | None
    worth_ns: float
    """Smallest difference that stands out."""

    @property
    def more_ns(self) -> float:
        return 0.0 if self.others_ns is None else self.mine_ns - self.others_ns

    @property
    def stands_out(self) -> bool:
        return self.name in _OWN and self.more_ns >= self.worth_ns

    @property
    def level(self) -> Level:
        return Level.WARN if self.stands_out else Level.STRONG if self.name.startswith("=") else Level.PLAIN

    @property
    def diff_level(self) -> Level:
        return self.level if abs(self.more_ns) >= self.worth_ns else Level.DIM

    @property
    def sign(self) -> str:
        return "+" if self.more_ns >= 0 else "-"


def _figures(run_view: RunView, row: Row, columns: int) -> list[Line]:
    """The parts of the rank's step against the median of the others, and what it costs them."""
    figures, mine = run_view.figures, row.figures
    if figures is None or mine is None:
        why = no_figures_reason(run_view.state) if figures is None else "its steps cannot be compared"
        return [heading("where a step goes", columns), *paragraph(f"{UNPROVEN} unknown: {why}", columns, Level.DIM)]
    others = [other for number, other in figures.ranks.items() if number != mine.rank]
    note = f"median ms of {plural(figures.steps, 'step')} to {count(figures.last_step)}"
    lines = [heading("where a step goes", columns, note), *_table(run_view, mine, others, columns)]
    return [*lines, *_cost(run_view, row, mine, len(others), columns)]


def _times_ns(figures: RankFigures, *, split: bool) -> dict[str, float]:
    """Times by name, in the order of the table; `split` = sync is split into waiting and wire."""
    wait_ns = figures.wait_ns or 0.0
    return {
        "data": figures.data_ns,
        "forward": figures.forward_ns,
        "backward": figures.backward_ns,
        "optimizer": figures.optimizer_ns,
        "other": figures.other_ns,
        "= self": figures.self_ns,
        **(
            {"waiting": wait_ns, "wire": max(figures.sync_ns - wait_ns, 0.0)}
            if split
            else {UNSPLIT.name: figures.sync_ns}
        ),
        "= step": figures.step_ns,
    }


def _table(run_view: RunView, mine: RankFigures, others: Sequence[RankFigures], columns: int) -> list[Line]:
    split = mine.wait_ns is not None
    others_ns = [_times_ns(other, split=split) for other in others]
    full_ns = max(mine.step_ns, max((other.step_ns for other in others), default=0.0), 1.0)
    name = "OTHERS" if len(others) > 1 else "OTHER"
    compared = (
        Column[_Compared](name, 9, 3, lambda part: Cell(ms(part.others_ns), Level.DIM)),
        Column[_Compared]("DIFF", 9, 2, lambda part: Cell(f"{part.sign}{ms(abs(part.more_ns))}", part.diff_level)),
        Column[_Compared]("", 9, 1, lambda part: Cell(_percent(part), part.diff_level)),
    )
    bars = Column[_Compared](
        f"  │ marks the {name.lower()}" if others else "", _MIN_BAR_COLUMNS + 3, 0, right=False, fills=False,
        draw=lambda part, width: [Cell("  "), *_marked_bar(part, full_ns, width - 3)], grow=(columns,),
    )  # fmt: skip
    layout = lay_out([*_MINE, *(compared if others else ()), bars], columns, gap=0)
    worth_ns = run_view.limits.straggler.share * mine.step_ns
    lines = [layout.heading()]
    for part, mine_ns in _times_ns(mine, split=split).items():
        median_ns = median(times_ns[part] for times_ns in others_ns) if others else None
        lines.append(layout.line(_Compared(part, mine_ns, median_ns, worth_ns)))
    return lines


_MINE: Final = (
    Column[_Compared](
        "", 11, right=False,
        read=lambda part: Cell(f"{'▲' if part.stands_out else ' '} {part.name.partition(',')[0]}", part.level),
    ),
    Column[_Compared]("THIS", 6, read=lambda part: Cell(ms(part.mine_ns), part.level)),
)  # fmt: skip


def _percent(part: _Compared) -> str:
    """The difference relative to the others; empty where it is rounding noise or meaninglessly large."""
    if not part.others_ns or abs(part.more_ns) > MAX_TIMES * part.others_ns:
        return ""
    shown = percent(abs(part.more_ns) / part.others_ns)
    return shown if shown == percent(0) else f"{part.sign}{shown}"


def _marked_bar(part: _Compared, full_ns: float, columns: int) -> Line:
    """The rank's time as a bar in the glyph of its phase, with a stroke where the bar of the others would end."""
    glyph, level = "━", Level.STRONG if part.name == "= self" else Level.DIM
    if part.name in _PIECES:
        _, glyph, level = _PIECES[part.name]
    length = min(round(part.mine_ns / full_ns * (columns - 1)), columns - 1)
    if part.others_ns is None:
        return [Cell(glyph * length, level)]
    mark = min(round(part.others_ns / full_ns * (columns - 1)), columns - 1)
    before = Cell((glyph * min(length, mark)).ljust(mark), level)
    return [before, Cell("│", Level.DIM), Cell(glyph * max(length - mark, 0), level)]


def _cost(run_view: RunView, row: Row, mine: RankFigures, others: int, columns: int) -> list[Line]:
    """Straggler cost: that of the alert on the rank, which covers more steps; else that in the steps of the table."""
    if not others or run_view.figures is None:
        return []
    waiters, steps = "the other rank" if others == 1 else "the others", run_view.figures.steps
    threshold = run_view.limits.straggler.share
    level = Level.PLAIN
    if mine.straggler_cost_share is None:
        text, level = "Its straggler cost is unknown: no data from some ranks.", Level.DIM
    elif not row.stands_out and StragglerLimits.MIN_COST_SHARE <= mine.straggler_cost_share < threshold:
        cost = percent(mine.straggler_cost_share)
        less = f"below the straggler threshold of {percent(threshold)}"
        text = f"Was last at times: cost {cost} of the job's time in these {plural(steps, 'step')}, {less}."
    elif mine.straggler_cost_share >= StragglerLimits.MIN_COST_SHARE:
        found = row.finding if row.stands_out else None
        over = "in the steps of its alert" if found and found.cost else f"in these {plural(steps, 'step')}"
        cost = percent(found.cost if found and found.cost else mine.straggler_cost_share)
        text = f"▲ Cost {cost} of the job's time {over}: {waiters} waited."
        level = Level.WARN
    else:
        wait_ns = mine.wait_ns or 0.0
        part = percent(wait_ns / max(mine.step_ns, 1.0))
        text = f"Not a straggler. Waits {ms(wait_ns)} ms per step for {waiters}: {part}."
    return paragraph(text, columns, level, lead=[Cell("  ")])


STRIP_ROWS: Final = 4
"""Height of the strip, in rows."""
MAX_STEPS: Final = 150
"""Max. number of steps in the strip."""
BASE: Final = "░"
ROOM_ABOVE: Final = 4 / 3
"""Top of the scale relative to the median step, which leaves a quarter of the height free."""
_LABEL_COLUMNS: Final = 8
"""Width of the labels of the axis, in terminal cells."""
_PER_ROW: Final = 8
"""Heights that a cell can show."""


def rank_strip(run_view: RunView, row: Row, columns: int) -> list[Line]:
    """Own work of the last steps, one column per step, the newest at the right; empty without steps.

    A column is shaded up to the median rank's work and solid above, so that it reads without color.
    """
    self_ns, median_ns = _series(run_view, row, min(columns - _LABEL_COLUMNS - 1, MAX_STEPS))
    if not len(self_ns):
        return []
    top_ns = float(max(self_ns.max(), np.median(self_ns) * ROOM_ABOVE, 1.0))
    eighths = STRIP_ROWS * _PER_ROW
    heights = np.rint(self_ns / top_ns * eighths).astype(np.int64)
    medians = np.rint(median_ns / top_ns * eighths).astype(np.int64)
    title = f"own work, last {plural(len(self_ns), 'step')}"
    lines = [heading(title, columns, f"{BASE} up to the median rank's, █ above")]
    for place in reversed(range(STRIP_ROWS)):
        label = {STRIP_ROWS - 1: f"{ms(top_ns)} ms", 0: "0"}.get(place, "")
        lines.append([Cell(f"{label:>{_LABEL_COLUMNS}} ", Level.DIM), *_cells(heights, medians, place * _PER_ROW)])
    last = run_view.last_step
    if last is not None and len(self_ns) >= _LABEL_COLUMNS * 2:
        at = f"step {count(last)}"
        lines.append([Cell(" " * (_LABEL_COLUMNS + 1) + at.rjust(len(self_ns)), Level.DIM)])
    return lines


def _series(run_view: RunView, row: Row, most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Own work of the rank and of the median rank, in the last steps that both have."""
    timeline, rank = run_view.timeline, row.state
    if rank.rank not in timeline.ranks or run_view.last_step is None or most < 1:
        return np.empty(0), np.empty(0)
    steps = timeline.steps(run_view.last_step, most)
    excess = timeline.excess(steps)[timeline.ranks.index(rank.rank)]
    known = rank.steps.holds(steps) & (excess != NOT_KNOWN)
    steps, excess = steps[known], excess[known]
    self_ns = np.zeros(len(steps))
    for phase in PHASES:
        if phase != "sync":
            self_ns += rank.steps.column(f"{phase}_ns", steps)
    # Below the straggler threshold nothing is shown as excess: it is noise.
    counts = excess >= run_view.limits.straggler.share * 100.0
    return self_ns, np.where(counts, timeline.series("median_ns", steps), self_ns)


def _cells(heights: NDArray[np.int64], medians: NDArray[np.int64], floor: int) -> Line:
    """One row of the strip, with neighbors of the same level in one cell."""
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


# Max. numbers of frames of a stack and of collectives shown, the innermost and the latest.
MAX_FRAMES: Final = 16
MAX_COLLECTIVES: Final = 4
NONE_YET: Final = "It has not answered the request for its stack: it is stopped, or something holds the GIL."


def stack_lines(rank: RankState, columns: int, *, asked: bool) -> list[Line]:
    """The stack of the training thread, innermost call first; calls of the script stand out.

    `asked` = the stack was requested, so that a missing answer is shown.
    """
    thread = training_thread(rank.stack)
    if rank.stack is None or thread is None:
        return [heading("stack", columns), *paragraph(NONE_YET, columns, Level.DIM)] if asked else []
    age_s = max(0, (rank.beat.mono_ns if rank.beat is not None else 0) - rank.stack.mono_ns) / 1e9
    note = "now" if age_s < 2 else f"{duration_text(age_s)} ago"
    lines = [heading("stack", columns, f"{thread.name}, {note}, innermost first")]
    lines += [fit(_frame(frame), columns) for frame in thread.frames[:MAX_FRAMES]]
    if len(thread.frames) > MAX_FRAMES:
        lines.append([Cell(f"… {len(thread.frames) - MAX_FRAMES} more calls", Level.DIM)])
    if rank.stack.collectives:
        lines += [[], heading("last collectives", columns)]
        for collective in reversed(rank.stack.collectives[-MAX_COLLECTIVES:]):
            state = Cell("done", Level.DIM) if collective.done else Cell("waiting", Level.WARN)
            what = f"{collective.op} #{collective.seq} {collective.shape}".rstrip()
            lines.append(fit([Cell(f"{what}, group {collective.group}: "), state], columns))
    return lines


def _frame(frame: StackFrame) -> Line:
    mark, level = ("  ", Level.DIM) if is_library(frame) else ("▸ ", Level.STRONG)
    return [Cell(f"{mark}{frame.function}", level), Cell(f"  {PurePath(frame.file).name}:{frame.line}", Level.DIM)]
