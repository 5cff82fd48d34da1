"""Hosts whose ranks wait for CPU cores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.state.run import ALIVE
from ddpwatch.core.units import percent, plural, ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext
    from ddpwatch.core.state.rank import RankState

RULE: Final = rules.CPU_STARVATION
OMP: Final = "OMP_NUM_THREADS"
OWN_CORES_ADVICE: Final = (
    "Give each rank cores of its own (taskset, --cpus-per-task), and stop other work on the host. Until then, "
    "differences between its ranks are mostly the scheduler's."
)


def cpu_starvation(context: DetectorContext) -> list[Finding]:
    """Ranks of a host wait for CPU cores, so that now one and now another of them is slow. No rank is at fault.

    Compares the time that each training thread was runnable without a core, as the kernel reports it, with the time
    that passed. Reported for a host if at least half of its ranks are starved; a single starved rank is a straggler.
    """
    limits = context.limits.cpu_starvation
    hosts: dict[str, list[RankState]] = {}
    for rank in context.state.ranks.values():
        if context.state.condition(rank) in ALIVE:
            hosts.setdefault(rank.host, []).append(rank)
    findings = []
    for host, ranks in hosts.items():
        shares = sorted(share for rank in ranks if (share := rank.cpu_starvation.lately) is not None)
        if len(shares) > 1 and len(shares) * 2 > len(ranks) and shares[(len(shares) - 1) // 2] >= limits.share:
            findings.append(_finding(host, ranks, shares, limits.lasting_s))
    return findings


def _finding(host: str, ranks: Sequence[RankState], shares: Sequence[float], lasting_s: float) -> Finding:
    cores = max((rank.hello.cores for rank in ranks if rank.hello is not None), default=0)
    least, most = percent(shares[0]), percent(shares[-1])
    names = ranks_text(rank.rank for rank in ranks)
    wait = f"may use {plural(cores, 'core')} and wait for one" if cores else "wait for a CPU core"
    return Finding(
        rule=RULE,
        severity=Severity.WARNING,
        subject=f"host {host}",
        message=f"{names} on {host} {wait} {least if least == most else f'{least} to {most}'} of the time: their steps "
        "vary with it",
        advice=_advice(ranks, cores),
        cost=sum(shares) / len(shares),
        evidence={
            "ranks": len(ranks),
            "cores": cores,
            "least_percent": round(shares[0] * 100, 1),
            "mean_percent": round(sum(shares) / len(shares) * 100, 1),
            "most_percent": round(shares[-1] * 100, 1),
        },
        lasting=lasting_s * 1e9,
    )


def _advice(ranks: Sequence[RankState], cores: int) -> str:
    """What uses the cores, as far as it is known, then what always helps."""
    advice = ""
    per_rank = max(1, cores // len(ranks))
    threads = {rank.hello.environment.get(OMP, "not set") for rank in ranks if rank.hello is not None}
    if cores and threads != {str(per_rank)}:
        advice += f"Set {OMP}={per_rank} (it is {', '.join(sorted(threads))}). "
    workers = max((rank.loader.workers for rank in ranks if rank.loader is not None), default=0)
    if workers:
        advice += f"Use fewer DataLoader workers than {workers} per rank. "
    return advice + OWN_CORES_ADVICE
