"""Rotation: whether the last rank to arrive changes from step to step, and how far own work follows input size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddpwatch.core.limits import UnevenWorkLimits
from ddpwatch.core.metrics.scaling import waited_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.core.metrics.window import Window


@dataclass(frozen=True)
class Rotation:
    """Waiting for a slowest rank that is another one in each step."""

    wait: float
    """Waiting as a fraction of the step."""
    changes: float
    """Fraction of steps whose last rank to arrive is not that of the step before."""


def rotation(window: Window) -> Rotation | None:
    """The rotation in a window; None = a rank is waited for most, the same one for many steps, or too few steps.

    Changes are compared with those of independent steps, as in a runs test: slow episodes of one rank after another,
    as CPU starvation causes them, change the last rank far less often.
    """
    if len(window.ranks) < 2 or len(window) < UnevenWorkLimits.MIN_STEPS:
        return None
    cost_ns = window.straggler_cost_ns
    by_rank_ns = cost_ns.sum(axis=1, dtype=np.float64)
    if waited_for(dict(zip(window.ranks, by_rank_ns.tolist(), strict=True))):
        return None
    last = cost_ns.argmax(axis=0)
    changes = float(np.mean(last[1:] != last[:-1]))
    shares = np.bincount(last) / len(last)
    if changes < UnevenWorkLimits.MIN_CHANGES * (1.0 - float(np.square(shares).sum())):
        return None
    return Rotation(float(window.job_wait_ns.sum()) / max(float(window.job_step_ns.sum()), 1.0), changes)


def explained_by(sizes: NDArray[np.int64], self_ns: NDArray[np.int64]) -> float | None:
    """Fraction of the variance of own work between ranks, within steps, that a size explains (squared correlation).

    None = the sizes are not known, or do not differ within steps.
    """
    known = (sizes > 0).all(axis=0)
    size = sizes[:, known].astype(np.float64)
    work_ns = self_ns[:, known].astype(np.float64)
    if not known.any() or (size == size[:1]).all():
        return None
    size -= size.mean(axis=0)
    work_ns -= work_ns.mean(axis=0)
    covariance, variances = float((size * work_ns).sum()), float((size**2).sum() * (work_ns**2).sum())
    return covariance**2 / variances if covariance > 0.0 else 0.0
