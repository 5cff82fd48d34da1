"""Time at each sync point of a step: DDP's own two, and the collectives that the script calls, by call site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.metrics.window import POINT_COLUMNS, SYNC_PATH
from ddpwatch.wire import MAX_PATHS, PHASES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.run import RunState

GRADIENTS: Final = "gradient all-reduce"
BUFFERS: Final = "buffer broadcast"
DDP: Final = "DDP"
FURTHER: Final = "further collectives"
"""Those of a step beyond the ones that are measured one by one."""
UNMATCHED: Final = "collectives that not all ranks call"
UNKNOWN: Final = "collectives"
"""Those whose names are not known: their description did not arrive."""
EVERY_STEP: Final = 0.95
"""A sync point that this fraction of the steps pass is one of every step."""
SUMS: Final = 4
TIME, WAIT, STEPS, SPLIT = range(SUMS)
"""Rows of sums: time in the sync point, waiting, steps that pass it, and steps in which waiting is known."""


@dataclass(frozen=True)
class SyncPointFigures:
    """A sync point over some steps. Times are means over ranks."""

    op: str
    place: str
    """Call site as `train.py:88`, or what calls it: `DDP`, `FSDP` and the like; empty = several."""
    phase: str
    """The phase that it interrupts; empty = several, or DDP's own."""
    share: float
    """Fraction of the time of all steps."""
    wait_share: float | None
    """The part of it that is waiting for slower ranks; None = not known."""
    steps_share: float
    """Fraction of the steps that pass it."""
    mean_ns: float
    """Time in a step that passes it."""

    @property
    def wire_share(self) -> float | None:
        """The part of the share that is the network; None = not known."""
        return None if self.wait_share is None else max(self.share - self.wait_share, 0.0)

    @property
    def label(self) -> str:
        """Operation and call site."""
        return f"{self.op}, {self.place}" if self.place else self.op

    @property
    def of_script(self) -> bool:
        """Whether it is one call of the script."""
        return ":" in self.place


class SyncPointSums:
    """Sums over steps of the time at each sync point."""

    def __init__(self) -> None:
        self._steps = 0
        self._own = np.zeros((2, SUMS))
        """(point, sum) of DDP's own."""
        self._by_path: dict[int, NDArray[np.float64]] = {}
        """(sum, point) by `Step.sync_path`."""
        self._unmatched = np.zeros(SUMS)

    def add(self, window: Window) -> None:
        """Add the steps of a window with all ranks, each once."""
        self._steps += len(window)
        presync_ns, after_ns = window.column("presync_ns"), window.after_backward_ns
        self._own += [
            _sums(presync_ns, window.presync_wait_ns),
            _sums(after_ns, after_ns - after_ns.min(axis=0)),
        ]
        if SYNC_PATH not in window.columns:
            return
        paths = window.column(SYNC_PATH)
        same = (paths == paths[:1]).all(axis=0)
        points_ns = window.script_points_ns
        for path in np.unique(paths[0, same]).tolist():
            if not path or (path not in self._by_path and len(self._by_path) >= MAX_PATHS):
                continue
            here = same & (paths[0] == path)
            sums = self._by_path.setdefault(path, np.zeros((SUMS, len(POINT_COLUMNS))))
            for number in range(len(POINT_COLUMNS)):
                point_ns = points_ns[number][:, here]
                split = bool(path >> number & 1)
                wait_ns = point_ns - point_ns.min(axis=0) if split else np.zeros_like(point_ns)
                sums[:, number] += _sums(point_ns, wait_ns, split=split)
        if not same.all():
            rest_ns = points_ns[:, :, ~same].sum(axis=0)
            self._unmatched += _sums(rest_ns, np.zeros_like(rest_ns), split=False)

    def figures(self, state: RunState, total_ns: float) -> list[SyncPointFigures]:
        """The sync points that take any time, the longest first. `total_ns` is the time of all these steps."""
        sums: dict[tuple[str, str, str], NDArray[np.float64]] = {}
        for name, found in self._named(state):
            sums[name] = sums.get(name, 0.0) + found
        points = []
        for (op, place, phase), found in sums.items():
            if found[TIME] <= 0:
                continue
            points.append(
                SyncPointFigures(
                    op,
                    place,
                    phase,
                    share=float(found[TIME]) / max(total_ns, 1.0),
                    wait_share=float(found[WAIT]) / max(total_ns, 1.0) if found[SPLIT] else None,
                    steps_share=min(float(found[STEPS]) / max(self._steps, 1), 1.0),
                    mean_ns=float(found[TIME]) / max(float(found[STEPS]), 1.0),
                )
            )
        return sorted(points, key=lambda point: -point.share)

    def _named(self, state: RunState) -> Iterator[tuple[tuple[str, str, str], NDArray[np.float64]]]:
        yield (BUFFERS, DDP, ""), self._own[0]
        yield (GRADIENTS, DDP, ""), self._own[1]
        yield (UNMATCHED, "", ""), self._unmatched
        for path, found in self._by_path.items():
            described = state.sync_path(path)
            points = described.points if described is not None else []
            names = [(point.op, point.place, PHASES[point.phase]) for point in points]
            names += [(FURTHER if points else UNKNOWN, "", "")] * (len(POINT_COLUMNS) - len(points))
            for name in dict.fromkeys(names):
                same = found[:, [number for number, other in enumerate(names) if other == name]]
                # Times add up, and a step that passes the same place twice is one step.
                yield name, np.concatenate([same[[TIME, WAIT]].sum(axis=1), same[[STEPS, SPLIT]].max(axis=1)])


def _sums(time_ns: NDArray[np.int64], wait_ns: NDArray[np.int64], *, split: bool = True) -> NDArray[np.float64]:
    passed = int(np.count_nonzero(time_ns.any(axis=0)))
    time, wait = (float(each.mean(axis=0).sum()) if each.size else 0.0 for each in (time_ns, wait_ns))
    return np.array([time, wait, passed, passed if split else 0.0])
