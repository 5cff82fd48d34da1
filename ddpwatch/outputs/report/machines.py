"""The sections on the machines: GPUs, or CPU and memory of the ranks; gradient buckets; and how to run it again."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from ddpwatch.core.buckets import backward_ns_of, timings_of
from ddpwatch.core.numbers import UNPROVEN, count, duration, ms, percent, plural, ranks_text, size
from ddpwatch.outputs.report import charts
from ddpwatch.outputs.report.markup import Html, h, table
from ddpwatch.outputs.report.pieces import Section, facts, figure, section
from ddpwatch.version import VERSION
from ddpwatch.view.buckets import speed_text
from ddpwatch.view.damage import damage_sentence
from ddpwatch.view.manifest import judged_by, lacks, manifest
from ddpwatch.view.remarks import remarks

if TYPE_CHECKING:
    from ddpwatch.core.loads import Load
    from ddpwatch.core.rank import RankState
    from ddpwatch.outputs.report.charts import Chart
    from ddpwatch.outputs.report.gather import Report

MOST_ROWS: Final = 32
MOST_BUCKETS: Final = 64
_GIB: Final = float(1 << 30)
_GPU_CURVES: Final = (
    ("util_percent", "Utilisation", "%", 1.0, 101.0),
    ("used_bytes", "Memory used", "GiB", _GIB, None),
    ("power_mw", "Power", "W", 1e3, None),
    ("temperature_c", "Temperature", "°C", 1.0, None),
)
_RANK_CURVES: Final = (
    ("cpu_percent", "CPU of a rank's process", "%", 1.0, None),
    ("rss_bytes", "Resident memory of a rank", "GiB", _GIB, None),
)


def loads(report: Report) -> Section:
    """GPU figures where there are any, else CPU and memory of the ranks."""
    has_gpus = bool(report.loads.gpus)
    made = [
        chart
        for chart in (charts.load(report.loads, *curve) for curve in (_GPU_CURVES if has_gpus else _RANK_CURVES))
        if chart is not None
    ]
    title = "GPUs" if has_gpus else "CPU and memory"
    if not made:
        return section(title, h("p", "No reading of a GPU, nor of CPU and memory, is in the recording."))
    note = "The line is the mean, the band goes from the least to the most."
    if not has_gpus:
        note = f"No GPU was read. {note}"
    elif any(load.total_bytes for load in report.loads.gpus.values()):
        note += " A GPU that waits inside an all-reduce is at 100 %, too."
    body = [h("p", note, class_="quiet"), h("div", map(figure, made), class_="pair")]
    body.append(_gpu_table(report) if has_gpus else _rank_table(report))
    return section(title, *body, charts=tuple(made))


def buckets(report: Report) -> Section:
    """The gradient buckets of one step of one rank, where they were recorded."""
    rank = _bucket_rank(report)
    if rank is None or rank.buckets is None:
        return Section(Html(""))
    backward_ns = backward_ns_of(rank, rank.buckets.step)
    timings = timings_of(rank.buckets.buckets, backward_ns, report.state.world_size)
    rows = [
        [
            str(timing.bucket.index), size(timing.bucket.bytes), ms(timing.bucket.ready_ns), ms(timing.took_ns),
            percent(timing.hidden), speed_text(timing.gb_per_s),
        ]
        for timing in timings[:MOST_BUCKETS]
    ]  # fmt: skip
    note = (
        f"Rank {rank.rank}, step {count(rank.buckets.step)}: {plural(len(timings), 'bucket')}, "
        f"{size(sum(timing.bucket.bytes for timing in timings))}. Hidden is what computing covered; "
        "bandwidth is counted as nccl-tests does."
    )
    titles = ["#", "size", "ready ms", "took ms", "hidden", "GB/s"]
    figures = table(titles, rows, numbers=range(6))
    made: tuple[Chart, ...] = ()
    if any(timing.took_ns is not None for timing in timings):
        made = (charts.buckets(timings[:MOST_BUCKETS], backward_ns),)
    body = [figure(chart, figures) for chart in made] or [figures]
    return section("Gradient buckets", h("p", note, class_="quiet"), *body, charts=made)


def reproduce(report: Report) -> Section:
    """What one needs to run it again, and what the recording lacks."""
    groups = [
        h("div", h("h3", title), facts(pairs), class_="group")
        for title, pairs in [*manifest(report.state), ("This recording", _recording(report))]
    ]
    body = [h("div", groups, class_="groups")]
    missing = [*_missing(report), *lacks(report.state, damaged=report.damage is not None)]
    body.append(h("h3", "What the recording lacks"))
    body.append(h("ul", (h("li", text) for text in missing)) if missing else h("p", "Nothing that is known of."))
    if notes := [cell.text for cell in remarks(report.state)]:
        body += [h("h3", "Notes of the ranks"), h("ul", (h("li", text) for text in notes))]
    return section("To run it again", *body)


def clock_text(unix_ns: int) -> str:
    """A moment as people write it; empty = out of any calendar."""
    try:
        return f"{datetime.fromtimestamp(unix_ns / 1e9, tz=timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return ""


def _recording(report: Report) -> list[tuple[str, str]]:
    began, ended = clock_text(report.began_ns), clock_text(report.ended_ns)
    return [
        ("file", report.file_name),
        ("run", f"{report.state.name} ({report.state.run_id})"),
        ("attempt", f"{report.number} of {report.attempts} in the recording"),
        ("recorded", f"{began} to {ended}, {duration(report.seconds)}"),
        *judged_by(report.judged.recorder, report.judged.limits),
        ("report by", f"ddpwatch {VERSION}"),
    ]


def _missing(report: Report) -> list[str]:
    found = []
    if report.damage is not None:
        found.append(damage_sentence(report.damage))
    if report.unclosed:
        found.append(
            f"Its recorder did not close it, and {report.file_name}-wal was not beside it: "
            "its newest part may be missing."
        )
    if report.skipped:
        found.append(
            f"{plural(report.skipped, 'step')} left out of the figures: not all ranks had them, or they held a pause, "
            "an evaluation or a skipped update."
        )
    first = report.digest.first_step
    if first is not None and first > 1:
        found.append(f"Steps before {count(first)} are not in it.")
    if report.disbelieved:
        found.append(f"Figures of {ranks_text(report.disbelieved)} cannot be true and were left out.")
    return found


def _bucket_rank(report: Report) -> RankState | None:
    ranks = report.state.ranks
    for cost in report.digest.costs()[:1]:
        if isinstance(cost.who, int) and (slow := ranks.get(cost.who)) is not None and slow.buckets is not None:
            return slow
    return next((rank for rank in ranks.values() if rank.buckets is not None), None)


def _gpu_table(report: Report) -> Html:
    def place(load: Load) -> tuple[float, float]:
        return -(load.held_share or 0.0), load.mean("util_percent") or 0.0

    found = sorted(report.loads.gpus.values(), key=place)
    shown = sorted(found[:MOST_ROWS], key=lambda load: (load.rank, load.device))
    most = ("utilisation", "memory, most", "power", "temperature, most")
    rows = [_gpu_row(report, load) for load in shown]
    figures = table(
        ["rank", "host", "GPU", "name", *most, "clocks held down"], rows, numbers=(0, 4, 5, 6, 7), stacks=True
    )
    if len(found) <= MOST_ROWS:
        return figures
    note = f"{len(shown)} of {len(found)}: those held down most, then those that did least."
    return h("div", h("p", note, class_="quiet"), figures)


def _gpu_row(report: Report, load: Load) -> list[str]:
    used, total = load.most.get("used_bytes"), load.total_bytes
    memory = UNPROVEN if used is None else size(used) + (f" of {size(total)}" if total else "")
    held = UNPROVEN
    if load.held_share is not None:
        reasons = sorted(load.held, key=lambda reason: -load.held[reason])[:2]
        held = f"{percent(load.held_share)} of the time: {', '.join(reasons)}" if reasons else "never"
    return [
        str(load.rank), report.state.ranks[load.rank].host, load.device, load.name,
        _unit(load.mean("util_percent"), "%"), memory, _unit(load.mean("power_mw"), "W", 1e3),
        _unit(load.most.get("temperature_c"), "°C"), held,
    ]  # fmt: skip


def _rank_table(report: Report) -> Html:
    found = sorted(report.loads.ranks.values(), key=lambda load: -(load.most.get("rss_bytes", 0.0)))
    shown = sorted(found[:MOST_ROWS], key=lambda load: load.rank)
    rows = [
        [
            str(load.rank), report.state.ranks[load.rank].host, _unit(load.mean("cpu_percent"), "%"),
            _unit(load.most.get("cpu_percent"), "%"),
            size(load.most["rss_bytes"]) if "rss_bytes" in load.most else UNPROVEN,
        ]
        for load in shown
    ]  # fmt: skip
    titles = ["rank", "host", "CPU, mean", "CPU, most", "memory, most"]
    return table(titles, rows, numbers=(0, 2, 3, 4), stacks=True)


def _unit(value: float | None, unit: str, scale: float = 1.0) -> str:
    return UNPROVEN if value is None else f"{value / scale:.0f} {unit}"
