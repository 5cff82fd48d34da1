"""All steps that were seen, added up: what is told of a run when it is over, in a size that does not grow with it.

A long run as one row a step: means over its ranks, in an amount of memory that does not grow with the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.limits import SummaryLimits, WindowLimits
from ddpwatch.core.metrics.histogram import MEDIAN, Spread
from ddpwatch.core.state.step_store import CAPACITY_STEPS
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.metrics.window import Window

    FloatArray = NDArray[np.float64]


class Tally:
    """Takes windows of aligned steps. One that comes again, because a history came late, counts once."""

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        """Of these ranks, ascending."""
        self.steps = 0
        """Steps that all ranks of the job have finished; others tell nothing of who waited for whom."""
        self._ranks = np.asarray(ranks, dtype=np.int64)
        self._counted = np.full(CAPACITY_STEPS, -1, dtype=np.int64)
        self._spread = Spread()
        self._straggler_cost_ns = np.zeros(len(ranks))
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
        self._straggler_cost_ns[np.searchsorted(self._ranks, window.ranks)] += window.straggler_cost_ns[:, new].sum(
            axis=1
        )
        self._spread.take(step_ns)
        samples = window.column("samples")[:, new]
        reported = (samples > 0).all(axis=0)
        self._samples += float(samples[:, reported].sum(dtype=np.float64))
        self._samples_ns += float(step_ns[reported].sum())

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
        return dict(
            zip(self._ranks.tolist(), (self._straggler_cost_ns / max(self._step_ns, 1.0)).tolist(), strict=True)
        )


MAX_ROWS: Final = 1 << 17
"""Of a longer run every second step is let go, picked by chance, and then again."""
PARTS: Final = ("data", "forward", "backward", "wire", "wait", "optimizer", "other")
"""What a step is made of: `sync` is split into wire and wait. They add up to the step."""
ROWS: Final = ("index", *PARTS, "samples")


class Ledger:
    """Takes the windows of a run in. Steps that not all ranks are known of are counted and left out."""

    def __init__(self, windows: Iterable[Window] = (), *, most_rows: int = MAX_ROWS) -> None:
        """Begin empty, or with these windows."""
        self.unproven = 0
        """Steps without all ranks: wire and waiting cannot be told apart in them."""
        self.seen = 0
        """Steps that were taken in, those that were let go again among them."""
        self.world_size = 0
        self._straggler_cost_ns: dict[int, float] = {}
        self._most = max(most_rows, 2)
        self._keep = 1.0
        self._chance = np.random.default_rng(0)
        self._chunks: list[FloatArray] = []
        self._rows = 0
        for window in windows:
            self.add(window)

    def add(self, window: Window) -> None:
        """Take a window in."""
        if not window.complete:
            self.unproven += len(window)
            return
        self.seen += len(window)
        self.world_size = window.world_size
        capped_ns = np.minimum(window.straggler_cost_ns, SummaryLimits.MAX_STEP_COST_SHARE * window.median_step_ns)
        for rank, straggler_cost_ns in zip(window.ranks, capped_ns.sum(axis=1).tolist(), strict=True):
            self._straggler_cost_ns[rank] = self._straggler_cost_ns.get(rank, 0.0) + straggler_cost_ns
        rows = _rows(window)
        if self._keep < 1.0:
            rows = rows[:, self._chance.random(rows.shape[1]) < self._keep]
        self._chunks.append(rows)
        self._rows += rows.shape[1]
        while self._rows > self._most:
            kept = self._table()
            kept = kept[:, self._chance.random(kept.shape[1]) < 0.5]
            self._chunks, self._rows, self._keep = [kept], kept.shape[1], self._keep / 2

    def passing(self, windows: Iterable[Window]) -> Iterator[Window]:
        """Take windows in on their way to somebody else."""
        for window in windows:
            self.add(window)
            yield window

    @property
    def straggler_costs(self) -> dict[int, float]:
        """By rank, its part of all the time that ranks have kept others waiting; empty = nobody has."""
        total_ns = sum(self._straggler_cost_ns.values())
        return {rank: ns / total_ns for rank, ns in self._straggler_cost_ns.items()} if total_ns > 0 else {}

    def steps(self) -> dict[str, FloatArray]:
        """The rows by name, in the order of steps, without those of warming up if there are enough others; never with
        step 0, which no figure of a run holds.
        """
        table = self._table()
        warm = table[0] >= SummaryLimits.WARMUP_STEPS
        kept = warm if warm.sum() >= WindowLimits.MIN_STEPS else table[0] > 0
        return dict(zip(ROWS, table[:, kept], strict=True))

    def _table(self) -> FloatArray:
        if not self._chunks:
            return np.empty((len(ROWS), 0))
        if len(self._chunks) > 1:
            self._chunks = [np.concatenate(self._chunks, axis=1)]
        return self._chunks[0]


def _rows(window: Window) -> FloatArray:
    """Means over ranks; samples are of all ranks together, nan where a rank could not tell."""
    phases_ns = dict(zip(PHASES, window.phases_ns.mean(axis=0), strict=True))
    parts_ns = {**phases_ns, "wire": window.wire_ns.astype(np.float64), "wait": window.wait_ns.mean(axis=0)}
    samples = window.column("samples").astype(np.float64)
    reported = np.where((samples > 0).all(axis=0), samples.sum(axis=0), np.nan)
    return np.stack([window.indices.astype(np.float64), *(parts_ns[name] for name in PARTS), reported])
