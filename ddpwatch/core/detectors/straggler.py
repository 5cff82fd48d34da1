"""Slow ranks and hosts by their own work: the phase, the cost and the likely cause."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.diagnosis.attribution import slow_cause
from ddpwatch.core.diagnosis.data_loading import loading_advice
from ddpwatch.core.diagnosis.scheduler_noise import with_scheduler_noise
from ddpwatch.core.diagnosis.straggler_stats import MAD_TO_SIGMA, suspects
from ddpwatch.core.limits import StragglerLimits
from ddpwatch.core.metrics.hung_steps import stuck_above_ns
from ddpwatch.core.metrics.window import SYNC, sampled_ranks, scaled_steps
from ddpwatch.core.units import ms_text, percent, ranks_text
from ddpwatch.wire import PHASES, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.detectors.context import DetectorContext
    from ddpwatch.core.diagnosis.straggler_stats import Suspect
    from ddpwatch.core.metrics.window import Window

RULE: Final = rules.STRAGGLER
OWN_PHASES: Final = [row for row in range(len(PHASES)) if row != SYNC]
MANY: Final = "ranks"
"""Subject of one finding for many ranks."""
MAX_CHARS: Final = 40
"""Many ranks are listed if the list has at most this many characters."""
_COMPUTING: Final = (
    "Compare its GPU clock and temperature with the others (`nvidia-smi -q -d PERFORMANCE`), then its input sizes: "
    "longer sequences or larger images on one rank look the same."
)
ANYWHERE: Final = (
    "Different phases are slow in different steps, as when something else uses its CPU cores or its GPU: check what "
    "runs on its host (top, nvidia-smi), and whether ranks share cores."
)
COMPUTING_ON_CPU: Final = (
    "Look for other work on its host (its DataLoader workers included), a throttled or shared CPU core, and larger "
    "inputs: longer sequences or larger images on one rank look the same."
)
ADVICE: Final = {
    "data": "Its DataLoader is late: try more num_workers, a larger prefetch_factor, faster storage or cheaper "
    "transforms.",
    "forward": _COMPUTING,
    "backward": _COMPUTING,
    "optimizer": "Look for work that only this rank does around optimizer.step(): weight averaging, uneven shards of a "
    "sharded optimizer, offloading.",
    "other": "Look for work that only this rank does between phases: logging, metrics, plots, uploads, files that it "
    "writes. Wrap intended pauses in agent.pause(...).",
}


def straggler(context: DetectorContext) -> list[Finding]:
    """A rank takes longer for its own work than the others, and all of them wait for it in every step.

    Compares `self`, the step without communication: in synchronous training all ranks have the same step time. Finds
    continuous, periodic and bursty slowness, reports most ranks of a host as the host, and names the phase with the
    largest excess. The cost is the fraction of the job's time that is lost against a rank as fast as the next-slowest
    one, measured since it became slow. Garbage collection, a checkpoint save, a lower GPU clock or CPU starvation in
    the same steps is reported as the cause.
    """
    if not len(context.window):
        return []
    limits = _for_short_steps(context)
    window = context.window.last(limits.window_steps)
    if len(window.ranks) < 2 or not context.has_majority or len(window) < limits.recent_steps:
        return []
    found = with_scheduler_noise(suspects(window, limits), context.state, window, limits)
    hosts = _whole_hosts(window, found)
    in_hosts = {suspect.row for rows in hosts.values() for suspect in rows}
    findings = []
    for host, slow in hosts.items():
        names = ranks_text(window.ranks[suspect.row] for suspect in slow)
        findings.append(_finding(context, window, slow, f"host {host}", f"host {host} ({names})", limits))
    alone = [suspect for suspect in found if suspect.row not in in_hosts]
    proven = [suspect for suspect in alone if suspect.proven]
    if len(proven) > limits.MAX_SEPARATE:
        # One finding: hundreds would take longer to compute than the steps.
        names = ranges((window.ranks[suspect.row] for suspect in proven), max_chars=MAX_CHARS)
        label = f"{len(proven)} of {len(window.ranks)} ranks"
        found_together = _finding(context, window, proven, MANY, label, limits)
        findings.append(
            replace(found_together, message=found_together.message + (f" · ranks {names}" if names else ""))
        )
        alone = [suspect for suspect in alone if not suspect.proven]
    # The worst of the suspected ones are enough.
    if len(alone) > limits.MAX_SEPARATE:
        alone = sorted(alone, key=lambda suspect: -suspect.excess_ns)[: 2 * limits.MAX_SEPARATE]
    for suspect in alone:
        subject = f"rank {window.ranks[suspect.row]}"
        where = f" ({window.hosts[suspect.row]})" if len(set(window.hosts)) > 1 else ""
        findings.append(_finding(context, window, [suspect], subject, subject + where, limits))
    return findings


def _for_short_steps(context: DetectorContext) -> StragglerLimits:
    """The limits with larger windows for short steps."""
    limits = context.limits.straggler
    step_ns = context.window.median_step_ns
    window_steps = scaled_steps(limits.window_steps, context.limits.judge.least_s, step_ns)
    recent_steps = limits.recent_steps * window_steps // limits.window_steps
    return msgspec.structs.replace(limits, window_steps=window_steps, recent_steps=recent_steps)


def _whole_hosts(window: Window, found: Sequence[Suspect]) -> dict[str, list[Suspect]]:
    """Hosts most of whose ranks are slow, with these, in a run of several hosts."""
    slow: dict[str, list[Suspect]] = {}
    for suspect in found:
        if suspect.proven:
            slow.setdefault(window.hosts[suspect.row], []).append(suspect)
    if len(set(window.hosts)) < 2:
        return {}
    return {
        host: rows
        for host, rows in slow.items()
        if len(rows) > 1 and len(rows) >= StragglerLimits.HOST_SHARE * window.hosts.count(host)
    }


@dataclass(frozen=True)
class _Phase:
    """The phase in which a rank exceeds the others most, in its slow steps."""

    name: str
    alone: bool
    """Whether most of the excess is in this phase. Otherwise the times are those of all its own work."""
    mine_ns: float
    others_ns: float
    spread_ns: float
    """Standard deviation among the others, from the MAD."""


def _phase(window: Window, suspect: Suspect) -> _Phase:
    peers = sampled_ranks(np.delete(np.arange(len(window.ranks)), suspect.row))
    mine, others = window.phases_ns[suspect.row][:, suspect.hit], window.phases_ns[peers][:, :, suspect.hit]
    excess_ns = mine - np.median(others, axis=0)
    median_ns = np.median(excess_ns, axis=1)
    row = max(OWN_PHASES, key=lambda phase: median_ns[phase])
    if median_ns[row] >= StragglerLimits.PHASE_SHARE * suspect.excess_ns:
        return _Phase(PHASES[row], True, *_figures(mine[row], others[:, row]))
    # Slow in varying phases: no phase is longer by the median, though each of these steps is.
    row = max(OWN_PHASES, key=lambda phase: float(excess_ns[phase].mean()))
    self_ns = window.self_ns[:, suspect.hit]
    return _Phase(PHASES[row], False, *_figures(self_ns[suspect.row], self_ns[peers]))


def _figures(mine_ns: NDArray[np.int64], others_ns: NDArray[np.int64]) -> tuple[float, float, float]:
    """Median of the rank, median of the others, and standard deviation among the others, from the MAD."""
    spread_ns = MAD_TO_SIGMA * float(np.median(np.abs(others_ns - np.median(others_ns))))
    return float(np.median(mine_ns)), float(np.median(np.median(others_ns, axis=0))), spread_ns


def _cost(window: Window, rows: list[int], excess_ns: float) -> float | None:
    """Fraction of the job's time that these ranks cost as the last to arrive, without hung steps, which are reported as
    such; None = unknown, because not all ranks are seen.
    """
    if not window.complete:
        return None
    if len(rows) == 1:
        cost_ns = window.straggler_cost_ns[rows[0]]
    else:
        others = np.setdiff1d(np.arange(len(window.ranks)), rows)
        cost_ns = window.group_straggler_cost_ns([np.asarray(rows), others])[0]
    slow = cost_ns <= stuck_above_ns(excess_ns)
    return float(cost_ns[slow].sum()) / max(float(window.job_step_ns[slow].sum()), 1.0)


def _advice(context: DetectorContext, window: Window, row: int, phase: _Phase) -> str:
    if not phase.alone:
        return ANYWHERE
    if phase.name == "data" and (advice := loading_advice(context.state, window, row)):
        return advice
    hello = context.state.ranks[window.ranks[row]].hello
    on_cpu = hello is not None and hello.device == "cpu"
    return COMPUTING_ON_CPU if on_cpu and ADVICE[phase.name] is _COMPUTING else ADVICE[phase.name]


def _finding(
    context: DetectorContext, window: Window, slow: Sequence[Suspect], subject: str, label: str, limits: StragglerLimits
) -> Finding:
    first, last = min(suspect.first for suspect in slow), max(suspect.last for suspect in slow)
    from_step, upto_step = window.indices[[first, last]].tolist()
    again_from = int(window.indices[max(suspect.lately for suspect in slow)])
    ranks = tuple(window.ranks[suspect.row] for suspect in slow)
    ended = all(suspect.ended for suspect in slow)
    # An episode may begin and end between two evaluations.
    if ended and len(window) - 1 - last > limits.recent_steps:
        return Finding(
            RULE, Severity.WARNING, subject, f"{label} {'were' if subject == MANY else 'was'} slow", "", ranks,
            opens=False, ended=True, from_step=from_step, upto_step=upto_step, again_from=again_from,
        )  # fmt: skip
    worst = max(slow, key=lambda suspect: suspect.excess_ns)
    phase = _phase(window, worst)
    reason = slow_cause(context, window, worst, slow, phase.name)
    longer = worst.excess_ns / max(window.median_step_ns, 1.0)
    measured = "phase" if phase.alone else "self"
    slow_label = f"{label} slow, worst rank {window.ranks[worst.row]}" if subject == MANY else f"{label} slow"
    # Only the steps of the episode: those before and after it would dilute the cost.
    episode = window if worst.pattern and not ended else window.part(worst.first, last + 1 if ended else len(window))
    cost = _cost(episode, [suspect.row for suspect in slow], worst.excess_ns)
    when = f" {worst.pattern}" if worst.pattern else ""
    where, of_what = f" in {phase.name}", ""
    if not phase.alone:
        where, of_what = f", mostly in {phase.name}{',' if when else ''}", " of its own work"
    lead = tail = ""
    if reason is not None and reason.is_activity:
        lead = f"{reason.text}, "
    elif reason is not None:
        tail = f" · {reason.text}"
    if cost is not None and cost >= StragglerLimits.MIN_COST_SHARE:
        effect = f"costs {percent(cost)} throughput"
    else:
        effect = f"excess is {percent(longer)} of the step"
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL if cost is not None and cost >= limits.critical_cost else Severity.WARNING,
        subject=subject,
        message=f"{slow_label}{where}{when}: {lead}{ms_text(phase.mine_ns)}{of_what} vs {ms_text(phase.others_ns)} on "
        f"the others · {effect}{tail}",
        advice=reason.advice if reason else _advice(context, window, worst.row, phase),
        ranks=ranks,
        phase=phase.name,
        pattern=(worst.pattern or None) if worst.regular else None,
        cost=cost,
        evidence={
            f"{measured}_ms": round(phase.mine_ns / 1e6, 3),
            f"others_{measured}_ms": round(phase.others_ns / 1e6, 3),
            "others_spread_ms": round(phase.spread_ns / 1e6, 3),
            "excess_ms": round(worst.excess_ns / 1e6, 3),
            "noise_ms": round(worst.noise_ns / 1e6, 3),
            "pattern_steps": worst.slow_steps,
            "window_steps": worst.steps,
            "pattern": worst.pattern or "lasting",
            **({reason.kind: reason.text} if reason else {}),
        },
        proven=all(suspect.proven for suspect in slow),
        from_step=from_step,
        upto_step=upto_step,
        ended=ended,
        again_from=again_from,
        # Bursts too far apart for one window are still one episode.
        lingers=limits.window_steps + limits.linger_steps,
    )
