"""JSON export: one object with the run, its step statistics, its ranks and all alerts. Single steps are in the CSV.

The keys are stable: `SCHEMA` changes when they do. Unknown values are null.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from ddpwatch.core.metrics.aggregate import P99, RunAggregate
from ddpwatch.core.metrics.window import SYNC
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.units import finite
from ddpwatch.recording.alerts import alerts_at_worst
from ddpwatch.recording.damage_report import damage_of
from ddpwatch.version import VERSION
from ddpwatch.view.alerts.format import alert_object, iso
from ddpwatch.view.job_manifest import manifest_object
from ddpwatch.view.outcome_text import hung_object
from ddpwatch.view.status import backend, pauses_object, sync_points_object

if TYPE_CHECKING:
    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.outputs.export.logged_values import Series
    from ddpwatch.outputs.export.step_range import Exported
    from ddpwatch.recording.damage_report import Damage
    from ddpwatch.recording.schema import RecordedBy

SCHEMA: Final = 1
# Decimal places of milliseconds, of fractions and of thresholds.
_MS_DIGITS: Final = 3
_SHARE_DIGITS: Final = 4
_LIMIT_DIGITS: Final = 6


def write_json(exported: Exported, file: IO[str]) -> None:
    """Write the object. Its figures equal those of a report: same steps, same aggregate."""
    aggregate = RunAggregate.of_run(exported.windows(unusual=False), tuple(exported.state.ranks))
    state, attempt = exported.state, exported.attempt
    json.dump(
        {
            "schema": SCHEMA,
            "ddpwatch": VERSION,
            "run": {
                "id": sanitize(state.run_id, NAME_CHARS),
                "name": sanitize(state.name, NAME_CHARS),
                "backend": backend(state),
                "world_size": state.world_size,
                "hosts": state.host_count,
                "state": state.run_condition(),
            },
            "attempt": exported.number,
            "attempts": len(exported.recorded.attempts),
            "recorded": {"from": iso(attempt.first_ns), "to": iso(attempt.last_ns)},
            "manifest": {**manifest_object(state), **_recorded_by(attempt.recorded_by)},
            "steps": {"left_out": exported.reader.skipped, **_steps(aggregate, state)},
            "ranks": _ranks(state, aggregate),
            "logged": {name: _series(series) for name, series in exported.logged.series.items()},
            "alerts": [alert_entry(alert) for alert in alerts_at_worst(exported.recorded, attempt, state)],
            **_damage(damage_of(exported.recorded, attempt)),
        },
        file,
        indent=1,
        allow_nan=False,
    )
    file.write("\n")


def _damage(damage: Damage | None) -> dict[str, Any]:
    return {
        "damaged_parts": damage.parts if damage else 0,
        "missing_frames": damage.missing if damage else 0,
        "alerts_may_be_missing": bool(damage and damage.alerts),
    }


def _recorded_by(recorded_by: RecordedBy) -> dict[str, Any]:
    """Version and thresholds of the recorder; null in recordings that lack them."""
    if not recorded_by.recorder:
        return {"recorder": None, "limits": None}
    limits = {
        sanitize(group, NAME_CHARS): {
            sanitize(key, NAME_CHARS): finite(value, _LIMIT_DIGITS) for key, value in keys.items()
        }
        for group, keys in recorded_by.limits.items()
    }
    return {"recorder": sanitize(recorded_by.recorder, NAME_CHARS), "limits": limits}


def _steps(figures: RunAggregate, state: RunState) -> dict[str, Any]:
    share, wire, wait = figures.shares()
    return {
        "count": figures.steps,
        "first": figures.first_step,
        "last": figures.last_step,
        "step_ms": _ms(figures.step_ns()),
        "step_p99_ms": _ms(figures.step_ns(P99)),
        "samples_per_s": _share(figures.samples_per_s, 1),
        "effective_batch": figures.effective_batch,
        "allreduce": {"share": _share(share), "wire_share": _share(wire), "wait_share": _share(wait)},
        "sync_points": sync_points_object(figures.sync_points(state)),
        "mean_parts_ms": {name: _ms(part_ns) for name, part_ns in figures.mean_parts_ns().items()} or None,
        "waited_for": list(figures.waited_for()),
        "stood_still": hung_object(figures.hung_steps()),
    }


def _series(series: Series) -> dict[str, Any]:
    """Statistics of one name over all steps and ranks; null for NaN and infinity."""
    names = ("first", "last", "min", "max", "mean")
    return {"count": series.count, **{name: _number(getattr(series, name)) for name in names}}


def alert_entry(alert: Alert) -> dict[str, Any]:
    """An alert at its worst severity. `last_seen_step` is set if it was open and stale at the end; then `last` is the
    time of that step.
    """
    seen = alert.seen
    return {
        **alert_object(alert if seen is None else replace(alert, last=seen)),
        "closed": iso(alert.closed.unix_ns) if alert.closed else None,
        "closed_step": alert.closed.step if alert.closed else None,
        "last_seen_step": seen.step if seen else None,
    }


def _ranks(state: RunState, aggregate: RunAggregate) -> list[dict[str, Any]]:
    phases_ns, waits_ns = aggregate.phases_ns(), aggregate.waits_ns()
    steps_ns = phases_ns.sum(axis=1)
    selves_ns = steps_ns - phases_ns[:, SYNC]
    shares = aggregate.pause_shares()
    costs = {cost.subject: cost.share for cost in aggregate.costs()}
    known = state.world_size > 1 and bool(np.isfinite(waits_ns).any())
    return [
        {
            **_rank(state, state.ranks[rank]),
            "steps": steps,
            "mean_step_ms": _ms(float(step_ns)),
            "mean_self_ms": _ms(float(self_ns)),
            "mean_wait_ms": _ms(float(wait_ns)),
            "pauses": pauses_object(shares, rank),
            "imposed_share": _share(costs.get(rank, 0.0)) if known and steps else None,
            "stood_still": hung_object(aggregate.hung_steps({rank})),
        }
        for rank, steps, step_ns, self_ns, wait_ns in zip(
            aggregate.ranks, aggregate.rank_steps.tolist(), steps_ns, selves_ns, waits_ns, strict=True
        )
    ]


def _rank(state: RunState, rank: RankState) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host": sanitize(rank.host, NAME_CHARS),
        "pid": rank.pid,
        "device": sanitize(rank.hello.device, NAME_CHARS) if rank.hello else None,
        "gpu": rank.gpus.latest.gpus[0].name if rank.gpus.latest and rank.gpus.latest.gpus else None,
        "state": state.condition(rank),
        "lost": rank.lost,
        "ending": sanitize(rank.bye.reason, NAME_CHARS) if rank.bye else None,
        "exit_code": rank.exit_code,
        "logged": {name: _number(value) for name, value in rank.logged[1].items()} if rank.logged else None,
    }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _ms(ns: float | None) -> float | None:
    return None if ns is None else finite(ns / 1e6, _MS_DIGITS)


def _share(value: float | None, digits: int = _SHARE_DIGITS) -> float | None:
    return None if value is None else finite(value, digits)
