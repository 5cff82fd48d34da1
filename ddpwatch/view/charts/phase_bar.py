"""Where a step's time goes, as bars: one step in glyphs for the terminal, mean steps of ranks for the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ddpwatch.core.metrics.window import SYNC
from ddpwatch.view.cells import Cell, Level
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.metrics.aggregate import RunAggregate
    from ddpwatch.core.metrics.live_metrics import RankFigures
    from ddpwatch.view.cells import Line


class Piece(NamedTuple):
    """One kind of time in the bar, with a glyph of its own, so that the bar reads without color."""

    name: str
    glyph: str
    level: Level


PIECES: Final = (
    Piece("data", "▚", Level.DATA),
    Piece("forward", "▓", Level.FORWARD),
    Piece("backward", "█", Level.BACKWARD),
    Piece("waiting", "░", Level.WAITING),
    Piece("wire", "▒", Level.WIRE),
    Piece("sync, not split", "▤", Level.WAITING),
    Piece("optimizer", "▞", Level.OPTIMIZER),
    Piece("other", "·", Level.OTHER),
)
"""In the order of a step. `sync` is split into waiting and wire, or shown unsplit where that is not possible."""
UNSPLIT: Final = PIECES[5]


def phase_bar(figures: RankFigures, full_ns: float, columns: int) -> Line:
    """A bar of exactly `columns`, which a step of `full_ns` fills."""
    # These are separate medians: a wait may slightly exceed the median sync.
    wait_ns = None if figures.wait_ns is None else min(figures.wait_ns, figures.sync_ns)
    times_ns = (
        figures.data_ns,
        figures.forward_ns,
        figures.backward_ns,
        wait_ns or 0.0,
        0.0 if wait_ns is None else figures.sync_ns - wait_ns,
        figures.sync_ns if wait_ns is None else 0.0,
        figures.optimizer_ns,
        figures.other_ns,
    )
    # For the same reason the phases may add up to more than the step: then the scale is larger.
    full_ns = max(full_ns, sum(times_ns), 1.0)
    lengths = _lengths([time_ns / full_ns * columns for time_ns in times_ns])
    bar = [Cell(piece.glyph * length, piece.level) for piece, length in zip(PIECES, lengths, strict=True) if length]
    return [*bar, Cell(" " * (columns - sum(lengths)))]


def legend(*, split: bool = True) -> Line:
    """The legend of the glyphs, with `sync` split into waiting and wire or not."""
    line: Line = []
    for piece in PIECES:
        if piece.name in ({UNSPLIT.name} if split else {"waiting", "wire"}):
            continue
        line += [Cell(piece.glyph, piece.level), Cell(f" {piece.name}  ", Level.DIM)]
    return line


def _lengths(exact: list[float]) -> list[int]:
    """Round to whole columns by the largest remainder method, which keeps the sum."""
    lengths = [int(value) for value in exact]
    spare = round(sum(exact)) - sum(lengths)
    by_remainder = sorted(range(len(exact)), key=lambda place: lengths[place] - exact[place])
    for place in by_remainder[:spare]:
        lengths[place] += 1
    return lengths


PARTS: Final = ("data", "forward", "backward", "optimizer", "other", "wire", "waiting", "sync")
"""Parts of a report bar, in order. `sync` replaces wire and waiting where they cannot be split."""
MAX_BARS: Final = 32
"""With more ranks than this, the report shows only the worst ones, the median one, and means of hosts."""
# Max. number of bars of the worst ranks, and of hosts, where not all ranks are shown.
WORST_BARS: Final = 8
HOST_BARS: Final = 12


@dataclass(frozen=True)
class RankBar:
    """The mean step of a rank, or of the ranks of a host."""

    label: str
    parts_ns: dict[str, float]

    @property
    def step_ns(self) -> float:
        """The whole step."""
        return sum(self.parts_ns.values())

    @property
    def self_ns(self) -> float:
        """Own work, without sync."""
        return sum(ns for part, ns in self.parts_ns.items() if part not in {"wire", "waiting", "sync"})


def rank_bars(aggregate: RunAggregate) -> list[RankBar]:
    """One bar per rank; with more than `MAX_BARS` ranks the worst, the median one, and means of hosts."""
    phases_ns, waits_ns = aggregate.phases_ns(), aggregate.waits_ns()
    if len(aggregate.ranks) < 2:
        waits_ns = np.full_like(waits_ns, np.nan)
    rows = np.flatnonzero(np.isfinite(phases_ns[:, 0]))
    if len(rows) <= MAX_BARS:
        return [_bar(f"rank {aggregate.ranks[row]}", phases_ns[row], waits_ns[row]) for row in rows]
    self_ns = phases_ns.sum(axis=1) - phases_ns[:, SYNC]
    by_work = rows[np.argsort(-self_ns[rows], kind="stable")]
    worst, median = by_work[:WORST_BARS], by_work[len(by_work) // 2]
    bars = [_bar(f"rank {aggregate.ranks[row]}", phases_ns[row], waits_ns[row]) for row in worst]
    bars.append(_bar(f"median: rank {aggregate.ranks[median]}", phases_ns[median], waits_ns[median]))
    return [*bars, *_host_bars(aggregate.hosts, rows, phases_ns, waits_ns)]


def _host_bars(
    hosts: Sequence[str], rows: NDArray[np.int64], phases_ns: NDArray[np.float64], waits_ns: NDArray[np.float64]
) -> list[RankBar]:
    """Means of the hosts whose ranks work longest."""
    of_host: dict[str, list[int]] = {}
    for row in rows.tolist():
        of_host.setdefault(hosts[row], []).append(row)
    if len(of_host) < 2:
        return []
    bars = [
        _bar(f"{host or '?'}, mean of {len(mine)}", phases_ns[mine].mean(axis=0), float(waits_ns[mine].mean()))
        for host, mine in of_host.items()
    ]
    return sorted(bars, key=lambda bar: -bar.self_ns)[:HOST_BARS]


def _bar(label: str, phases_ns: NDArray[np.float64], wait_ns: float) -> RankBar:
    parts_ns = {phase: float(ns) for phase, ns in zip(PHASES, phases_ns, strict=True) if phase != "sync"}
    sync_ns = float(phases_ns[SYNC])
    if np.isfinite(wait_ns):
        parts_ns |= {"wire": sync_ns - float(wait_ns), "waiting": float(wait_ns)}
    else:
        parts_ns["sync"] = sync_ns
    return RankBar(label, {part: parts_ns[part] for part in PARTS if part in parts_ns})
