"""Whether the memory of a rank keeps growing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Final

from ddpwatch.core.alerts import Finding, Severity
from ddpwatch.core.detectors.detector import Detector
from ddpwatch.core.numbers import duration, ranks_text, size

if TYPE_CHECKING:
    from ddpwatch.core.evidence import Evidence
    from ddpwatch.core.limits import MemoryLimits
    from ddpwatch.core.rank import RankState

RULE: Final = "memory"
LEAST_SAMPLES: Final = 9
SAMPLES: Final = 60
"""About so many are looked at, evenly spread: an hour of a thousand ranks is asked about four times a second."""
MOST_ALONE: Final = 3
"""More ranks than this are told together."""
EITHER_HALF: Final = 0.25
"""Part of the growth that must fall into each half of the time: loading and filling caches comes to an end."""
ADVICE: Final = (
    "Look for what is kept from step to step: lists of losses without .item(), caches, logged tensors. DataLoader "
    "workers that copy a list of Python objects count as well: keep it in an array."
)


@dataclass(frozen=True)
class _Growth:
    rank: int
    first_bytes: float
    last_bytes: float
    watched_s: float
    bytes_per_hour: float


def memory(evidence: Evidence) -> list[Finding]:
    """The resident memory of a rank keeps growing: in the end the host kills the process, and the job with it.

    Told by the medians of the first, the second and the last third of the time watched, which must grow all along;
    what is loaded once and then stays does not count. It is memory of the host, not of the GPU.
    """
    limits = evidence.limits.memory
    state = evidence.state
    watched = [rank for rank in state.ranks.values() if state.condition(rank) != "ended"]
    grown = [growth for rank in watched if (growth := _growth(rank, limits)) is not None]
    if len(grown) > MOST_ALONE:
        return [_finding(grown)]
    return [_finding([growth]) for growth in grown]


def _growth(rank: RankState, limits: MemoryLimits) -> _Growth | None:
    every = max(len(rank.memory) // SAMPLES, 1)
    samples = list(islice(rank.memory, (len(rank.memory) - 1) % every, None, every)) if rank.memory else []
    if len(samples) < LEAST_SAMPLES:
        return None
    at_ns, used = zip(*samples, strict=True)
    watched_s = (rank.memory[-1][0] - rank.memory[0][0]) / 1e9
    # Medians cannot be further apart than that, and nearly every rank of a large world ends here.
    if watched_s < limits.least_s or max(used) - min(used) < limits.growth_bytes:
        return None
    third = len(samples) // 3
    first, middle, last = median(used[:third]), median(used[third:-third]), median(used[-third:])
    more = last - first
    if more < limits.growth_bytes or more < limits.growth_share * first:
        return None
    latest = median(used[-max(len(samples) // 10, 3) :])
    if min(middle - first, last - middle) < EITHER_HALF * more or latest < last:
        return None
    between_s = (median(at_ns[-third:]) - median(at_ns[:third])) / 1e9
    return _Growth(rank.rank, first, last, watched_s, more / max(between_s, 1.0) * 3600)


def _finding(grown: list[_Growth]) -> Finding:
    worst = max(grown, key=lambda growth: growth.bytes_per_hour)
    ranks = tuple(growth.rank for growth in grown)
    who = ranks_text(ranks)
    most = "" if len(grown) == 1 else f"; most on rank {worst.rank}"
    return Finding(
        rule=RULE,
        severity=Severity.WARNING,
        subject=who if len(grown) == 1 else "ranks",
        message=f"memory of {who} keeps growing{most}: {size(worst.first_bytes)} to {size(worst.last_bytes)} in "
        f"{duration(worst.watched_s)}, {size(worst.bytes_per_hour)} an hour",
        advice=ADVICE,
        ranks=ranks,
        evidence={
            "first_bytes": round(worst.first_bytes),
            "last_bytes": round(worst.last_bytes),
            "bytes_per_hour": round(worst.bytes_per_hour),
            "watched_s": round(worst.watched_s, 1),
        },
    )


MEMORY: Final = Detector(RULE, memory, by_step=False)
