"""Where a step's time went, one bar a rank; of many ranks the worst, a typical one, and the means of the hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.window import SYNC
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.digest import Digest

PARTS: Final = ("data", "forward", "backward", "optimizer", "other", "wire", "waiting", "sync")
"""Of a bar, in order. `sync` stands alone where wire and waiting cannot be told apart, or a rank has nobody to meet."""
MOST_BARS: Final = 32
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
        """Own work."""
        return sum(ns for part, ns in self.parts_ns.items() if part not in {"wire", "waiting", "sync"})


def rank_bars(digest: Digest) -> list[RankBar]:
    """Of all ranks in their order, or folded where there are more than a page should have."""
    phases_ns, waits_ns = digest.phases_ns(), digest.waits_ns()
    if len(digest.ranks) < 2:
        waits_ns = np.full_like(waits_ns, np.nan)
    rows = np.flatnonzero(np.isfinite(phases_ns[:, 0]))
    if len(rows) <= MOST_BARS:
        return [_bar(f"rank {digest.ranks[row]}", phases_ns[row], waits_ns[row]) for row in rows]
    self_ns = phases_ns.sum(axis=1) - phases_ns[:, SYNC]
    by_work = rows[np.argsort(-self_ns[rows], kind="stable")]
    worst, middle = by_work[:WORST_BARS], by_work[len(by_work) // 2]
    bars = [_bar(f"rank {digest.ranks[row]}", phases_ns[row], waits_ns[row]) for row in worst]
    bars.append(_bar(f"a typical one: rank {digest.ranks[middle]}", phases_ns[middle], waits_ns[middle]))
    return [*bars, *_host_bars(digest.hosts, rows, phases_ns, waits_ns)]


def _host_bars(
    hosts: Sequence[str], rows: NDArray[np.int64], phases_ns: NDArray[np.float64], waits_ns: NDArray[np.float64]
) -> list[RankBar]:
    """Those whose ranks work longest, in the mean."""
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
