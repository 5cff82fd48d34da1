"""A whole run in some figures, each of one meaning: a report and an export tell the same under the same name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.scaling import WORTH_BLAMING, profile, waited_for
from ddpwatch.core.spread import MEDIAN
from ddpwatch.core.window import SYNC
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from ddpwatch.core.digest import Digest
    from ddpwatch.core.scaling import Profile
    from ddpwatch.core.standstills import Standstill

P99: Final = 0.99


@dataclass(frozen=True)
class Overall:
    """Of the steps that were measured: all that all ranks have finished, but for the first one and unusual ones."""

    steps: int
    first_step: int | None
    last_step: int | None
    step_ns: float | None
    """Median; a step counts as the mean of its ranks."""
    step_p99_ns: float | None
    samples_per_s: float | None
    """Of all ranks: all samples over all the time that they took."""
    effective_batch: int | None
    """Samples of all ranks in most of the steps."""
    share: float | None
    wire_share: float | None
    wait_share: float | None
    """All-reduce, and of it wire and waiting: total time over total time. None for one rank: it has nobody to meet."""
    mean_parts_ns: dict[str, float]
    """Means over steps and ranks, which add up to the mean step; `sync` where it cannot be split, and of one rank.
    Empty = no steps."""
    waited_for: tuple[int, ...]
    """Ranks that most of the waiting was for; empty = none stands out, or there is hardly any."""
    still: Standstill | None
    """The steps in which the job stood still; None = it never did."""


def overall(digest: Digest) -> Overall:
    """The figures of a digest."""
    share, wire, wait = digest.shares() if len(digest.ranks) > 1 else (None, None, None)
    return Overall(
        steps=digest.steps,
        first_step=digest.first_step,
        last_step=digest.last_step,
        step_ns=digest.step_ns(MEDIAN),
        step_p99_ns=digest.step_ns(P99),
        samples_per_s=digest.samples_per_s,
        effective_batch=digest.effective_batch,
        share=share,
        wire_share=wire,
        wait_share=wait,
        mean_parts_ns=_mean_parts_ns(digest),
        waited_for=waited_for(imposed_parts(digest)) if (wait or 0.0) >= WORTH_BLAMING else (),
        still=digest.standstill(),
    )


def profile_of_digest(digest: Digest) -> Profile | None:
    """A whole run for scaling, by the figures that are told of it; None = wire and waiting cannot be told apart."""
    figures = overall(digest)
    # Of one rank, too: what others spend there beyond that is what they have lost by being several.
    _, wire, wait = digest.shares()
    if wire is None or wait is None or not figures.mean_parts_ns:
        return None
    step_ns = sum(figures.mean_parts_ns.values())
    data = figures.mean_parts_ns["data"] / max(step_ns, 1.0)
    return profile(
        len(digest.ranks),
        figures.steps,
        step_ns,
        {"wire": wire, "waiting": wait, "data": data},
        samples_per_s=figures.samples_per_s,
        effective_batch=figures.effective_batch,
        imposed=imposed_parts(digest),
        median_ns=figures.step_ns,
        p99_ns=figures.step_p99_ns,
    )


def imposed_parts(digest: Digest) -> dict[int, float]:
    """By rank, its part of what ranks have kept others waiting for; empty = nobody has."""
    imposed = {cost.who: cost.share for cost in digest.costs() if isinstance(cost.who, int)}
    together = sum(imposed.values())
    return {rank: imposed.get(rank, 0.0) / together for rank in digest.ranks} if together > 0 else {}


def _mean_parts_ns(digest: Digest) -> dict[str, float]:
    phases_ns, waits_ns = digest.phases_ns(), digest.waits_ns()
    known = np.isfinite(phases_ns[:, 0])
    if not known.any():
        return {}
    parts_ns = dict(zip(PHASES, phases_ns[known].mean(axis=0).tolist(), strict=True))
    if len(digest.ranks) > 1 and np.isfinite(waits_ns[known]).all():
        wait_ns = float(waits_ns[known].mean())
        sync_ns = parts_ns.pop(PHASES[SYNC])
        parts_ns |= {"wire": sync_ns - wait_ns, "wait": wait_ns}
    return parts_ns
