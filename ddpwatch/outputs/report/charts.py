"""Plotly figures of a report, as plain values; colors are names of CSS variables (`var:wire`) in `style.css`.

Plotly reads tags in its labels, so untrusted text is escaped here too.
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
    from ddpwatch.core.metrics.live_metrics import Timing
    from ddpwatch.core.metrics.utilization import Utilization
    from ddpwatch.outputs.report.data import Scaling
    from ddpwatch.view.charts.phase_bar import RankBar

MAP_ROWS: Final = 40
"""Max rows of the heat map; more ranks share rows."""
MAP_TOP: Final = 40
"""Upper end of the heat map's color scale, in percent of the step time above the median rank."""
MAX_MARKS: Final = 40
"""Max alert marks in the all-reduce chart."""
LABEL_CHARS: Final = 24
"""Max length of a label, in characters."""
# Heights in CSS pixels.
HEIGHT: Final = 300
SMALL_HEIGHT: Final = 220
_BAR_HEIGHT: Final = 22
_LABEL_HEIGHT: Final = 16
_FEW_POINTS: Final = 12
"""Max points of a curve that gets a marker and an axis label for each of them."""
_MAX_LINEAR_RATIO: Final = 20.0
"""Ratio of the slowest step to the median above which the time axis is logarithmic."""
_LONG_S: Final = 300.0
"""Duration, in seconds, from which time axes are in minutes."""
_LINE: Final = {"color": "var:backward", "width": 2}
_CATEGORIES: Final = {"autorange": "reversed", "automargin": True, "type": "category", "fixedrange": True}
"""Axis of ranks or buckets, from top to bottom."""


@dataclass(frozen=True)
class Chart:
    """A figure, with its text alternative."""

    name: str
    alt: str
    height: int
    data: list[dict[str, Any]]
    layout: dict[str, Any]


def label(text: str, chars: int = LABEL_CHARS) -> str:
    """Escape text for plotly's labels."""
    return escape(sanitize(text, chars), quote=False)


def phases(bars: Sequence[RankBar]) -> Chart:
    """Stacked bars of the phases, one for each rank."""
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
    layout = {"barmode": "stack", "bargap": 0.25, "xaxis": {"title": {"text": "ms per step"}}, "yaxis": _CATEGORIES}
    return Chart("phases", "One bar per rank: the phases of its mean step, in ms.", height, data, layout)


def all_reduce(aggregate: RunAggregate, limit: float, alerts: Sequence[Alert]) -> Chart:
    """All-reduce share over time, wire below waiting, with the threshold and the onsets of alerts."""
    steps = _centers(aggregate)
    share, wire, wait = aggregate.shares_over_time()
    if np.isfinite(wire).any():
        data = [
            _curve(
                name, steps, _shares(values), _mode(steps), stackgroup="s", fillcolor=f"var:{name}",
                line={"width": 0.5, "color": f"var:{name}", "shape": "hvh"},
                hovertemplate=f"{name} %{{y:.1f}}%<extra></extra>",
            )
            for name, values in (("wire", wire), ("waiting", wait))
        ]  # fmt: skip
    else:
        sync = {"fill": "tozeroy", "fillcolor": "var:sync", "line": {"color": "var:sync"}}
        data = [{**_curve("all-reduce", steps, _shares(share), _mode(steps)), **sync}]
    threshold = {"color": "var:ink", "width": 1.5, "dash": "dash"}
    name = f"{percent(limit)}: alert threshold"
    data.append(_curve(name, [steps[0], steps[-1]], [limit * 100] * 2, hoverinfo="skip", line=threshold))
    marks = [alert for alert in alerts if alert.since.step is not None][:MAX_MARKS]
    if marks:
        data.append(_alert_marks(marks, float(np.nanmax(share, initial=limit)) * 100))
    layout = {
        "xaxis": _steps_axis(aggregate), "hovermode": "x unified",
        "yaxis": {"title": {"text": "% of the step"}, "rangemode": "tozero"},
    }  # fmt: skip
    return Chart("share", "All-reduce share of the step over time, wire and waiting.", HEIGHT, data, layout)


def step_time(aggregate: RunAggregate) -> Chart:
    """Median step time of each column, with a band up to the 99th percentile; columns of one step have no band."""
    steps = _centers(aggregate)
    median, slow = (_ms(aggregate.step_ns_over_time(quantile)) for quantile in (0.5, 0.99))
    one = aggregate.over_time.width == 1
    name = "step time" if one else "median"
    hover = f"{name} %{{y:.3g}} ms<extra></extra>"
    line = _curve(name, steps, median, _mode(steps), line=_LINE, hovertemplate=hover)
    layout = {
        "xaxis": _steps_axis(aggregate), "hovermode": "x unified", "showlegend": True,
        "yaxis": _times_axis(median, slow),
    }  # fmt: skip
    alt = "The time of each step, in ms." if one else "The step time over time: median and 99th percentile, in ms."
    data = [line] if one else [*_band(steps, median, slow), line]
    return Chart("step-time", alt, HEIGHT, data, layout)


def _band(steps: Sequence[int], low: Sequence[float], high: Sequence[float]) -> list[dict[str, Any]]:
    """Band between two curves: one polygon for each piece without a gap, because plotly's `tonexty` fills gaps."""
    x: list[int | None] = []
    y: list[float | None] = []
    for first, end in _pieces(low):
        x += [*steps[first:end], *reversed(steps[first:end]), None]
        y += [*high[first:end], *reversed(low[first:end]), None]
    return [
        _curve(
            "up to p99", x, y, legendgroup="band", fill="toself", fillcolor="var:band", hoverinfo="skip",
            line={"width": 0, "color": "var:band"},
        ),
        _curve(
            "p99", steps, high, legendgroup="band", showlegend=False, line={"color": "var:band", "width": 1},
            hovertemplate="p99 %{y:.3g} ms<extra></extra>",
        ),
    ]  # fmt: skip


def _pieces(values: Sequence[float]) -> list[tuple[int, int]]:
    """First and end index of each run of finite values."""
    known = np.concatenate(([False], np.isfinite(values), [False]))
    edges = np.flatnonzero(known[1:] != known[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def heat_map(aggregate: RunAggregate) -> Chart:
    """Heat map of ranks by time; in large runs ranks share a row, which shows the worst of them."""
    excess = aggregate.excess_over_time()
    rows = rows_of(aggregate.ranks, MAP_ROWS, aggregate.hosts)
    known = np.where(np.isfinite(excess), excess, -1.0)
    worst = np.maximum.reduceat(known, rows.starts, axis=0)
    labels = [label(text) for text in rows.labels]
    rows_height = max(_BAR_HEIGHT * min(len(labels), 12), 14 * len(labels))
    data = [
        {
            "type": "heatmap", "x": _centers(aggregate), "y": labels, "zmin": 0, "zmax": MAP_TOP, "ygap": 1,
            "z": [[None if value < 0 else round(value, 1) for value in row] for row in worst.tolist()],
            "colorscale": [[0, "var:heat-0"], [0.125, "var:heat-1"], [0.3, "var:heat-2"], [0.6, "var:heat-3"],
                           [1, "var:heat-4"]],
            "colorbar": {"title": {"text": "% of time"}, "thickness": 10, "len": 1, "outlinewidth": 0,
                         "tick0": 0, "dtick": _tick_interval(rows_height)},
            "hovertemplate": "%{y}, step %{x}: %{z}% of the step time above the median rank<extra></extra>",
        }
    ]  # fmt: skip
    layout = {"xaxis": _steps_axis(aggregate), "yaxis": _CATEGORIES, "showlegend": False}
    alt = "Ranks by time: self time of each above that of the median rank."
    return Chart("map", alt, 110 + rows_height, data, layout)


def _tick_interval(height: int) -> int:
    """Interval of the color scale's labels, in percent, at which they do not overlap in `height` pixels."""
    return next((step for step in (10, 20) if MAP_TOP // step * _LABEL_HEIGHT <= height), MAP_TOP)


def utilization(
    found: Utilization, name: str, title: str, unit: str, scale: float, top: float | None = None
) -> Chart | None:
    """One column of the utilization over time: its mean, with a band from minimum to maximum; None if never read."""
    mean, low, high = found.curve(name)
    if not np.isfinite(mean).any():
        return None
    passed_s = (found.over_time.begins - (found.over_time.origin or 0)) / 1e9
    long = passed_s[-1] >= _LONG_S
    passed = np.round(passed_s / 60.0 if long else passed_s, 3).tolist()
    band: dict[str, Any] = {"line": {"width": 0}, "connectgaps": True}
    data = [
        _curve("min", passed, _scaled(low, scale), showlegend=False, hoverinfo="skip", **band),
        _curve(
            "min to max", passed, _scaled(high, scale), fill="tonexty", fillcolor="var:band",
            hovertemplate=f"max %{{y:.4g}} {unit}<extra></extra>", **band,
        ),
        _curve(
            "mean", passed, _scaled(mean, scale), line=_LINE, connectgaps=True,
            hovertemplate=f"mean %{{y:.4g}} {unit}<extra></extra>",
        ),
    ]  # fmt: skip
    yaxis: dict[str, Any] = {"title": {"text": unit}, "rangemode": "tozero"}
    if top is not None:
        yaxis["range"] = [0, top]
    xaxis = {"title": {"text": "minutes" if long else "seconds"}}
    layout = {"title": {"text": title}, "xaxis": xaxis, "yaxis": yaxis,
              "hovermode": "x unified", "showlegend": False}  # fmt: skip
    alt = f"{title} over time: mean, min and max of all."
    return Chart(f"load-{name.replace('_', '-')}", alt, SMALL_HEIGHT, data, layout)


def buckets(timings: Sequence[Timing], backward_ns: int | None) -> Chart:
    """Transfer of each gradient bucket, from the beginning of backward."""
    shown = [timing for timing in timings if timing.took_ns is not None]
    data = [
        {
            "type": "bar", "orientation": "h", "name": "in flight", "marker": {"color": "var:wire"},
            "y": [f"bucket {timing.bucket.index}" for timing in shown],
            "base": [timing.bucket.ready_ns / 1e6 for timing in shown],
            "x": [(timing.took_ns or 0) / 1e6 for timing in shown],
            "hovertemplate": "%{y}: from %{base:.3g} ms, for %{x:.3g} ms<extra></extra>",
        }
    ]  # fmt: skip
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "ms since backward began"}, "rangemode": "tozero"}, "showlegend": False,
        "yaxis": _CATEGORIES,
    }  # fmt: skip
    if backward_ns is not None:
        line = {"color": "var:bad", "width": 1, "dash": "dot"}
        ends = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": backward_ns / 1e6, "x1": backward_ns / 1e6}
        layout["shapes"] = [{**ends, "line": line}]
        note = {"x": backward_ns / 1e6, "yref": "paper", "y": 1, "yanchor": "bottom", "text": "backward ends"}
        layout["annotations"] = [{**note, "showarrow": False}]
    height = 120 + _BAR_HEIGHT * max(len(shown), 3)
    return Chart("buckets", "When each gradient bucket was in flight.", min(height, 700), data, layout)


def waterfall(scaling: Scaling) -> Chart:
    """Waterfall from the ideal speedup through the losses to the speedup reached."""
    losses = scaling.losses
    data = [
        {
            "type": "waterfall", "x": ["ideal", *(label(name) for name, _ in losses), "reached"],
            "y": [100.0, *(-100.0 * share for _, share in losses), 100.0 * scaling.efficiency],
            "measure": ["absolute", *("relative" for _ in losses), "total"],
            "decreasing": {"marker": {"color": "var:waiting"}}, "increasing": {"marker": {"color": "var:optimizer"}},
            "totals": {"marker": {"color": "var:backward"}}, "hovertemplate": "%{x}: %{y:.1f}%<extra></extra>",
        }
    ]  # fmt: skip
    layout = {"yaxis": {"title": {"text": "% of the ideal speedup"}}, "showlegend": False}
    return Chart("scaling", "From the ideal speedup to the speedup reached, loss by loss.", HEIGHT, data, layout)


def _centers(aggregate: RunAggregate) -> list[int]:
    """Center of each column, in steps."""
    width = aggregate.over_time.width
    return [begin + width // 2 for begin in aggregate.over_time.begins.tolist()]


def _steps_axis(aggregate: RunAggregate) -> dict[str, Any]:
    """Axis that all charts over steps share, so that they align."""
    begins, width = aggregate.over_time.begins.tolist(), aggregate.over_time.width
    axis: dict[str, Any] = {"title": {"text": "step"}, "range": [begins[0] - 0.5, begins[-1] + width - 0.5]}
    return axis | ({"dtick": 1} if begins[-1] + width - begins[0] <= _FEW_POINTS else {})


def _times_axis(median: Sequence[float], slow: Sequence[float]) -> dict[str, Any]:
    """Linear from zero, or logarithmic if one long step would flatten all others."""
    if np.nanmax(slow) > _MAX_LINEAR_RATIO * float(np.nanmedian(median)):
        return {"title": {"text": "ms, logarithmic"}, "type": "log"}
    return {"title": {"text": "ms"}, "rangemode": "tozero"}


def _mode(points: Sequence[float]) -> str:
    """With markers for few points: a line of one point is invisible."""
    return "lines+markers" if len(points) <= _FEW_POINTS else "lines"


def _alert_marks(alerts: Sequence[Alert], height: float) -> dict[str, Any]:
    return _curve(
        "alert opened", [alert.since.step for alert in alerts], [height * 1.08] * len(alerts), "markers",
        text=[label(f"{alert.finding.rule}, step {count(alert.since.step or 0)}", NAME_CHARS) for alert in alerts],
        marker={"symbol": "triangle-down", "size": 10, "color": "var:bad"}, hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip


def _curve(
    name: str, x: Sequence[float | None], y: Sequence[float | None], mode: str = "lines", **options: Any
) -> dict[str, Any]:
    """A scatter trace of plotly."""
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **options}


def _shares(values: NDArray[np.float64]) -> list[float]:
    return _scaled(values, 0.01, 2)


def _ms(values: NDArray[np.float64]) -> list[float]:
    return _scaled(values, 1e6, 4)


def _scaled(values: NDArray[np.float64], unit: float, digits: int = 3) -> list[float]:
    scaled: list[float] = np.round(values / unit, digits).tolist()
    return scaled
