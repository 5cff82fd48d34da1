"""How well a job uses its ranks: against a run of one process, and where the part that is lost went.

What a sample costs is the time of one rank for it: ranks x step / batch. The efficiency is what it cost in the baseline
over what it costs in the run. Each part of a step costs so much of that time in either; the differences, as parts of
the run's time, add up to what is lost. A negative one is a gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.ledger import PARTS, Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpwatch.core.figures import Figures
    from ddpwatch.core.window import Window

LOSSES: Final = ("wire", "waiting", "data", "compute")
"""What efficiency is lost to; `compute` is forward, backward, optimizer and other."""
MOSTLY: Final = 0.75
"""Ranks are named that together caused this part of the waiting, if they are at most half of all ranks."""
WORTH_BLAMING: Final = 0.01
"""Nobody is named for waiting below this part of the step."""


@dataclass(frozen=True)
class Profile:
    """A run boiled down. Times are of one step and one rank; the parts add up to the step."""

    world_size: int
    steps: int
    """How many steps it stands on."""
    step_ns: float
    samples_per_s: float | None
    """Of all ranks together; None = the batch size could not be told."""
    effective_batch: float | None
    data_ns: float
    compute_ns: float
    wire_ns: float
    wait_ns: float
    waited_for: tuple[int, ...] = ()
    """Ranks that most of the waiting was for; empty = none stands out, or there is hardly any."""

    @property
    def shares(self) -> dict[str, float]:
        """The parts of a step by their names in `LOSSES`; together 1."""
        parts_ns = (self.wire_ns, self.wait_ns, self.data_ns, self.compute_ns)
        return {name: part_ns / self.step_ns for name, part_ns in zip(LOSSES, parts_ns, strict=True)}


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
    step_ns = max(float(np.median(whole_ns)), 1.0)
    told = np.isfinite(steps["samples"]) & (whole_ns > 0)
    samples, seconds = steps["samples"][told], whole_ns[told] / 1e9
    parts_ns = {name: float(np.median(steps[name])) for name in PARTS}
    return _profile(
        ledger.world_size,
        len(whole_ns),
        step_ns,
        parts_ns,
        samples_per_s=float(np.median(samples / seconds)) if len(samples) else None,
        effective_batch=float(np.median(samples)) if len(samples) else None,
        imposed=ledger.imposed,
    )


def profile_of_windows(windows: Iterable[Window]) -> Profile | None:
    """The run of these windows, without its first steps; None = no step in them that all ranks have finished."""
    return profile_of(Ledger(windows))


def profile_of_figures(figures: Figures | None, world_size: int) -> Profile | None:
    """The run as it is now; None = not all ranks are in its figures, or there are none."""
    if figures is None or figures.wire_share is None or not figures.complete:
        return None
    ranks = figures.ranks.values()
    step_ns = max(figures.step_ns, 1.0)
    data_ns = sum(rank.data_ns for rank in ranks) / max(len(ranks), 1)
    wire_ns, wait_ns = figures.wire_share * step_ns, (figures.share - figures.wire_share) * step_ns
    imposed = {rank.rank: rank.imposed_share or 0.0 for rank in ranks}
    together = sum(imposed.values())
    return _profile(
        world_size,
        figures.steps,
        step_ns,
        {"data": data_ns, "wire": wire_ns, "wait": wait_ns, "other": max(step_ns - data_ns - wire_ns - wait_ns, 0.0)},
        samples_per_s=figures.samples_per_s,
        effective_batch=figures.effective_batch,
        imposed={rank: share / together for rank, share in imposed.items()} if together > 0 else {},
    )


def scaling_of(baseline: Profile | None, figures: Figures | None, world_size: int) -> Scaling | None:
    """The run as it is now against a baseline; None = there is none, or nothing can be said yet."""
    run = None if baseline is None else profile_of_figures(figures, world_size)
    return None if baseline is None or run is None else scaling(baseline, run)


def _profile(
    world_size: int,
    steps: int,
    step_ns: float,
    parts_ns: Mapping[str, float],
    *,
    samples_per_s: float | None,
    effective_batch: float | None,
    imposed: Mapping[int, float],
) -> Profile:
    """Medians do not add up exactly: the parts are stretched so that they do."""
    total_ns = sum(parts_ns.values())
    stretch = step_ns / total_ns if total_ns > 0 else 0.0
    data_ns, wire_ns, wait_ns = (parts_ns[name] * stretch for name in ("data", "wire", "wait"))
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
        waited_for=waited_for(imposed) if wait_ns >= WORTH_BLAMING * step_ns else (),
    )


def waited_for(imposed: Mapping[int, float]) -> tuple[int, ...]:
    """The fewest ranks that caused most of the waiting, by the part that each has; none, if it takes more than half of
    them.
    """
    named: list[int] = []
    caused = 0.0
    for rank in sorted(imposed, key=lambda rank: -imposed[rank]):
        if caused >= MOSTLY:
            break
        named.append(rank)
        caused += imposed[rank]
    return tuple(sorted(named)) if caused >= MOSTLY and len(named) <= len(imposed) // 2 else ()
