"""What is told to Prometheus: one table of metrics, all read from one look at a run.

Units are base units and names follow Prometheus's conventions. What is not known is absent. Above `MOST_RANKS` ranks
only the worst are told one by one, so that the number of series is bounded by constants; what stands for all ranks
together is always told. Text from outside becomes a label only when it is tame and short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, get_args

from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.state import Condition, RunCondition
from ddpwatch.core.text import NAME_CHARS, tame
from ddpwatch.outputs.readings import (
    MOST_RANKS,
    UP,
    WORST_RANKS,
    all_reduce,
    gpu_info,
    gpus_over_ranks,
    of_beats,
    of_figures,
    of_gpus,
    of_measured,
    of_ranks,
    of_run,
    of_states,
    open_alerts,
    over_ranks,
    phases,
    phases_over_ranks,
    ratio,
    run_info,
    scaled,
    seconds,
    shares,
    sum_of_beats,
    throttled,
)
from ddpwatch.version import VERSION
from ddpwatch.view.status import host_count

if TYPE_CHECKING:
    from ddpwatch.outputs.readings import Look, Reader

_RANK: Final = ("rank", "host")
_GPU: Final = ("rank", "host", "device")
_MANY: Final = f" Above {MOST_RANKS} ranks only of the worst {WORST_RANKS}."
_MEDIAN: Final = "median of the last steps that all ranks have finished"


@dataclass(frozen=True)
class Metric:
    """One name, and how its series are read from a look. A name that ends in `_total` is a counter's."""

    name: str
    help: str
    read: Reader
    labels: tuple[str, ...] = ()


Snapshot: TypeAlias = tuple[tuple[Metric, dict[tuple[str, ...], float]], ...]
"""All that is known, by metric and by the values of its labels. Values only: any thread may read it."""


def read(look: Look) -> Snapshot:
    """Every metric that has a series."""
    read_now = ((metric, _series(metric, look)) for metric in METRICS)
    return tuple((metric, series) for metric, series in read_now if series)


def _series(metric: Metric, look: Look) -> dict[tuple[str, ...], float]:
    series: dict[tuple[str, ...], float] = {}
    for labels, value in metric.read(look):
        if value is not None and math.isfinite(value):
            # The first one stands: with the same labels twice a scrape would be refused as a whole.
            series.setdefault(tuple([tame(str(label), NAME_CHARS) for label in labels]), float(value))
    return series


BUILD_INFO: Final = Metric(
    "ddpwatch_build_info", "The ddpwatch that watches.", lambda _: [((VERSION,), 1)], ("version",)
)
METRICS: Final = (
    BUILD_INFO,
    Metric("ddpwatch_run_info", "The run that is watched.", run_info, ("run", "name", "backend")),
    Metric(
        "ddpwatch_run_state",
        "1 for the state that the run is in.",
        of_states(get_args(RunCondition), lambda look, state: look.state.run_condition() == state),
        ("state",),
    ),
    Metric("ddpwatch_world_size", "Ranks of the job.", of_run(lambda look: look.state.world_size)),
    Metric("ddpwatch_hosts", "Hosts that its ranks run on.", of_run(lambda look: host_count(look.state))),
    Metric(
        "ddpwatch_ranks",
        "Ranks by state: missing were never heard, silent no longer, lost are gone without a word.",
        of_states(get_args(Condition), lambda look, state: sum(state == each for each in look.conditions.values())),
        ("state",),
    ),
    Metric("ddpwatch_steps_total", "Steps done by the furthest rank.", of_run(lambda look: look.state.step)),
    Metric("ddpwatch_window_steps", "Steps that the figures stand on.", of_figures(lambda found: found.steps)),
    Metric("ddpwatch_step_seconds", f"Time of a step: {_MEDIAN}.", of_figures(lambda found: seconds(found.step_ns))),
    Metric("ddpwatch_samples_per_second", "Samples of all ranks.", of_figures(lambda found: found.samples_per_s)),
    Metric(
        "ddpwatch_effective_batch_samples",
        "Samples of all ranks in one step, accumulation included.",
        of_figures(lambda found: found.effective_batch),
    ),
    Metric(
        "ddpwatch_allreduce_ratio",
        "Share of the step that is exposed communication, wire and waiting together.",
        all_reduce,
    ),
    Metric(
        "ddpwatch_allreduce_share_ratio",
        "Share of the step that the network costs (wire), and that ranks wait for slower ones (wait).",
        shares,
        ("part",),
    ),
    Metric(
        "ddpwatch_allreduce_overlap_ratio",
        "Part of the gradient all-reduce that is hidden behind computing.",
        of_figures(lambda found: found.overlap),
    ),
    Metric(
        "ddpwatch_alerts_open",
        "Alerts that are open.",
        open_alerts,
        ("rule", "severity"),
    ),
    Metric(
        "ddpwatch_alerts_opened_total",
        "Alerts that were opened since watching began.",
        lambda look: [((detector.rule,), look.opened[detector.rule]) for detector in DETECTORS],
        ("rule",),
    ),
    Metric(
        "ddpwatch_lost_messages",
        "Messages of all ranks that did not arrive; one that comes late is taken off again.",
        of_run(lambda look: sum(max(rank.lost, 0) for rank in look.state.ranks.values())),
    ),
    Metric(
        "ddpwatch_unusable_frames_total",
        "Frames and steps that could not be used.",
        of_run(lambda look: look.state.bad + look.state.unknown),
    ),
    Metric(
        "ddpwatch_agent_dropped_records_total",
        "Records that agents overwrote before they could send them, all ranks together.",
        of_run(lambda look: sum_of_beats(look, lambda beat: beat.dropped)),
    ),
    Metric(
        "ddpwatch_agent_hook_seconds_total",
        "Time of ddpwatch's hooks on the training threads, all ranks together, estimated.",
        of_run(lambda look: sum_of_beats(look, lambda beat: beat.hook_ns / 1e9)),
    ),
    Metric(
        "ddpwatch_agent_cpu_seconds_total",
        "CPU time of the agents' own threads, all ranks together.",
        of_run(lambda look: sum_of_beats(look, lambda beat: beat.agent_cpu_ns / 1e9)),
    ),
    Metric(
        "ddpwatch_ranks_self_seconds",
        "Own work in a step over all ranks.",
        over_ranks(lambda found: seconds(found.self_ns)),
        ("stat",),
    ),
    Metric(
        "ddpwatch_ranks_wait_seconds",
        "Waiting for slower ranks in a step over all ranks.",
        over_ranks(lambda found: seconds(found.wait_ns)),
        ("stat",),
    ),
    Metric("ddpwatch_ranks_phase_seconds", "Time in each phase over all ranks.", phases_over_ranks, ("phase", "stat")),
    Metric("ddpwatch_ranks_gpu_utilization_ratio", "GPU utilisation over all ranks.", gpus_over_ranks, ("stat",)),
    Metric(
        "ddpwatch_rank_up",
        "Whether the rank gives signs of life." + _MANY,
        of_ranks(lambda look, rank: look.conditions[rank.rank] in UP),
        _RANK,
    ),
    Metric("ddpwatch_rank_steps_total", "Steps done by the rank." + _MANY, of_ranks(lambda _, rank: rank.step), _RANK),
    Metric(
        "ddpwatch_rank_self_seconds",
        f"Own work of the rank, the step without sync: {_MEDIAN}. Only this shows a slow rank." + _MANY,
        of_measured(lambda found: seconds(found.self_ns)),
        _RANK,
    ),
    Metric(
        "ddpwatch_rank_wait_seconds",
        f"Time that the rank waits for slower ones: {_MEDIAN}." + _MANY,
        of_measured(lambda found: seconds(found.wait_ns)),
        _RANK,
    ),
    Metric("ddpwatch_rank_phase_seconds", f"Time in each phase: {_MEDIAN}." + _MANY, phases, (*_RANK, "phase")),
    Metric(
        "ddpwatch_rank_imposed_ratio",
        "Part of its time that the job would save, were this rank as fast as the next-slowest." + _MANY,
        of_measured(lambda found: found.imposed_share),
        _RANK,
    ),
    Metric(
        "ddpwatch_rank_cpu_ratio",
        "CPU use of the rank's process; 1 is a core." + _MANY,
        of_beats(lambda beat: beat.cpu_percent / 100),
        _RANK,
    ),
    Metric(
        "ddpwatch_rank_resident_memory_bytes",
        "Resident memory of the rank's process." + _MANY,
        of_beats(lambda beat: beat.rss_bytes or None),
        _RANK,
    ),
    Metric("ddpwatch_gpu_info", "The GPUs of a rank." + _MANY, gpu_info, (*_GPU, "name", "uuid")),
    Metric(
        "ddpwatch_gpu_utilization_ratio",
        "Share of the time in which a kernel ran; one that waits in an all-reduce counts." + _MANY,
        of_gpus(lambda gpu: ratio(gpu.util_percent)),
        _GPU,
    ),
    Metric("ddpwatch_gpu_memory_used_bytes", "Memory in use." + _MANY, of_gpus(lambda gpu: gpu.used_bytes), _GPU),
    Metric("ddpwatch_gpu_memory_total_bytes", "Memory there is." + _MANY, of_gpus(lambda gpu: gpu.total_bytes), _GPU),
    Metric("ddpwatch_gpu_temperature_celsius", "Temperature." + _MANY, of_gpus(lambda gpu: gpu.temperature_c), _GPU),
    Metric("ddpwatch_gpu_power_watts", "Power drawn." + _MANY, of_gpus(lambda gpu: scaled(gpu.power_mw, 1e-3)), _GPU),
    Metric(
        "ddpwatch_gpu_sm_clock_hertz", "Clock of the SMs." + _MANY, of_gpus(lambda gpu: scaled(gpu.sm_mhz, 1e6)), _GPU
    ),
    Metric(
        "ddpwatch_gpu_throttled",
        "Whether this reason holds the clocks down." + _MANY,
        throttled,
        (*_GPU, "reason"),
    ),
    Metric(
        "ddpwatch_gpu_uncorrected_ecc_errors_total",
        "Uncorrected memory errors since the driver was loaded." + _MANY,
        of_gpus(lambda gpu: gpu.ecc_uncorrected),
        _GPU,
    ),
    Metric("ddpwatch_gpu_lost", "Whether it has fallen off the bus." + _MANY, of_gpus(lambda gpu: gpu.lost), _GPU),
)
"""All of them, in the order in which they are told."""
