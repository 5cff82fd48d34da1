"""Steps of several ranks side by side, aligned by step index: what the figures and the rules look at.

Clocks of different hosts are never compared. In synchronous training all ranks take the same time for a step; one
whose steps do not fit that by far, or who counts other steps than everybody else, is left out and named.

The middle of many values. Rows of some dozens, thousands of them: sorted whole they are done sooner than picked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from ddpwatch.core.limits import WindowLimits
from ddpwatch.core.state.step_store import CAPACITY_STEPS, COLUMNS
from ddpwatch.wire import EVALUATED, PAUSED, PHASES, SKIPPED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.core.state.step_store import IntArray

WINDOW_STEPS: Final = 50
"""Figures are over at most this many of the latest aligned steps."""
MAX_ASKED: Final = 256
"""So many ranks tell what is usual."""
UNUSUAL: Final = SKIPPED | PAUSED | EVALUATED
FIRST_PHASE: Final = f"{PHASES[0]}_ns"
"""The phases stand together in the table, in their order."""
SYNC: Final = PHASES.index("sync")
NOT_KNOWN: Final = 255
"""In arrays of `excess_percent`: the rank has no such step."""
NumberT = TypeVar("NumberT", bound=np.generic)
BY_STEP: Final = (
    "phases_ns", "step_ns", "self_ns", "wire_ns", "wait_ns", "straggler_cost_ns", "median_self_ns", "excess_ns",
    "excess_percent", "job_step_ns", "job_sync_ns", "samples",
)  # fmt: skip
"""Of a window, what each step has whatever the others are."""


@dataclass(frozen=True)
class Window:
    """Some aligned steps of some ranks. Arrays are (rank, step), or (rank, phase, step)."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    indices: IntArray
    table: IntArray
    """(rank, column, step)."""
    world_size: int
    implausible: tuple[int, ...] = ()
    """Ranks that were left out because their numbers cannot be true."""
    columns: Sequence[str] = COLUMNS
    """Those in the table."""

    def __len__(self) -> int:
        """Steps."""
        return len(self.indices)

    @property
    def complete(self) -> bool:
        """Whether all ranks of the world are in it."""
        return len(self.ranks) == self.world_size

    @property
    def one_host(self) -> bool:
        """Whether all of the ranks are known to share a host: then no network is between them."""
        return len(set(self.hosts)) == 1 and bool(self.hosts[0])

    def column(self, name: str) -> IntArray:
        """One number of every step of every rank."""
        column: IntArray = self.table[:, self.columns.index(name)]
        return column

    @cached_property
    def phases_ns(self) -> IntArray:
        """The six phases, in the order of `PHASES`."""
        first = self.columns.index(FIRST_PHASE)
        phases: IntArray = self.table[:, first : first + len(PHASES)]
        return phases

    @cached_property
    def step_ns(self) -> IntArray:
        """Whole steps."""
        steps: IntArray = self.phases_ns.sum(axis=1)
        return steps

    @cached_property
    def median_step_ns(self) -> float:
        """The median of all steps of all ranks; where there are very many, of some."""
        return float(np.median(sampled_ranks(self.step_ns)))

    @cached_property
    def self_ns(self) -> IntArray:
        """Own work: the step without `sync`."""
        return self.step_ns - self.phases_ns[:, SYNC]

    @cached_property
    def sync_points_ns(self) -> tuple[IntArray, IntArray]:
        """Sync at the two meetings of a step: before the forward pass, and after backward."""
        presync_ns = self.column("presync_ns")
        return presync_ns, self.phases_ns[:, SYNC] - presync_ns

    @cached_property
    def wire_ns(self) -> IntArray:
        """What the network cost in each step: at each meeting even the last to arrive spends so much."""
        before, after = self.sync_points_ns
        wire_ns: IntArray = before.min(axis=0) + after.min(axis=0)
        return wire_ns

    @cached_property
    def wait_ns(self) -> IntArray:
        """What each rank spent waiting for slower ones. Wire and waiting add up to sync exactly."""
        return self.phases_ns[:, SYNC] - self.wire_ns

    @cached_property
    def job_step_ns(self) -> NDArray[np.float64]:
        """(step): the length of each step, as the mean of its ranks."""
        step_ns: NDArray[np.float64] = self.step_ns.mean(axis=0)
        return step_ns

    @cached_property
    def job_sync_ns(self) -> NDArray[np.float64]:
        """(step): the all-reduce, as the mean of its ranks."""
        sync_ns: NDArray[np.float64] = self.phases_ns[:, SYNC].mean(axis=0)
        return sync_ns

    @property
    def job_wait_ns(self) -> NDArray[np.float64]:
        """(step): waiting, as the mean of its ranks."""
        return self.job_sync_ns - self.wire_ns

    @cached_property
    def samples(self) -> NDArray[np.float64]:
        """(step): samples of all ranks together; nan where one of them did not report any."""
        samples = self.column("samples")
        # As floats: what thousands of hostile ranks claim does not fit an integer.
        total: NDArray[np.float64] = samples.sum(axis=0, dtype=np.float64)
        return np.where((samples > 0).all(axis=0), total, np.nan)

    @property
    def samples_per_s(self) -> NDArray[np.float64]:
        """(step): throughput of the job; nan where it was not reported."""
        return self.samples * 1e9 / np.maximum(self.job_step_ns, 1.0)

    @cached_property
    def straggler_cost_ns(self) -> IntArray:
        """Straggler cost: what the job would have saved in each step, had this rank been as fast as the next-slowest.

        At each sync point the last to arrive is the one that waits least; it has kept even the next one waiting for
        the difference.
        """
        cost_ns = np.zeros_like(self.step_ns)
        if len(self.ranks) < 2:
            return cost_ns
        for sync_ns in self.sync_points_ns:
            add_straggler_cost(cost_ns, sync_ns)
        # Two ranks, late at one sync point each, may claim the same time: together they cost at most the step.
        claimed_ns, step_ns = cost_ns.sum(axis=0), self.step_ns.min(axis=0)
        if (claimed_ns <= step_ns).all():
            return cost_ns
        scaled_ns: IntArray = np.floor(cost_ns * np.minimum(1.0, step_ns / np.maximum(claimed_ns, 1))).astype(np.int64)
        return scaled_ns

    def group_straggler_cost_ns(self, groups: Sequence[NDArray[np.int64]]) -> IntArray:
        """(group, step): straggler cost of groups of rows, such as hosts. The last rank of a group to arrive stands for
        the group.
        """
        cost_ns = np.zeros((len(groups), len(self)), dtype=np.int64)
        for sync_ns in self.sync_points_ns:
            add_straggler_cost(cost_ns, np.stack([sync_ns[rows].min(axis=0) for rows in groups]))
        return cost_ns

    @cached_property
    def median_self_ns(self) -> NDArray[np.float64]:
        """Own work of the median rank in each step: the lower one of two, so that of two ranks the slow one does not
        raise what it is compared with.
        """
        asked = sampled_ranks(self.self_ns)
        place = (len(asked) - 1) // 2
        median_ns: NDArray[np.float64] = np.partition(asked, place, axis=0)[place].astype(np.float64)
        return median_ns

    @cached_property
    def excess_ns(self) -> NDArray[np.float64]:
        """(rank, step): own work beyond the median rank's; at most the step, which is the mean of its ranks."""
        excess_ns: NDArray[np.float64] = np.clip(self.self_ns - self.median_self_ns, 0.0, self.job_step_ns)
        return excess_ns

    @cached_property
    def excess_percent(self) -> NDArray[np.uint8]:
        """The same in percent of the step. Of the step and not of the work: where work is short against the wire, its
        noise does not matter.
        """
        percent = self.excess_ns * 100.0 / np.maximum(self.job_step_ns, 1.0)
        excess: NDArray[np.uint8] = percent.astype(np.uint8)
        return excess

    def last(self, steps: int) -> Window:
        """The latest of the steps."""
        return self if steps >= len(self) else self.part(len(self) - steps, len(self))

    def part(self, begin: int, end: int) -> Window:
        """The steps from one place to before another. What has been worked out of each is not worked out again."""
        part = replace(self, indices=self.indices[begin:end], table=self.table[:, :, begin:end])
        part.__dict__.update((name, worked_out[..., begin:end]) for name, worked_out in self._by_step())
        return part

    def _by_step(self) -> Iterator[tuple[str, IntArray]]:
        return ((name, self.__dict__[name]) for name in BY_STEP if name in self.__dict__)

    def where(self, kept: NDArray[np.bool_]) -> Window:
        """The steps for which `kept` is true."""
        return self if kept.all() else replace(self, indices=self.indices[kept], table=self.table[:, :, kept])


def add_straggler_cost(cost_ns: IntArray, sync_ns: IntArray) -> None:
    """Add to the row that waits least in each step how much longer the next one waits. There are at least two rows."""
    steps = np.arange(sync_ns.shape[1])
    last = sync_ns.argmin(axis=0)
    # The least of the others, found by looking through them: of thousands that is done sooner than by ordering them.
    others_ns = sync_ns.copy()
    others_ns[last, steps] = np.iinfo(np.int64).max
    cost_ns[last, steps] += others_ns.min(axis=0) - sync_ns[last, steps]


def sampled_ranks(by_rank: NDArray[NumberT]) -> NDArray[NumberT]:
    """Of very many ranks some, evenly spread: what is usual among these is so among all."""
    return by_rank[:: -(-len(by_rank) // MAX_ASKED)] if len(by_rank) > MAX_ASKED else by_rank


def scaled_steps(steps: int, least_s: float, step_ns: float) -> int:
    """So many steps, or as many more as `least_s` takes; not more than are kept."""
    if step_ns <= 0:
        return steps
    return min(max(steps, round(least_s * 1e9 / step_ns)), CAPACITY_STEPS // 2)


def gather(
    state: RunState,
    ranks: Sequence[RankState],
    *,
    upto: int,
    steps: int,
    first: int = 1,
    columns: Sequence[str] = COLUMNS,
) -> Window:
    """The last `steps` that all these ranks have, from `first` to `upto`. Unusual ones only if there are few others.

    Step 0 is never among them: it holds warming up and bucket building.
    """
    indices = _chosen(ranks, upto, steps, max(first, 1))
    return without_implausible(aligned_window(state, ranks, indices, columns))


def aligned_window(
    state: RunState, ranks: Sequence[RankState], indices: IntArray, columns: Sequence[str] = COLUMNS
) -> Window:
    """These steps of these ranks. All of them must be held by all."""
    stores = {rank.steps.store for rank in ranks}
    if len(stores) == 1:
        table = stores.pop().read([rank.steps.row for rank in ranks], indices, columns)
    else:
        table = np.empty((len(ranks), len(columns), len(indices)), dtype=np.int64)
        for store in stores:
            rows = [row for row, rank in enumerate(ranks) if rank.steps.store is store]
            table[rows] = store.read([ranks[row].steps.row for row in rows], indices, columns)
    return Window(
        tuple(rank.rank for rank in ranks),
        tuple(rank.host for rank in ranks),
        indices,
        table,
        state.world_size,
        columns=columns,
    )


def _chosen(ranks: Sequence[RankState], upto: int, steps: int, first: int) -> IntArray:
    latest = max(first, upto - steps + 1)
    if ranks and all(rank.steps.is_plain(latest, upto) for rank in ranks):
        return np.arange(latest, upto + 1, dtype=np.int64)
    # Twice as many are looked at, so that a pause or a lost message does not empty the window.
    candidates = np.arange(max(first, upto - 2 * steps + 1), upto + 1, dtype=np.int64)
    return _ordinary_and_held(ranks, candidates)[-steps:]


def older_may_count(state: RunState) -> bool:
    """Whether a window of the last steps might be another one if older steps were known."""
    upto = min((rank.steps.newest for rank in together(state)), default=-1)
    if upto < 1:
        return True
    latest, earliest = max(1, upto - WINDOW_STEPS + 1), max(1, upto - 2 * WINDOW_STEPS + 1)
    return any(
        not rank.steps.is_plain(latest, upto) and rank.steps.indices()[0] > earliest
        for rank in state.ranks.values()
        if rank.steps.newest >= 0
    )


def _ordinary_and_held(ranks: Sequence[RankState], indices: IntArray) -> IntArray:
    """Those of the steps that all ranks have, without unusual ones if enough others are left."""
    held, usual = held_by_all(ranks, indices)
    chosen: IntArray = indices[usual if usual.sum() >= WindowLimits.MIN_STEPS else held]
    return chosen


def held_by_all(ranks: Sequence[RankState], indices: IntArray) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which of these steps all ranks have, and which of them are unusual for none. `indices` ascend without a gap."""
    held = np.full(len(indices), bool(ranks))
    flags = np.zeros(len(indices), dtype=np.int64)
    if len(indices):
        first, last = int(indices[0]), int(indices[-1])
        for rank in ranks:
            if not rank.steps.is_plain(first, last):
                rank.steps.narrow(indices, held, flags)
    return held, held & ((flags & UNUSUAL) == 0)


@dataclass(frozen=True)
class ComparedRanks:
    """Who is compared with whom."""

    compared: list[RankState]
    out_of_step: tuple[int, ...]
    """Ranks that live and cannot be compared: their steps do not arrive, or are quite other steps than most have."""


def compared_ranks(state: RunState) -> ComparedRanks:
    """Compared are all ranks that were heard, without those that left while the others trained on.

    A rank that ended or fell silent within the window still counts, so that the last figures of a run that ends, or
    hangs, stay those of the whole world. One that is out of step does not.
    """
    received = [rank for rank in state.ranks.values() if rank.last_received_ns is not None]
    live = {rank.rank for rank in received if state.condition(rank) in {"ok", "paused"}}
    if not live:
        return ComparedRanks(received, ())
    newest = sorted(rank.steps.newest for rank in received if rank.rank in live)
    middle = newest[(len(newest) - 1) // 2]
    odd = {rank.rank for rank in received if rank.steps.newest != middle and _is_out_of_step(rank, middle, len(live))}
    fit = live - odd
    front = max((rank.steps.newest for rank in received if rank.rank in fit), default=-1)
    compared = [
        rank
        for rank in received
        if rank.rank not in odd and (rank.rank in live or rank.steps.newest > front - WINDOW_STEPS)
    ]
    return ComparedRanks(compared, tuple(sorted(odd & live)))


def together(state: RunState) -> list[RankState]:
    """The ranks that are compared."""
    return compared_ranks(state).compared


def _is_out_of_step(rank: RankState, middle: int, live: int) -> bool:
    newest = rank.steps.newest
    if newest >= middle:
        # Ahead: messages of the others may be on their way, but then it has done what they have done.
        if middle < 0 or live < WindowLimits.MIN_MAJORITY_RANKS or rank.steps.has(middle):
            return False
        near = np.arange(max(0, middle - WINDOW_STEPS + 1), middle + 1, dtype=np.int64)
        return not rank.steps.holds(near).any()
    # Behind: so are its messages, unless it says itself that it is further, or is so far that nothing is in common.
    says = rank.beat.step if rank.beat is not None else 0
    behind = middle - newest
    return behind >= CAPACITY_STEPS or (behind >= WINDOW_STEPS and says - newest > WINDOW_STEPS)


def without_implausible(window: Window) -> Window:
    """The window without ranks whose time in it cannot be true."""
    if len(window.ranks) < 3 or not len(window):
        return window
    total_ns = np.maximum(window.step_ns.sum(axis=1), 1).astype(np.float64)
    ratio = total_ns / np.median(total_ns)
    keep = (ratio < WindowLimits.IMPLAUSIBLE_FACTOR) & (ratio > 1 / WindowLimits.IMPLAUSIBLE_FACTOR)
    if keep.all():
        return window
    kept = np.flatnonzero(keep)
    return Window(
        tuple(window.ranks[row] for row in kept),
        tuple(window.hosts[row] for row in kept),
        window.indices,
        window.table[kept],
        window.world_size,
        tuple(rank for rank, without_implausible in zip(window.ranks, keep, strict=True) if not without_implausible),
        window.columns,
    )


def medians(values: NDArray[Any]) -> NDArray[np.float64]:
    """The median of each row: what `np.median(values, axis=-1)` gives. No row may be empty."""
    ordered = np.sort(values, axis=-1)
    count = ordered.shape[-1]
    middle: NDArray[np.float64] = (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2.0
    return middle


def medians_across(values: NDArray[Any]) -> NDArray[np.float64]:
    """The median of each column of a table."""
    return medians(np.ascontiguousarray(values.T))
