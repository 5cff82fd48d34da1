"""How well a job uses its ranks: against a run of one process, and where the part that is lost went.

What a sample costs is the time of one rank for it: ranks x step / batch. The efficiency is what it cost in the baseline
over what it costs in the run. Each part of a step costs so much of that time in either; the differences, as parts of
the run's time, add up to what is lost. A negative one is a gain. All of it is total time over total time, as shares of
a run are: medians of parts do not add up. What speed-up medians come to is told beside it where it is another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.limits import ScalingLimits
from ddpwatch.core.metrics.tally import PARTS, Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpwatch.core.metrics.figures import Figures
    from ddpwatch.core.metrics.tally import Tally
    from ddpwatch.core.metrics.window import Window

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
    """Of the single steps; None = not looked at."""

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


def profile_of(ledger: Ledger) -> Profile | None:
    """The run of a ledger; None = it has no step that all ranks have finished."""
    steps = ledger.steps()
    whole_ns = np.sum([steps[name] for name in PARTS], axis=0)
    if not len(whole_ns) or not whole_ns.any():
        return None
    step_ns = float(whole_ns.mean())
    reported = np.isfinite(steps["samples"]) & (whole_ns > 0)
    samples, seconds = steps["samples"][reported], whole_ns[reported] / 1e9
    data, wire, wait = (float(steps[name].mean()) / step_ns for name in ("data", "wire", "wait"))
    return profile(
        ledger.world_size,
        len(whole_ns),
        step_ns,
        {"wire": wire, "waiting": wait, "data": data},
        samples_per_s=float(samples.sum() / seconds.sum()) if len(samples) else None,
        effective_batch=float(np.median(samples)) if len(samples) else None,
        straggler_costs=ledger.straggler_costs,
    )


def profile_of_windows(windows: Iterable[Window]) -> Profile | None:
    """The run of these windows, without its first steps; None = no step in them that all ranks have finished."""
    return profile_of(Ledger(windows))


def profile_of_figures(figures: Figures | None, world_size: int) -> Profile | None:
    """The run as it is now; None = not all ranks are in its figures, or there are none."""
    if figures is None or figures.wire_share is None or figures.wait_share is None or not figures.complete:
        return None
    return profile(
        world_size,
        figures.steps,
        figures.mean_step_ns,
        {"wire": figures.wire_share, "waiting": figures.wait_share, "data": figures.data_share},
        samples_per_s=figures.mean_samples_per_s,
        effective_batch=figures.effective_batch,
        straggler_costs=_parts({rank.rank: rank.straggler_cost_share or 0.0 for rank in figures.ranks.values()}),
        median_ns=figures.step_ns,
    )


def profile_of_tally(tally: Tally, world_size: int) -> Profile | None:
    """All steps of a run that were seen; None = there are none that all ranks have finished."""
    if not tally.steps:
        return None
    return profile(
        world_size,
        tally.steps,
        tally.mean_step_ns,
        {"wire": tally.wire_share, "waiting": tally.share - tally.wire_share, "data": tally.data_share},
        samples_per_s=tally.samples_per_s,
        effective_batch=None,
        straggler_costs=_parts(tally.costs()),
        median_ns=tally.step_ns,
    )


def scaling_of(baseline: Profile | None, figures: Figures | None, world_size: int) -> Scaling | None:
    """The run as it is now against a baseline; None = there is none, or nothing can be said yet."""
    run = None if baseline is None else profile_of_figures(figures, world_size)
    return None if baseline is None or run is None else scaling(baseline, run)


def scaling_of_all(baseline: Profile | None, tally: Tally, world_size: int) -> Scaling | None:
    """All steps that were seen against a baseline; None = there is none, or nothing can be said."""
    run = None if baseline is None else profile_of_tally(tally, world_size)
    return None if baseline is None or run is None else scaling(baseline, run)


def profile(
    world_size: int,
    steps: int,
    step_ns: float,
    shares: Mapping[str, float],
    *,
    samples_per_s: float | None,
    effective_batch: float | None,
    straggler_costs: Mapping[int, float],
    median_ns: float | None = None,
    p99_ns: float | None = None,
) -> Profile:
    """Of the shares of a step that are not compute, by their names in `LOSSES`."""
    step_ns = max(step_ns, 1.0)
    wire_ns, wait_ns, data_ns = (shares[name] * step_ns for name in LOSSES[:3])
    return Profile(
        world_size=world_size,
        steps=steps,
        step_ns=step_ns,
        samples_per_s=samples_per_s,
        effective_batch=effective_batch,
        data_ns=data_ns,
        compute_ns=step_ns - data_ns - wire_ns - wait_ns,
        wire_ns=wire_ns,
        wait_ns=wait_ns,
        waited_for=waited_for(straggler_costs) if shares["waiting"] >= ScalingLimits.MIN_WAIT_SHARE else (),
        median_ns=median_ns,
        p99_ns=p99_ns,
    )


def _parts(straggler_costs: Mapping[int, float]) -> dict[int, float]:
    """Of what ranks have kept others waiting for, the part of each; empty = nobody has."""
    together = sum(straggler_costs.values())
    return {rank: share / together for rank, share in straggler_costs.items()} if together > 0 else {}


def waited_for(straggler_costs: Mapping[int, float]) -> tuple[int, ...]:
    """The fewest ranks that caused most of the waiting, by the part that each has; none, if it takes more than half of
    them.
    """
    named: list[int] = []
    caused = 0.0
    for rank in sorted(straggler_costs, key=lambda rank: -straggler_costs[rank]):
        if caused >= ScalingLimits.WAITED_FOR_SHARE:
            break
        named.append(rank)
        caused += straggler_costs[rank]
    few = len(named) <= len(straggler_costs) // 2
    return tuple(sorted(named)) if few and caused >= ScalingLimits.WAITED_FOR_SHARE else ()
