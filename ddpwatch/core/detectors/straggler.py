"""Which ranks the others wait for, in which phase, and what that costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from ddpwatch.core.alerts import Finding, Severity
from ddpwatch.core.detectors.detector import Detector
from ddpwatch.core.numbers import ms, percent, ranks_text
from ddpwatch.core.window import SYNC, scaled_steps
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ddpwatch.core.evidence import Evidence
    from ddpwatch.core.limits import StragglerLimits
    from ddpwatch.core.ring import IntArray
    from ddpwatch.core.window import Window

    FloatArray = NDArray[np.float64]
    BoolArray = NDArray[np.bool_]

RULE: Final = "straggler"
MAD_TO_SIGMA: Final = 1.4826
MEDIAN_ERROR: Final = 1.2533
"""Standard error of a median against that of a mean."""
SIGMA_ERROR: Final = 1.3
"""A spread estimated from few numbers may be too small: this over the root of their count is added to it."""
LASTING: Final = 1
PERIODS: Final = (LASTING, 2, 3, 4, 5, 6, 7, 8)
"""A rank that is slow in every k-th step is looked for by folding the window."""
MORE_SIGMAS_FOLDED: Final = 0.5
"""Folding asks many questions at once, so each needs a clearer answer."""
FOLDED_STEPS: Final = 8
"""Fewer slow steps than this are no pattern: pauses of the garbage collector fall into any order."""
OUTLIER_SIGMAS: Final = 4.0
RARE_SHARE: Final = 0.005
"""Odd steps that any rank may have: a pause of the garbage collector, a page fault."""
CHANCE: Final = 1e-6
"""Chance of blaming anybody for odd steps alone, each time it is judged."""
OWN_PHASES: Final = [row for row in range(len(PHASES)) if row != SYNC]
HOST_SHARE: Final = 0.8
"""So many ranks of a host are slow: then it is the host."""
_COMPUTING: Final = (
    "Compare its clocks and temperature with the others (nvidia-smi -q -d PERFORMANCE), then the sizes of its inputs: "
    "longer sequences or larger images on one rank look the same."
)
ADVICE: Final = {
    "data": "Its DataLoader is late: more workers or prefetch_factor, faster storage, cheaper transforms.",
    "forward": _COMPUTING,
    "backward": _COMPUTING,
    "optimizer": "Look for work that only this rank does around optimizer.step(): weight averaging, a sharded "
    "optimizer with uneven shards, offloading.",
    "other": "Look for work that only this rank does between the phases: logging, garbage collection, checkpoints, "
    "metrics. Wrap what is meant in agent.pause(...).",
}


@dataclass(frozen=True)
class _Suspect:
    """A rank and the steps in which it is slow."""

    row: int
    excess_ns: float
    """Own work beyond that of the others: the median over those steps."""
    hit: BoolArray
    pattern: str
    noise_ns: float
    """What the excess must exceed to be beyond doubt."""

    @property
    def proven(self) -> bool:
        return self.excess_ns > self.noise_ns


def straggler(evidence: Evidence) -> list[Finding]:
    """A rank takes longer for its own work than the others do, so that all of them wait for it.

    Compared is `self`, the step without communication: in synchronous training the step times of all ranks are equal
    and show nothing. Lasting, bursting and regularly recurring slowness is found; the phase is the one in which the
    rank exceeds the others most. The cost is what the job would save, were the rank as fast as the next-slowest.
    """
    if not len(evidence.window):
        return []
    limits = _for_short_steps(evidence)
    window = evidence.window.last(limits.window_steps)
    if len(window.ranks) < 2 or len(window.ranks) * 2 < window.world_size or len(window) < limits.recent_steps:
        return []
    suspects = _suspects(window, limits)
    hosts = _whole_hosts(window, suspects)
    in_hosts = {suspect.row for rows in hosts.values() for suspect in rows}
    findings = [_host_finding(window, host, rows, limits) for host, rows in hosts.items()]
    findings += [_rank_finding(window, suspect, limits) for suspect in suspects if suspect.row not in in_hosts]
    return findings


def _for_short_steps(evidence: Evidence) -> StragglerLimits:
    """The limits with as many more steps as short ones need."""
    limits = evidence.limits.straggler
    step_ns = float(np.median(evidence.window.step_ns))
    window_steps = scaled_steps(limits.window_steps, evidence.limits.judge.least_s, step_ns)
    recent_steps = limits.recent_steps * window_steps // limits.window_steps
    return msgspec.structs.replace(limits, window_steps=window_steps, recent_steps=recent_steps)


def _suspects(window: Window, limits: StragglerLimits) -> list[_Suspect]:
    """Ranks that stand out against the median, judged once more against the others without them."""
    self_ns = window.self_ns.astype(np.float64)
    limit_ns = limits.share * float(np.median(window.step_ns))
    sigma_ns = _sigma(self_ns)
    everybody = np.ones(len(window.ranks), dtype=np.bool_)
    # With half of the ranks slow the median lies half-way between: so the first look has half the limits.
    first = _slow_ranks(self_ns, everybody, sigma_ns / 2, limit_ns / 2, limits)
    slow = [suspect.row for suspect in first if suspect.proven]
    others = everybody.copy()
    if len(slow) * 2 <= len(everybody):
        others[slow] = False
    found = _slow_ranks(self_ns, others, sigma_ns, limit_ns, limits)
    return [suspect for suspect in found if not others[suspect.row] or not suspect.proven]


def _sigma(self_ns: FloatArray) -> float:
    """How much a rank's own work varies from step to step, by itself.

    From differences between neighbours, so that what all ranks share goes out, and around their medians, so that a
    lasting difference is no noise.
    """
    pairs_ns = self_ns[1:] - self_ns[:-1]
    around_ns = pairs_ns - np.median(pairs_ns, axis=1, keepdims=True)
    sigma_ns = MAD_TO_SIGMA * float(np.median(np.abs(around_ns))) / np.sqrt(2.0)
    return float(sigma_ns * (1.0 + SIGMA_ERROR / np.sqrt(around_ns.size)))


def _slow_ranks(
    self_ns: FloatArray, others: BoolArray, sigma_ns: float, limit_ns: float, limits: StragglerLimits
) -> list[_Suspect]:
    """Every rank that exceeds the limit, in the clearest of the ways in which it does."""
    excess_ns, sigma_ns = _excess(self_ns, others, sigma_ns)
    best: dict[int, _Suspect] = {}
    for suspect in (
        *_folded(excess_ns, sigma_ns, limit_ns, limits),
        *_often(excess_ns, others, sigma_ns, limit_ns, limits),
    ):
        known = best.get(suspect.row)
        if known is None or (suspect.proven and not known.proven):
            best[suspect.row] = suspect
    return [best[row] for row in sorted(best)]


def _excess(self_ns: FloatArray, others: BoolArray, sigma_ns: float) -> tuple[FloatArray, float]:
    """Own work beyond the median of the others, and how much it varies."""
    if len(self_ns) == 2:
        # Of two there is no majority: each is measured by the other.
        return self_ns - self_ns[::-1], sigma_ns * float(np.sqrt(2.0))
    count = int(others.sum())
    error = 1.0 / count if count <= 2 else MEDIAN_ERROR**2 / count
    return self_ns - np.median(self_ns[others], axis=0), sigma_ns * float(np.sqrt(1.0 + error))


def _beyond_doubt(sigmas: float, ranks: int) -> float:
    """The more ranks there are, the further one of them strays by chance."""
    return math.sqrt(sigmas**2 + 2.0 * math.log(max(1.0, ranks / 2)))


def _folded(excess_ns: FloatArray, sigma_ns: float, limit_ns: float, limits: StragglerLimits) -> Iterator[_Suspect]:
    """Ranks that are slow in all of the latest steps, or in every k-th of the window, the simplest pattern first."""
    steps = np.arange(excess_ns.shape[1])
    for period in PERIODS:
        sigmas = limits.sigmas + (MORE_SIGMAS_FOLDED if period > LASTING else 0.0)
        for hit in _ways(steps, period, limits):
            error_ns = MEDIAN_ERROR * sigma_ns / math.sqrt(hit.sum())
            noise_ns = _beyond_doubt(sigmas, len(excess_ns)) * error_ns
            medians_ns = _lower_median(excess_ns[:, hit])
            if period == LASTING:
                # A hiccup has one side: what lasts shows in the earlier half as in the later one.
                halves = np.array_split(np.flatnonzero(hit), 2)
                one_sided = np.any([_lower_median(excess_ns[:, half]) < limit_ns / 2 for half in halves], axis=0)
                medians_ns = np.where(one_sided, 0.0, medians_ns)
            pattern = "" if period == LASTING else f"every {_ordinal(period)} step"
            for row in np.flatnonzero(medians_ns > limit_ns):
                yield _Suspect(int(row), float(medians_ns[row]), hit, pattern, noise_ns)


def _lower_median(values: FloatArray) -> FloatArray:
    """Exceeded by more than half of them: of an even number the smaller of the two in the middle."""
    middle = (values.shape[1] - 1) // 2
    lower: FloatArray = np.partition(values, middle, axis=1)[:, middle]
    return lower


def _ways(steps: IntArray, period: int, limits: StragglerLimits) -> Iterator[BoolArray]:
    """The steps in which a rank may be slow with a period: in the latest half of the window, to be soon, and in all."""
    if period == LASTING:
        for span in (limits.recent_steps, limits.recent_steps // 2):
            yield steps >= len(steps) - span
        return
    for span in (len(steps) // 2, len(steps)):
        if span >= FOLDED_STEPS * period and span >= 2 * limits.recent_steps:
            for start in range(period):
                yield (steps >= len(steps) - span) & (steps % period == start)


def _often(
    excess_ns: FloatArray, others: BoolArray, sigma_ns: float, limit_ns: float, limits: StragglerLimits
) -> Iterator[_Suspect]:
    """Ranks with several slow steps in no order, each of them beyond the noise by itself, and more than others have."""
    steps = excess_ns.shape[1]
    threshold_ns = max(limit_ns, OUTLIER_SIGMAS * sigma_ns)
    for span in (limits.recent_steps, 2 * limits.recent_steps, steps):
        hits = excess_ns > threshold_ns
        hits[:, : max(0, steps - span)] = False
        counts = hits.sum(axis=1)
        usual = max(float(counts[others].mean()), RARE_SHARE * min(span, steps))
        for row in np.flatnonzero(counts >= max(limits.outliers, _too_many(usual, len(counts)))):
            hit = hits[row]
            pattern = f"in {percent(float(hit.sum() / min(span, steps)))} of the steps"
            yield _Suspect(int(row), float(np.median(excess_ns[row, hit])), hit, pattern, threshold_ns)


def _too_many(usual: float, ranks: int) -> int:
    """How many odd steps of a rank are no chance, where so many are usual: Poisson, for that many ranks at once."""
    term, below, count = math.exp(-usual), 0.0, 0
    while (1.0 - below) * ranks > CHANCE:
        below += term
        count += 1
        term *= usual / count
    return count


def _whole_hosts(window: Window, suspects: list[_Suspect]) -> dict[str, list[_Suspect]]:
    """Hosts most of whose ranks are slow, if there are others that are not."""
    slow: dict[str, list[_Suspect]] = {}
    for suspect in suspects:
        if suspect.proven:
            slow.setdefault(window.hosts[suspect.row], []).append(suspect)
    if len(set(window.hosts)) < 2:
        return {}
    return {
        host: rows
        for host, rows in slow.items()
        if len(rows) > 1 and len(rows) >= HOST_SHARE * window.hosts.count(host)
    }


def _phase(window: Window, suspect: _Suspect) -> tuple[int, float, float]:
    """The phase with the largest excess in the slow steps, its time, and that of the others."""
    mine = window.phases_ns[suspect.row][:, suspect.hit]
    others = np.delete(window.phases_ns, suspect.row, axis=0)[:, :, suspect.hit]
    usual = np.median(others, axis=0)
    excess = np.median(mine - usual, axis=1)
    row = max(OWN_PHASES, key=lambda phase: excess[phase])
    return row, float(np.median(mine[row])), float(np.median(usual[row]))


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


def _rank_finding(window: Window, suspect: _Suspect, limits: StragglerLimits) -> Finding:
    rank = window.ranks[suspect.row]
    return _finding(window, [suspect], f"rank {rank}", limits)


def _host_finding(window: Window, host: str, suspects: list[_Suspect], limits: StragglerLimits) -> Finding:
    ranks = [window.ranks[suspect.row] for suspect in suspects]
    return _finding(window, suspects, f"host {host} ({ranks_text(ranks)})", limits, subject=f"host {host}")


def _finding(
    window: Window, suspects: list[_Suspect], who: str, limits: StragglerLimits, subject: str | None = None
) -> Finding:
    worst = max(suspects, key=lambda suspect: suspect.excess_ns)
    phase_row, mine_ns, others_ns = _phase(window, worst)
    phase = PHASES[phase_row]
    step_ns = max(float(np.median(window.step_ns)), 1.0)
    cost = _cost(window, [suspect.row for suspect in suspects])
    when = f" {worst.pattern}" if worst.pattern else ""
    price = f" · costs the job {percent(cost)} of its time" if cost is not None and cost >= 0.005 else ""
    spread_ns = worst.noise_ns
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL if cost is not None and cost >= limits.critical_cost else Severity.WARNING,
        subject=subject or who,
        message=f"{who} is slow in {phase}{when}: {ms(mine_ns)} ms, others {ms(others_ns)}"
        f" · {percent(worst.excess_ns / step_ns)} of the step longer{price}",
        advice=ADVICE[phase],
        ranks=tuple(window.ranks[suspect.row] for suspect in suspects),
        phase=phase,
        cost=cost,
        evidence={
            "phase_ms": round(mine_ns / 1e6, 3),
            "others_phase_ms": round(others_ns / 1e6, 3),
            "excess_ms": round(worst.excess_ns / 1e6, 3),
            "noise_ms": round(spread_ns / 1e6, 3),
            "slow_steps": int(worst.hit.sum()),
            "steps": len(window),
            "pattern": worst.pattern or "lasting",
        },
        proven=all(suspect.proven for suspect in suspects),
    )


def _ordinal(number: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(number, f"{number}th")


STRAGGLER: Final = Detector(RULE, straggler, by_step=True)
