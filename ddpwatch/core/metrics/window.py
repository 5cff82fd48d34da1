"""Steps of several ranks aligned by step index, and their split into work, wire and wait.

Clocks of different hosts are never compared. In synchronous training all ranks take the same time for a step; ranks
that contradict this by far, or that count other steps than the rest, are excluded and named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from ddpwatch.core.limits import WindowLimits
from ddpwatch.core.state.run import ALIVE
from ddpwatch.core.state.step_store import CAPACITY_STEPS, COLUMNS
from ddpwatch.wire import EVALUATED, HOST_TIMED, MAX_POINTS, PAUSED, PHASES, SKIPPED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.core.state.step_store import IntArray

WINDOW_STEPS: Final = 50
"""Figures cover at most this number of the latest aligned steps."""
MAX_SAMPLED_RANKS: Final = 256
"""Number of ranks that medians over ranks are taken from."""
UNUSUAL: Final = SKIPPED | PAUSED | EVALUATED | HOST_TIMED
FIRST_PHASE: Final = f"{PHASES[0]}_ns"
"""The phases are contiguous columns of the table, in order."""
SYNC: Final = PHASES.index("sync")
BEFORE_FORWARD: Final = [PHASES.index("data"), PHASES.index("other")]
"""Phases that lie mostly between the end of a step and the next forward pass."""
ROOT: Final = 0
"""The rank whose buffers DDP broadcasts."""
POINT_COLUMNS: Final = (*(f"point{number}_ns" for number in range(1, MAX_POINTS + 1)), "more_points_ns")
SYNC_PATH: Final = "sync_path"
PAUSES: Final = {"gc_ns": "garbage collection", "save_ns": "checkpoint save", "eval_ns": "evaluation"}
"""Parts of a step with a name of their own, by column."""
PAUSE_COLUMNS: Final = ("gc_ns", "gc_full_ns", "save_ns", "eval_ns")
"""In the order of the table, so that they are read at once."""
OTHER: Final = PHASES.index("other")
NOT_KNOWN: Final = 255
"""In arrays of `excess_percent`: the rank has no such step."""
NumberT = TypeVar("NumberT", bound=np.generic)
BY_STEP: Final = (
    "phases_ns", "step_ns", "self_ns", "wire_ns", "wait_ns", "straggler_cost_ns", "median_self_ns", "excess_ns",
    "excess_percent", "job_step_ns", "job_sync_ns", "samples",
)  # fmt: skip
"""Cached properties of a window whose value for a step does not depend on other steps."""


@dataclass(frozen=True)
class Window:
    """Aligned steps of some ranks. Arrays are (rank, step), or (rank, phase, step)."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    indices: IntArray
    table: IntArray
    """(rank, column, step)."""
    world_size: int
    implausible: tuple[int, ...] = ()
    """Ranks that were excluded because their times cannot be true."""
    columns: Sequence[str] = COLUMNS
    """Columns of the table."""

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.indices)

    @property
    def complete(self) -> bool:
        """Whether it holds all ranks of the world."""
        return len(self.ranks) == self.world_size

    @property
    def one_host(self) -> bool:
        """Whether all ranks are known to share a host: then there is no network between them."""
        return len(set(self.hosts)) == 1 and bool(self.hosts[0])

    def column(self, name: str) -> IntArray:
        """One column of the table as (rank, step)."""
        column: IntArray = self.table[:, self.columns.index(name)]
        return column

    def pause_ns(self, name: str) -> IntArray:
        """One of `PAUSE_COLUMNS` as (rank, step), at most the time that it is part of."""
        whole_ns = self.self_ns if name.startswith("gc") else self.phases_ns[:, OTHER]
        return np.minimum(self.column(name), whole_ns)

    @cached_property
    def phases_ns(self) -> IntArray:
        """The phases in the order of `PHASES`."""
        first = self.columns.index(FIRST_PHASE)
        phases: IntArray = self.table[:, first : first + len(PHASES)]
        return phases

    @cached_property
    def step_ns(self) -> IntArray:
        """Durations of whole steps."""
        steps: IntArray = self.phases_ns.sum(axis=1)
        return steps

    @cached_property
    def median_step_ns(self) -> float:
        """Median over all steps of all ranks, or of a sample of ranks."""
        return float(np.median(sampled_ranks(self.step_ns)))

    @cached_property
    def self_ns(self) -> IntArray:
        """Own work: the step without `sync`."""
        return self.step_ns - self.phases_ns[:, SYNC]

    @cached_property
    def script_points_ns(self) -> IntArray:
        """(point, rank, step): sync at the collectives that the script calls, in their order; the last row sums those
        beyond `MAX_POINTS`. No rows if no rank reports any.
        """
        if SYNC_PATH not in self.columns:
            return np.empty((0, *self.step_ns.shape), dtype=np.int64)
        first = self.columns.index(POINT_COLUMNS[0])
        points_ns: IntArray = self.table[:, first : first + len(POINT_COLUMNS)].swapaxes(0, 1)
        return points_ns

    @cached_property
    def matched_points(self) -> NDArray[np.bool_]:
        """(point, step): whether all ranks passed the same operations in this step, and leave this one together."""
        if SYNC_PATH not in self.columns:
            return np.empty((0, len(self)), dtype=np.bool_)
        paths = self.column(SYNC_PATH)
        same = (paths == paths[:1]).all(axis=0)
        bits = np.arange(len(POINT_COLUMNS))[:, None]
        matched: NDArray[np.bool_] = same & ((paths[0] >> bits) & 1).astype(np.bool_)
        return matched

    @cached_property
    def after_backward_ns(self) -> IntArray:
        """Sync in which DDP ends the backward pass."""
        script_ns: IntArray = self.script_points_ns.sum(axis=0)
        sync_ns: IntArray = self.phases_ns[:, SYNC] - self.column("presync_ns") - script_ns
        return sync_ns

    @cached_property
    def presync_wait_ns(self) -> IntArray:
        """Waiting before the forward pass, where rank 0 broadcasts its buffers.

        Not by the minimum over ranks: the root of a broadcast leaves early. A rank waits as long as the root comes
        later from its work before the forward pass, and at most as long as it was in sync.
        """
        presync_ns = self.column("presync_ns")
        if ROOT not in self.ranks:
            return np.zeros_like(presync_ns)
        before_ns = self.phases_ns[:, BEFORE_FORWARD].sum(axis=1)
        late_ns = before_ns[self.ranks.index(ROOT)] - before_ns
        wait_ns: IntArray = np.where(self.mixed_clocks, 0, np.clip(late_ns, 0, presync_ns))
        return wait_ns

    @cached_property
    def mixed_clocks(self) -> NDArray[np.bool_]:
        """(step): whether some ranks have the GPU's times and others the host's, so that ranks cannot be compared. Only
        exports include such steps.
        """
        if "flags" not in self.columns:
            return np.zeros(len(self), dtype=np.bool_)
        by_host = self.column("flags") & HOST_TIMED
        mixed: NDArray[np.bool_] = (by_host != by_host[:1]).any(axis=0)
        return mixed

    @cached_property
    def arrivals_ns(self) -> list[IntArray]:
        """At each sync point where arrivals can be compared, the time in it of each rank as (rank, step): least of the
        last to arrive.
        """
        points_ns = [self.presync_wait_ns, np.where(self.mixed_clocks, 0, self.after_backward_ns)]
        for point_ns, matched in zip(self.script_points_ns, self.matched_points & ~self.mixed_clocks, strict=True):
            if matched.any():
                points_ns.append(np.where(matched, point_ns, 0))
        return points_ns

    @cached_property
    def wait_ns(self) -> IntArray:
        """Time that each rank waited for slower ones: at each sync point, what exceeds that of the last to arrive."""
        wait_ns = np.zeros_like(self.step_ns)
        for point_ns in self.arrivals_ns:
            wait_ns += point_ns - point_ns.min(axis=0)
        return wait_ns

    @cached_property
    def wire_ns(self) -> IntArray:
        """Network time of each step: sync without waiting, as the mean of its ranks. Sync points where arrivals cannot
        be compared count in full.
        """
        wire_ns: IntArray = np.rint(self.job_sync_ns - self.wait_ns.mean(axis=0)).astype(np.int64)
        return wire_ns

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
        for sync_ns in self.arrivals_ns:
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
        for sync_ns in self.arrivals_ns:
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
        """The steps from one position up to another. Values per step that are cached stay cached."""
        part = replace(self, indices=self.indices[begin:end], table=self.table[:, :, begin:end])
        computed = self.__dict__
        part.__dict__.update((name, computed[name][..., begin:end]) for name in BY_STEP if name in computed)
        return part

    def where(self, kept: NDArray[np.bool_]) -> Window:
        """The steps for which `kept` is true."""
        return self if kept.all() else replace(self, indices=self.indices[kept], table=self.table[:, :, kept])


def add_straggler_cost(cost_ns: IntArray, sync_ns: IntArray) -> None:
    """Add to the row that waits least in each step how much longer the next one waits. There are at least two rows."""
    steps = np.arange(sync_ns.shape[1])
    last = sync_ns.argmin(axis=0)
    # A masked minimum: faster than a partition of thousands of ranks.
    others_ns = sync_ns.copy()
    others_ns[last, steps] = np.iinfo(np.int64).max
    cost_ns[last, steps] += others_ns.min(axis=0) - sync_ns[last, steps]


def sampled_ranks(by_rank: NDArray[NumberT]) -> NDArray[NumberT]:
    """At most `MAX_SAMPLED_RANKS` of the rows, evenly spaced."""
    return by_rank[:: -(-len(by_rank) // MAX_SAMPLED_RANKS)] if len(by_rank) > MAX_SAMPLED_RANKS else by_rank


def scaled_steps(steps: int, min_s: float, step_ns: float) -> int:
    """`steps`, or the number of steps in `min_s` seconds if that is more; at most half of those kept."""
    if step_ns <= 0:
        return steps
    return min(max(steps, round(min_s * 1e9 / step_ns)), CAPACITY_STEPS // 2)


def gather(
    state: RunState,
    ranks: Sequence[RankState],
    *,
    upto: int,
    steps: int,
    first: int = 1,
    columns: Sequence[str] = COLUMNS,
) -> Window:
    """The last `steps` steps up to `upto` that all these ranks hold, unusual ones only if there are few others.

    Step 0 is never included: it contains warmup and bucket building.
    """
    indices = _chosen(ranks, upto, steps, max(first, 1))
    return without_implausible(aligned_window(state, ranks, indices, columns))


def aligned_window(
    state: RunState, ranks: Sequence[RankState], indices: IntArray, columns: Sequence[str] = COLUMNS
) -> Window:
    """Window of these steps, all of which all ranks must hold."""
    if state.has_sync_points and SYNC_PATH not in columns:
        columns = (*columns, *POINT_COLUMNS, SYNC_PATH)
    stores = {rank.steps.store for rank in ranks}
    if len(stores) == 1:
        table = stores.pop().read([rank.steps.row for rank in ranks], indices, columns)
    else:
        table = np.empty((len(ranks), len(columns), len(indices)), dtype=np.int64)
        for store in stores:
            rows = [row for row, rank in enumerate(ranks) if rank.steps.store is store]
            table[rows] = store.read([ranks[row].steps.row for row in rows], indices, columns)
    numbers, hosts = tuple(rank.rank for rank in ranks), tuple(rank.host for rank in ranks)
    return Window(numbers, hosts, indices, table, state.world_size, columns=columns)


def _chosen(ranks: Sequence[RankState], upto: int, steps: int, first: int) -> IntArray:
    latest = max(first, upto - steps + 1)
    if ranks and all(rank.steps.is_plain(latest, upto) for rank in ranks):
        return np.arange(latest, upto + 1, dtype=np.int64)
    # Search twice the range, so that a pause or a lost message does not empty the window.
    candidates = np.arange(max(first, upto - 2 * steps + 1), upto + 1, dtype=np.int64)
    held = held_by_all(ranks, candidates)
    enough = held.ordinary.sum() >= WindowLimits.MIN_STEPS
    chosen: IntArray = candidates[held.ordinary if enough else held.comparable][-steps:]
    return chosen


def older_may_count(state: RunState) -> bool:
    """Whether older steps, if they were known, could change the latest window."""
    upto = min((rank.steps.newest for rank in ranks_to_compare(state)), default=-1)
    if upto < 1:
        return True
    latest, earliest = max(1, upto - WINDOW_STEPS + 1), max(1, upto - 2 * WINDOW_STEPS + 1)
    return any(
        not rank.steps.is_plain(latest, upto) and rank.steps.indices()[0] > earliest
        for rank in state.ranks.values()
        if rank.steps.newest >= 0
    )


class HeldSteps(NamedTuple):
    """Which steps of a range all ranks hold."""

    held: NDArray[np.bool_]
    comparable: NDArray[np.bool_]
    """Those whose times all ranks took from the same kind of clock: the host's `sync` of a step that a GPU runs is
    about 0, so the rank would seem to be the last to arrive."""
    ordinary: NDArray[np.bool_]
    """Those that are unusual for none."""


def held_by_all(ranks: Sequence[RankState], indices: IntArray) -> HeldSteps:
    """Which of these steps all ranks hold. `indices` are consecutive."""
    held = np.full(len(indices), bool(ranks))
    any_flags = np.zeros(len(indices), dtype=np.int64)
    all_flags = np.full(len(indices), -1, dtype=np.int64)
    if len(indices):
        first, last = int(indices[0]), int(indices[-1])
        for rank in ranks:
            if rank.steps.is_plain(first, last):
                all_flags[:] = 0
            else:
                rank.steps.narrow(indices, held, any_flags, all_flags)
    mixed = (any_flags & ~all_flags & HOST_TIMED) != 0
    return HeldSteps(held, held & ~mixed, held & ((any_flags & UNUSUAL) == 0))


@dataclass(frozen=True)
class ComparedRanks:
    """Ranks that figures compare, and live ranks that cannot be compared."""

    compared: list[RankState]
    out_of_step: tuple[int, ...]
    """Live ranks whose steps do not arrive, or have other indices than most."""


def compared_ranks(state: RunState) -> ComparedRanks:
    """Ranks to compare: all that have sent anything, except those that left while the others trained on.

    A rank that ended or went silent within the window still counts, so that the last figures of a run that ends or
    hangs cover the whole world. One that is out of step does not.
    """
    received = [rank for rank in state.ranks.values() if rank.last_received_ns is not None]
    live = {rank.rank for rank in received if state.condition(rank) in ALIVE}
    if not live:
        return ComparedRanks(received, ())
    newest = sorted(rank.steps.newest for rank in received if rank.rank in live)
    median = newest[(len(newest) - 1) // 2]
    odd = {rank.rank for rank in received if rank.steps.newest != median and _is_out_of_step(rank, median, len(live))}
    fit = live - odd
    front = max((rank.steps.newest for rank in received if rank.rank in fit), default=-1)
    compared = [
        rank
        for rank in received
        if rank.rank not in odd and (rank.rank in live or rank.steps.newest > front - WINDOW_STEPS)
    ]
    return ComparedRanks(compared, tuple(sorted(odd & live)))


def ranks_to_compare(state: RunState) -> list[RankState]:
    """The ranks that figures compare."""
    return compared_ranks(state).compared


def _is_out_of_step(rank: RankState, median: int, live: int) -> bool:
    """Whether a rank whose newest step is not the median one counts other steps than the rest."""
    newest = rank.steps.newest
    if newest >= median:
        # Ahead: messages of the others may be on their way, but then it has the steps that they have.
        if median < 0 or live < WindowLimits.MIN_MAJORITY_RANKS or rank.steps.has(median):
            return False
        near = np.arange(max(0, median - WINDOW_STEPS + 1), median + 1, dtype=np.int64)
        return not rank.steps.holds(near).any()
    # Behind: so are its messages, unless its heartbeat is further, or there is no step in common.
    beat_step = rank.beat.step if rank.beat is not None else 0
    behind = median - newest
    return behind >= CAPACITY_STEPS or (behind >= WINDOW_STEPS and beat_step - newest > WINDOW_STEPS)


def without_implausible(window: Window) -> Window:
    """The window without ranks whose total time cannot be true."""
    if len(window.ranks) < WindowLimits.MIN_MAJORITY_RANKS or not len(window):
        return window
    total_ns = np.maximum(window.step_ns.sum(axis=1), 1).astype(np.float64)
    ratio = total_ns / np.median(total_ns)
    keep = (ratio < WindowLimits.IMPLAUSIBLE_FACTOR) & (ratio > 1 / WindowLimits.IMPLAUSIBLE_FACTOR)
    if keep.all():
        return window
    kept = np.flatnonzero(keep)
    return replace(
        window,
        ranks=tuple(window.ranks[row] for row in kept),
        hosts=tuple(window.hosts[row] for row in kept),
        table=window.table[kept],
        implausible=tuple(window.ranks[row] for row in np.flatnonzero(~keep)),
    )


def medians(values: NDArray[Any]) -> NDArray[np.float64]:
    """Row medians, as `np.median(values, axis=-1)`: a full sort beats `np.partition` for thousands of short rows. No
    row may be empty.
    """
    ordered = np.sort(values, axis=-1)
    count = ordered.shape[-1]
    row_medians: NDArray[np.float64] = (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2.0
    return row_medians


def medians_across(values: NDArray[Any]) -> NDArray[np.float64]:
    """Column medians."""
    return medians(np.ascontiguousarray(values.T))
