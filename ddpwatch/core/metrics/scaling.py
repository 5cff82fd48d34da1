"""Scaling efficiency of a job against a baseline run, and what the lost part is spent on.

A sample costs ranks x step / batch. Efficiency is its cost in the baseline over its cost in the run. The differences of
the parts of a step, as fractions of the run's time, add up to the loss; a negative one is a gain. All of it is total
time over total time, because medians of parts do not add up; the speedup of medians is reported separately.
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
    """Summary of a run: mean times of one step and one rank, whose parts add up to the step."""

    world_size: int
    steps: int
    """Number of steps in it."""
    step_ns: float
    samples_per_s: float | None
    """Of all ranks together; None = the batch size is not known."""
    effective_batch: float | None
    data_ns: float
    compute_ns: float
    wire_ns: float
    wait_ns: float
    waited_for: tuple[int, ...] = ()
    """Ranks that most of the waiting was for; empty = none stands out, or there is hardly any."""
    median_ns: float | None = None
    p99_ns: float | None = None
    """Of single steps; None = not known."""

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of a step by the names in `LOSSES`; they add up to 1."""
        parts_ns = (self.wire_ns, self.wait_ns, self.data_ns, self.compute_ns)
        return {name: part_ns / self.step_ns for name, part_ns in zip(LOSSES, parts_ns, strict=True)}

    @property
    def is_uneven(self) -> bool:
        """Whether the mean step is far above the median, so that it does not show the typical speed."""
        return self.median_ns is not None and self.step_ns > ScalingLimits.UNEVEN_FACTOR * self.median_ns


@dataclass(frozen=True)
class Scaling:
    """A run against its baseline."""

    baseline: Profile
    run: Profile
    speedup: float
    """Ratio of the samples per second."""
    efficiency: float
    """Speedup over the number of ranks; above 1 = a rank does more than one alone."""
    parts: dict[str, float]
    """Loss by the names in `LOSSES`; negative = gain. They add up to `1 - efficiency`."""
    by_steps: bool = False
    """Whether samples are not known, and every rank is assumed to have the baseline's batch."""

    @property
    def median_speedup(self) -> float | None:
        """The speedup if all steps of both runs took their medians; None = not known."""
        before_ns, now_ns = self.baseline.median_ns, self.run.median_ns
        if not before_ns or not now_ns:
            return None
        return self.speedup * (self.run.step_ns / now_ns) / (self.baseline.step_ns / before_ns)

    @property
    def medians_differ(self) -> bool:
        """Whether the ratio of the medians shows another speedup."""
        by_medians = self.median_speedup
        return by_medians is not None and abs(by_medians - self.speedup) > ScalingLimits.MIN_DIFFERENCE * self.speedup


def scaling(baseline: Profile, run: Profile) -> Scaling:
    """Speedup and efficiency of a run against a baseline, and what the rest is lost to."""
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
    """Scaling of a run, or of its last steps; None = without a baseline, or the run has no complete steps."""
    profile = None if baseline is None or run is None else run.profile()
    return None if baseline is None or profile is None else scaling(baseline, profile)


def waited_for(costs: Mapping[int, float]) -> tuple[int, ...]:
    """The fewest ranks that caused most of the waiting, by their straggler costs in any unit; none if these are more
    than half of the ranks.
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
