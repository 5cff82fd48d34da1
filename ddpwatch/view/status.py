"""Output of `ddpwatch status`: the JSON object and the text screen.

Keys of the object and their meaning are stable: a change of them increments `SCHEMA`.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.alerts.severity import most_urgent_first
from ddpwatch.core.metrics.window import PAUSES
from ddpwatch.core.model_kinds import MODEL_PARALLEL, kind_name, kind_of_run, sync_name
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.units import count, finite, ms, percent, plural, wire_and_waiting
from ddpwatch.view.alerts.format import MARKS, alert_object, mark_of, message_of
from ddpwatch.view.allreduce import share_mark
from ddpwatch.view.cells import Cell, Level, fit, line_columns
from ddpwatch.view.charts.phase_bar import legend
from ddpwatch.view.layout import paragraph
from ddpwatch.view.ranks.table import BY_RANK_UP_TO, rank_table
from ddpwatch.view.run_view import no_figures_reason, remarks
from ddpwatch.view.scaling import scaling_doubt, scaling_object, scaling_sentence
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.alerts.model import Finding
    from ddpwatch.core.metrics.live_metrics import Figures, RankFigures
    from ddpwatch.core.metrics.scaling import Scaling
    from ddpwatch.core.metrics.sync_points import SyncPointFigures
    from ddpwatch.core.state.run import RunCondition, RunState
    from ddpwatch.view.cells import Line
    from ddpwatch.view.ranks.columns import Row
    from ddpwatch.view.run_view import RunView
    from ddpwatch.wire import Gpu

SCHEMA: Final = 1
# Decimal places in JSON of milliseconds and of fractions.
_MS_DIGITS: Final = 3
_SHARE_DIGITS: Final = 4
ALERTS_SHOWN: Final = 3
"""Max. number of alerts shown where there is room."""
ALERT_LINES: Final = 2
"""Max. number of lines of an alert that is not critical."""
CRITICAL_LINES: Final = 6
"""Max. number of lines of a critical alert: which rank is in which collective takes more than `ALERT_LINES`."""
FEW_RANKS: Final = 4
"""Number of ranks that must fit before the window gets a legend and blank lines."""
MIN_COLUMNS: Final = 40
"""Min. width of the text, in terminal cells; a narrower terminal wraps it."""
_LABEL_COLUMNS: Final = 14
"""Width of labels, in terminal cells."""
_ONE_LINE: Final = 1000
"""Width, in columns, at which a sentence is not wrapped but cut."""
RUN_MARKS: Final[dict[RunCondition, Cell]] = {
    "waiting": Cell("… no heartbeat yet", Level.WARN),
    "live": Cell("● live", Level.OK),
    "silent": Cell("▲ no heartbeat", Level.WARN),
    "ended": Cell("■ ended", Level.DIM),
}


def status_object(run_view: RunView) -> dict[str, Any]:
    """The run as a JSON object. Unknown values are None; no key is left out."""
    state, figures = run_view.state, run_view.figures
    shares = figures.aggregate.pause_shares() if figures else {}
    return {
        "schema": SCHEMA,
        "run": {
            "id": state.run_id,
            "name": state.name,
            "backend": backend(state),
            "world_size": state.world_size,
            "hosts": run_view.totals.hosts,
            "state": run_view.condition,
        },
        "step": run_view.totals.step,
        "step_ms": _ms(figures.step_ns if figures else None),
        "samples_per_s": _rounded(figures.samples_per_s if figures else None, 1),
        "effective_batch": figures.effective_batch if figures else None,
        "allreduce": _allreduce(figures if state.world_size > 1 else None),
        "sync_points": sync_points_object(figures.aggregate.sync_points(state) if figures else []),
        "scaling": scaling_object(run_view.scaling),
        "ranks": [_rank(row, shares) for row in run_view.rows],
        "alerts": [alert_object(alert) for alert in most_urgent_first(run_view.alerts)],
    }


def backend(state: RunState) -> str | None:
    """Backend of the process group, as the ranks report it; None = unknown."""
    return next((rank.hello.backend for rank in state.ranks.values() if rank.hello and rank.hello.backend), None)


def _allreduce(figures: Figures | None) -> dict[str, float | None]:
    if figures is None:
        return {"share": None, "wire_share": None, "wait_share": None, "overlap": None}
    share, wire_share = round(figures.share, _SHARE_DIGITS), _rounded(figures.wire_share, _SHARE_DIGITS)
    return {
        "share": share,
        "wire_share": wire_share,
        # Computed from the rounded values, so that the printed ones add up.
        "wait_share": None if wire_share is None else round(share - wire_share, _SHARE_DIGITS),
        "overlap": _rounded(figures.overlap, _SHARE_DIGITS),
    }


def sync_points_object(points: Sequence[SyncPointFigures]) -> list[dict[str, Any]]:
    """Sync points of a step as JSON, the longest first."""
    return [
        {
            "op": point.op,
            "place": point.place or None,
            "phase": point.phase or None,
            "share": round(point.share, _SHARE_DIGITS),
            "wire_share": _rounded(point.wire_share, _SHARE_DIGITS),
            "wait_share": _rounded(point.wait_share, _SHARE_DIGITS),
            "steps_share": round(point.steps_share, _SHARE_DIGITS),
            "mean_ms": round(point.mean_ns / 1e6, 3),
        }
        for point in points
    ]


def _rank(row: Row, pause_shares: dict[str, dict[int, float]]) -> dict[str, Any]:
    rank, measured = row.state, row.figures
    return {
        "rank": rank.rank,
        "host": rank.host,
        "pid": rank.pid,
        "state": row.condition,
        "step": rank.step,
        "phase": PHASES[rank.beat.phase] if rank.beat and row.condition != "ended" else None,
        "activity": (rank.beat.activity or None) if rank.beat and row.condition != "ended" else None,
        **_times(measured),
        "pauses": pauses_object(pause_shares, rank.rank),
        "batch": measured.batch if measured else None,
        "cpu_percent": finite(rank.beat.cpu_percent, 1) if rank.beat else None,
        "rss_bytes": rank.beat.rss_bytes if rank.beat else None,
        "lost": rank.lost,
        "gpu": _gpu(rank.gpus.latest.gpus[0] if rank.gpus.latest and rank.gpus.latest.gpus else None),
    }


def pauses_object(shares: dict[str, dict[int, float]], rank: int) -> dict[str, float | None]:
    """Pauses of a rank as JSON, as fractions of the time."""
    return {
        f"{column.removesuffix('_ns')}_share": _rounded(shares.get(column, {}).get(rank), _SHARE_DIGITS)
        for column in PAUSES
    }


def _gpu(gpu: Gpu | None) -> dict[str, Any] | None:
    if gpu is None:
        return None
    return {
        "name": gpu.name,
        "util": gpu.util_percent,
        "mem_util": gpu.memory_util_percent,
        "mem_used": gpu.used_bytes,
        "mem_total": gpu.total_bytes,
        "temp_c": gpu.temperature_c,
        "power_w": None if gpu.power_mw is None else round(gpu.power_mw / 1000, 1),
        "throttle": list(gpu.throttle),
    }


def _times(measured: RankFigures | None) -> dict[str, float | None]:
    names = ("step", "self", "data", "forward", "backward", "sync", "wait", "optimizer", "other")
    return {f"{name}_ms": _ms(getattr(measured, f"{name}_ns") if measured else None) for name in names}


def _ms(ns: float | None) -> float | None:
    return _rounded(None if ns is None else ns / 1e6, _MS_DIGITS)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else finite(value, digits)


def status_screen(run_view: RunView, columns: int, rows: int | None = None) -> list[Line]:
    """Text screen of at most `columns`; with `rows`, the least urgent ranks are left out to fit."""
    columns = max(columns, MIN_COLUMNS)
    header, figures = _header(run_view, columns), run_view.figures
    top = [header, [], *_figure_lines(run_view, ALERTS_SHOWN, columns), []]
    bottom = [[], legend(split=figures is None or figures.complete), *_remark_lines(run_view.state, columns)]
    table_rows = _ordered(run_view)
    if rows is not None and len(top) + len(bottom) + 1 + min(len(table_rows), FEW_RANKS) > rows:
        # In a low window ranks replace the legend, blank lines, and all alerts but the worst.
        top = [header, *_figure_lines(run_view, 1, columns, scaling_columns=_ONE_LINE)]
        bottom = [line for line in bottom[2:] if line]
    room = len(table_rows) if rows is None else max(1, rows - len(top) - len(bottom) - 1)
    shown = table_rows
    if len(table_rows) > room:
        shown = sorted(table_rows, key=_urgency)[: max(1, room - 1)]
    table = rank_table(shown, columns, show_host=run_view.totals.hosts > 1)
    if len(shown) < len(table_rows):
        table.append([Cell(f"… {len(table_rows) - len(shown)} more", Level.DIM)])
    return [fit(line, columns) for line in [*top, *table, *bottom]]


def _header(run_view: RunView, columns: int) -> Line:
    state, figures, totals = run_view.state, run_view.figures, run_view.totals
    facts = [
        *filter(None, [kind_name(state)]),
        backend(state) or "backend unknown",
        f"{plural(state.world_size, 'rank')} on {plural(totals.hosts, 'host')}",
    ]
    if totals.step is not None:
        facts.append(f"step {count(totals.step)}")
    if figures and figures.effective_batch is not None:
        facts.append(f"batch {count(figures.effective_batch)}")
    mark = RUN_MARKS[run_view.condition]
    if run_view.hang is not None:
        sign, level, _ = MARKS[run_view.hang.finding.severity]
        mark = Cell(f"{sign} hangs", level)
    line = [Cell(state.name or state.run_id, Level.STRONG), Cell(" · " + " · ".join(facts))]
    line = fit(line, columns - line_columns([mark]) - 2)
    return [*line, Cell(" " * (columns - line_columns(line) - line_columns([mark]))), mark]


def _figure_lines(run_view: RunView, max_alerts: int, columns: int, scaling_columns: int = 0) -> list[Line]:
    """Figures and the most urgent alerts. The sentence on scaling wraps at `scaling_columns`; 0 = `columns`."""
    state, figures = run_view.state, run_view.figures
    alerts = _alert_lines(run_view, max_alerts, columns)
    if figures is None:
        why = no_figures_reason(state) if run_view.totals.step is not None else "no step yet"
        return [[_label("figures"), Cell(f"unknown: {why}", Level.WARN)], *alerts]
    basis = f" · all times in ms, medians of {plural(figures.steps, 'step')}"
    step_time = [_label("step time"), Cell(f"{ms(figures.step_ns)} ms", Level.STRONG), Cell(basis, Level.DIM)]
    lines = [step_time, _throughput(state, figures)]
    if state.world_size > 1:
        lines.append(_allreduce_line(sync_name(state), figures, share_mark(run_view)))
    lines += [*_scaling(run_view.scaling, scaling_columns or columns), *alerts]
    if state.world_size > 1:
        lines.append(_slowest(run_view, figures))
    return [line for line in lines if line]


def _throughput(state: RunState, figures: Figures) -> Line:
    if figures.samples_per_s is None:
        why = "the batch size was not found" if figures.complete else "no data from some ranks"
        if kind_of_run(state) in MODEL_PARALLEL:
            why = "several ranks train on the same samples"
        return [_label("throughput"), Cell(f"unknown: {why}", Level.DIM)]
    line = [_label("throughput"), Cell(f"{count(figures.samples_per_s)} samples/s", Level.STRONG)]
    if state.world_size > 1:
        line.append(Cell(f" · {count(figures.samples_per_s / state.world_size)} per rank"))
    return line


def _allreduce_line(name: str, figures: Figures, mark: str) -> Line:
    line = [_label(name), Cell(percent(figures.share), Level.WARN if mark else Level.STRONG)]
    if figures.wire_share is None:
        line.append(Cell(" of the step; wire and waiting are unknown: no data from some ranks"))
    else:
        wire, waiting = wire_and_waiting(figures.share, figures.wire_share)
        line += [
            Cell(" = "),
            Cell(f"wire {wire}%", Level.WIRE),
            Cell(" + "),
            Cell(f"waiting {waiting}%", Level.WAITING),
        ]
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


def _alert_lines(run_view: RunView, max_alerts: int, columns: int) -> list[Line]:
    """The most urgent open alerts, stale ones last, and the number of others."""
    # The all-reduce share is shown with its mark above.
    alerts = [alert for alert in run_view.alerts if alert.finding.rule != rules.COMM_SHARE]
    more = len(alerts) - max_alerts
    lines: list[Line] = []
    for alert in alerts[:max_alerts]:
        mark, level, _ = mark_of(alert)
        message, reported = message_of(alert), Level.DIM if alert.stale else Level.PLAIN
        # At least two blanks; aligned with the figures if the name is short.
        label = f"{mark} {alert.finding.rule}".ljust(_LABEL_COLUMNS - 2) + "  "
        if max_alerts == 1:
            others = Cell(f"(+{more} more) " if more > 0 else "", Level.DIM)
            lines.append([Cell(label, level), others, Cell(message, reported)])
        else:
            max_lines = CRITICAL_LINES if alert.finding.severity is Severity.CRITICAL else ALERT_LINES
            width = max(20, columns - len(label))
            first, *rest = textwrap.wrap(message, width, max_lines=max_lines, placeholder=" …") or [""]
            lines.append([Cell(label, level), Cell(first, reported)])
            lines += [[Cell(" " * len(label) + text, reported)] for text in rest]
    if more > 0 and max_alerts > 1:
        lines.append([Cell(" " * _LABEL_COLUMNS + plural(more, "more alert"), Level.DIM)])
    return lines


def _slowest(run_view: RunView, figures: Figures) -> Line:
    """Line on the slowest rank; empty if an alert names it."""
    if any(alert.finding.rule == rules.STRAGGLER for alert in run_view.fresh):
        return []
    if unproven := run_view.monitor.book.unproven.get(rules.STRAGGLER):
        worst = max(unproven, key=_excess_ms)
        slower = percent(_excess_ms(worst) * 1e6 / max(figures.step_ns, 1.0))
        text = f"inconclusive: {sanitize(worst.subject, NAME_CHARS)} looks {slower} slower, which is within noise"
        return [_label("slowest rank"), Cell(text, Level.DIM)]
    if run_view.alerts or not figures.complete:
        return []
    text = "unknown: too few steps yet" if run_view.too_early else "none stands out"
    return [_label("slowest rank"), Cell(text, Level.DIM)]


def _excess_ms(finding: Finding) -> float:
    excess_ms = finding.evidence.get("excess_ms", 0.0)
    return float(excess_ms) if isinstance(excess_ms, (int, float)) else 0.0


def _label(text: str) -> Cell:
    return Cell(text.ljust(_LABEL_COLUMNS), Level.DIM)


def _ordered(run_view: RunView) -> list[Row]:
    rows = [row._replace(finding=_for_table(row)) for row in run_view.rows]
    if len(rows) > BY_RANK_UP_TO:
        rows.sort(key=_urgency)
    return rows


def _for_table(row: Row) -> Finding | None:
    """The finding without its phase and cost, which are shown above the table and would take the room of a column."""
    return None if row.finding is None else replace(row.finding, phase=None, cost=None)


def _urgency(row: Row) -> tuple[bool, float]:
    """Sort key: ranks that the others wait for, then those without figures, then the slowest."""
    return not row.waited_for, -row.figures.self_ns if row.figures else float("-inf")


def _remark_lines(state: RunState, columns: int) -> list[Line]:
    lines: list[Line] = []
    for remark in remarks(state):
        wrapped = textwrap.wrap(remark.text, max(columns - 2, 20), break_long_words=True) or [""]
        lines.append([Cell("▲ ", remark.level), Cell(wrapped[0])])
        lines += [[Cell(f"  {rest}")] for rest in wrapped[1:]]
    return [[], *lines] if lines else []
