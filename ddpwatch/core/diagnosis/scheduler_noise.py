"""Scheduler noise: a variance component of a rank's own work, measured by the time that ranks wait for CPU cores.

Where cores are oversubscribed, the kernel starves one thread after another, each for up to some seconds. Slow steps
then come in bursts, so a standard error that assumes independent steps is far too small. The kernel reports how long
each training thread was runnable without a core: the standard deviation of that share over time is the noise that is
added to a straggler's excess, and its correlation time reduces the number of independent observations. An excess that
this time does not explain, as it was measured in the same steps, is proven without most of that noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from ddpwatch.core.diagnosis.straggler_stats import excess_error
from ddpwatch.core.limits import StragglerLimits
from ddpwatch.core.state.gpu import evenly_sampled
from ddpwatch.core.state.rank import CPU_SAMPLE_NS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.diagnosis.straggler_stats import Suspect
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState


def with_scheduler_noise(
    found: Sequence[Suspect], state: RunState, window: Window, limits: StragglerLimits
) -> list[Suspect]:
    """The suspects, each with the scheduler noise of its host added to its noise; ended ones only if still proven."""
    error = limits.sigmas * excess_error(len(window.ranks) - 1)
    noises: dict[str, SchedulerNoise] = {}
    noisier = []
    for suspect in found:
        host = window.hosts[suspect.row]
        if host not in noises:
            ranks = [state.ranks[rank] for rank, on in zip(window.ranks, window.hosts, strict=True) if on == host]
            noises[host] = scheduler_noise(ranks, int(window.indices[-1]))
        span_ns = float(window.job_step_ns[suspect.first : suspect.last + 1].sum())
        share = error * noises[host].sigma(window.ranks[suspect.row], span_ns)
        # As an excess in each of its slow steps, which together cost this share of the time.
        per_share_ns = span_ns / max(suspect.slow_steps, 1)
        noise_ns = math.hypot(suspect.noise_ns, share * per_share_ns)
        # What was measured in these very steps is known better than by its distribution.
        starved = _measured(state, window, suspect)
        if starved is not None:
            rest_ns = math.hypot(suspect.noise_ns, StragglerLimits.UNMEASURED_PART * share * per_share_ns)
            noise_ns = min(noise_ns, rest_ns + max(starved, 0.0) * per_share_ns)
        noisier.append(replace(suspect, noise_ns=noise_ns))
    return [suspect for suspect in noisier if suspect.proven or not suspect.ended]


def _measured(state: RunState, window: Window, suspect: Suspect) -> float | None:
    """Share of the time by which the suspect waited longer for a core than the median of the others, during its slow
    episode; None = not known.
    """
    indices = window.indices[[max(suspect.first - 1, 0), suspect.last]]
    shares: dict[int, float] = {}
    sampled = evenly_sampled([state.ranks[rank] for rank in window.ranks])
    for rank in {window.ranks[suspect.row], *(each.rank for each in sampled)}:
        begin_ns, end_ns = state.ranks[rank].steps.column("end_ns", indices).tolist()
        share = state.ranks[rank].cpu_starvation.share(begin_ns, end_ns)
        if share is not None:
            shares[rank] = share
    mine = shares.pop(window.ranks[suspect.row], None)
    return None if mine is None or not shares else mine - median(shares.values())


@dataclass(frozen=True)
class SchedulerNoise:
    """Distribution of the share of time that training threads of a host wait for a core."""

    mean: float = 0.0
    spread: float = 0.0
    """Standard deviation over time, in intervals of `CPU_SAMPLE_NS`, of all ranks."""
    own_spread: Mapping[int, float] = field(default_factory=dict)
    """The same by rank."""

    def sigma(self, rank: int, span_ns: float) -> float:
        """Standard deviation of the share of a rank in a time span: its own or that of all, whichever is larger.

        Within an interval the scheduler's time slices are independent, up to a span in which a thread either has a
        core or has none. Intervals are correlated for `SCHEDULER_NS`.
        """
        spread = max(self.spread, self.own_spread.get(rank, 0.0))
        if span_ns < CPU_SAMPLE_NS:
            on_or_off = math.sqrt(self.mean * max(0.0, 1.0 - self.mean))
            return max(spread, min(on_or_off, spread * math.sqrt(CPU_SAMPLE_NS / max(span_ns, 1.0))))
        return spread * math.sqrt(min(1.0, StragglerLimits.SCHEDULER_NS / span_ns))


def scheduler_noise(ranks: Sequence[RankState], step: int) -> SchedulerNoise:
    """Scheduler noise on the host of these ranks up to a step; none where the kernel does not report it.

    Each rank varies around its own mean, which is shrunk towards the mean of all: a rank that is starved all the time,
    by a process on its cores, is not noise, but that takes many correlation times to know.
    """
    known = [(rank, share) for rank in evenly_sampled(ranks) if (share := rank.starved_share) is not None]
    if not known:
        return SchedulerNoise()
    prior, weight = sum(share for _, share in known) / len(known), StragglerLimits.PRIOR_INTERVALS
    shares = {rank.rank: rank.cpu_starvation.shares_before(_end_ns(rank, step)) for rank, _ in known}
    intervals = weight + sum(map(len, shares.values()))
    mean = (weight * prior + sum(float(each.sum()) for each in shares.values())) / intervals
    squares = {rank: _squares(each, mean) for rank, each in shares.items()}
    return SchedulerNoise(
        mean=mean,
        spread=math.sqrt((weight * prior**2 + sum(squares.values())) / intervals),
        own_spread={rank: math.sqrt(squares[rank] / (weight + len(each))) for rank, each in shares.items()},
    )


def _end_ns(rank: RankState, step: int) -> int:
    return int(rank.steps.column("end_ns", np.array([step]))[0])


def _squares(shares: NDArray[np.float64], mean: float) -> float:
    """Sum of squared deviations from the rank's own mean, as far as it is known."""
    if not len(shares):
        return 0.0
    own = max(0.0, 1.0 - StragglerLimits.SCHEDULER_NS / (len(shares) * CPU_SAMPLE_NS))
    return float(np.square(shares - (own * shares.mean() + (1.0 - own) * mean)).sum())


def starvation(state: RunState, window: Window) -> float:
    """Time that the training threads of all ranks wait for a core, as a fraction: waiting up to that is the
    scheduler's.
    """
    return scheduler_noise([state.ranks[rank] for rank in window.ranks], int(window.indices[-1])).mean
