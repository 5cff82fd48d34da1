"""A run as one JSON object: who it was, what its steps came to, what each rank did, and every alert.

The keys are a promise: `SCHEMA` moves when they do. What is not known is null. Single steps are in the CSV.
"""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from ddpwatch.core.ledger import PARTS, Ledger
from ddpwatch.core.numbers import finite
from ddpwatch.core.scaling import profile_of
from ddpwatch.core.text import NAME_CHARS, tame
from ddpwatch.outputs.readout import told
from ddpwatch.version import VERSION
from ddpwatch.view.alerts import alert_object, iso
from ddpwatch.view.status import backend, host_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.core.alerts import AlertEvent
    from ddpwatch.core.rank import RankState
    from ddpwatch.core.state import RunState
    from ddpwatch.core.window import Window
    from ddpwatch.outputs.export.exported import Exported

SCHEMA: Final = 1
_MS_DIGITS: Final = 3
_SHARE_DIGITS: Final = 4
P99: Final = 99
SHARED: Final = ("agent_version", "python", "torch", "backend", "kind", "model", "comm", "clock")
"""What ranks say of themselves and mostly agree on."""


def write_json(exported: Exported, file: IO[str]) -> None:
    """Write the object."""
    ledger, ranks = Ledger(), _RankSums()
    for window in exported.windows():
        ledger.add(window)
        ranks.add(window)
    state, attempt = exported.state, exported.attempt
    json.dump(
        {
            "schema": SCHEMA,
            "ddpwatch": VERSION,
            "run": {
                "id": tame(state.run_id, NAME_CHARS),
                "name": tame(state.name, NAME_CHARS),
                "backend": backend(state),
                "world_size": state.world_size,
                "hosts": host_count(state),
                "state": state.run_condition(),
            },
            "attempt": exported.number,
            "attempts": len(exported.recorded.attempts),
            "recorded": {"from": iso(attempt.first_ns), "to": iso(attempt.last_ns)},
            "manifest": manifest(state),
            "steps": {"left_out": exported.readout.skipped, **summary(ledger)},
            "ranks": [_rank(state, rank, ranks) for rank in state.ranks.values()],
            "alerts": alerts(event for _, event in told(exported.recorded, attempt)),
            "damaged_parts": exported.recorded.damaged,
        },
        file,
        indent=1,
        allow_nan=False,
    )
    file.write("\n")


def manifest(state: RunState) -> dict[str, Any]:
    """What the ranks say of themselves: each value that was told, once."""
    hellos = [rank.hello for rank in state.ranks.values() if rank.hello is not None]
    shared = {name: _values(getattr(hello, name) for hello in hellos) for name in SHARED}
    settings = sorted({(name, value) for hello in hellos for name, value in hello.ddp.items()})
    return {
        **shared,
        "ddp": {tame(name, NAME_CHARS): tame(value, NAME_CHARS) for name, value in settings},
        "parameters": max((hello.parameters for hello in hellos), default=0) or None,
        "parameter_bytes": max((hello.parameter_bytes for hello in hellos), default=0) or None,
    }


def summary(ledger: Ledger) -> dict[str, Any]:
    """The steps that all ranks have finished, without those of warming up: medians of the means over ranks."""
    profile, steps = profile_of(ledger), ledger.steps()
    whole_ns = np.sum([steps[name] for name in PARTS], axis=0)
    if profile is None:
        names = ("first", "last", "step_ms", "step_p99_ms", "samples_per_s", "effective_batch")
        return {"count": 0, **dict.fromkeys(names), "allreduce": None, "parts_ms": None, "waited_for": []}
    wire, wait = (float(steps[name].sum() / max(whole_ns.sum(), 1.0)) for name in ("wire", "wait"))
    return {
        "count": ledger.seen,
        "first": int(steps["index"][0]),
        "last": int(steps["index"][-1]),
        "step_ms": _ms(profile.step_ns),
        "step_p99_ms": _ms(float(np.percentile(whole_ns, P99))),
        "samples_per_s": None if profile.samples_per_s is None else finite(profile.samples_per_s, 1),
        "effective_batch": profile.effective_batch,
        "allreduce": {
            "share": finite(wire + wait, _SHARE_DIGITS),
            "wire_share": finite(wire, _SHARE_DIGITS),
            "wait_share": finite(wait, _SHARE_DIGITS),
        },
        "parts_ms": {name: _ms(float(np.median(steps[name]))) for name in PARTS},
        "waited_for": list(profile.waited_for),
    }


def alerts(events: Iterable[AlertEvent]) -> list[dict[str, Any]]:
    """Every alert once, as it was told last, in the order in which they opened."""
    latest = {(event.alert.key, event.alert.since.now_ns): event.alert for event in events}
    return [
        {
            **alert_object(alert),
            "closed": iso(alert.closed.unix_ns) if alert.closed else None,
            "closed_step": alert.closed.step if alert.closed else None,
        }
        for alert in latest.values()
    ]


class _RankSums:
    """Total times of each rank."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        self.step_ns: dict[int, int] = {}
        self.self_ns: dict[int, int] = {}
        self.wait_ns: dict[int, int] = {}
        self.imposed_ns: dict[int, int] = {}

    def add(self, window: Window) -> None:
        sums = {"step_ns": window.step_ns, "self_ns": window.self_ns}
        if window.complete:
            sums |= {"wait_ns": window.wait_ns, "imposed_ns": window.imposed_ns}
        for rank in window.ranks:
            self.steps[rank] = self.steps.get(rank, 0) + len(window)
        for name, values in sums.items():
            totals: dict[int, int] = getattr(self, name)
            for rank, total in zip(window.ranks, values.sum(axis=1).tolist(), strict=True):
                totals[rank] = totals.get(rank, 0) + total

    def mean_ms(self, name: str, rank: int) -> float | None:
        totals: dict[int, int] = getattr(self, name)
        return _ms(totals[rank] / self.steps[rank]) if rank in totals else None

    def imposed_share(self, rank: int) -> float | None:
        whole_ns = self.step_ns.get(rank, 0)
        known = rank in self.imposed_ns and whole_ns > 0
        return finite(self.imposed_ns[rank] / whole_ns, _SHARE_DIGITS) if known else None


def _rank(state: RunState, rank: RankState, sums: _RankSums) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host": tame(rank.host, NAME_CHARS),
        "pid": rank.pid,
        "device": tame(rank.hello.device, NAME_CHARS) if rank.hello else None,
        "gpu": rank.gpus.latest.gpus[0].name if rank.gpus.latest and rank.gpus.latest.gpus else None,
        "state": state.condition(rank),
        "steps": sums.steps.get(rank.rank, 0),
        "mean_step_ms": sums.mean_ms("step_ns", rank.rank),
        "mean_self_ms": sums.mean_ms("self_ns", rank.rank),
        "mean_wait_ms": sums.mean_ms("wait_ns", rank.rank),
        "imposed_share": sums.imposed_share(rank.rank),
        "lost": rank.lost,
        "ending": tame(rank.bye.reason, NAME_CHARS) if rank.bye else None,
    }


def _values(values: Iterable[str]) -> list[str]:
    return sorted({tame(value, NAME_CHARS) for value in values if value})


def _ms(ns: float) -> float | None:
    return finite(ns / 1e6, _MS_DIGITS)
