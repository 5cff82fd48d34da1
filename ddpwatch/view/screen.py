"""The text screen of `ddpwatch status`: header, figures, rank table, and what a person should know."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddpwatch.core import rules
from ddpwatch.core.alerts import Severity
from ddpwatch.core.hangs import gone_on, tells_of_a_hang
from ddpwatch.core.numbers import count, ms, percent, plural, wire_and_waiting
from ddpwatch.core.text import NAME_CHARS, NOTE_CHARS, tame
from ddpwatch.core.window import ENOUGH_STEPS
from ddpwatch.view.alerts import FADED, MARKS, most_urgent_first
from ddpwatch.view.cells import Cell, Level, fit, line_columns
from ddpwatch.view.fading import faded_alerts, not_seen
from ddpwatch.view.phasebar import legend
from ddpwatch.view.prose import paragraph
from ddpwatch.view.remarks import remarks
from ddpwatch.view.rows import rows_of, worst_of
from ddpwatch.view.scaling import scaling_doubt, scaling_sentence
from ddpwatch.view.sharemark import share_mark_now
from ddpwatch.view.status import backend, host_count
from ddpwatch.view.table import rank_table
from ddpwatch.view.unmeasured import why_none

if TYPE_CHECKING:
    from ddpwatch.core.alerts import Finding
    from ddpwatch.core.figures import Figures
    from ddpwatch.core.scaling import Scaling
    from ddpwatch.core.state import RunCondition, RunState
    from ddpwatch.core.watch import Watch
    from ddpwatch.view.cells import Line
    from ddpwatch.view.columns import Row

ALERTS_SHOWN: Final = 3
ALERT_LINES: Final = 2
CRITICAL_LINES: Final = 6
"""What is critical is told to its end: who is in which operation may take some lines."""
RANK_ORDER_UP_TO: Final = 16
"""More ranks than this are sorted, slowest first."""
FEW_RANKS: Final = 4
"""So many ranks are shown before a low window gets a legend and blank lines."""
MIN_COLUMNS: Final = 40
_LABEL_COLUMNS: Final = 14
_ONE_LINE: Final = 1000
"""Columns in which any sentence is one line, to be cut."""

_RUN_MARKS: Final[dict[RunCondition, Cell]] = {
    "waiting": Cell("… no rank heard yet", Level.WARN),
    "live": Cell("● live", Level.OK),
    "silent": Cell("▲ silent", Level.WARN),
    "ended": Cell("■ ended", Level.DIM),
}
HANGS: Final = Cell("✖ hangs", Level.BAD)


def status_screen(
    watch: Watch,
    figures: Figures | None,
    columns: int,
    rows: int | None = None,
    *,
    scaling: Scaling | None = None,
) -> list[Line]:
    """The whole screen, no line wider than `columns`. With `rows`, ranks are left out until it is no taller."""
    columns = max(columns, MIN_COLUMNS)
    state = watch.state
    scaled = _scaling(scaling, columns)
    top = [_header(watch, figures, columns), [], *_figure_lines(watch, figures, ALERTS_SHOWN, columns, scaled), []]
    bottom = [[], legend(split=figures is None or figures.complete), *_remark_lines(state, columns)]
    table_rows = _ordered(watch, figures)
    if rows is not None and len(top) + len(bottom) + 1 + min(len(table_rows), FEW_RANKS) > rows:
        # A low window: ranks before ornament, and before all alerts but the worst.
        top = [
            _header(watch, figures, columns),
            *_figure_lines(watch, figures, 1, columns, _scaling(scaling, _ONE_LINE)),
        ]
        bottom = [line for line in bottom[2:] if line]
    room = len(table_rows) if rows is None else max(1, rows - len(top) - len(bottom) - 1)
    shown = table_rows
    if len(table_rows) > room:
        shown = sorted(table_rows, key=_urgency)[: max(1, room - 1)]
    table = rank_table(shown, columns, show_host=host_count(state) > 1)
    if len(shown) < len(table_rows):
        table.append([Cell(f"… {len(table_rows) - len(shown)} more", Level.DIM)])
    return [fit(line, columns) for line in [*top, *table, *bottom]]


def _header(watch: Watch, figures: Figures | None, columns: int) -> Line:
    state = watch.state
    facts = [
        backend(state) or "backend not known",
        f"{plural(state.world_size, 'rank')} on {plural(host_count(state), 'host')}",
    ]
    if state.step is not None:
        facts.append(f"step {count(state.step)}")
    if figures and figures.effective_batch is not None:
        facts.append(f"batch {count(figures.effective_batch)}")
    condition = state.run_condition()
    hangs = condition == "live" and any(
        tells_of_a_hang(alert.finding) and not gone_on(state, alert) for alert in watch.book.open.values()
    )
    mark = HANGS if hangs else _RUN_MARKS[condition]
    line = [Cell(state.name or state.run_id, Level.STRONG), Cell(" · " + " · ".join(facts))]
    line = fit(line, columns - line_columns([mark]) - 2)
    return [*line, Cell(" " * (columns - line_columns(line) - line_columns([mark]))), mark]


def _figure_lines(
    watch: Watch, figures: Figures | None, most_alerts: int, columns: int, scaled: list[Line]
) -> list[Line]:
    state = watch.state
    if figures is None:
        why = why_none(state) if state.step is not None else "no step seen yet"
        told = _alert_lines(watch, figures, most_alerts, columns)
        return [[_label("figures"), Cell(f"unproven: {why}", Level.WARN)], *told]
    basis = f" · all times in ms, medians of {plural(figures.steps, 'step')}"
    step_time = [_label("step time"), Cell(f"{ms(figures.step_ns)} ms", Level.STRONG), Cell(basis, Level.DIM)]
    lines = [step_time, _throughput(state, figures)]
    if state.world_size > 1:
        lines.append(_allreduce(figures, share_mark_now(watch, figures)))
    lines += scaled
    lines += _alert_lines(watch, figures, most_alerts, columns)
    if state.world_size > 1:
        lines.append(_slowest(watch, figures))
    return [line for line in lines if line]


def _throughput(state: RunState, figures: Figures) -> Line:
    if figures.samples_per_s is None:
        why = "the batch size could not be told" if figures.complete else "not all ranks are heard"
        return [_label("throughput"), Cell(f"unproven: {why}", Level.DIM)]
    line = [_label("throughput"), Cell(f"{count(figures.samples_per_s)} samples/s", Level.STRONG)]
    if state.world_size > 1:
        line.append(Cell(f" · {count(figures.samples_per_s / state.world_size)} a rank"))
    return line


def _allreduce(figures: Figures, mark: str) -> Line:
    line = [_label("all-reduce"), Cell(percent(figures.share), Level.WARN if mark else Level.STRONG)]
    if figures.wire_share is None:
        line.append(Cell(" of the step; wire or waiting is unproven: not all ranks are heard"))
    else:
        wire, waiting = wire_and_waiting(figures.share, figures.wire_share)
        line.append(Cell(f" = wire {wire} % + waiting {waiting} %"))
    if mark:
        line.append(Cell(f"  {mark}", Level.WARN))
    if figures.overlap is not None:
        line.append(Cell(f"  · {percent(figures.overlap)} overlapped"))
    return line


def _scaling(scaling: Scaling | None, columns: int) -> list[Line]:
    if scaling is None:
        return []
    lines = paragraph(scaling_sentence(scaling), columns, lead=[_label("scaling")])
    doubt = scaling_doubt(scaling)
    return [*lines, *paragraph(doubt, columns, lead=[_label(""), Cell("▲ ", Level.WARN)])] if doubt else lines


def _alert_lines(watch: Watch, figures: Figures | None, most: int, columns: int) -> list[Line]:
    """The most urgent of the open alerts, faded ones after them; the last line says how many more there are."""
    # The share stands above, with its mark.
    shown = [alert for alert in watch.book.open.values() if alert.finding.rule != rules.COMM_SHARE]
    faded = faded_alerts(watch, shown, figures)
    alerts = sorted(most_urgent_first(shown), key=lambda alert: alert.key in faded)
    more = len(alerts) - most
    lines: list[Line] = []
    for alert in alerts[:most]:
        mark, level, _ = MARKS[alert.finding.severity]
        message, told = tame(alert.finding.message, NOTE_CHARS), Level.PLAIN
        if (seen := faded.get(alert.key)) is not None:
            mark, level, message, told = FADED, Level.DIM, not_seen(alert.finding, seen), Level.DIM
        # Two blanks at least, and in line with the figures where the name is short.
        label = f"{mark} {alert.finding.rule}".ljust(_LABEL_COLUMNS - 2) + "  "
        if most == 1:
            others = Cell(f"(+{more} more) " if more > 0 else "", Level.DIM)
            lines.append([Cell(label, level), others, Cell(message, told)])
        else:
            most_lines = CRITICAL_LINES if alert.finding.severity is Severity.CRITICAL else ALERT_LINES
            width = max(20, columns - len(label))
            first, *rest = textwrap.wrap(message, width, max_lines=most_lines, placeholder=" …") or [""]
            lines.append([Cell(label, level), Cell(first, told)])
            lines += [[Cell(" " * len(label) + text, told)] for text in rest]
    if more > 0 and most > 1:
        lines.append([Cell(" " * _LABEL_COLUMNS + plural(more, "more alert"), Level.DIM)])
    return lines


def _slowest(watch: Watch, figures: Figures) -> Line:
    """What can be said about the slowest rank, unless an alert says it already."""
    book = watch.book
    if _stragglers(watch, figures):
        return []
    if unproven := book.unproven.get(rules.STRAGGLER):
        worst = max(unproven, key=_excess_ms)
        slower = percent(_excess_ms(worst) * 1e6 / max(figures.step_ns, 1.0))
        text = f"unproven: {tame(worst.subject, NAME_CHARS)} looks {slower} slower, which is inside the noise"
        return [_label("slowest rank"), Cell(text, Level.DIM)]
    if book.open or not figures.complete:
        return []
    judged = figures.last_step >= watch.limits.judge.warmup_steps + ENOUGH_STEPS
    return [_label("slowest rank"), Cell("none stands out" if judged else "unproven: too few steps yet", Level.DIM)]


def _stragglers(watch: Watch, figures: Figures | None) -> set[int]:
    alerts = [alert for (rule, _), alert in watch.book.open.items() if rule == rules.STRAGGLER]
    faded = faded_alerts(watch, alerts, figures)
    return {rank for alert in alerts if alert.key not in faded for rank in alert.finding.ranks}


def _excess_ms(finding: Finding) -> float:
    excess_ms = finding.evidence.get("excess_ms", 0.0)
    return float(excess_ms) if isinstance(excess_ms, (int, float)) else 0.0


def _label(text: str) -> Cell:
    return Cell(text.ljust(_LABEL_COLUMNS), Level.DIM)


def _ordered(watch: Watch, figures: Figures | None) -> list[Row]:
    alerts = most_urgent_first(watch.book.open.values())
    faded = faded_alerts(watch, alerts, figures)
    worst = worst_of(alert for alert in alerts if alert.key not in faded)
    rows = [row._replace(finding=_for_table(row)) for row in rows_of(watch.state, figures, worst)]
    if len(rows) > RANK_ORDER_UP_TO:
        rows.sort(key=_urgency)
    return rows


def _for_table(row: Row) -> Finding | None:
    """What the state of a rank tells. Findings stand above the table, and take the room of a column only as far as a
    mark in it needs a word.
    """
    if row.stands_out and row.finding is not None:
        return replace(row.finding, phase=None, cost=None)
    return row.finding if row.waited_for else None


def _urgency(row: Row) -> tuple[bool, float]:
    """Those that the others wait for come first, then ranks without figures, then the slowest: they are the ones to
    look at.
    """
    return not row.waited_for, -row.figures.self_ns if row.figures else float("-inf")


def _remark_lines(state: RunState, columns: int) -> list[Line]:
    lines: list[Line] = []
    for remark in remarks(state):
        wrapped = textwrap.wrap(remark.text, max(columns - 2, 20), break_long_words=True) or [""]
        lines.append([Cell("▲ ", remark.level), Cell(wrapped[0])])
        lines += [[Cell(f"  {rest}")] for rest in wrapped[1:]]
    return [[], *lines] if lines else []
