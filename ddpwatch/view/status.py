"""The object that `status --json` prints. Its keys and their meaning are a promise: `SCHEMA` moves when they do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ddpwatch.core.numbers import finite
from ddpwatch.view.alerts import alert_object, most_urgent_first
from ddpwatch.view.scaling import scaling_object
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from ddpwatch.core.figures import Figures, RankFigures
    from ddpwatch.core.state import RunState
    from ddpwatch.view.columns import Row
    from ddpwatch.view.picture import Picture
    from ddpwatch.wire import Gpu

SCHEMA: Final = 1
_MS_DIGITS: Final = 3
_SHARE_DIGITS: Final = 4


def status_object(picture: Picture) -> dict[str, Any]:
    """The run as plain values, ready for JSON. What is not known is None; no key is ever left out."""
    state, figures = picture.state, picture.figures
    return {
        "schema": SCHEMA,
        "run": {
            "id": state.run_id,
            "name": state.name,
            "backend": backend(state),
            "world_size": state.world_size,
            "hosts": picture.totals.hosts,
            "state": picture.condition,
        },
        "step": picture.totals.step,
        "step_ms": _ms(figures.step_ns if figures else None),
        "samples_per_s": _rounded(figures.samples_per_s if figures else None, 1),
        "effective_batch": figures.effective_batch if figures else None,
        "allreduce": _allreduce(figures if state.world_size > 1 else None),
        "scaling": scaling_object(picture.scaling),
        "ranks": [_rank(row) for row in picture.rows],
        "alerts": [alert_object(alert) for alert in most_urgent_first(picture.alerts)],
    }


def backend(state: RunState) -> str | None:
    """The process group's backend, as the ranks tell it."""
    return next((rank.hello.backend for rank in state.ranks.values() if rank.hello and rank.hello.backend), None)


def host_count(state: RunState) -> int:
    """On how many hosts the ranks run."""
    return max(1, len({rank.host for rank in state.ranks.values() if rank.host}))


def _allreduce(figures: Figures | None) -> dict[str, float | None]:
    """Nothing but None without figures: of one rank, too, which has nobody to meet."""
    if figures is None:
        return {"share": None, "wire_share": None, "wait_share": None, "overlap": None}
    share, wire_share = round(figures.share, _SHARE_DIGITS), _rounded(figures.wire_share, _SHARE_DIGITS)
    return {
        "share": share,
        "wire_share": wire_share,
        # From the rounded ones, so that the printed numbers add up.
        "wait_share": None if wire_share is None else round(share - wire_share, _SHARE_DIGITS),
        "overlap": _rounded(figures.overlap, _SHARE_DIGITS),
    }


def _rank(row: Row) -> dict[str, Any]:
    rank, measured = row.state, row.figures
    return {
        "rank": rank.rank,
        "host": rank.host,
        "pid": rank.pid,
        "state": row.condition,
        "step": rank.step,
        "phase": PHASES[rank.beat.phase] if rank.beat and row.condition != "ended" else None,
        **_times(measured),
        "batch": measured.batch if measured else None,
        "cpu_percent": finite(rank.beat.cpu_percent, 1) if rank.beat else None,
        "rss_bytes": rank.beat.rss_bytes if rank.beat else None,
        "lost": rank.lost,
        "gpu": _gpu(rank.gpus.latest.gpus[0] if rank.gpus.latest and rank.gpus.latest.gpus else None),
    }


def _gpu(gpu: Gpu | None) -> dict[str, Any] | None:
    """The rank's first GPU as it was read last."""
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
