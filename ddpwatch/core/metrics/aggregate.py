"""A whole run in numbers of a fixed size: what each rank did, whom the others waited for, and how that went over time.

Fed with windows of aligned steps, each once, in order. Quantiles are within one per cent; sums are exact.

A whole run in some figures, each of one meaning: a report and an export tell the same under the same name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.limits import HungStepLimits, ScalingLimits, SummaryLimits
from ddpwatch.core.metrics.histogram import BINS, MEDIAN, Folded, Spread, bins, quantile
from ddpwatch.core.metrics.hung_steps import Standstills, guilty_of
from ddpwatch.core.metrics.scaling import profile, waited_for
from ddpwatch.core.metrics.timeline import excess_ns, excess_percent
from ddpwatch.core.metrics.window import SYNC, add_straggler_cost
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.metrics.hung_steps import Standstill
    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.core.metrics.window import Window

    FloatArray = NDArray[np.float64]

COLUMNS: Final = 160
"""Over time: as many as a chart can show."""
MAX_BATCHES: Final = 64
"""Different numbers of samples in a step that are told apart."""
SUMMED: Final = ("steps", "step_ns", "sync_ns", "told", "wire_ns", "wait_ns")
"""Over the steps of a column; `reported` = those whose wire and waiting can be told apart."""


@dataclass(frozen=True)
class Cost:
    """What somebody cost the job: the time it would have saved, had they been as fast as the next-slowest."""

    who: int | str
    """A rank, or the name of a host."""
    share: float
    """Of the time in steps."""
    seconds: float
    """Of the job; every rank of it has lost them."""
    phases: tuple[str, ...] = ()
    """Where it was slower than the others, the slowest first; empty = cannot be told. Without standstills, unless most
    of the cost is in them."""
    still: Standstill | None = None
    """When it made the job stand still, if that was a good part of what it cost."""
    mainly_still: bool = False
    """Whether that was most of it: then it was not slow, but stuck."""


class Digest:
    """What becomes of the windows."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """These ranks, ascending; steps of others are not looked at."""
        self.ranks = tuple(ranks)
        self.hosts = [""] * len(ranks)
        self.steps = 0
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.over_time = Folded(COLUMNS)
        for name in SUMMED:
            self.over_time.keep(name)
        self.over_time.keep("spread", shape=(BINS,), dtype=np.int32)
        self.over_time.keep("excess_percent", shape=(len(ranks),), dtype=np.float32)
        self.over_time.keep("excess_ns", shape=(len(ranks),))
        self.over_time.keep("heard_ns", shape=(len(ranks),))
        self.over_time.keep("slow_last", "most", shape=(len(ranks),))
        self.over_time.keep("heard", shape=(len(ranks),), dtype=np.float32)
        self.over_time.keep("imposed_ns", shape=(len(ranks),))
        self.batches: Counter[int] = Counter()
        """Samples of all ranks in a step, and how often."""
        self.samples = 0
        self.samples_ns = 0.0
        """Samples, and the time of the steps that told them."""
        self._phases_ns = np.zeros((len(ranks), len(PHASES)))
        self._wait_ns = np.zeros(len(ranks))
        self._rank_steps = np.zeros(len(ranks), dtype=np.int64)
        self._told_steps = np.zeros(len(ranks), dtype=np.int64)
        self._straggler_cost_ns = np.zeros(len(ranks))
        self._beyond_ns = np.zeros((len(ranks), len(PHASES)))
        """What each phase took longer than the middle rank's in the steps in which the others waited for it."""
        self._host_imposed_ns: Counter[str] = Counter()
        self._total_ns = 0.0
        self._spread = Spread()
        self._still = Standstills()

    def take(self, window: Window) -> None:
        """Take some more steps in."""
        rows = np.searchsorted(self.ranks, window.ranks)
        if not len(window) or not len(rows) or int(rows.max()) >= len(self.ranks):
            return
        self.steps += len(window)
        self.last_step = int(window.indices[-1])
        self.first_step = int(window.indices[0]) if self.first_step is None else self.first_step
        for row, host in zip(rows.tolist(), window.hosts, strict=True):
            self.hosts[row] = host
        step_ns = window.step_ns.mean(axis=0)
        self._total_ns += float(step_ns.sum())
        self._spread.take(step_ns)
        self._phases_ns[rows] += window.phases_ns.sum(axis=2)
        self._rank_steps[rows] += len(window)
        self._take_columns(window, rows)
        if window.complete:
            self._take_complete(window, rows)

    def _take_columns(self, window: Window, rows: NDArray[np.int64]) -> None:
        over_time, steps = self.over_time, len(window)
        places = over_time.places(window.indices)
        step_ns = window.step_ns.mean(axis=0)
        whole = float(window.complete)
        figures = (np.ones(steps), step_ns, window.column("sync_ns").mean(axis=0), np.full(steps, whole))
        waits = (window.wire_ns * whole, window.wait_ns.mean(axis=0) * whole)
        for name, values in zip(SUMMED, (*figures, *waits), strict=True):
            over_time.add(name, places, values)
        spread = np.zeros((steps, BINS), dtype=np.int32)
        spread[np.arange(steps), bins(step_ns)] = 1
        over_time.add("spread", places, spread)
        beyond_ns = excess_ns(window)
        in_percent = excess_percent(window, beyond_ns)
        by_rank = {name: np.zeros((steps, len(self.ranks))) for name in ("excess_percent", "excess_ns", "heard_ns")}
        by_rank["excess_percent"][:, rows] = in_percent.T
        by_rank["excess_ns"][:, rows] = beyond_ns.T
        by_rank["heard_ns"][:, rows] = step_ns[:, None]
        for name, values in by_rank.items():
            over_time.add(name, places, values)
        received = np.zeros((steps, len(self.ranks)), dtype=np.float32)
        received[:, rows] = 1.0
        over_time.add("heard", places, received)
        slow = by_rank["excess_percent"] >= SummaryLimits.SLOW_PERCENT
        over_time.add("slow_last", places, np.where(slow, window.indices[:, None], -np.inf))
        self._take_long(window, step_ns, in_percent)

    def _take_long(self, window: Window, step_ns: FloatArray, in_percent: NDArray[np.uint8]) -> None:
        """Steps that may turn out to be standstills."""
        if not (step_ns > HungStepLimits.EXTRA_NS).any():
            return
        guilty = guilty_of(window.ranks, in_percent)
        costs = None
        if window.complete:
            each = np.arange(len(window))
            row = np.searchsorted(window.ranks, guilty)
            beyond_ns = window.phases_ns - np.median(window.phases_ns, axis=0)
            straggler_cost_ns = window.straggler_cost_ns[row, each].astype(np.float64)
            costs = straggler_cost_ns, np.where(straggler_cost_ns > 0, beyond_ns[row, :, each].T, 0.0)
        self._still.take(window.indices, step_ns, guilty, costs)

    def _take_complete(self, window: Window, rows: NDArray[np.int64]) -> None:
        """What can be told only where all ranks are there."""
        self._wait_ns[rows] += window.wait_ns.sum(axis=1)
        self._told_steps[rows] += len(window)
        straggler_cost_ns = window.straggler_cost_ns
        self._straggler_cost_ns[rows] += straggler_cost_ns.sum(axis=1)
        by_step = np.zeros((len(window), len(self.ranks)))
        by_step[:, rows] = straggler_cost_ns.T
        self.over_time.add("imposed_ns", self.over_time.places(window.indices), by_step)
        beyond_ns = window.phases_ns - np.median(window.phases_ns, axis=0)
        self._beyond_ns[rows] += np.where((straggler_cost_ns > 0)[:, None], beyond_ns, 0.0).sum(axis=2)
        self._host_imposed_ns.update(_host_imposed(window))
        samples = window.column("samples")
        reported = (samples > 0).all(axis=0)
        in_step = samples[:, reported].sum(axis=0)
        self.samples += int(in_step.sum())
        self.samples_ns += float(window.step_ns[:, reported].mean(axis=0).sum())
        for batch, times in zip(*np.unique(in_step, return_counts=True), strict=True):
            if int(batch) in self.batches or len(self.batches) < MAX_BATCHES:
                self.batches[int(batch)] += int(times)

    @property
    def total_s(self) -> float:
        """Time in the steps that were taken in."""
        return self._total_ns / 1e9

    @property
    def effective_batch(self) -> int | None:
        """Samples of all ranks in most of the steps; None = could not be told."""
        return self.batches.most_common(1)[0][0] if self.batches else None

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks, over the steps that told; None = none did."""
        return self.samples * 1e9 / self.samples_ns if self.samples_ns else None

    def step_ns(self, part: float) -> float | None:
        """This quantile of the steps; each counts as the mean of its ranks. None = there are none."""
        return self._spread.quantile(part)

    def step_ns_over_time(self, part: float) -> FloatArray:
        """The same for each column, to one per cent; nan where no step is."""
        return quantile(self.over_time["spread"], part)

    def shares(self) -> tuple[float | None, float | None, float | None]:
        """The all-reduce as a part of the steps, and of that wire and waiting; None = cannot be told."""
        sums = {name: float(self.over_time[name].sum()) for name in SUMMED}
        if not sums["step_ns"]:
            return None, None, None
        share = sums["sync_ns"] / sums["step_ns"]
        if sums["told"] < sums["steps"] / 2:
            return share, None, None
        wire, wait = sums["wire_ns"], sums["wait_ns"]
        # Over the steps that tell them apart, scaled to the share of all, so that the parts add up to it.
        return share, share * wire / max(wire + wait, 1.0), share * wait / max(wire + wait, 1.0)

    def shares_over_time(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """All-reduce, wire and waiting as parts of the step, by columns; nan where they cannot be told."""
        over_time = self.over_time
        whole_ns = np.where(over_time["step_ns"] > 0, over_time["step_ns"], np.nan)
        reported = over_time["told"] == over_time["steps"]
        wire, wait = (np.where(reported, over_time[name], np.nan) / whole_ns for name in ("wire_ns", "wait_ns"))
        return over_time["sync_ns"] / whole_ns, wire, wait

    def slow_until(self, rank: int, since: int) -> tuple[int, bool] | None:
        """The last step of a rank that was slow from `since` on and then as fast as the others, and whether it is known
        exactly, or as far as columns tell that are several steps wide; None = it has not become fast again.
        """
        row = self.ranks.index(rank)
        # The mean of its steps, each counted once: one that stood still must not make the others look fast.
        excess = self.over_time["excess_percent"][:, row] / np.maximum(self.over_time["heard"][:, row], 1.0)
        begins, width = self.over_time.begins, self.over_time.width
        # A column that `since` is inside of counts.
        later = begins + width > since
        if not later.any():
            return None
        slow = np.flatnonzero(later & (excess >= SummaryLimits.SLOW_SHARE * excess[later].max()))
        last = int(slow[-1])
        if last >= len(begins) - 2:
            return None
        clearly, after = self.over_time["slow_last"][last : last + 2, row].tolist()
        if clearly < 0:
            return int(begins[last]) + width - 1, width == 1
        # Where the next column has slow steps, too, it may have gone on for some of them.
        return int(clearly), width == 1 or after < 0

    def excess_over_time(self) -> FloatArray:
        """(rank, column): own work beyond the middle rank's, in per cent of the steps' time; nan = it was not there."""
        return _in_percent(self.over_time["excess_ns"].T, self.over_time["heard_ns"].T)

    def excess_of_ranks(self) -> FloatArray:
        """The same of each rank over all of its steps."""
        return _in_percent(self.over_time["excess_ns"].sum(axis=0), self.over_time["heard_ns"].sum(axis=0))

    def standstill(self, ranks: Collection[int] | None = None) -> Standstill | None:
        """The steps in which the job stood still, for one of these ranks or for whomever; None = it never did."""
        return self._still.found(self.step_ns(MEDIAN), ranks)

    def rank_steps(self) -> list[int]:
        """Of each rank, the steps that were measured."""
        steps: list[int] = self._rank_steps.tolist()
        return steps

    def phases_ns(self) -> FloatArray:
        """(rank, phase): the mean of a step; `sync` is all of it. nan for a rank without steps."""
        steps = np.where(self._rank_steps > 0, self._rank_steps, np.nan)
        phases_ns: FloatArray = self._phases_ns / steps[:, None]
        return phases_ns

    def waits_ns(self) -> FloatArray:
        """The mean of what each rank waited for others in a step, at most its sync; nan = cannot be told."""
        reported = np.where(self._told_steps > 0, self._told_steps, np.nan)
        waits_ns: FloatArray = np.minimum(self._wait_ns / reported, self.phases_ns()[:, SYNC])
        return waits_ns

    def costs(self) -> list[Cost]:
        """Of every rank, the dearest first."""
        baseline_ns = self.step_ns(MEDIAN)
        found = [
            self._cost(row, straggler_cost_ns, self._still.found(baseline_ns, {rank}))
            for row, (rank, straggler_cost_ns) in enumerate(
                zip(self.ranks, self._straggler_cost_ns.tolist(), strict=True)
            )
            if straggler_cost_ns > 0
        ]
        return sorted(found, key=lambda cost: -cost.share)

    def host_costs(self) -> list[Cost]:
        """Of every host, where there are several, the dearest first: its ranks together against all others."""
        found = [
            self._host_cost(host, straggler_cost_ns)
            for host, straggler_cost_ns in self._host_imposed_ns.items()
            if straggler_cost_ns > 0
        ]
        return sorted(found, key=lambda cost: -cost.share)

    def part_within(self, rank: int, spans: Sequence[tuple[int, int]]) -> float:
        """Of what a rank cost, the part that falls into these steps, from the first to the last of each; as far as
        columns tell that are several steps wide.
        """
        straggler_cost_ns = self.over_time["imposed_ns"][:, self.ranks.index(rank)]
        begins, ends = self.over_time.begins, self.over_time.begins + self.over_time.width - 1
        within = np.zeros(len(begins), np.bool_)
        for first, last in spans:
            within |= (begins <= last) & (ends >= first)
        return float(straggler_cost_ns[within].sum() / max(straggler_cost_ns.sum(), 1.0))

    def _cost(self, row: int, straggler_cost_ns: float, still: Standstill | None) -> Cost:
        rank, beyond_ns = self.ranks[row], self._beyond_ns[row]
        share, seconds = straggler_cost_ns / self._total_ns, straggler_cost_ns / 1e9
        if still is None or still.straggler_cost_ns < SummaryLimits.CAUSE_SHARE * straggler_cost_ns:
            return Cost(rank, share, seconds, _slow_phases(beyond_ns, straggler_cost_ns))
        if still.straggler_cost_ns >= SummaryLimits.MAIN_SHARE * straggler_cost_ns:
            return Cost(
                rank, share, seconds, _slow_phases(still.beyond_ns, still.straggler_cost_ns), still, mainly_still=True
            )
        rest = _slow_phases(beyond_ns - still.beyond_ns, straggler_cost_ns - still.straggler_cost_ns)
        return Cost(rank, share, seconds, rest, still)

    def _host_cost(self, host: str, straggler_cost_ns: float) -> Cost:
        seconds = straggler_cost_ns / 1e9
        still = self.standstill({rank for rank, its in zip(self.ranks, self.hosts, strict=True) if its == host})
        if still is None or still.lost_s < SummaryLimits.CAUSE_SHARE * seconds:
            return Cost(host, straggler_cost_ns / self._total_ns, seconds)
        mainly = still.lost_s >= SummaryLimits.MAIN_SHARE * seconds
        return Cost(host, straggler_cost_ns / self._total_ns, seconds, still=still, mainly_still=mainly)


def _in_percent(part_ns: FloatArray, whole_ns: FloatArray) -> FloatArray:
    percent: FloatArray = np.where(whole_ns > 0, 100.0 * part_ns / np.maximum(whole_ns, 1.0), np.nan)
    return percent


def _slow_phases(beyond_ns: FloatArray, straggler_cost_ns: float) -> tuple[str, ...]:
    """Those in which it is slower than the others by so much that it explains a good part of what it cost, the slowest
    first, and what is not far less than that.
    """
    beyond_ns = beyond_ns.copy()
    beyond_ns[SYNC] = 0.0
    min_ns = max(SummaryLimits.CAUSE_SHARE * straggler_cost_ns, SummaryLimits.SLOW_SHARE * beyond_ns.max())
    order = np.argsort(-beyond_ns, kind="stable").tolist()
    return tuple(PHASES[place] for place in order if beyond_ns[place] > min_ns)


def _host_imposed(window: Window) -> dict[str, float]:
    """What each host cost in this window: as for ranks, with the last of its ranks to arrive standing for it."""
    hosts = sorted(set(window.hosts))
    if len(hosts) < 2 or not all(hosts):
        return {}
    names = np.array(window.hosts)
    straggler_cost_ns = np.zeros((len(hosts), len(window)), dtype=np.int64)
    for sync_ns in window.sync_points_ns:
        add_straggler_cost(straggler_cost_ns, np.stack([sync_ns[names == host].min(axis=0) for host in hosts]))
    return dict(zip(hosts, straggler_cost_ns.sum(axis=1).tolist(), strict=True))


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
        waited_for=waited_for(imposed_parts(digest)) if (wait or 0.0) >= ScalingLimits.MIN_WAIT_SHARE else (),
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
        straggler_costs=imposed_parts(digest),
        median_ns=figures.step_ns,
        p99_ns=figures.step_p99_ns,
    )


def imposed_parts(digest: Digest) -> dict[int, float]:
    """By rank, its part of what ranks have kept others waiting for; empty = nobody has."""
    straggler_costs = {cost.who: cost.share for cost in digest.costs() if isinstance(cost.who, int)}
    together = sum(straggler_costs.values())
    return {rank: straggler_costs.get(rank, 0.0) / together for rank in digest.ranks} if together > 0 else {}


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
