"""Sections of a report: text, tables and charts. Each chart has a table of its figures, for readers without scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.limits import DEFAULTS
from ddpwatch.core.metrics.aggregate import P99
from ddpwatch.core.metrics.live_metrics import backward_ns_of, timings_of
from ddpwatch.core.metrics.window import PAUSES
from ddpwatch.core.model_kinds import sync_name
from ddpwatch.core.units import (
    UNPROVEN,
    count,
    duration_text,
    moment_of,
    ms,
    ordinal,
    percent,
    plural,
    ranks_text,
    size,
    wire_and_waiting,
)
from ddpwatch.outputs.report import charts
from ddpwatch.outputs.report.html_elements import Html, Section, facts, figure, h, section, table
from ddpwatch.recording.damage_report import damage_sentence
from ddpwatch.version import VERSION
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.alerts.page import alert_facts, evidence_facts
from ddpwatch.view.allreduce import speed_text
from ddpwatch.view.charts.phase_bar import MAX_BARS, PARTS, rank_bars
from ddpwatch.view.job_manifest import manifest, missing_facts, recorded_by_facts
from ddpwatch.view.layout import machine_time
from ddpwatch.view.outcome_text import longest_text, seconds_text
from ddpwatch.view.run_view import no_recorded_steps_reason, remarks
from ddpwatch.view.verdict import cost_name, kept_steps_from, of_what, phases_text, when_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.core.metrics.aggregate import Cost
    from ddpwatch.core.metrics.utilization import DeviceUtilization
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.outputs.report.charts import Chart
    from ddpwatch.outputs.report.data import Report

MAX_ALERTS: Final = 100
"""Max alerts in the report, the most urgent ones."""
MAX_COSTS: Final = 20
"""Max ranks in the tables of costs and of excess work."""
MIN_COST: Final = 0.001
"""Minimum straggler cost, as a fraction of the job's time, that is listed."""
MAX_POINTS: Final = 24
"""Max rows of a table over time."""
MAX_EVIDENCE: Final = 24
"""Max evidence of one alert."""
MAX_ROWS: Final = 32
"""Max GPUs in their table."""
MAX_BUCKETS: Final = 64
"""Max buckets in the table and chart of them."""
_GIB: Final = float(1 << 30)
_GPU_CURVES: Final = (
    ("util_percent", "Utilization", "%", 1.0, 101.0),
    ("used_bytes", "Memory used", "GiB", _GIB, None),
    ("power_mw", "Power", "W", 1e3, None),
    ("temperature_c", "Temperature", "°C", 1.0, None),
)
"""Arguments of `charts.utilization`."""
_RANK_CURVES: Final = (
    ("cpu_percent", "CPU of a rank's process", "%", 1.0, None),
    ("rss_bytes", "Resident memory of a rank", "GiB", _GIB, None),
)
_NOTHING: Final = Section(Html(""))


def key_figures(report: Report) -> Section:
    """Tiles of the main figures: duration, steps, speed, all-reduce share."""
    figures, state = report.aggregate, report.state
    share, wire, _ = figures.shares()
    parts = "wire or waiting unproven"
    if share is not None and wire is not None:
        parts = "= wire {} + waiting {}".format(*wire_and_waiting(share, wire))
    throughput = figures.samples_per_s
    each = f"samples/s, {count(throughput / max(state.world_size, 1))} per rank" if throughput else ""
    tiles = [
        ("recorded", duration_text(report.seconds), ""),
        ("steps", UNPROVEN if state.step is None else count(state.step), f"{count(figures.steps)} measured"),
        ("step, median", f"{ms(figures.step_ns())} ms", f"p99 {ms(figures.step_ns(P99))} ms"),
        ("throughput", count(throughput) if throughput else UNPROVEN, each),
        (
            "effective batch",
            count(figures.effective_batch) if figures.effective_batch else UNPROVEN,
            "samples per step",
        ),
        ("ranks × hosts", f"{count(state.world_size)} × {count(state.host_count)}", ""),
    ]
    if state.world_size > 1:
        tiles.insert(5, (sync_name(state), UNPROVEN if share is None else percent(share), parts))
    if hang := report.outcome.hang:
        spent = machine_time(hang.seconds * state.world_size, "GPU" if report.utilization.gpus else "rank")
        for_ranks = f"for {ranks_text(hang.ranks)}, " if hang.ranks else ""
        tiles.append(("hung at the end", duration_text(hang.seconds), for_ranks + spent))
    if hung := figures.hung_steps():
        tiles.append(("hung steps", seconds_text(hung.lost_s), longest_text(hung)))
    shown = (h("div", h("dt", name), h("dd", value, h("small", note)), class_="tile") for name, value, note in tiles)
    return Section(h("dl", shown, class_="tiles"))


def phases(report: Report) -> Section:
    """Phases of the mean step, by rank."""
    bars = rank_bars(report.aggregate)
    if not bars:
        why = no_recorded_steps_reason(report.state)
        return section("Where a step's time went", h("p", f"{why[:1].upper()}{why[1:]}."))
    parts = [part for part in PARTS if any(part in bar.parts_ns for bar in bars)]
    rows = [[bar.label, ms(bar.step_ns), *(ms(bar.parts_ns.get(part)) for part in parts)] for bar in bars]
    chart = charts.phases(bars)
    note = "The mean step of each rank."
    if report.state.world_size > 1:
        note += " Waiting is time spent waiting for slower ranks; the rank that waits least is the slowest."
    if len(report.aggregate.ranks) > MAX_BARS:
        note += " In large runs: the slowest ranks, a typical one, and the means of the slowest hosts."
    figures = figure(chart, table(["", "step ms", *parts], rows, numbers=range(1, len(parts) + 2)))
    return section("Where a step's time went", h("p", note, class_="quiet"), figures, charts=(chart,))


def over_time(report: Report) -> Section:
    """All-reduce share and step time over time; a single rank has no share."""
    aggregate = report.aggregate
    if not aggregate.steps:
        return _NOTHING
    median, slow = aggregate.step_ns_over_time(0.5), aggregate.step_ns_over_time(0.99)
    begins, width = aggregate.over_time.begins.tolist(), aggregate.over_time.width
    every = -(-len(begins) // MAX_POINTS)
    places = range(0, len(begins), every)
    titles = ["steps", "step ms, median", "p99"]
    rows = [
        [
            _steps(begins[place], min(begins[place] + width - 1, aggregate.last_step or 0)),
            ms(_known(median[place])), ms(_known(slow[place])),
        ]
        for place in places
    ]  # fmt: skip
    made = [charts.step_time(aggregate)]
    what, parts = "Step time over time", ""
    if report.state.world_size > 1:
        what = "All-reduce and step time over time"
        parts = "Wire is time on the network, waiting is for slower ranks. "
        made.insert(0, charts.all_reduce(aggregate, DEFAULTS.comm_share.share, report.alerts))
        titles[1:1] = ["all-reduce", "wire", "waiting"]
        shares = aggregate.shares_over_time()
        for row, place in zip(rows, places, strict=True):
            row[1:1] = [_percent(each[place]) for each in shares]
    note = (
        f"One point is {plural(width, 'step')}. {parts}Steps with a pause, an evaluation or a skipped update are left "
        "out. Step times here are precise to 1%."
    )
    if every > 1:
        note += f" The table has every {ordinal(every)} point."
    *first, last = made
    body = [h("p", note, class_="quiet"), *(figure(chart) for chart in first)]
    body.append(figure(last, table(titles, rows, numbers=range(1, len(titles)))))
    return section(what, *body, charts=tuple(made))


def heat(report: Report) -> Section:
    """Heat map of the ranks' own work over time, against the median rank."""
    aggregate = report.aggregate
    if not aggregate.steps or report.state.world_size < 2:
        return _NOTHING
    excess, whole = aggregate.excess_over_time(), aggregate.excess_of_ranks()
    known = np.flatnonzero(np.isfinite(whole)).tolist()
    rows = [
        [f"rank {aggregate.ranks[row]}", aggregate.hosts[row], f"{whole[row]:.1f}%", f"{np.nanmax(excess[row]):.0f}%"]
        for row in sorted(known, key=lambda row: -whole[row])[:MAX_COSTS]
    ]
    chart = charts.heat_map(aggregate)
    note = (
        "Self time of each rank above that of the median rank, in percent of the step time. "
        f"One column is {plural(aggregate.over_time.width, 'step')}."
    )
    figures = table(["", "host", "above the median rank", "max in a column"], rows, numbers=(2, 3))
    return section("Ranks by time", h("p", note, class_="quiet"), figure(chart, figures), charts=(chart,))


def costs(report: Report) -> Section:
    """Straggler cost of ranks and hosts, as a share of the job's time and in GPU time."""
    aggregate = report.aggregate
    if not aggregate.steps or report.state.world_size < 2:
        return _NOTHING
    what = "GPU" if report.utilization.gpus else "rank"
    ranks = [cost for cost in aggregate.costs() if cost.share >= MIN_COST]
    hosts = [cost for cost in aggregate.host_costs() if cost.share >= MIN_COST]
    if not ranks and not hosts:
        return section("Straggler cost", h("p", "No rank kept the others waiting for long."))
    of = of_what(aggregate, report.alerts)
    steps = "all steps of the run"
    if kept_steps_from(aggregate, report.alerts) is not None:
        steps = f"{of} (those before are not in the recording)"
    note = (
        "Time the job would have saved if this rank had been as fast as the next-slowest: as a share of "
        f"{steps}, and as time on all {plural(report.state.world_size, 'rank')}, in {what} time"
        f"{'' if what == 'GPU' else ' (no GPU readings)'}."
    )
    titles = ["", "host", "phase", "when", f"of {of}", "", f"{what} time lost"]
    rows = [_cost_row(report, cost, what, ranks[0].share) for cost in ranks[:MAX_COSTS]]
    body = [h("p", note, class_="quiet"), table(titles, rows, numbers=(4, 6), stacks=True)]
    if len(ranks) > MAX_COSTS:
        body.append(h("p", f"{len(ranks) - MAX_COSTS} more ranks cost less than these.", class_="quiet"))
    if hosts:
        rows = [[row[0], *row[4:]] for row in (_cost_row(report, cost, what, hosts[0].share) for cost in hosts)]
        short = table([titles[0], *titles[4:]], rows[:MAX_COSTS], numbers=(1, 3), stacks=True)
        body += [h("h3", "Hosts, each compared with the others"), short]
    return section("Straggler cost", *body)


def alerts(report: Report) -> Section:
    """Alerts with evidence and advice."""
    hurt = report.damage is not None and report.damage.alerts
    if not report.alerts:
        return section("Alerts", h("p", f"None {'readable ' if hurt else ''}in the recording."))
    shown = report.alerts[:MAX_ALERTS]
    still_open = sum(alert.closed is None for alert in report.alerts)
    note = f"{plural(len(report.alerts), 'alert')}, {still_open} open at the end."
    if stale := sum(bool(alert.stale) for alert in report.alerts):
        note = f"{note[:-1]}, {stale} of them stale."
    note += " Each is shown at its worst."
    if hurt:
        note += " Others may be missing: the recording is damaged."
    body = [h("p", note, class_="quiet"), *map(_alert, shown)]
    if len(report.alerts) > len(shown):
        body.append(h("p", f"{len(report.alerts) - len(shown)} less severe alerts are not shown.", class_="quiet"))
    return section("Alerts", *body)


def scaling(report: Report) -> Section:
    """Scaling efficiency, if a baseline was given."""
    if report.scaling is None:
        return _NOTHING
    chart = charts.waterfall(report.scaling)
    rows = [[name, _percent(share)] for name, share in report.scaling.losses]
    lines = [h("p", line) for line in report.scaling.lines]
    figures = figure(chart, table(["lost to", "of the ideal"], rows, numbers=(1,)))
    return section("Scaling against one process", *lines, figures, charts=(chart,))


def _alert(alert: Alert) -> Html:
    finding, seen = alert.finding, alert.seen
    word = finding.severity.word
    state = "open at the end" if alert.closed is None else "closed"
    if seen is not None:
        state = f"not seen since step {count(seen.step or 0)}, open at the end"
    lead = h("span", f"{MARKS[finding.severity].text} {finding.rule}", class_=word)
    pieces = [h("div", lead, f" · {word} · {state}"), h("div", finding.message, class_="what")]
    if finding.detail:
        pieces.append(h("div", finding.detail))
    if finding.advice:
        pieces.append(h("div", h("b", "What to try:"), f" {finding.advice}"))
    # While an alert goes on, "last seen" is only the time of its last message.
    when = [pair for pair in alert_facts(alert) if seen is not None or pair[0] != "last seen"]
    pieces.append(_line("When and where", when))
    if evidence := evidence_facts(finding.evidence)[:MAX_EVIDENCE]:
        pieces.append(_line("Evidence", evidence))
    return h("div", *pieces, class_="alert")


def _line(title: str, pairs: Sequence[tuple[str, str]]) -> Html:
    """Names and values on one line."""
    shown = [h("span", h("i", name), f" {text}", class_="fact") for name, text in pairs]
    return h("div", h("span", f"{title}:", class_="fact"), shown, class_="quiet")


def _cost_row(report: Report, cost: Cost, what: str, most: float) -> list[str | Html]:
    aggregate = report.aggregate
    host = aggregate.hosts[aggregate.ranks.index(cost.subject)] if isinstance(cost.subject, int) else cost.subject
    bar = h("span", class_="bar", style=f"width:{min(100 * cost.share / max(most, 1e-9), 100):.0f}px")
    spent = machine_time(cost.seconds * report.state.world_size, what)
    when = when_text(cost, report.alerts, aggregate) or UNPROVEN
    return [cost_name(cost), host, phases_text(cost) or UNPROVEN, when, _percent(cost.share), bar, spent]


def _steps(first: int, last: int) -> str:
    return f"{count(first)} – {count(last)}" if last > first else count(first)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if np.isfinite(share) else UNPROVEN


def _known(ns: float) -> float | None:
    return ns if np.isfinite(ns) else None


def utilization(report: Report) -> Section:
    """Utilization of the GPUs, or CPU and memory of the ranks if no GPU was read."""
    has_gpus = bool(report.utilization.gpus)
    curves = _GPU_CURVES if has_gpus else _RANK_CURVES
    made = [chart for curve in curves if (chart := charts.utilization(report.utilization, *curve)) is not None]
    title = "GPUs" if has_gpus else "CPU and memory"
    if not made:
        return section(title, h("p", "The recording has no readings of GPUs, CPU or memory."))
    note = "The line is the mean, the band the range from min to max."
    if not has_gpus:
        note = f"No GPU readings. {note}"
    elif any(gpu.total_bytes for gpu in report.utilization.gpus.values()):
        note += " A GPU that waits in an all-reduce also shows 100%."
    body = [h("p", note, class_="quiet"), h("div", map(figure, made), class_="pair")]
    body.append(_gpu_table(report) if has_gpus else _rank_table(report))
    return section(title, *body, charts=tuple(made))


def sync_points(report: Report) -> Section:
    """Sync points of a step with their call sites, if the script calls collectives of its own."""
    if not report.state.has_sync_points:
        return _NOTHING
    rows = [
        [
            point.label, point.phase, ms(point.mean_ns), percent(point.share), percent(point.wire_share),
            percent(point.wait_share), percent(point.steps_share),
        ]
        for point in report.aggregate.sync_points(report.state)
    ]  # fmt: skip
    note = (
        "Where ranks wait for each other in a step: in DDP or FSDP itself, and in collectives of the script, by line. "
        "The wire is the network's time; waiting is for slower ranks."
    )
    titles = ["sync point", "in", "ms", "of the time", "wire", "waiting", "of the steps"]
    return section("Sync points", h("p", note, class_="quiet"), table(titles, rows, numbers=range(2, 7)))


def pauses(report: Report) -> Section:
    """Garbage collection, checkpoint saves and evaluation, if there were any."""
    rows = []
    for column, by_rank in report.aggregate.pause_shares().items():
        most = max(by_rank, key=lambda rank: by_rank[rank], default=None)
        if most is not None and by_rank[most]:
            mean = sum(by_rank.values()) / len(by_rank)
            rows.append([PAUSES[column], f"{mean:.1%}", f"rank {most}", f"{by_rank[most]:.1%}"])
    if not rows:
        return _NOTHING
    note = "Parts of a step with a name of their own. All ranks wait while one of them pauses alone."
    titles = ["pause", "of the time", "most on", "of its time"]
    return section("Pauses", h("p", note, class_="quiet"), table(titles, rows, numbers=(1, 3)))


def buckets(report: Report) -> Section:
    """Gradient buckets of one step of one rank, if they were recorded."""
    rank = _bucket_rank(report)
    if rank is None or rank.buckets is None:
        return _NOTHING
    backward_ns = backward_ns_of(rank, rank.buckets.step)
    timings = timings_of(rank.buckets.buckets, backward_ns, report.state.world_size)
    rows = [
        [
            str(timing.bucket.index), size(timing.bucket.bytes), ms(timing.bucket.ready_ns), ms(timing.took_ns),
            percent(timing.hidden), speed_text(timing.gb_per_s),
        ]
        for timing in timings[:MAX_BUCKETS]
    ]  # fmt: skip
    note = (
        f"Rank {rank.rank}, step {count(rank.buckets.step)}: {plural(len(timings), 'bucket')}, "
        f"{size(sum(timing.bucket.bytes for timing in timings))}. Hidden is what overlaps with computation; "
        "bandwidth is bus bandwidth as in nccl-tests."
    )
    figures = table(["#", "size", "ready ms", "took ms", "hidden", "GB/s"], rows, numbers=range(6))
    made: tuple[Chart, ...] = ()
    if any(timing.took_ns is not None for timing in timings):
        made = (charts.buckets(timings[:MAX_BUCKETS], backward_ns),)
    body = [figure(chart, figures) for chart in made] or [figures]
    return section("Gradient buckets", h("p", note, class_="quiet"), *body, charts=made)


def reproduce(report: Report) -> Section:
    """What is needed to repeat the run, and what the recording lacks."""
    groups = [
        h("div", h("h3", title), facts(pairs), class_="group")
        for title, pairs in [*manifest(report.state), ("This recording", _recording(report))]
    ]
    body = [h("div", groups, class_="groups")]
    missing = [*_missing(report), *missing_facts(report.state, damaged=report.damage is not None)]
    body.append(h("h3", "What is missing in the recording"))
    body.append(h("ul", (h("li", text) for text in missing)) if missing else h("p", "Nothing known."))
    if notes := [cell.text for cell in remarks(report.state)]:
        body += [h("h3", "Notes of the ranks"), h("ul", (h("li", text) for text in notes))]
    return section("To reproduce the run", *body)


def clock_text(unix_ns: int) -> str:
    """A time in UTC; empty if it is out of range."""
    moment = moment_of(unix_ns)
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else ""


def _recording(report: Report) -> list[tuple[str, str]]:
    began, ended = clock_text(report.began_ns), clock_text(report.ended_ns)
    return [
        ("file", report.file_name),
        ("run", f"{report.state.name} ({report.state.run_id})"),
        ("attempt", f"{report.number} of {report.attempts} in the recording"),
        ("recorded", f"{began} to {ended}, {duration_text(report.seconds)}"),
        *recorded_by_facts(report.recorded_by.recorder, report.recorded_by.limits),
        ("report written by", f"ddpwatch {VERSION}"),
    ]


def _missing(report: Report) -> list[str]:
    found = []
    if report.damage is not None:
        found.append(damage_sentence(report.damage))
    if report.unclosed:
        found.append(
            f"Its recorder did not close it, and {report.file_name}-wal is missing: the newest data may be lost."
        )
    if report.skipped:
        found.append(
            f"{plural(report.skipped, 'step')} left out: not all ranks finished them, or they had a pause, "
            "an evaluation or a skipped update."
        )
    first = report.aggregate.first_step
    if first is not None and first > 1:
        found.append(f"Steps before {count(first)} are not in it.")
    if report.implausible:
        found.append(f"Implausible figures of {ranks_text(report.implausible)} were left out.")
    return found


def _bucket_rank(report: Report) -> RankState | None:
    """The costliest rank, or else the first one, with recorded buckets."""
    ranks = report.state.ranks
    for cost in report.aggregate.costs()[:1]:
        if isinstance(cost.subject, int) and (slow := ranks.get(cost.subject)) is not None and slow.buckets is not None:
            return slow
    return next((rank for rank in ranks.values() if rank.buckets is not None), None)


def _gpu_table(report: Report) -> Html:
    found = sorted(
        report.utilization.gpus.values(), key=lambda gpu: (-(gpu.held_share or 0.0), gpu.mean("util_percent") or 0.0)
    )
    shown = sorted(found[:MAX_ROWS], key=lambda gpu: (gpu.rank, gpu.device))
    titles = [
        "rank", "host", "GPU", "name", "utilization", "max memory", "power", "max temperature", "throttled",
    ]  # fmt: skip
    figures = table(titles, [_gpu_row(report, gpu) for gpu in shown], numbers=(0, 4, 5, 6, 7), stacks=True)
    if len(found) <= MAX_ROWS:
        return figures
    note = f"{len(shown)} of {len(found)}: the most throttled, then the least utilized."
    return h("div", h("p", note, class_="quiet"), figures)


def _gpu_row(report: Report, gpu: DeviceUtilization) -> list[str]:
    used, total = gpu.most.get("used_bytes"), gpu.total_bytes
    memory = UNPROVEN if used is None else size(used) + (f" of {size(total)}" if total else "")
    held = UNPROVEN
    if gpu.held_share is not None:
        reasons = sorted(gpu.held, key=lambda reason: -gpu.held[reason])[:2]
        held = f"{percent(gpu.held_share)} of the time: {', '.join(reasons)}" if reasons else "never"
    return [
        str(gpu.rank), report.state.ranks[gpu.rank].host, gpu.device, gpu.name,
        _unit(gpu.mean("util_percent"), "%"), memory, _unit(gpu.mean("power_mw"), "W", 1e3),
        _unit(gpu.most.get("temperature_c"), "°C"), held,
    ]  # fmt: skip


def _rank_table(report: Report) -> Html:
    found = sorted(report.utilization.ranks.values(), key=lambda rank: -rank.most.get("rss_bytes", 0.0))
    shown = sorted(found[:MAX_ROWS], key=lambda rank: rank.rank)
    rows = [
        [
            str(rank.rank), report.state.ranks[rank.rank].host, _unit(rank.mean("cpu_percent"), "%"),
            _unit(rank.most.get("cpu_percent"), "%"),
            size(rank.most["rss_bytes"]) if "rss_bytes" in rank.most else UNPROVEN,
        ]
        for rank in shown
    ]  # fmt: skip
    titles = ["rank", "host", "mean CPU", "max CPU", "max memory"]
    return table(titles, rows, numbers=(0, 2, 3, 4), stacks=True)


def _unit(value: float | None, unit: str, scale: float = 1.0) -> str:
    return UNPROVEN if value is None else f"{value / scale:.0f} {unit}"
