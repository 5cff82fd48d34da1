"""What is said of all ranks together. Walks them once, when a picture is worked out, so that drawing does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpwatch.view.cells import columns_of
from ddpwatch.view.gpuload import gpu_rows
from ddpwatch.view.gputotals import gpu_totals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.state import RunState
    from ddpwatch.view.columns import Row
    from ddpwatch.view.gputotals import GpuTotals


@dataclass(frozen=True)
class Extent:
    """How much room the longest entries of the rank table take, and the step that fills a bar."""

    rank_columns: int
    host_columns: int
    full_ns: float
    has_gpus: bool = False
    """Whether GPUs are read: they have columns then."""


@dataclass(frozen=True)
class Totals:
    """All ranks in a few numbers."""

    hosts: int
    step: int | None
    """The furthest step that a rank is in."""
    running_s: float | None
    """For how long the run has been going, or had at the step that is looked back at, by the ranks' own clocks; None =
    they do not tell.
    """
    beats: int
    """Ranks that have told of their CPU and memory."""
    cpu_percent: float
    """The mean of them."""
    most_cpu_percent: float
    rss_bytes: int
    gpus: GpuTotals | None
    """None = no rank tells of a GPU."""
    extent: Extent


def extent_of(rows: Sequence[Row]) -> Extent:
    """For a table of these ranks."""
    return Extent(
        rank_columns=len(str(max((row.state.rank for row in rows), default=0))),
        host_columns=max((columns_of(host) for host in {row.state.host for row in rows}), default=0),
        full_ns=max((row.figures.step_ns for row in rows if row.figures), default=1.0),
        has_gpus=any(row.state.gpus.latest is not None and row.state.gpus.latest.gpus for row in rows),
    )


def totals_of(state: RunState, rows: Sequence[Row], at: int | None = None, *, of_now: bool = True) -> Totals:
    """Of this run, whose ranks are these; `at` is the step that is looked back at, `of_now` = the figures of the ranks
    are.
    """
    beats = [row.state.beat for row in rows if row.state.beat is not None]
    extent = extent_of(rows)
    cpu_percent = [beat.cpu_percent for beat in beats]
    return Totals(
        hosts=max(1, len({row.state.host for row in rows if row.state.host})),
        step=state.step,
        running_s=_running_s(state, rows, at),
        beats=len(beats),
        cpu_percent=sum(cpu_percent) / max(len(beats), 1),
        most_cpu_percent=max(cpu_percent, default=0.0),
        rss_bytes=sum(beat.rss_bytes for beat in beats),
        gpus=gpu_totals(gpu_rows(rows, of_now=of_now)) if extent.has_gpus else None,
        extent=extent,
    )


def _running_s(state: RunState, rows: Sequence[Row], at: int | None) -> float | None:
    started_ns = min(
        (row.state.hello.started_unix_ns for row in rows if row.state.hello and row.state.hello.started_unix_ns),
        default=0,
    )
    now_ns = state.unix_ns
    if at is not None and now_ns:
        ended_ns = next((ns for row in rows if (ns := row.state.finished_ns(at)) is not None), None)
        now_ns = 0 if ended_ns is None else now_ns - (state.now_ns - ended_ns)
    return (now_ns - started_ns) / 1e9 if 0 < started_ns <= now_ns else None
