"""How the figures of one GPU went: a line each, over the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ddpwatch.core.numbers import duration, size
from ddpwatch.view.cells import Cell, Level, pad
from ddpwatch.view.prose import FACT_COLUMNS, heading
from ddpwatch.view.spark import sparks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.view.cells import Line
    from ddpwatch.view.gpuload import GpuRow
    from ddpwatch.wire import Gpu

RANGE_COLUMNS: Final = 22
LEAST_COLUMNS: Final = 50
MOST_ROWS: Final = 2
"""Of one curve."""


class _Curve(NamedTuple):
    title: str
    name: str
    full: Callable[[Gpu], float | None]
    """What fills the row; None = the largest value does."""
    text: Callable[[float], str]


CURVES: Final = (
    _Curve("utilisation", "util_percent", lambda _: 100.0, lambda value: f"{value:.0f} %"),
    _Curve("memory", "used_bytes", lambda gpu: gpu.total_bytes, size),
    _Curve("SM clock", "sm_mhz", lambda gpu: gpu.sm_max_mhz, lambda value: f"{value:.0f} MHz"),
    _Curve("power", "power_mw", lambda gpu: gpu.power_limit_mw, lambda value: f"{value / 1000:.0f} W"),
    _Curve("temperature", "temperature_c", lambda _: 100.0, lambda value: f"{value:.0f} °C"),
)


def gpu_curves(entry: GpuRow, columns: int, rows: int) -> list[Line]:
    """The figures that are known, newest at the right, as high as there are rows for; nothing where there is no room
    or no history.
    """
    row, gpu = entry
    history = row.state.gpus.histories.get(gpu.device) if gpu is not None else None
    width = columns - FACT_COLUMNS - RANGE_COLUMNS
    if gpu is None or history is None or columns < LEAST_COLUMNS or len(history.times_ns()) < 2:
        return []
    times_ns = history.times_ns()[-width:]
    shown = [(curve, history.curve(curve.name)[-width:].astype(np.float64)) for curve in CURVES]
    shown = [(curve, values) for curve, values in shown if not np.isnan(values).all()]
    each = min((rows - 1) // max(len(shown), 1), MOST_ROWS)
    if not shown or each < 1:
        return []
    lines = [heading("history", columns, f"last {duration((int(times_ns[-1]) - int(times_ns[0])) / 1e9)}")]
    for curve, values in shown:
        full = curve.full(gpu)
        # The largest value leaves an eighth of a row free, so that the curves stand apart.
        drawn = sparks(values, width, each, level=Level.DIM, top=full / (1 - 1 / (8 * each)) if full else None)
        blank = [Cell(" " * (FACT_COLUMNS + RANGE_COLUMNS))]
        title = [
            Cell(pad(curve.title, FACT_COLUMNS), Level.DIM),
            Cell(pad(_range(curve, float(np.nanmin(values)), float(np.nanmax(values))), RANGE_COLUMNS)),
        ]
        lines += [[*(blank if row else title), *line] for row, line in enumerate(drawn)]
    return lines


def _range(curve: _Curve, least: float, most: float) -> str:
    one, other = curve.text(least), curve.text(most)
    return one if one == other else f"{one} to {other}"
