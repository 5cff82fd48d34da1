"""The charts of a report as figures of plotly: plain values, and colours by the names that the style gives them.

Plotly reads tags in its labels, so text from outside is escaped here, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.units import count, percent
from ddpwatch.view.charts.heatmap import rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.core.metrics.aggregate import RunAggregate
    from ddpwatch.core.metrics.figures import Timing
    from ddpwatch.core.metrics.utilization import Utilization
    from ddpwatch.outputs.report.data import Scaling
    from ddpwatch.view.charts.phase_bar import RankBar

MAP_ROWS: Final = 40
MAP_TOP: Final = 40
"""Per cent of the time above the middle rank, from which on a place of the map looks the same."""
MAX_MARKS: Final = 40
LABEL_CHARS: Final = 24
HEIGHT: Final = 300
SMALL_HEIGHT: Final = 220
_BAR_HEIGHT: Final = 22
_LABEL_HEIGHT: Final = 16
_SHARES: Final = ("wire", "waiting")
_FEW_POINTS: Final = 12
"""So few are seen each by itself, and are counted one by one."""
_FAR_TIMES: Final = 20.0
"""A curve that goes so many times above its middle would be flat everywhere else."""
_LONG_S: Final = 300.0
"""From here on minutes are counted, and not seconds."""


@dataclass(frozen=True)
class Chart:
    """A figure, and what it shows for those who do not see it."""

    name: str
    alt: str
    height: int
    data: list[dict[str, Any]]
    layout: dict[str, Any]


def label(text: str, chars: int = LABEL_CHARS) -> str:
    """Text as plotly shows it letter by letter."""
    return escape(sanitize(text, chars), quote=False)


def phases(bars: Sequence[RankBar]) -> Chart:
    """A stacked bar for each rank."""
    labels = [label(bar.label, 2 * LABEL_CHARS) for bar in bars]
    parts = list(dict.fromkeys(part for bar in bars for part in bar.parts_ns))
    data = [
        {
            "type": "bar", "orientation": "h", "name": part, "y": labels,
            "x": [round(bar.parts_ns.get(part, 0.0) / 1e6, 4) for bar in bars],
            "marker": {"color": f"var:{part}"}, "hovertemplate": f"%{{y}}: {part} %{{x:.3g}} ms<extra></extra>",
        }
        for part in parts
    ]  # fmt: skip
    height = 110 + _BAR_HEIGHT * max(len(bars), 3)
    yaxis = {"autorange": "reversed", "automargin": True, "type": "category", "fixedrange": True}
    layout = {"barmode": "stack", "bargap": 0.25, "xaxis": {"title": {"text": "ms a step"}}, "yaxis": yaxis}
    return Chart("phases", "A bar for each rank: the phases of its mean step, in ms.", height, data, layout)


def all_reduce(aggregate: RunAggregate, limit: float, alerts: Sequence[Alert]) -> Chart:
    """The share over time, wire below waiting, with the limit and where alerts began."""
    steps = _middles(aggregate)
    share, wire, wait = aggregate.shares_over_time()
    if np.isfinite(wire).any():
        data = [
            {
                "type": "scatter", "mode": _mode(steps), "name": name, "x": steps, "y": _shares(values),
                "stackgroup": "s",
                "line": {"width": 0.5, "color": f"var:{name}", "shape": "hvh"}, "fillcolor": f"var:{name}",
                "hovertemplate": f"{name} %{{y:.1f}} %<extra></extra>",
            }
            for name, values in zip(_SHARES, (wire, wait), strict=True)
        ]  # fmt: skip
    else:
        data = [
            {
                "type": "scatter", "mode": _mode(steps), "name": "all-reduce", "x": steps, "y": _shares(share),
                "fill": "tozeroy", "line": {"color": "var:sync"}, "fillcolor": "var:sync",
            }
        ]  # fmt: skip
    data.append(_across(limit * 100, f"{percent(limit)}: worth a warning", steps))
    marks = [alert for alert in alerts if alert.since.step is not None][:MAX_MARKS]
    if marks:
        data.append(_alert_marks(marks, float(np.nanmax(share, initial=limit)) * 100))
    layout = {
        "xaxis": _steps_axis(aggregate), "hovermode": "x unified",
        "yaxis": {"title": {"text": "% of the step"}, "rangemode": "tozero"},
    }  # fmt: skip
    return Chart("share", "The all-reduce share of the step over time, wire and waiting.", HEIGHT, data, layout)


def step_time(aggregate: RunAggregate) -> Chart:
    """The median of the steps of each column, and the band up to the slowest per cent. One step has no band."""
    steps = _middles(aggregate)
    median, slow = (_ms(aggregate.step_ns_over_time(part)) for part in (0.5, 0.99))
    one = aggregate.over_time.width == 1
    name = "step time" if one else "median"
    line = {
        "type": "scatter", "mode": _mode(steps), "name": name, "x": steps, "y": median,
        "line": {"color": "var:backward", "width": 2}, "hovertemplate": f"{name} %{{y:.3g}} ms<extra></extra>",
    }  # fmt: skip
    layout = {
        "xaxis": _steps_axis(aggregate), "hovermode": "x unified", "showlegend": True,
        "yaxis": _times_axis(median, slow),
    }  # fmt: skip
    alt = "The time of each step, in ms." if one else "The step time over time: median and 99th percentile, in ms."
    data = [line] if one else [*_band(steps, median, slow), line]
    return Chart("step-time", alt, HEIGHT, data, layout)


def _band(steps: Sequence[int], low: Sequence[float], high: Sequence[float]) -> list[dict[str, Any]]:
    """From the one curve up to the other: a closed shape for each piece without a gap. A fill up to another curve would
    be drawn across the gaps of both.
    """
    x: list[int | None] = []
    y: list[float | None] = []
    for first, last in _pieces(low):
        there = range(first, last)
        x += [*(steps[place] for place in there), *(steps[place] for place in reversed(there)), None]
        y += [*(high[place] for place in there), *(low[place] for place in reversed(there)), None]
    of_band = {"type": "scatter", "mode": "lines", "legendgroup": "band"}
    return [
        {
            **of_band, "name": "up to p99", "x": x, "y": y, "fill": "toself", "fillcolor": "var:band",
            "line": {"width": 0, "color": "var:band"}, "hoverinfo": "skip",
        },
        {
            **of_band, "name": "p99", "x": steps, "y": high, "line": {"color": "var:band", "width": 1},
            "showlegend": False, "hovertemplate": "p99 %{y:.3g} ms<extra></extra>",
        },
    ]  # fmt: skip


def _pieces(values: Sequence[float]) -> list[tuple[int, int]]:
    """From where to before where each piece without a gap is."""
    known = np.concatenate(([False], np.isfinite(values), [False]))
    edges = np.flatnonzero(known[1:] != known[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def heat_map(aggregate: RunAggregate) -> Chart:
    """Ranks by time; many ranks share a row, and the worst of them shows."""
    excess = aggregate.excess_over_time()
    rows = rows_of(aggregate.ranks, MAP_ROWS, aggregate.hosts)
    known = np.where(np.isfinite(excess), excess, -1.0)
    worst = np.maximum.reduceat(known, rows.starts, axis=0)
    labels = [label(text) for text in rows.labels]
    rows_height = max(_BAR_HEIGHT * min(len(labels), 12), 14 * len(labels))
    data = [
        {
            "type": "heatmap", "x": _middles(aggregate), "y": labels, "zmin": 0, "zmax": MAP_TOP, "ygap": 1,
            "z": [[None if value < 0 else round(value, 1) for value in row] for row in worst.tolist()],
            "colorscale": [[0, "var:heat-0"], [0.125, "var:heat-1"], [0.3, "var:heat-2"], [0.6, "var:heat-3"],
                           [1, "var:heat-4"]],
            "colorbar": {"title": {"text": "% of time"}, "thickness": 10, "len": 1, "outlinewidth": 0,
                         "tick0": 0, "dtick": _apart(rows_height)},
            "hovertemplate": "%{y}, step %{x}: %{z} % of the time above the middle rank<extra></extra>",
        }
    ]  # fmt: skip
    yaxis = {"autorange": "reversed", "automargin": True, "type": "category", "fixedrange": True}
    layout = {"xaxis": _steps_axis(aggregate), "yaxis": yaxis, "showlegend": False}
    alt = "Ranks by time: how far the own work of each was above that of the middle rank."
    return Chart("map", alt, 110 + rows_height, data, layout)


def _apart(height: int) -> int:
    """How far apart the labels beside so many pixels of colours are, lest they touch each other."""
    return next((step for step in (10, 20) if MAP_TOP // step * _LABEL_HEIGHT <= height), MAP_TOP)


def load(loads: Utilization, name: str, title: str, unit: str, scale: float, top: float | None = None) -> Chart | None:
    """One figure of the machines over time: the mean, and the band from the least to the most. None = never read."""
    mean, least, most = loads.curve(name)
    if not np.isfinite(mean).any():
        return None
    passed_s = (loads.over_time.begins - (loads.over_time.origin or 0)) / 1e9
    long = passed_s[-1] >= _LONG_S
    passed = np.round(passed_s / 60.0 if long else passed_s, 3).tolist()
    band = {"type": "scatter", "mode": "lines", "x": passed, "line": {"width": 0}, "connectgaps": True}
    data = [
        {**band, "name": "least", "y": _scaled(least, scale), "showlegend": False, "hoverinfo": "skip"},
        {
            **band, "name": "least to most", "y": _scaled(most, scale), "fill": "tonexty", "fillcolor": "var:band",
            "hovertemplate": f"most %{{y:.4g}} {unit}<extra></extra>",
        },
        {
            "type": "scatter", "mode": "lines", "name": "mean", "x": passed, "y": _scaled(mean, scale),
            "line": {"color": "var:backward", "width": 2}, "connectgaps": True,
            "hovertemplate": f"mean %{{y:.4g}} {unit}<extra></extra>",
        },
    ]  # fmt: skip
    yaxis: dict[str, Any] = {"title": {"text": unit}, "rangemode": "tozero"}
    if top is not None:
        yaxis["range"] = [0, top]
    xaxis = {"title": {"text": "minutes" if long else "seconds"}}
    layout = {"title": {"text": title}, "xaxis": xaxis, "yaxis": yaxis,
              "hovermode": "x unified", "showlegend": False}  # fmt: skip
    alt = f"{title} over time: the mean, the least and the most of all."
    return Chart(f"load-{name.replace('_', '-')}", alt, SMALL_HEIGHT, data, layout)


def buckets(timings: Sequence[Timing], backward_ns: int | None) -> Chart:
    """When each bucket was under way, from the beginning of backward."""
    shown = [timing for timing in timings if timing.took_ns is not None]
    data = [
        {
            "type": "bar", "orientation": "h", "name": "under way", "marker": {"color": "var:wire"},
            "y": [f"bucket {timing.bucket.index}" for timing in shown],
            "base": [timing.bucket.ready_ns / 1e6 for timing in shown],
            "x": [(timing.took_ns or 0) / 1e6 for timing in shown],
            "hovertemplate": "%{y}: from %{base:.3g} ms, for %{x:.3g} ms<extra></extra>",
        }
    ]  # fmt: skip
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "ms since backward began"}, "rangemode": "tozero"}, "showlegend": False,
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category", "fixedrange": True},
    }  # fmt: skip
    if backward_ns is not None:
        line = {"color": "var:bad", "width": 1, "dash": "dot"}
        ends = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": backward_ns / 1e6, "x1": backward_ns / 1e6}
        layout["shapes"] = [{**ends, "line": line}]
        note = {"x": backward_ns / 1e6, "yref": "paper", "y": 1, "yanchor": "bottom", "text": "own backward ends"}
        layout["annotations"] = [{**note, "showarrow": False}]
    height = 120 + _BAR_HEIGHT * max(len(shown), 3)
    return Chart("buckets", "When each gradient bucket was under way.", min(height, 700), data, layout)


def waterfall(scaling: Scaling) -> Chart:
    """From the ideal speed-up down to what was reached."""
    losses = scaling.losses
    data = [
        {
            "type": "waterfall", "x": ["ideal", *(label(name) for name, _ in losses), "reached"],
            "y": [100.0, *(-100.0 * share for _, share in losses), 100.0 * scaling.efficiency],
            "measure": ["absolute", *("relative" for _ in losses), "total"],
            "decreasing": {"marker": {"color": "var:waiting"}}, "increasing": {"marker": {"color": "var:optimizer"}},
            "totals": {"marker": {"color": "var:backward"}}, "hovertemplate": "%{x}: %{y:.1f} %<extra></extra>",
        }
    ]  # fmt: skip
    layout = {"yaxis": {"title": {"text": "% of the ideal speed-up"}}, "showlegend": False}
    return Chart("scaling", "From the ideal speed-up down to what was reached, loss by loss.", HEIGHT, data, layout)


def _middles(aggregate: RunAggregate) -> list[int]:
    width = aggregate.over_time.width
    return [begin + width // 2 for begin in aggregate.over_time.begins.tolist()]


def _steps_axis(aggregate: RunAggregate) -> dict[str, Any]:
    """The same for all charts over steps, so that they stand in line."""
    begins, width = aggregate.over_time.begins.tolist(), aggregate.over_time.width
    axis: dict[str, Any] = {"title": {"text": "step"}, "range": [begins[0] - 0.5, begins[-1] + width - 0.5]}
    return axis | ({"dtick": 1} if begins[-1] + width - begins[0] <= _FEW_POINTS else {})


def _times_axis(median: Sequence[float], slow: Sequence[float]) -> dict[str, Any]:
    """From zero on, unless one long step would hide all others."""
    if np.nanmax(slow) > _FAR_TIMES * float(np.nanmedian(median)):
        return {"title": {"text": "ms, logarithmic"}, "type": "log"}
    return {"title": {"text": "ms"}, "rangemode": "tozero"}


def _mode(points: Sequence[float]) -> str:
    """A line of a single point cannot be seen."""
    return "lines+markers" if len(points) <= _FEW_POINTS else "lines"


def _alert_marks(alerts: Sequence[Alert], height: float) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": "alert opened", "y": [height * 1.08] * len(alerts),
        "x": [alert.since.step for alert in alerts],
        "text": [label(f"{alert.finding.rule}, step {count(alert.since.step or 0)}", NAME_CHARS) for alert in alerts],
        "marker": {"symbol": "triangle-down", "size": 10, "color": "var:bad"},
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _across(y: float, name: str, steps: Sequence[int]) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": [steps[0], steps[-1]], "y": [y, y], "hoverinfo": "skip",
        "line": {"color": "var:ink", "width": 1.5, "dash": "dash"},
    }  # fmt: skip


def _shares(values: NDArray[np.float64]) -> list[float]:
    return _scaled(values, 0.01, 2)


def _ms(values: NDArray[np.float64]) -> list[float]:
    return _scaled(values, 1e6, 4)


def _scaled(values: NDArray[np.float64], unit: float, digits: int = 3) -> list[float]:
    scaled: list[float] = np.round(values / unit, digits).tolist()
    return scaled
