"""Which ranks the others wait for, in which phase, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from ddpwatch.core.alerts import Finding, Severity
from ddpwatch.core.clocks import clock_text, clocks_between, evenly, slowed
from ddpwatch.core.detectors.detector import Detector
from ddpwatch.core.excess import MAD_TO_SIGMA, suspects
from ddpwatch.core.numbers import ms, percent, ranks_text
from ddpwatch.core.window import SYNC, scaled_steps
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.clocks import Clock
    from ddpwatch.core.evidence import Evidence
    from ddpwatch.core.excess import Suspect
    from ddpwatch.core.limits import StragglerLimits
    from ddpwatch.core.rank import RankState
    from ddpwatch.core.window import Window

RULE: Final = "straggler"
OWN_PHASES: Final = [row for row in range(len(PHASES)) if row != SYNC]
HOST_SHARE: Final = 0.8
"""So many ranks of a host are slow: then it is the host."""
WORTH_SAYING: Final = 0.005
"""A cost below this part of the job's time is not told."""
_COMPUTING: Final = (
    "Compare its clocks and temperature with the others (nvidia-smi -q -d PERFORMANCE), then the sizes of its inputs: "
    "longer sequences or larger images on one rank look the same."
)
CLOCKS_ADVICE: Final = (
    "Its GPU is clocked lower than it could be, and that is the likely reason: see gpu-throttle and "
    "nvidia-smi -q -d PERFORMANCE on its host; leave the host out until that is mended."
)
ON_GPU: Final = frozenset({"forward", "backward", "optimizer"})
"""Phases that a slow GPU makes longer."""
ADVICE: Final = {
    "data": "Its DataLoader is late: more workers or prefetch_factor, faster storage, cheaper transforms.",
    "forward": _COMPUTING,
    "backward": _COMPUTING,
    "optimizer": "Look for work that only this rank does around optimizer.step(): weight averaging, a sharded "
    "optimizer with uneven shards, offloading.",
    "other": "Look for work that only this rank does between the phases: logging, garbage collection, checkpoints, "
    "metrics. Wrap what is meant in agent.pause(...).",
}


def straggler(evidence: Evidence) -> list[Finding]:
    """A rank takes longer for its own work than the others do, so that all of them wait for it.

    Compared is `self`, the step without communication: in synchronous training the step times of all ranks are equal
    and show nothing. Lasting, bursting and regularly recurring slowness is found; the phase is the one in which the
    rank exceeds the others most. The cost is what the job would save, were the rank as fast as the next-slowest. Where
    its GPU was clocked lower than the others' meanwhile, that is told with it.
    """
    if not len(evidence.window):
        return []
    limits = _for_short_steps(evidence)
    window = evidence.window.last(limits.window_steps)
    if len(window.ranks) < 2 or len(window.ranks) * 2 < window.world_size or len(window) < limits.recent_steps:
        return []
    found = suspects(window, limits)
    hosts = _whole_hosts(window, found)
    in_hosts = {suspect.row for rows in hosts.values() for suspect in rows}
    findings = [_of_host(evidence, window, host, rows, limits) for host, rows in hosts.items()]
    findings += [_of_rank(evidence, window, suspect, limits) for suspect in found if suspect.row not in in_hosts]
    return findings


def _for_short_steps(evidence: Evidence) -> StragglerLimits:
    """The limits with as many more steps as short ones need."""
    limits = evidence.limits.straggler
    step_ns = evidence.window.usual_step_ns
    window_steps = scaled_steps(limits.window_steps, evidence.limits.judge.least_s, step_ns)
    recent_steps = limits.recent_steps * window_steps // limits.window_steps
    return msgspec.structs.replace(limits, window_steps=window_steps, recent_steps=recent_steps)


def _whole_hosts(window: Window, found: Sequence[Suspect]) -> dict[str, list[Suspect]]:
    """Hosts most of whose ranks are slow, if there are others that are not."""
    slow: dict[str, list[Suspect]] = {}
    for suspect in found:
        if suspect.proven:
            slow.setdefault(window.hosts[suspect.row], []).append(suspect)
    if len(set(window.hosts)) < 2:
        return {}
    return {
        host: rows
        for host, rows in slow.items()
        if len(rows) > 1 and len(rows) >= HOST_SHARE * window.hosts.count(host)
    }


@dataclass(frozen=True)
class _Phase:
    """Where a rank exceeds the others most, in its slow steps."""

    name: str
    mine_ns: float
    others_ns: float
    spread_ns: float
    """How much the others differ among themselves."""


def _phase(window: Window, suspect: Suspect) -> _Phase:
    mine = window.phases_ns[suspect.row][:, suspect.hit]
    others = np.delete(window.phases_ns, suspect.row, axis=0)[:, :, suspect.hit]
    usual = np.median(others, axis=0)
    excess = np.median(mine - usual, axis=1)
    row = max(OWN_PHASES, key=lambda phase: excess[phase])
    spread_ns = MAD_TO_SIGMA * float(np.median(np.abs(others[:, row] - np.median(others[:, row]))))
    return _Phase(PHASES[row], float(np.median(mine[row])), float(np.median(usual[row])), spread_ns)


def _cost(window: Window, rows: list[int]) -> float | None:
    """Part of the job's time that these ranks cost, while they were the last to arrive."""
    if not window.complete:
        return None
    total_ns = max(float(window.step_ns.mean(axis=0).sum()), 1.0)
    if len(rows) == 1:
        return float(window.imposed_ns[rows[0]].sum()) / total_ns
    others = np.setdiff1d(np.arange(len(window.ranks)), rows)
    spared_ns = sum(
        np.maximum(sync_ns[others].min(axis=0) - sync_ns[rows].min(axis=0), 0).sum() for sync_ns in window.meetings_ns
    )
    return float(spared_ns) / total_ns


def _of_rank(evidence: Evidence, window: Window, suspect: Suspect, limits: StragglerLimits) -> Finding:
    subject = f"rank {window.ranks[suspect.row]}"
    where = f" ({window.hosts[suspect.row]})" if len(set(window.hosts)) > 1 else ""
    return _finding(evidence, window, [suspect], subject, subject + where, limits)


def _of_host(
    evidence: Evidence, window: Window, host: str, slow: Sequence[Suspect], limits: StragglerLimits
) -> Finding:
    ranks = [window.ranks[suspect.row] for suspect in slow]
    return _finding(evidence, window, slow, f"host {host}", f"host {host} ({ranks_text(ranks)})", limits)


def _clocks(evidence: Evidence, window: Window, suspect: Suspect, slow: Sequence[Suspect]) -> str:
    """How the rank's GPU was clocked in these steps, if that explains something; else nothing."""
    ranks = evidence.state.ranks
    mine = ranks[window.ranks[suspect.row]]
    if mine.gpus.latest is None:
        return ""
    rows = {one.row for one in slow}
    others = evenly([ranks[rank] for row, rank in enumerate(window.ranks) if row not in rows])
    found = slowed(
        _clocks_meanwhile(mine, window),
        [clock for other in others for clock in _clocks_meanwhile(other, window)],
        evidence.limits.gpu_throttle.clock_part,
    )
    return clock_text(*found) if found is not None else ""


def _clocks_meanwhile(rank: RankState, window: Window) -> list[Clock]:
    """By the rank's own clock, on which steps and readings are told alike."""
    first_ns, last_ns = rank.steps.column("end_ns", window.indices[[0, -1]]).tolist()
    return clocks_between(rank, first_ns, last_ns)


def _finding(
    evidence: Evidence, window: Window, slow: Sequence[Suspect], subject: str, who: str, limits: StragglerLimits
) -> Finding:
    worst = max(slow, key=lambda suspect: suspect.excess_ns)
    phase = _phase(window, worst)
    clocks = _clocks(evidence, window, worst, slow) if phase.name in ON_GPU else ""
    longer = worst.excess_ns / max(window.usual_step_ns, 1.0)
    cost = _cost(window, [suspect.row for suspect in slow])
    when = f" {worst.pattern}" if worst.pattern else ""
    if cost is not None and cost >= WORTH_SAYING:
        effect = f"costs the job {percent(cost)} of its time"
    else:
        effect = f"{percent(longer)} of the step longer"
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL if cost is not None and cost >= limits.critical_cost else Severity.WARNING,
        subject=subject,
        message=f"{who} is slow in {phase.name}{when}: {ms(phase.mine_ns)} ms, others {ms(phase.others_ns)}"
        f" ± {ms(phase.spread_ns)} · {effect}{f' · {clocks}' if clocks else ''}",
        advice=CLOCKS_ADVICE if clocks else ADVICE[phase.name],
        ranks=tuple(window.ranks[suspect.row] for suspect in slow),
        phase=phase.name,
        pattern=(worst.pattern or None) if worst.regular else None,
        cost=cost,
        evidence={
            "phase_ms": round(phase.mine_ns / 1e6, 3),
            "others_phase_ms": round(phase.others_ns / 1e6, 3),
            "others_spread_ms": round(phase.spread_ns / 1e6, 3),
            "excess_ms": round(worst.excess_ns / 1e6, 3),
            "noise_ms": round(worst.noise_ns / 1e6, 3),
            "pattern_steps": int(worst.hit.sum()),
            "window_steps": len(window),
            "pattern": worst.pattern or "lasting",
            **({"clocks": clocks} if clocks else {}),
        },
        proven=all(suspect.proven for suspect in slow),
    )


STRAGGLER: Final = Detector(RULE, straggler, by_step=True)
