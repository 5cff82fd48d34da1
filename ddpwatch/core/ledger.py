"""A long run as one row a step: means over its ranks, in an amount of memory that does not grow with the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.window import ENOUGH_STEPS
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from ddpwatch.core.window import Window

    FloatArray = NDArray[np.float64]

MOST_ROWS: Final = 1 << 17
"""Of a longer run every second step is let go, picked by chance, and then again."""
WARM_UP_STEPS: Final = 10
"""The first steps of a run are left out: they hold compiling, caches and bucket building."""
ODD: Final = 0.1
"""In one step nobody is held to have kept others waiting for more than this part of it: some odd steps blame nobody."""
PARTS: Final = ("data", "forward", "backward", "wire", "wait", "optimizer", "other")
"""What a step is made of: `sync` is split into wire and wait. They add up to the step."""
ROWS: Final = ("index", *PARTS, "samples")


class Ledger:
    """Takes the windows of a run in. Steps that not all ranks are known of are counted and left out."""

    def __init__(self, windows: Iterable[Window] = (), *, most_rows: int = MOST_ROWS) -> None:
        """Begin empty, or with these windows."""
        self.unproven = 0
        """Steps without all ranks: wire and waiting cannot be told apart in them."""
        self.seen = 0
        """Steps that were taken in, those that were let go again among them."""
        self.world_size = 0
        self._imposed_ns: dict[int, float] = {}
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
        capped_ns = np.minimum(window.imposed_ns, ODD * window.usual_step_ns)
        for rank, imposed_ns in zip(window.ranks, capped_ns.sum(axis=1).tolist(), strict=True):
            self._imposed_ns[rank] = self._imposed_ns.get(rank, 0.0) + imposed_ns
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
    def imposed(self) -> dict[int, float]:
        """By rank, its part of all the time that ranks have kept others waiting; empty = nobody has."""
        total_ns = sum(self._imposed_ns.values())
        return {rank: ns / total_ns for rank, ns in self._imposed_ns.items()} if total_ns > 0 else {}

    def steps(self) -> dict[str, FloatArray]:
        """The rows by name, in the order of steps, without those of warming up if there are enough others; never with
        step 0, which no figure of a run holds.
        """
        table = self._table()
        warm = table[0] >= WARM_UP_STEPS
        kept = warm if warm.sum() >= ENOUGH_STEPS else table[0] > 0
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
    told = np.where((samples > 0).all(axis=0), samples.sum(axis=0), np.nan)
    return np.stack([window.indices.astype(np.float64), *(parts_ns[name] for name in PARTS), told])
