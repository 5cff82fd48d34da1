"""GPUs whose clocks are held down, against the median clock of their peers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.state.gpu import POWER_CAP, THROTTLE_REASONS, clock_text, evenly_sampled, latest_clock, median_mhz
from ddpwatch.core.state.run import ALIVE
from ddpwatch.core.units import plural, ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.state.gpu import Clock
    from ddpwatch.core.state.rank import RankState

RULE: Final = rules.GPU_THROTTLE
HOT_ADVICE: Final = (
    "It is too hot, or its hardware protects itself: check fans, air flow, power supply and cables of the host "
    "(`nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE`), and exclude the host until it is fixed."
)
POWER_ADVICE: Final = (
    "Its power limit is lower than that of the others: compare `nvidia-smi -q -d POWER`, and set the same limit with "
    "`nvidia-smi -pl`."
)
NORMAL_ADVICE: Final = "Nothing to do: at full load the power limit sets the clock of a GPU."
_HELD: Final = frozenset(THROTTLE_REASONS)


def gpu_throttle(context: DetectorContext) -> list[Finding]:
    """A GPU is throttled: its clocks are reduced, so that it computes more slowly than it could.

    Reported when it is throttled in most of the last readings. Thermal and hardware slowdown are a warning. A power cap
    is normal at full load, and a warning only if the clocks are clearly below those of other GPUs of the same model.
    Most GPUs of one host together are reported as the host.
    """
    limits = context.limits.gpu_throttle
    clocks, ranks = _held_clocks(context)
    if not clocks:
        return []
    peers = _peers(ranks, limits.readings)
    bad: list[Clock] = []
    capped: list[Clock] = []
    median: dict[str, float] = {}
    for clock in clocks:
        # With many peers the median is the same whether it includes the GPU itself or not.
        if clock.name not in median or len(peers) < limits.MANY_PEERS:
            median[clock.name] = median_mhz(clock, peers)
        below = 0 < clock.mhz < limits.clock_part * median[clock.name]
        (bad if clock.harsh or below else capped).append(clock)
    findings = _by_host(context, bad, ranks)
    if capped:
        findings.append(_normal(capped, ranks))
    return [replace(finding, lasting=limits.lasting_s * 1e9) for finding in findings]


def _held_clocks(context: DetectorContext) -> tuple[list[Clock], list[RankState]]:
    """Clocks that are held down, and all ranks with GPU readings."""
    state, readings = context.state, context.limits.gpu_throttle.readings
    clocks, ranks = [], []
    for rank in state.ranks.values():
        gpus = rank.gpus.now(state.now_ns)
        if not gpus or state.condition(rank) not in ALIVE:
            continue
        ranks.append(rank)
        # Cheap check first: nearly all of thousands of GPUs have no reason at this moment.
        for gpu in gpus:
            if gpu.throttle and not _HELD.isdisjoint(gpu.throttle):
                clock = latest_clock(rank, gpu, readings)
                if clock is not None and clock.reasons:
                    clocks.append(clock)
    return clocks, ranks


def _peers(ranks: Sequence[RankState], readings: int) -> list[Clock]:
    found = (
        latest_clock(rank, gpu, readings)
        for rank in evenly_sampled(ranks)
        for gpu in (rank.gpus.latest.gpus if rank.gpus.latest else ())
    )
    return [clock for clock in found if clock is not None]


def _by_host(context: DetectorContext, clocks: Sequence[Clock], ranks: Sequence[RankState]) -> list[Finding]:
    """One finding for each host most of whose GPUs are held down, or each GPU; one for all if there are many."""
    limits = context.limits.gpu_throttle
    hosts: dict[str, list[Clock]] = {}
    for clock in clocks:
        hosts.setdefault(context.state.ranks[clock.rank].host, []).append(clock)
    gpus: Counter[str] = Counter()
    for rank in ranks:
        gpus[rank.host] += len(rank.gpus.latest.gpus if rank.gpus.latest else ())
    groups: dict[str, list[Clock]] = {}
    for host, held in hosts.items():
        if len(held) > 1 and len(held) >= limits.HOST_SHARE * gpus[host]:
            groups[f"host {host}"] = held
        else:
            groups |= {f"rank {clock.rank} · {clock.device}": [clock] for clock in held}
    if len(groups) > limits.MAX_SEPARATE:
        groups = {"GPUs": list(chain.from_iterable(groups.values()))}
    return [_finding(subject, held) for subject, held in groups.items()]


def _finding(subject: str, held: Sequence[Clock]) -> Finding:
    worst = min(held, key=lambda clock: clock.mhz)
    ranks = tuple(sorted({clock.rank for clock in held}))
    label = subject
    if len(held) > 1:
        of = f"{subject}, " if subject.startswith("host ") else ""
        label = f"{of}{plural(len(held), 'GPU')} ({ranks_text(ranks)})"
    message = f"{label} throttled{', worst' if len(held) > 1 else ''}: {clock_text(worst)}"
    advice = HOT_ADVICE if any(clock.harsh for clock in held) else POWER_ADVICE
    return Finding(RULE, Severity.WARNING, subject, message, advice, ranks, evidence=_evidence(held, worst))


def _normal(capped: Sequence[Clock], ranks: Sequence[RankState]) -> Finding:
    slowest = min(capped, key=lambda clock: clock.mhz)
    total = sum(len(rank.gpus.latest.gpus) for rank in ranks if rank.gpus.latest)
    label = f"{len(capped)} of {plural(total, 'GPU')} at the power cap" if total > 1 else "the GPU at its power cap"
    clocks = clock_text(slowest).partition(",")[0]
    message = f"{label}, none far below the others: {clocks}" if total > 1 else f"{label}: {clocks}"
    return Finding(RULE, Severity.INFO, "power cap", message, NORMAL_ADVICE, evidence=_evidence(capped, slowest))


def _evidence(held: Sequence[Clock], worst: Clock) -> Evidence:
    evidence: Evidence = {
        "gpus": len(held),
        "clock_mhz": round(worst.mhz),
        "max_clock_mhz": worst.max_mhz,
        "reasons": ", ".join(worst.reasons) or POWER_CAP,
        "readings": worst.readings,
    }
    if worst.temperature_c is not None:
        evidence["temperature_c"] = worst.temperature_c
    return evidence
