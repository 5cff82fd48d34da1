"""One aggregate of aligned steps: every sum over a run or a window, and every figure that follows from sums.

- `Aggregate`: step time, phases, the all-reduce split into wire and wait, straggler cost and throughput. Read by
  the live figures, the summary of a run, scaling and `compare`.
- `RunAggregate`: the same of a recorded run, with how that went over time, the cost of ranks and hosts by phase, and
  hung steps. Read by reports, exports and verdicts.
- `StepSample`: one row a step, for the bootstrap of a comparison.

All of them are fed with windows of aligned steps, each step once, and keep a size that does not grow with the run. Sums
are exact; quantiles are exact for one window, else within a tenth of a percent, and those over time within one percent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ddpwatch.core.limits import ScalingLimits, SummaryLimits, WindowLimits
from ddpwatch.core.metrics.histogram import BINS, MEDIAN, Histogram, MergingColumns, bins, quantile
from ddpwatch.core.metrics.hung_steps import HungStepFinder
from ddpwatch.core.metrics.scaling import Profile, waited_for
from ddpwatch.core.metrics.sync_points import SyncPointSums
from ddpwatch.core.metrics.window import PAUSES, SYNC, without_implausible
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.metrics.hung_steps import HungSteps
    from ddpwatch.core.metrics.sync_points import SyncPointFigures
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.run import RunState

    FloatArray = NDArray[np.float64]

P99: Final = 0.99
MAX_BATCHES: Final = 64
"""Different numbers of samples in a step that are counted apart."""
COLUMNS: Final = 160
"""Columns over time: as many as a chart can show."""
SUMMED: Final = ("steps", "step_ns", "sync_ns", "complete", "wire_ns", "wait_ns")
"""Sums over the steps of a column; `complete` = steps with all ranks, of which wire and wait are known."""
MAX_ROWS: Final = 1 << 17
"""Steps that a sample keeps. Of a longer run every second one is dropped at random, and then again."""
PARTS: Final = ("data", "forward", "backward", "wire", "wait", "optimizer", "other")
"""The parts of a step, with `sync` split into wire and wait. They add up to the step."""
ROWS: Final = ("index", *PARTS, "samples")


class Shares(NamedTuple):
    """The all-reduce as a fraction of step time, and its split into wire and wait; None = not known."""

    total: float | None
    wire: float | None
    wait: float | None


UNKNOWN: Final = Shares(None, None, None)


class Aggregate:
    """Sums over aligned steps. Steps without all ranks count for times, and not for what compares ranks."""

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        """Of these ranks, ascending; windows with others are ignored."""
        self.ranks = tuple(ranks)
        self.world_size = 0
        self.steps = 0
        self.first_step: int | None = None
        self.last_step: int | None = None
        self._complete_steps = 0
        self._phases_ns = np.zeros(len(PHASES))
        """Of each phase, the sum over steps of the mean over ranks."""
        self._wire_ns = self._wait_ns = 0.0
        """The same of wire and wait, over the complete steps."""
        self._straggler_cost_ns = np.zeros(len(ranks))
        self._sync_points = SyncPointSums()
        self._pauses_ns = np.zeros((len(PAUSES), len(ranks)))
        """(pause, rank)."""
        self._samples = self._samples_ns = 0.0
        """Samples, and the time of the steps that reported them."""
        self._batches: Counter[int] = Counter()
        """Samples of all ranks in a step, and how often."""
        self._step_ns = Histogram()
        self._window_ns: FloatArray | None = None
        """Of one window, its step times."""

    @classmethod
    def of(cls, window: Window) -> Aggregate:
        """The aggregate of one window, which is not empty. Its quantiles are exact."""
        aggregate = cls(window.ranks)
        aggregate.add(window)
        aggregate._window_ns = window.job_step_ns
        return aggregate

    def add(self, window: Window) -> None:
        """Add the steps of a window, each once."""
        rows = np.searchsorted(self.ranks, window.ranks)
        if len(window) and len(rows) and int(rows.max()) < len(self.ranks):
            self._add(window, rows)

    def _add(self, window: Window, rows: NDArray[np.int64]) -> None:
        first, last = int(window.indices[0]), int(window.indices[-1])
        self.first_step = first if self.first_step is None else min(first, self.first_step)
        self.last_step = last if self.last_step is None else max(last, self.last_step)
        self.world_size = window.world_size
        self.steps += len(window)
        self._phases_ns += window.phases_ns.mean(axis=0).sum(axis=1)
        self._step_ns.add(window.job_step_ns)
        if set(PAUSES) <= set(window.columns):
            self._pauses_ns[:, rows] += [window.pause_ns(name).sum(axis=1) for name in PAUSES]
        if not window.complete:
            return
        self._complete_steps += len(window)
        self._wire_ns += float(window.wire_ns.sum(dtype=np.float64))
        self._wait_ns += float(window.job_wait_ns.sum())
        self._straggler_cost_ns[rows] += window.straggler_cost_ns.sum(axis=1)
        self._sync_points.add(window)
        known = np.isfinite(window.samples)
        self._samples += float(window.samples[known].sum())
        self._samples_ns += float(window.job_step_ns[known].sum())
        for batch, times in zip(*np.unique(window.samples[known], return_counts=True), strict=True):
            if int(batch) in self._batches or len(self._batches) < MAX_BATCHES:
                self._batches[int(batch)] += int(times)

    @property
    def total_ns(self) -> float:
        """Time in the steps; each counts as the mean of its ranks."""
        return float(self._phases_ns.sum())

    @property
    def mean_step_ns(self) -> float:
        """0 = there are no steps."""
        return self.total_ns / max(self.steps, 1)

    def step_ns(self, fraction: float = MEDIAN) -> float | None:
        """This quantile of the step times, each the mean of its ranks. None = there are no steps."""
        if self._window_ns is not None:
            return float(np.quantile(self._window_ns, fraction))
        return self._step_ns.quantile(fraction)

    @property
    def samples_per_s(self) -> float | None:
        """All samples of all ranks over all the time that they took; None = not reported."""
        return self._samples * 1e9 / self._samples_ns if self._samples_ns else None

    @property
    def effective_batch(self) -> int | None:
        """Samples of all ranks in most of the steps, accumulation included; None = not reported."""
        return self._batches.most_common(1)[0][0] if self._batches else None

    def shares(self) -> Shares:
        """All-reduce, wire and wait as fractions of the total time. None for a single rank."""
        return self.sync_shares() if len(self.ranks) > 1 else UNKNOWN

    def sync_shares(self) -> Shares:
        """The same, also for a single rank: scaling needs its sync as the reference."""
        total_ns = self.total_ns
        if not total_ns:
            return UNKNOWN
        share = float(self._phases_ns[SYNC]) / total_ns
        if self._complete_steps < self.steps / 2:
            return Shares(share, None, None)
        # Over the complete steps, scaled to the share of all, so that the parts add up to it.
        sync_ns = max(self._wire_ns + self._wait_ns, 1.0)
        return Shares(share, share * self._wire_ns / sync_ns, share * self._wait_ns / sync_ns)

    def sync_points(self, state: RunState) -> list[SyncPointFigures]:
        """Sync points of the complete steps, the longest first."""
        return self._sync_points.figures(state, self.total_ns * self._complete_steps / max(self.steps, 1))

    def pause_shares(self) -> dict[str, dict[int, float]]:
        """By column of steps and rank: garbage collection, checkpoint saves and evaluation as fractions of the steps'
        time.
        """
        shares = (self._pauses_ns / max(self.total_ns, 1.0)).tolist()
        return {name: dict(zip(self.ranks, row, strict=True)) for name, row in zip(PAUSES, shares, strict=True)}

    def mean_parts_ns(self) -> dict[str, float]:
        """Means over steps and ranks, which add up to the mean step: phases, with `sync` as wire and wait where that is
        known. Empty = no steps.
        """
        if not self.steps:
            return {}
        parts_ns = dict(zip(PHASES, (self._phases_ns / self.steps).tolist(), strict=True))
        shares = self.shares()
        if shares.wire is not None and shares.wait is not None:
            del parts_ns[PHASES[SYNC]]
            parts_ns |= {"wire": shares.wire * self.mean_step_ns, "wait": shares.wait * self.mean_step_ns}
        return parts_ns

    def straggler_costs(self) -> dict[int, float]:
        """By rank, its straggler cost as a fraction of the steps' time."""
        return dict(zip(self.ranks, (self._straggler_cost_ns / max(self.total_ns, 1.0)).tolist(), strict=True))

    def waited_for(self) -> tuple[int, ...]:
        """Ranks that most of the waiting was for; empty = none stands out, or there is hardly any."""
        wait = self.sync_shares().wait or 0.0
        return waited_for(self.straggler_costs()) if wait >= ScalingLimits.MIN_WAIT_SHARE else ()

    def profile(self) -> Profile | None:
        """What scaling compares; None = no steps, or wire and wait are not known."""
        _, wire, wait = self.sync_shares()
        if wire is None or wait is None:
            return None
        step_ns = self.mean_step_ns
        wire_ns, wait_ns = wire * step_ns, wait * step_ns
        data_ns = float(self._phases_ns[PHASES.index("data")]) / self.steps
        return Profile(
            world_size=self.world_size,
            steps=self.steps,
            step_ns=step_ns,
            samples_per_s=self.samples_per_s,
            effective_batch=None if self.effective_batch is None else float(self.effective_batch),
            data_ns=data_ns,
            compute_ns=step_ns - data_ns - wire_ns - wait_ns,
            wire_ns=wire_ns,
            wait_ns=wait_ns,
            waited_for=self.waited_for(),
            median_ns=self.step_ns(),
            p99_ns=self.step_ns(P99),
        )


@dataclass(frozen=True)
class Cost:
    """Straggler cost of a rank or a host: the time that the job would have saved, had it been as fast as the
    next-slowest.
    """

    subject: int | str
    """A rank, or the name of a host."""
    share: float
    """Of the time in steps."""
    seconds: float
    """Of the job; every rank of it has lost them."""
    phases: tuple[str, ...] = ()
    """Where it was slower than the others, the slowest first; empty = not known. Without hung steps, unless most of the
    cost is in them."""
    hung: HungSteps | None = None
    """The hung steps that it is to blame for, if they are a good part of what it cost."""
    mainly_hung: bool = False
    """Whether they are most of it: then it was not slow, but stuck."""


class RunAggregate(Aggregate):
    """Aggregate of a recorded run, with columns over time, what each rank did, and the costs of ranks and hosts."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Of these ranks, ascending."""
        super().__init__(ranks)
        self.hosts = [""] * len(ranks)
        self.implausible: set[int] = set()
        """Ranks whose times were left out of some steps because they cannot be true."""
        self.over_time = MergingColumns(COLUMNS)
        for name in SUMMED:
            self.over_time.keep(name)
        self.over_time.keep("histogram", shape=(BINS,), dtype=np.int32)
        self.over_time.keep("excess_percent", shape=(len(ranks),), dtype=np.float32)
        self.over_time.keep("excess_ns", shape=(len(ranks),))
        self.over_time.keep("present_ns", shape=(len(ranks),))
        self.over_time.keep("slow_last", "max", shape=(len(ranks),))
        self.over_time.keep("present", shape=(len(ranks),), dtype=np.float32)
        self.over_time.keep("straggler_cost_ns", shape=(len(ranks),))
        self.rank_steps = np.zeros(len(ranks), dtype=np.int64)
        """Of each rank, the steps that were measured."""
        self._rank_phases_ns = np.zeros((len(ranks), len(PHASES)))
        self._rank_wait_ns = np.zeros(len(ranks))
        self._excess_ns = np.zeros((len(ranks), len(PHASES)))
        """Of each phase, the time beyond the median rank's in the steps in which the others waited for this rank."""
        self._host_straggler_cost_ns: Counter[str] = Counter()
        self._hung = HungStepFinder()

    @classmethod
    def of_run(cls, windows: Iterable[Window], ranks: Sequence[int]) -> RunAggregate:
        """Aggregate of all windows of a run, without step 0, which contains warmup, and without implausible ranks."""
        aggregate = cls(ranks)
        for window in windows:
            measured = without_implausible(window.where(window.indices > 0))
            aggregate.implausible.update(measured.implausible)
            aggregate.add(measured)
        return aggregate

    def _add(self, window: Window, rows: NDArray[np.int64]) -> None:
        super()._add(window, rows)
        for row, host in zip(rows.tolist(), window.hosts, strict=True):
            self.hosts[row] = host
        self._rank_phases_ns[rows] += window.phases_ns.sum(axis=2)
        self.rank_steps[rows] += len(window)
        self._hung.add_window(window)
        self._add_columns(window, rows)
        if window.complete:
            self._rank_wait_ns[rows] += window.wait_ns.sum(axis=1)
            excess_ns = window.phases_ns - np.median(window.phases_ns, axis=0)
            self._excess_ns[rows] += np.where((window.straggler_cost_ns > 0)[:, None], excess_ns, 0.0).sum(axis=2)
            self._host_straggler_cost_ns.update(_host_straggler_cost_ns(window))

    def _add_columns(self, window: Window, rows: NDArray[np.int64]) -> None:
        over_time, steps = self.over_time, len(window)
        places = over_time.places(window.indices)
        complete = float(window.complete)
        sums = (np.ones(steps), window.job_step_ns, window.job_sync_ns, np.full(steps, complete))
        split = (window.wire_ns * complete, window.job_wait_ns * complete)
        for name, values in zip(SUMMED, (*sums, *split), strict=True):
            over_time.add(name, places, values)
        histogram = np.zeros((steps, BINS), dtype=np.int32)
        histogram[np.arange(steps), bins(window.job_step_ns)] = 1
        over_time.add("histogram", places, histogram)
        by_rank: dict[str, NDArray[Any]] = {
            "excess_percent": window.excess_percent,
            "excess_ns": window.excess_ns,
            "present_ns": window.job_step_ns,
            "present": np.ones(steps),
            "straggler_cost_ns": window.straggler_cost_ns * complete,
        }
        for name, of_ranks in by_rank.items():
            in_step = np.zeros((steps, len(self.ranks)))
            in_step[:, rows] = np.atleast_2d(of_ranks).T
            over_time.add(name, places, in_step)
        slow_last = np.full((steps, len(self.ranks)), -np.inf)
        slow_last[:, rows] = np.where(window.excess_percent >= SummaryLimits.SLOW_PERCENT, window.indices, -np.inf).T
        over_time.add("slow_last", places, slow_last)

    def step_ns_over_time(self, part: float) -> FloatArray:
        """This quantile of the step times by column; nan where no step is."""
        return quantile(self.over_time["histogram"], part)

    def shares_over_time(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """All-reduce, wire and wait as fractions of the step, by column; nan where they are not known."""
        over_time = self.over_time
        whole_ns = np.where(over_time["step_ns"] > 0, over_time["step_ns"], np.nan)
        complete = over_time["complete"] == over_time["steps"]
        wire, wait = (np.where(complete, over_time[name], np.nan) / whole_ns for name in ("wire_ns", "wait_ns"))
        return over_time["sync_ns"] / whole_ns, wire, wait

    def slow_until(self, rank: int, since: int) -> tuple[int, bool] | None:
        """The last step of a rank that was slow from `since` on and then as fast as the others, and whether it is
        exact, or rounded to columns of several steps; None = it has not become fast again.
        """
        row = self.ranks.index(rank)
        # The mean of its steps, each counted once: a hung one must not make the others look fast.
        excess = self.over_time["excess_percent"][:, row] / np.maximum(self.over_time["present"][:, row], 1.0)
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
        """(rank, column): own work beyond the median rank's, in percent of the steps' time; nan = it was absent."""
        return _in_percent(self.over_time["excess_ns"].T, self.over_time["present_ns"].T)

    def excess_of_ranks(self) -> FloatArray:
        """The same of each rank over all of its steps."""
        return _in_percent(self.over_time["excess_ns"].sum(axis=0), self.over_time["present_ns"].sum(axis=0))

    def phases_ns(self) -> FloatArray:
        """(rank, phase): the mean of a step; `sync` is all of it. nan for a rank without steps."""
        steps = np.where(self.rank_steps > 0, self.rank_steps, np.nan)
        phases_ns: FloatArray = self._rank_phases_ns / steps[:, None]
        return phases_ns

    def waits_ns(self) -> FloatArray:
        """The mean of what each rank waited for others in a step, at most its sync; nan = not known."""
        steps = self._complete_steps or np.nan
        waits_ns: FloatArray = np.minimum(self._rank_wait_ns / steps, self.phases_ns()[:, SYNC])
        return waits_ns

    def hung_steps(self, ranks: Collection[int] | None = None) -> HungSteps | None:
        """The hung steps, or those that these ranks are to blame for; None = there are none."""
        return self._hung.found(self.step_ns(), self.total_ns, ranks)

    def costs(self) -> list[Cost]:
        """Straggler cost of every rank that has one, the largest first."""
        median_ns, total_ns = self.step_ns(), self.total_ns
        found = [
            self._cost(row, cost_ns, self._hung.found(median_ns, total_ns, {self.ranks[row]}))
            for row, cost_ns in enumerate(self._straggler_cost_ns.tolist())
            if cost_ns > 0
        ]
        return sorted(found, key=lambda cost: -cost.share)

    def host_costs(self) -> list[Cost]:
        """The same of every host, where there are several: its ranks together against all others."""
        found = [
            self._host_cost(host, cost_ns) for host, cost_ns in self._host_straggler_cost_ns.items() if cost_ns > 0
        ]
        return sorted(found, key=lambda cost: -cost.share)

    def fraction_within(self, rank: int, spans: Sequence[tuple[int, int]]) -> float:
        """The fraction of a rank's cost that falls into these steps, from the first to the last of each; rounded to
        columns of several steps.
        """
        cost_ns = self.over_time["straggler_cost_ns"][:, self.ranks.index(rank)]
        begins, ends = self.over_time.begins, self.over_time.begins + self.over_time.width - 1
        within = np.zeros(len(begins), np.bool_)
        for first, last in spans:
            within |= (begins <= last) & (ends >= first)
        return float(cost_ns[within].sum() / max(cost_ns.sum(), 1.0))

    def _cost(self, row: int, cost_ns: float, hung: HungSteps | None) -> Cost:
        rank, excess_ns = self.ranks[row], self._excess_ns[row]
        share, seconds = cost_ns / self.total_ns, cost_ns / 1e9
        if hung is None or hung.straggler_cost_ns < SummaryLimits.CAUSE_SHARE * cost_ns:
            return Cost(rank, share, seconds, _slow_phases(excess_ns, cost_ns))
        if hung.straggler_cost_ns >= SummaryLimits.MAIN_SHARE * cost_ns:
            return Cost(
                rank, share, seconds, _slow_phases(hung.excess_ns, hung.straggler_cost_ns), hung, mainly_hung=True
            )
        rest = _slow_phases(excess_ns - hung.excess_ns, cost_ns - hung.straggler_cost_ns)
        return Cost(rank, share, seconds, rest, hung)

    def _host_cost(self, host: str, cost_ns: float) -> Cost:
        share, seconds = cost_ns / self.total_ns, cost_ns / 1e9
        hung = self.hung_steps({rank for rank, its in zip(self.ranks, self.hosts, strict=True) if its == host})
        if hung is None or hung.lost_s < SummaryLimits.CAUSE_SHARE * seconds:
            return Cost(host, share, seconds)
        return Cost(host, share, seconds, hung=hung, mainly_hung=hung.lost_s >= SummaryLimits.MAIN_SHARE * seconds)


def _in_percent(part_ns: FloatArray, whole_ns: FloatArray) -> FloatArray:
    percent: FloatArray = np.where(whole_ns > 0, 100.0 * part_ns / np.maximum(whole_ns, 1.0), np.nan)
    return percent


def _slow_phases(excess_ns: FloatArray, cost_ns: float) -> tuple[str, ...]:
    """Phases whose excess over the others explains a good part of the cost, the slowest first."""
    excess_ns = excess_ns.copy()
    excess_ns[SYNC] = 0.0
    min_ns = max(SummaryLimits.CAUSE_SHARE * cost_ns, SummaryLimits.SLOW_SHARE * excess_ns.max())
    order = np.argsort(-excess_ns, kind="stable").tolist()
    return tuple(PHASES[place] for place in order if excess_ns[place] > min_ns)


def _host_straggler_cost_ns(window: Window) -> dict[str, float]:
    """Straggler cost of each host in this window; empty = one host, or hosts are not known."""
    hosts = sorted(set(window.hosts))
    if len(hosts) < 2 or not all(hosts):
        return {}
    names = np.array(window.hosts)
    cost_ns = window.group_straggler_cost_ns([np.flatnonzero(names == host) for host in hosts])
    return dict(zip(hosts, cost_ns.sum(axis=1).tolist(), strict=True))


class StepSample:
    """One row a step, means over its ranks; of a very long run a random sample. Incomplete steps are skipped."""

    def __init__(self, windows: Iterable[Window] = (), *, max_rows: int = MAX_ROWS) -> None:
        """Begin empty, or with these windows."""
        self.seen = 0
        """Steps that were added, dropped ones among them."""
        self.world_size = 0
        self._warm, self._all = Aggregate(), Aggregate()
        self._capped_ns = np.zeros(0)
        """By rank, its straggler cost, capped in each step: a few odd steps do not put the blame on a rank."""
        self._max = max(max_rows, 2)
        self._keep = 1.0
        self._random = np.random.default_rng(0)
        self._chunks: list[FloatArray] = []
        self._rows = 0
        for window in windows:
            self.add(window)

    def add(self, window: Window) -> None:
        """Add the steps of a window, none of which was added before."""
        if not window.complete:
            return
        if not self.seen:
            self._warm, self._all = Aggregate(window.ranks), Aggregate(window.ranks)
            self._capped_ns = np.zeros(len(window.ranks))
        self.seen += len(window)
        self.world_size = window.world_size
        max_ns = SummaryLimits.MAX_STEP_COST_SHARE * window.median_step_ns
        self._capped_ns += np.minimum(window.straggler_cost_ns, max_ns).sum(axis=1)
        self._warm.add(window.where(window.indices >= SummaryLimits.WARMUP_STEPS))
        self._all.add(window.where(window.indices > 0))
        rows = _rows(window)
        if self._keep < 1.0:
            rows = rows[:, self._random.random(rows.shape[1]) < self._keep]
        self._chunks.append(rows)
        self._rows += rows.shape[1]
        while self._rows > self._max:
            kept = self._table()
            kept = kept[:, self._random.random(kept.shape[1]) < 0.5]
            self._chunks, self._rows, self._keep = [kept], kept.shape[1], self._keep / 2

    def passing(self, windows: Iterable[Window]) -> Iterator[Window]:
        """Add windows while passing them on."""
        for window in windows:
            self.add(window)
            yield window

    def profile(self) -> Profile | None:
        """Of all steps that `steps` samples; None = there are none."""
        profile = (self._warm if self._warm.steps >= WindowLimits.MIN_STEPS else self._all).profile()
        if profile is None:
            return None
        is_noticeable = profile.shares["waiting"] >= ScalingLimits.MIN_WAIT_SHARE
        costs = dict(zip(self._warm.ranks, self._capped_ns.tolist(), strict=True))
        return replace(profile, waited_for=waited_for(costs) if is_noticeable else ())

    def steps(self) -> dict[str, FloatArray]:
        """The rows by name, in the order of steps, without warm-up steps if there are enough others; never with step
        0, which no figure of a run holds.
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
    """Means over ranks; samples are of all ranks together, nan where a rank did not report them."""
    phases_ns = dict(zip(PHASES, window.phases_ns.mean(axis=0), strict=True))
    parts_ns = {**phases_ns, "wire": window.wire_ns, "wait": window.job_wait_ns}
    return np.stack([window.indices, *(parts_ns[name] for name in PARTS), window.samples])
