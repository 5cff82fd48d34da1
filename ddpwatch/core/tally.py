"""All steps that were seen, added up: what is told of a run when it is over, in a size that does not grow with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ddpwatch.core.ring import CAPACITY_STEPS
from ddpwatch.core.spread import MEDIAN, Spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.window import Window


class Tally:
    """Takes windows of aligned steps. One that comes again, because a history came late, counts once."""

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        """Of these ranks, ascending."""
        self.steps = 0
        """Steps that all ranks of the job have finished; others tell nothing of who waited for whom."""
        self._ranks = np.asarray(ranks, dtype=np.int64)
        self._counted = np.full(CAPACITY_STEPS, -1, dtype=np.int64)
        self._spread = Spread()
        self._imposed_ns = np.zeros(len(ranks))
        self._step_ns = self._sync_ns = self._wire_ns = self._data_ns = self._samples_ns = 0.0
        self._samples = 0.0

    def take(self, window: Window) -> None:
        """Count those of the steps that are new."""
        slots = window.indices % CAPACITY_STEPS
        new = self._counted[slots] != window.indices
        if not window.complete or not new.any():
            return
        self._counted[slots] = window.indices
        step_ns = window.step_ns.mean(axis=0)[new]
        self.steps += int(new.sum())
        self._step_ns += float(step_ns.sum())
        self._sync_ns += float(window.column("sync_ns").mean(axis=0)[new].sum())
        self._data_ns += float(window.column("data_ns").mean(axis=0)[new].sum())
        self._wire_ns += float(window.wire_ns[new].sum(dtype=np.float64))
        self._imposed_ns[np.searchsorted(self._ranks, window.ranks)] += window.imposed_ns[:, new].sum(axis=1)
        self._spread.take(step_ns)
        samples = window.column("samples")[:, new]
        told = (samples > 0).all(axis=0)
        self._samples += float(samples[:, told].sum(dtype=np.float64))
        self._samples_ns += float(step_ns[told].sum())

    @property
    def step_ns(self) -> float | None:
        """Median; None = there are no steps."""
        return self._spread.quantile(MEDIAN)

    @property
    def mean_step_ns(self) -> float:
        """Of the steps that were seen; 0 = there are none."""
        return self._step_ns / max(self.steps, 1)

    @property
    def share(self) -> float:
        """Of the steps' time, what the all-reduce took."""
        return self._sync_ns / max(self._step_ns, 1.0)

    @property
    def wire_share(self) -> float:
        """Of the same, what was the wire."""
        return self._wire_ns / max(self._step_ns, 1.0)

    @property
    def data_share(self) -> float:
        """Of the same, what was spent waiting for data."""
        return self._data_ns / max(self._step_ns, 1.0)

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks; None = no step told its samples."""
        return self._samples * 1e9 / self._samples_ns if self._samples_ns else None

    def costs(self) -> dict[int, float]:
        """By rank, what it has cost the job, as part of the steps' time."""
        return dict(zip(self._ranks.tolist(), (self._imposed_ns / max(self._step_ns, 1.0)).tolist(), strict=True))
