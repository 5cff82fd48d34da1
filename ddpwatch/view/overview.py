"""Cards at the top of the overview: step time, throughput, all-reduce share, and devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core import rule_names as rules
from ddpwatch.core.model_kinds import sync_name
from ddpwatch.core.units import UNPROVEN, count, duration_text, ms, percent, plural, wire_and_waiting
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.allreduce import share_lately, share_mark
from ddpwatch.view.cells import Cell, Level, fit, line_columns
from ddpwatch.view.charts.sparkline import spark
from ddpwatch.view.gpus.busy_and_waiting import WORTH_SAYING_PERCENT, is_throttled, throttle_reasons
from ddpwatch.view.gpus.columns import memory_text
from ddpwatch.view.layout import spelled_size
from ddpwatch.view.scaling import scaling_mark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.metrics.live_metrics import Figures
    from ddpwatch.view.cells import Line
    from ddpwatch.view.gpus.busy_and_waiting import GpuTotals
    from ddpwatch.view.run_view import RunView

SPARK_STEPS: Final = 200
"""Number of latest steps in a sparkline."""
_LABEL_COLUMNS: Final = 12
"""Width of the labels of the small layout, in terminal cells."""


def step_card(run_view: RunView, columns: int) -> list[Line]:
    """Card of the step time: median, p99 and sparkline."""
    figures, timeline = run_view.figures, run_view.timeline
    if figures is None:
        return [_unproven("no step yet"), [], []]
    steps = timeline.steps(run_view.last_step, SPARK_STEPS)
    values = timeline.series("step_ns", steps)
    stalled = _stalled_line(run_view)
    line = [Cell(f"{ms(figures.step_ns)} ms", Level.DIM if stalled else Level.STRONG)]
    if len(values):
        line.append(Cell(f"   p99 {ms(float(np.percentile(values, 99)))}", Level.DIM))
    pace = f"{1e9 / max(figures.step_ns, 1.0):.3g} steps/s"
    return [line, stalled or [Cell(pace, Level.DIM)], spark(values, columns)]


def throughput_card(run_view: RunView, columns: int) -> list[Line]:
    """Card of the throughput: samples per second of all ranks and of one, and sparkline."""
    figures, timeline = run_view.figures, run_view.timeline
    if figures is None or figures.samples_per_s is None:
        why = "no step yet" if figures is None else "batch size unknown" if figures.complete else "ranks missing"
        return [_unproven(why), [scaling_mark(run_view.scaling)] if run_view.scaling else [], []]
    world = run_view.state.world_size
    steps = timeline.steps(run_view.last_step, SPARK_STEPS)
    each = [Cell("one rank", Level.DIM)]
    if world > 1:
        # Scaling efficiency needs a baseline.
        own_work = Cell(f"{percent(1.0 - figures.share)} own work", Level.DIM)
        reported = scaling_mark(run_view.scaling) if run_view.scaling is not None else own_work
        of_one = count(figures.samples_per_s / world)
        words = (f"{of_one}/rank · ", "")
        each = _first_that_fits([[Cell(text, Level.DIM), reported] for text in words], columns)
    stalled = _stalled_line(run_view)
    return [
        [Cell(f"{count(figures.samples_per_s)} samples/s", Level.DIM if stalled else Level.STRONG)],
        stalled or each,
        spark(timeline.series("samples_per_s", steps), columns),
    ]


def allreduce_card(run_view: RunView, columns: int) -> list[Line]:
    """Card of the all-reduce share, split into wire and waiting."""
    figures = run_view.figures
    if run_view.state.world_size == 1:
        return [[Cell(f"one rank: no {sync_name(run_view.state)}", Level.DIM)], [], []]
    if figures is None:
        return [_unproven("no step yet"), [], []]
    if mark := share_mark(run_view):
        first = [Cell(percent(figures.share), Level.WARN), Cell(f" {mark}", Level.WARN)]
    else:
        share = Cell(percent(figures.share), Level.STRONG)
        words = (share_lately(run_view), "recently") if share_lately(run_view) else ("of the step",)
        first = _first_that_fits([[share, Cell(f"  {text}", Level.DIM)] for text in words], columns)
    if run_view.stalled_s is not None:
        first = [cell._replace(level=Level.DIM) for cell in first]
    if figures.wire_share is None:
        return [first, [Cell("wire/waiting: ranks missing", Level.DIM)], []]
    wire, waiting = wire_and_waiting(figures.share, figures.wire_share)
    second = [Cell(f"wire {wire}% + waiting {waiting}%", Level.PLAIN)]
    stragglers = [finding for finding in run_view.worst.values() if finding.rule == rules.STRAGGLER]
    slow = max(stragglers, key=lambda finding: finding.cost or 0.0, default=None)
    if slow is not None and waiting > wire:
        named = Cell(f"(r{slow.ranks[0]})", MARKS[slow.severity].level)
        # The bar below shows the wire, too; the rank is shown nowhere else in the card.
        parts = (f"wire {wire}% + waiting {waiting}% ", f"wire {wire}% + wait {waiting}% ", f"waiting {waiting}% ")
        second = _first_that_fits([[Cell(text), named] for text in parts], columns)
    return [first, second, _split_bar(figures, columns)]


def device_title(run_view: RunView) -> str:
    """Title of the card of devices."""
    return "GPU" if run_view.totals.gpus is not None else "CPU"


def device_card(run_view: RunView, columns: int) -> list[Line]:
    """Card of the GPUs, or of CPU and memory if no rank reports a GPU."""
    totals = run_view.totals
    if totals.gpus is not None:
        return _with_hindsight(run_view, _gpu_card(totals.gpus, columns))
    if not totals.beats:
        return [_unproven("no heartbeat"), [], []]
    card = [
        [
            Cell(f"{count(totals.cpu_percent)}% CPU", Level.STRONG),
            Cell(f"   max {count(totals.max_cpu_percent)}%", Level.DIM),
        ],
        [Cell(f"{spelled_size(totals.rss_bytes)} RSS in total", Level.DIM)],
        [Cell("no GPU data", Level.DIM)],
    ]
    return _with_hindsight(run_view, card)


def _with_hindsight(run_view: RunView, card: list[Line]) -> list[Line]:
    """Looking back, the devices are current values: dim them, and add the step that they are of."""
    if not run_view.hindsight:
        return card
    first, second, _ = ([cell._replace(level=Level.DIM) for cell in line] for line in card)
    return [first, second, [Cell(f"‖ {run_view.newest}", Level.WARN)]]


def _gpu_card(gpus: GpuTotals, columns: int) -> list[Line]:
    """Utilization with its part spent waiting; the fullest, the hottest, and the most throttled GPU."""
    first = [Cell(UNPROVEN if gpus.util_percent is None else f"{gpus.util_percent:.0f}%", Level.STRONG)]
    if gpus.waiting_percent is not None and gpus.waiting_percent >= WORTH_SAYING_PERCENT:
        waiting = f"{gpus.waiting_percent:.0f}"
        words = (f"   {waiting}% waiting", f"   {waiting}% wait")
        first = _first_that_fits([[*first, Cell(text, Level.WAITING)] for text in words], columns)
    else:
        first.append(Cell("   median", Level.DIM))
    memory = [memory_text(*gpus.fullest, spelled=spelled) for spelled in (True, False)] if gpus.fullest else []
    heat = "" if gpus.hottest is None else f"{gpus.hottest[0]} °C r{gpus.hottest[1]}"
    pairs = ((used, word) for used in memory or [""] for word in (heat and f"hottest {heat}", heat))
    second = _first_that_fits([_dotted(*pair) for pair in pairs], columns)
    return [first, second, _throttled(gpus, columns)]


def _dotted(*texts: str) -> Line:
    """The texts that are not empty, as one dim cell each."""
    known = list(filter(None, texts))
    return [Cell(f"{' · ' if place else ''}{text}", Level.DIM) for place, text in enumerate(known)]


def _throttled(gpus: GpuTotals, columns: int) -> Line:
    if gpus.failed:
        return [Cell(f"✖ {plural(gpus.failed, 'GPU')} with errors", Level.BAD)]
    if gpus.slowest is None:
        return [Cell("no GPU throttled", Level.DIM)]
    gpu, rank = gpus.slowest
    clocks = [f" {gpu.sm_mhz} MHz"] if gpu.sm_mhz else [""]
    if gpu.sm_mhz and gpu.sm_max_mhz:
        clocks.insert(0, f" {gpu.sm_mhz}/{gpu.sm_max_mhz} MHz")
    lead, level = f"{gpus.power_capped} at power cap", Level.DIM
    if is_throttled(gpu):
        more = f" +{gpus.throttled - 1}" if gpus.throttled > 1 else ""
        why = "thermal" if "thermal" in throttle_reasons(gpu)[0] else "throttled"
        lead, level = f"▲ r{rank}{more} {why}", Level.WARN
    return _first_that_fits([[Cell(f"{lead}{text}", level)] for text in clocks], columns)


def compact(run_view: RunView, columns: int) -> list[Line]:
    """The cards as one line each, for low windows."""
    cards = (
        ("step", step_card),
        ("throughput", throughput_card),
        (sync_name(run_view.state), allreduce_card),
        (device_title(run_view), device_card),
    )
    lines: list[Line] = []
    for label, card in cards:
        first, second, third = card(run_view, max(8, columns - 50))
        line = [Cell(f" {label}".ljust(_LABEL_COLUMNS), Level.DIM), *first]
        # Of devices the last line matters more: throttling, or that the values are of another step.
        turned = label == "GPU" or (label == "CPU" and bool(run_view.hindsight))
        if turned:
            second, third = third, second
        if second:
            line += [Cell("  · ", Level.DIM), *second]
        if turned:
            line += _whole_cells(third, columns - line_columns(line))
        # The sparkline fills the rest, unless that is very short.
        left = columns - line_columns(line) - 3
        if third and left >= 12 and label in {"step", "throughput"}:
            line += [Cell("  "), *card(run_view, left)[2]]
        lines.append(fit(line, columns))
    return lines


def _whole_cells(cells: Line, columns: int) -> Line:
    """The cells that fit without a cut, after a dot."""
    line: Line = [Cell("  · ", Level.DIM)]
    for cell in cells:
        if line_columns([*line, cell]) > columns:
            break
        line.append(cell)
    return line if len(line) > 1 else []


def _first_that_fits(lines: Sequence[Line], columns: int) -> Line:
    """The first wording that fits; the last one if none does."""
    return next((line for line in lines if line_columns(line) <= columns), lines[-1])


def _split_bar(figures: Figures, columns: int) -> Line:
    """The step as a bar: wire, waiting, and the rest."""
    wire = round((figures.wire_share or 0.0) * columns)
    waiting = max(0, round(figures.share * columns) - wire)
    rest = max(0, columns - wire - waiting)
    return [Cell("▒" * wire, Level.WIRE), Cell("░" * waiting, Level.WAITING), Cell("·" * rest, Level.DIM)]


def _stalled_line(run_view: RunView) -> Line:
    """Warning that the run is stalled; empty = it is not."""
    if run_view.stalled_s is None:
        return []
    return [Cell(f"▲ no step for {duration_text(run_view.stalled_s)}", Level.WARN)]


def _unproven(why: str) -> Line:
    return [Cell(UNPROVEN, Level.STRONG), Cell(f"  {why}", Level.DIM)]
