"""Table of all Prometheus metrics and how each is read from one sample of a run.

Units are base units and names follow Prometheus's conventions. An unknown value is None and its series absent, never
zero. Above `MAX_RANKS` ranks only the worst have series of their own, so that the number of series is bounded by
constants; metrics over all ranks are always there. Text from outside becomes a label only when sanitized and short.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, get_args

import numpy as np

from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.alerts.severity import findings_by_rank, steady_severity
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.state.gpu import THROTTLE_REASONS
from ddpwatch.core.state.run import ALIVE, Condition, RunCondition
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.version import VERSION
from ddpwatch.view.status import backend
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.core.metrics.live_metrics import Figures, RankFigures
    from ddpwatch.core.monitor import Monitor
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.wire import Beat, Gpu

MAX_RANKS: Final = 256
"""Maximum number of ranks that all have series of their own."""
WORST_RANKS: Final = 32
"""Number of ranks with series of their own in larger runs: the most severe, then those with the longest self time."""
MAX_GPUS: Final = 8
"""Maximum number of GPUs of one rank."""
_STATS: Final = ("min", "median", "p90", "max")

Labels: TypeAlias = tuple[object, ...]
Readings: TypeAlias = "Iterable[tuple[Labels, float | None]]"
Reader: TypeAlias = "Callable[[RunSample], Readings]"


@dataclass(frozen=True)
class RunSample:
    """A run at one moment."""

    state: RunState
    figures: Figures | None
    open: tuple[Alert, ...]
    opened: Counter[str]
    """Alerts opened since watching began, by rule."""
    conditions: dict[int, Condition]
    ranks: Sequence[RankState]
    """Ranks with series of their own."""


def sample_run(monitor: Monitor, opened: Counter[str], before: frozenset[int] = frozenset()) -> RunSample:
    """Sample the run. `before` are the ranks that had series of their own the last time."""
    state, figures, alerts = monitor.state, monitor.figures(), tuple(monitor.book.open.values())
    conditions = {rank.rank: state.condition(rank) for rank in state.ranks.values()}
    ranks: Sequence[RankState] = list(state.ranks.values())
    if len(ranks) > MAX_RANKS:
        ranks = _worst(state, figures, alerts, conditions, before)
    return RunSample(state, figures, alerts, Counter(opened), conditions, ranks)


def _worst(
    state: RunState,
    figures: Figures | None,
    alerts: Iterable[Alert],
    conditions: dict[int, Condition],
    before: frozenset[int],
) -> list[RankState]:
    """The worst ranks by number, with hysteresis for those in `before`: each newcomer is a new series."""
    findings = findings_by_rank(alerts)
    measured = figures.ranks if figures else {}

    def badness(rank: int) -> tuple[int, float]:
        severity = steady_severity(state.ranks[rank], conditions[rank], findings.get(rank))
        own = measured.get(rank)
        return -1 if severity is None else severity, own.self_ns if own else 0.0

    order = sorted(state.ranks, key=badness, reverse=True)
    surely, maybe = order[: WORST_RANKS // 2], order[WORST_RANKS // 2 : 2 * WORST_RANKS]
    maybe.sort(key=lambda rank: rank not in before)
    return [state.ranks[rank] for rank in sorted((surely + maybe)[:WORST_RANKS])]


def of_run(get: Callable[[RunSample], float | None]) -> Reader:
    """One value."""
    return lambda sample: [((), get(sample))]


def of_figures(get: Callable[[Figures], float | None]) -> Reader:
    """One value; absent while there are no figures."""
    return lambda sample: [((), get(sample.figures))] if sample.figures else ()


def of_states(states: tuple[str, ...], count: Callable[[RunSample, str], float]) -> Reader:
    """A value for each state."""
    return lambda sample: [((state,), count(sample, state)) for state in states]


def of_ranks(get: Callable[[RunSample, RankState], float | None]) -> Reader:
    """A value for each rank with series of its own."""
    return lambda sample: [((rank.rank, rank.host), get(sample, rank)) for rank in sample.ranks]


def of_beats(get: Callable[[Beat], float | None]) -> Reader:
    """A value from the latest heartbeat of each rank."""
    return of_ranks(lambda _, rank: get(rank.beat) if rank.beat else None)


def of_measured(get: Callable[[RankFigures], float | None]) -> Reader:
    """A value from the figures of each rank."""

    def value(sample: RunSample, rank: RankState) -> float | None:
        found = sample.figures.ranks.get(rank.rank) if sample.figures else None
        return None if found is None else get(found)

    return of_ranks(value)


def phases(sample: RunSample) -> Readings:
    """The phases of each rank."""
    for rank in sample.ranks:
        if sample.figures and (found := sample.figures.ranks.get(rank.rank)):
            for phase in PHASES:
                yield (rank.rank, rank.host, phase), seconds(getattr(found, f"{phase}_ns"))


def _quantiles(values: Sequence[float | None]) -> list[tuple[Labels, float]]:
    """Minimum, median, 90th percentile and maximum of the known values, each labeled with its name."""
    known = [value for value in values if value is not None]
    if not known:
        return []
    return [((name,), value) for name, value in zip(_STATS, np.percentile(known, (0, 50, 90, 100)), strict=True)]


def over_ranks(get: Callable[[RankFigures], float | None]) -> Reader:
    """Quantiles of a figure over all ranks."""
    return lambda sample: _quantiles([get(one) for one in sample.figures.ranks.values()]) if sample.figures else ()


def phases_over_ranks(sample: RunSample) -> Readings:
    """Quantiles of each phase over all ranks."""
    found = sample.figures.ranks.values() if sample.figures else ()
    for phase in PHASES:
        for stat, value in _quantiles([seconds(getattr(one, f"{phase}_ns")) for one in found]):
            yield (phase, *stat), value


def _gpus(sample: RunSample, ranks: Iterable[RankState]) -> Iterator[tuple[Labels, Gpu]]:
    """Labels and last reading of each GPU; a reading that is too old is left out."""
    for rank in ranks:
        for gpu in rank.gpus.now(sample.state.now_ns)[:MAX_GPUS]:
            yield (rank.rank, rank.host, gpu.device), gpu


def of_gpus(get: Callable[[Gpu], float | None]) -> Reader:
    """A value for each GPU."""
    return lambda sample: [(labels, get(gpu)) for labels, gpu in _gpus(sample, sample.ranks)]


def gpu_info(sample: RunSample) -> Readings:
    """Name and UUID of a GPU."""
    return [((*labels, gpu.name, gpu.uuid), 1) for labels, gpu in _gpus(sample, sample.ranks)]


def throttled(sample: RunSample) -> Readings:
    """Whether each GPU is throttled, by reason."""
    for labels, gpu in _gpus(sample, sample.ranks):
        if "throttle" not in gpu.absent and not gpu.lost:
            yield from (((*labels, reason), reason in gpu.throttle) for reason in THROTTLE_REASONS)


def gpus_over_ranks(sample: RunSample) -> Readings:
    """Quantiles of utilization over all GPUs."""
    return _quantiles([ratio(gpu.util_percent) for _, gpu in _gpus(sample, sample.state.ranks.values())])


def open_alerts(sample: RunSample) -> Readings:
    """Open alerts by rule and severity, zeros included, so that a rule that never fired differs from an unknown one."""
    counts = Counter((alert.finding.rule, alert.finding.severity) for alert in sample.open)
    for detector in DETECTORS:
        for severity in Severity:
            yield (detector.rule, severity.word), counts[detector.rule, severity]


def all_reduce(sample: RunSample) -> Readings:
    """All-reduce share of the step; absent for one rank."""
    return [((), sample.figures.share)] if sample.figures and sample.state.world_size > 1 else ()


def shares(sample: RunSample) -> Readings:
    """Wire and wait shares; absent where a rank is missing, and for one rank."""
    if sample.figures and sample.state.world_size > 1:
        yield ("wire",), sample.figures.wire_share
        yield ("wait",), sample.figures.wait_share


def run_info(sample: RunSample) -> Readings:
    """Identity of the run."""
    state = sample.state
    return [((state.run_id, state.name, backend(state) or ""), 1)]


def sum_of_beats(get: Callable[[Beat], float]) -> Reader:
    """Sum over all ranks that sent a heartbeat; absent while none did."""

    def total(sample: RunSample) -> float | None:
        received = [get(rank.beat) for rank in sample.state.ranks.values() if rank.beat]
        return sum(received) if received else None

    return of_run(total)


def seconds(ns: float | None) -> float | None:
    """Convert nanoseconds."""
    return None if ns is None else ns / 1e9


def ratio(percent: float | None) -> float | None:
    """Convert percent."""
    return None if percent is None else percent / 100


def scaled(value: float | None, factor: float) -> float | None:
    """Convert by a factor."""
    return None if value is None else value * factor


_MANY: Final = f" In runs of more than {MAX_RANKS} ranks, only for the worst {WORST_RANKS}."
_MEDIAN: Final = "median of the last steps that all ranks finished"


@dataclass(frozen=True)
class Metric:
    """Name of a metric and how its series are read from a sample; a name that ends in `_total` is a counter's."""

    name: str
    help: str
    read: Reader
    labels: tuple[str, ...] = ()


def _rank_metric(name: str, text: str, read_from: Reader, *labels: str) -> Metric:
    return Metric(name, text + _MANY, read_from, ("rank", "host", *labels))


def _gpu_metric(name: str, text: str, read_from: Reader, *labels: str) -> Metric:
    return _rank_metric(name, text, read_from, "device", *labels)


Snapshot: TypeAlias = tuple[tuple[Metric, dict[tuple[str, ...], float]], ...]
"""All values by metric and labels. Immutable, so that any thread may read it."""


def read(sample: RunSample) -> Snapshot:
    """Read every metric that has a series."""
    read_now = ((metric, _series(metric, sample)) for metric in METRICS)
    return tuple((metric, series) for metric, series in read_now if series)


def _series(metric: Metric, sample: RunSample) -> dict[tuple[str, ...], float]:
    series: dict[tuple[str, ...], float] = {}
    for labels, value in metric.read(sample):
        if value is not None and math.isfinite(value):
            # The first one wins: Prometheus refuses a scrape with duplicate labels as a whole.
            series.setdefault(tuple([sanitize(str(label), NAME_CHARS) for label in labels]), float(value))
    return series


BUILD_INFO: Final = Metric("ddpwatch_build_info", "Version of ddpwatch.", lambda _: [((VERSION,), 1)], ("version",))
METRICS: Final = (
    BUILD_INFO,
    Metric("ddpwatch_run_info", "Identity of the run.", run_info, ("run", "name", "backend")),
    Metric("ddpwatch_run_state", "1 for the current state of the run, 0 for the others.",
           of_states(get_args(RunCondition), lambda sample, state: sample.state.run_condition() == state), ("state",)),
    Metric("ddpwatch_world_size", "Number of ranks.", of_run(lambda sample: sample.state.world_size)),
    Metric("ddpwatch_hosts", "Number of hosts.", of_run(lambda sample: sample.state.host_count)),
    Metric("ddpwatch_ranks",
           "Ranks by state: missing = never received, silent = no heartbeat, lost = exited without an exit message.",
           of_states(get_args(Condition), lambda sample, state: Counter[str](sample.conditions.values())[state]),
           ("state",)),
    Metric("ddpwatch_steps_total", "Highest step count of any rank.", of_run(lambda sample: sample.state.step)),
    Metric("ddpwatch_window_steps", "Steps in the window of the figures.", of_figures(lambda found: found.steps)),
    Metric("ddpwatch_step_seconds", f"Step time: {_MEDIAN}.", of_figures(lambda found: seconds(found.step_ns))),
    Metric("ddpwatch_samples_per_second", "Throughput of all ranks.", of_figures(lambda found: found.samples_per_s)),
    Metric("ddpwatch_effective_batch_samples",
           "Effective batch size: samples of all ranks per step, with gradient accumulation.",
           of_figures(lambda found: found.effective_batch)),
    Metric("ddpwatch_allreduce_ratio", "Exposed communication as a fraction of the step, wire and wait together.",
           all_reduce),
    Metric("ddpwatch_allreduce_share_ratio",
           "Fraction of the step spent on the network (wire), and waiting for slower ranks (wait).",
           shares, ("part",)),
    Metric("ddpwatch_allreduce_overlap_ratio", "Fraction of the gradient all-reduce that overlaps with computation.",
           of_figures(lambda found: found.overlap)),
    Metric("ddpwatch_alerts_open", "Open alerts.", open_alerts, ("rule", "severity")),
    Metric("ddpwatch_alerts_opened_total", "Alerts opened since ddpwatch began to watch.",
           lambda sample: [((detector.rule,), sample.opened[detector.rule]) for detector in DETECTORS], ("rule",)),
    Metric("ddpwatch_lost_messages",
           "Messages of all ranks that did not arrive; late arrivals are subtracted.",
           of_run(lambda sample: sum(max(rank.lost, 0) for rank in sample.state.ranks.values()))),
    Metric("ddpwatch_unusable_frames_total", "Frames and steps that could not be decoded or were implausible.",
           of_run(lambda sample: sample.state.bad + sample.state.unknown)),
    Metric("ddpwatch_agent_dropped_records_total",
           "Records that agents overwrote before sending them, sum of all ranks.",
           sum_of_beats(lambda beat: beat.dropped)),
    Metric("ddpwatch_agent_hook_seconds_total",
           "Estimated time of ddpwatch's hooks on the training threads, sum of all ranks.",
           sum_of_beats(lambda beat: beat.hook_ns / 1e9)),
    Metric("ddpwatch_agent_cpu_seconds_total", "CPU time of the agents' threads, sum of all ranks.",
           sum_of_beats(lambda beat: beat.agent_cpu_ns / 1e9)),
    Metric("ddpwatch_ranks_self_seconds", "Self time per step over all ranks.",
           over_ranks(lambda found: seconds(found.self_ns)), ("stat",)),
    Metric("ddpwatch_ranks_wait_seconds", "Time per step spent waiting for slower ranks, over all ranks.",
           over_ranks(lambda found: seconds(found.wait_ns)), ("stat",)),
    Metric("ddpwatch_ranks_phase_seconds", "Time in each phase over all ranks.", phases_over_ranks, ("phase", "stat")),
    Metric("ddpwatch_ranks_gpu_utilization_ratio", "GPU utilization over all ranks.", gpus_over_ranks, ("stat",)),
    _rank_metric("ddpwatch_rank_up", "Whether the rank sends heartbeats.",
                 of_ranks(lambda sample, rank: sample.conditions[rank.rank] in ALIVE)),
    _rank_metric("ddpwatch_rank_steps_total", "Steps finished by the rank.", of_ranks(lambda _, rank: rank.step)),
    _rank_metric("ddpwatch_rank_self_seconds",
                 f"Self time: the step without communication, {_MEDIAN}. It shows a slow rank; step times are equal.",
                 of_measured(lambda found: seconds(found.self_ns))),
    _rank_metric("ddpwatch_rank_wait_seconds", f"Time that the rank waits for slower ranks: {_MEDIAN}.",
                 of_measured(lambda found: seconds(found.wait_ns))),
    _rank_metric("ddpwatch_rank_phase_seconds", f"Time in each phase of the step: {_MEDIAN}.", phases, "phase"),
    _rank_metric("ddpwatch_rank_imposed_ratio",
                 "Straggler cost: fraction of the job's time saved if this rank were as fast as the next-slowest.",
                 of_measured(lambda found: found.straggler_cost_share)),
    _rank_metric("ddpwatch_rank_cpu_ratio", "CPU utilization of the rank's process; 1 is one core.",
                 of_beats(lambda beat: beat.cpu_percent / 100)),
    _rank_metric("ddpwatch_rank_resident_memory_bytes", "Resident memory of the rank's process.",
                 of_beats(lambda beat: beat.rss_bytes or None)),
    _gpu_metric("ddpwatch_gpu_info", "Name and UUID of a GPU.", gpu_info, "name", "uuid"),
    _gpu_metric("ddpwatch_gpu_utilization_ratio",
                "Fraction of the time in which a kernel ran, including one that waits in an all-reduce.",
                of_gpus(lambda gpu: ratio(gpu.util_percent))),
    _gpu_metric("ddpwatch_gpu_memory_used_bytes", "GPU memory in use.", of_gpus(lambda gpu: gpu.used_bytes)),
    _gpu_metric("ddpwatch_gpu_memory_total_bytes", "Total GPU memory.", of_gpus(lambda gpu: gpu.total_bytes)),
    _gpu_metric("ddpwatch_gpu_temperature_celsius", "GPU temperature.", of_gpus(lambda gpu: gpu.temperature_c)),
    _gpu_metric("ddpwatch_gpu_power_watts", "GPU power draw.", of_gpus(lambda gpu: scaled(gpu.power_mw, 1e-3))),
    _gpu_metric("ddpwatch_gpu_sm_clock_hertz", "SM clock.", of_gpus(lambda gpu: scaled(gpu.sm_mhz, 1e6))),
    _gpu_metric("ddpwatch_gpu_throttled", "Whether the GPU is throttled for this reason.", throttled, "reason"),
    _gpu_metric("ddpwatch_gpu_uncorrected_ecc_errors_total", "Uncorrected ECC errors since the driver was loaded.",
                of_gpus(lambda gpu: gpu.ecc_uncorrected)),
    _gpu_metric("ddpwatch_gpu_lost", "Whether the GPU has fallen off the bus.", of_gpus(lambda gpu: gpu.lost)),
)  # fmt: skip
"""All metrics, in the order of the exposition."""
