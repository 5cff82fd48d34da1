"""How well a job uses its ranks: against a run of one process, and where the part that is lost went.

What a sample costs is the time of one rank for it: ranks x step / batch. The efficiency is what it cost in the baseline
over what it costs in the run. Each part of a step costs so much of that time in either; the differences, as parts of
the run's time, add up to what is lost. A negative one is a gain. All of it is total time over total time, as shares of
a run are: medians of parts do not add up. What speed-up medians come to is told beside it where it is another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpwatch.core.limits import ScalingLimits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpwatch.core.metrics.aggregate import Aggregate

LOSSES: Final = ("wire", "waiting", "data", "compute")
"""What efficiency is lost to; `compute` is forward, backward, optimizer and other."""


@dataclass(frozen=True)
class Profile:
    """A run boiled down. Times are of one step and one rank, in the mean; the parts add up to the step."""

    world_size: int
    steps: int
    """How many steps it stands on."""
    step_ns: float
    samples_per_s: float | None
    """Of all ranks together, in the mean; None = the batch size could not be told."""
    effective_batch: float | None
    data_ns: float
    compute_ns: float
    wire_ns: float
    wait_ns: float
    waited_for: tuple[int, ...] = ()
    """Ranks that most of the waiting was for; empty = none stands out, or there is hardly any."""
    median_ns: float | None = None
    p99_ns: float | None = None
    """Of the single steps; None = not known."""

    @property
    def shares(self) -> dict[str, float]:
        """The parts of a step by their names in `LOSSES`; together 1."""
        parts_ns = (self.wire_ns, self.wait_ns, self.data_ns, self.compute_ns)
        return {name: part_ns / self.step_ns for name, part_ns in zip(LOSSES, parts_ns, strict=True)}

    @property
    def is_uneven(self) -> bool:
        """Whether some steps took so much longer than most that the mean does not tell how fast it runs."""
        return self.median_ns is not None and self.step_ns > ScalingLimits.UNEVEN_FACTOR * self.median_ns


@dataclass(frozen=True)
class Scaling:
    """A run against its baseline."""

    baseline: Profile
    run: Profile
    speedup: float
    """So many times as many samples a second."""
    efficiency: float
    """The speed-up over the number of ranks; above 1 = a rank does more than one alone."""
    parts: dict[str, float]
    """By the names in `LOSSES`, what is lost; negative = gained. Together `1 - efficiency`."""
    by_steps: bool = False
    """Samples are not told: every rank is taken to have the same batch as the baseline."""

    @property
    def median_speedup(self) -> float | None:
        """What the speed-up would be if all steps of both took as long as their median ones; None = not known."""
        before_ns, now_ns = self.baseline.median_ns, self.run.median_ns
        if not before_ns or not now_ns:
            return None
        return self.speedup * (self.run.step_ns / now_ns) / (self.baseline.step_ns / before_ns)

    @property
    def medians_differ(self) -> bool:
        """Whether a reader who divides one median by the other comes to another speed-up."""
        by_medians = self.median_speedup
        return by_medians is not None and abs(by_medians - self.speedup) > ScalingLimits.MIN_DIFFERENCE * self.speedup


def scaling(baseline: Profile, run: Profile) -> Scaling:
    """How much faster the run is than the baseline, how much of its ranks' time that uses, and where the rest goes."""
    if baseline.samples_per_s and run.samples_per_s:
        by_steps = False
        speedup = run.samples_per_s / baseline.samples_per_s
    else:
        by_steps = True
        speedup = run.world_size / run.step_ns * baseline.step_ns / baseline.world_size
    efficiency = speedup * baseline.world_size / run.world_size
    before, now = baseline.shares, run.shares
    parts = {name: now[name] - efficiency * before[name] for name in LOSSES}
    return Scaling(baseline, run, speedup, efficiency, parts, by_steps)


def scaling_of(baseline: Profile | None, run: Aggregate | None) -> Scaling | None:
    """A run, or its last steps, against a baseline; None = there is none, or the run has no steps that tell."""
    profile = None if baseline is None or run is None else run.profile()
    return None if baseline is None or profile is None else scaling(baseline, profile)


def waited_for(costs: Mapping[int, float]) -> tuple[int, ...]:
    """The fewest ranks that caused most of the waiting, by the straggler cost of each in any unit; none, if it takes
    more than half of them.
    """
    total = sum(costs.values())
    named: list[int] = []
    caused = 0.0
    for rank in sorted(costs, key=lambda rank: -costs[rank]):
        if caused >= ScalingLimits.WAITED_FOR_SHARE * total:
            break
        named.append(rank)
        caused += costs[rank]
    return tuple(sorted(named)) if total > 0 and len(named) <= len(costs) // 2 else ()
