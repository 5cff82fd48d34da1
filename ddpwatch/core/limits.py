"""Every threshold that decides a finding, with its unit and its default, grouped by rule.

Lowercase fields can be set by users, and their docstrings are shown by `ddpwatch rules`; in TOML a group is a table of
its rule's name: `[straggler]` `share = 0.03`. Uppercase attributes are fixed.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ddpwatch.errors import UsageError, choices_text
from ddpwatch.wire import BEAT_NS

Share: TypeAlias = Annotated[float, Meta(gt=0, lt=10)]
Factor: TypeAlias = Annotated[float, Meta(gt=1, le=1000)]
Sigmas: TypeAlias = Annotated[float, Meta(ge=1, le=100)]
Fraction: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Steps: TypeAlias = Annotated[int, Meta(ge=1, le=500)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.1, le=86_400)]
Bytes: TypeAlias = Annotated[int, Meta(ge=1, le=2**50)]
Readings: TypeAlias = Annotated[int, Meta(ge=2, le=100)]
"""Number of GPU readings, which come once a second."""


class _Group(Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    pass


class EvaluationLimits(_Group, frozen=True):
    """When rules are evaluated; the same for all of them."""

    warmup_steps: Steps = 10
    """First steps of a run that are never evaluated: bucket building, compilation, caches."""
    stride_steps: Steps = 5
    """Steps that all ranks complete between two evaluations; several times that in very large runs."""
    least_s: Seconds = 5.0
    """Minimum time in seconds that the evaluated steps cover: more steps are evaluated if they are short."""

    INTERVAL_NS: ClassVar[int] = 250_000_000
    """Interval in ns at which rules by time are evaluated and due steps are looked for."""
    MANY_RANKS_INTERVAL_NS: ClassVar[int] = 1_000_000_000
    """The same interval in runs of more than `MANY_RANKS` ranks, whose agents send one heartbeat a second."""
    GRADUAL_NS: ClassVar[int] = 4_000_000_000
    """Interval in ns between evaluations of gradual rules in runs of more than `MANY_RANKS` ranks."""
    STRIDE_NS_PER_RANK: ClassVar[int] = 4_000_000
    """Training time in ns for each rank between evaluations of steps in runs of more than `MANY_RANKS` ranks."""
    MAX_STRIDES: ClassVar[int] = 8
    """Evaluations of steps are at most this many times `stride-steps` apart."""
    START_DELAY_NS: ClassVar[int] = 3_000_000_000
    """Time in ns that ranks without a hello are waited for before the others are evaluated without them."""
    MAX_STEPS: ClassVar[int] = 100
    """Steps that a rule may look at, unless steps are short."""
    LOG_DELAY_NS: ClassVar[int] = 3_000_000_000
    """Open delay in ns of a finding from logs: the rank's own last message says more and arrives after the line."""


class StragglerLimits(_Group, frozen=True):
    """A rank or host is slower in its own work than the others."""

    share: Share = 0.05
    """Minimum excess of own work over the others, as a fraction of the step."""
    window_steps: Steps = 80
    """Steps evaluated."""
    recent_steps: Steps = 20
    """Latest steps in whose median a continuous excess must show."""
    sigmas: Sigmas = 5.0
    """Minimum excess over the noise, in standard errors."""
    outliers: Steps = 5
    """Minimum slow steps in the window for an irregular straggler."""
    critical_cost: Share = 0.5
    """Critical instead of a warning from this fraction of the job's time."""
    linger_steps: Steps = 120
    """Closed after this number of steps without a slow one; longer than the pauses between bursts."""

    HOST_SHARE: ClassVar[float] = 0.8
    """Fraction of a host's ranks that must be slow for the host to be named."""
    MAX_SEPARATE: ClassVar[int] = 8
    """More slow ranks than this share one alert."""
    PHASE_SHARE: ClassVar[float] = 0.5
    """Fraction of a rank's excess that must lie in one phase for the phase to be the place of it."""
    MIN_COST_SHARE: ClassVar[float] = 0.005
    """A cost below this fraction of the job's time is not reported."""
    CAUSE_SHARE: ClassVar[float] = 0.5
    """CPU starvation or a pause that makes up this fraction of a rank's excess is its cause."""
    SCHEDULER_NS: ClassVar[int] = 2_000_000_000
    """Correlation time in ns of scheduler noise: the kernel moves threads between cores every few seconds."""
    UNMEASURED_PART: ClassVar[float] = 0.5
    """Standard deviation of what the measured starvation leaves open, as a fraction of that of starvation: excess and
    starvation correlate by 0.9 and more, and less with DataLoader workers, whose own starvation is not measured."""
    PRIOR_INTERVALS: ClassVar[int] = 1
    """Weight, in sampled intervals, of the prior of scheduler noise: a standard deviation equal to the mean starvation
    since the start."""
    MIN_PERIODIC_STEPS: ClassVar[int] = 8
    """Fewer slow steps than this are no periodic pattern: pauses of the garbage collector fall into any order."""
    PERIODIC_EXTRA_SIGMAS: ClassVar[float] = 0.5
    """Added to `sigmas` for periodic patterns: folding tests many hypotheses at once."""
    HICCUP_DIVISOR: ClassVar[int] = 4
    """At most recent_steps // HICCUP_DIVISOR slow steps are too few to reopen an ended episode."""
    ONSET_STEPS: ClassVar[int] = 5
    """Block length in steps of the backward search for the first slow step."""
    MIN_SLOW_SHARE: ClassVar[float] = 0.5
    """A set of steps counts as slow if more than this fraction of it is."""
    STEADY_SHARE: ClassVar[float] = 0.8
    """Fraction of steps that must be slow, or of gaps that must be equal, for slowness to be lasting or periodic."""
    MAX_PATTERN_CHANCE: ClassVar[float] = 1e-4
    """Probability per evaluation of blaming a rank for slow steps that form a pattern by chance (binomial)."""
    MAX_SPORADIC_CHANCE: ClassVar[float] = 1e-6
    """Probability per evaluation of blaming a rank for sporadic slow steps alone (Poisson)."""
    EXPLAINED_SHARE: ClassVar[float] = 0.8
    """The simplest pattern that shows this fraction of the largest excess explains it."""
    OUTLIER_SIGMAS: ClassVar[float] = 4.0
    """Standard deviations by which a step must exceed the others to be an outlier by itself."""
    MIN_BASE_RATE: ClassVar[float] = 0.005
    """Fraction of odd steps that any rank may have: a pause of the garbage collector, a page fault."""
    LLR_THRESHOLD: ClassVar[float] = 12.0
    """Log-likelihood ratio from which an episode, or its end, is significant: some chances in a million."""
    MAX_SLOW_RATE: ClassVar[float] = 0.97
    """Upper bound of the rate of slow steps in an episode: a lasting straggler has a normal step now and then."""
    MIN_RATE_FACTOR: ClassVar[float] = 2.0
    """Steps are slow at least this many times as often inside an episode as outside."""
    MAX_BASE_RATE: ClassVar[float] = 0.4
    """Upper bound of the rate of slow steps outside episodes."""


class CommShareLimits(_Group, frozen=True):
    """Exposed communication takes too much of the step."""

    share: Share = 0.10
    """Opened above this all-reduce share of the step, waiting included."""
    close_part: Fraction = 0.8
    """Closed below this fraction of `share`."""
    window_steps: Steps = 50
    """Steps evaluated."""
    linger_steps: Steps = 100
    """Closed after this number of steps below the share."""


class SyncPointLimits(_Group, frozen=True):
    """A collective that the script calls itself takes too much of the step."""

    share: Share = 0.05
    """Opened above this fraction of the step, without waiting for slower ranks."""
    close_part: Fraction = 0.8
    """Closed below this fraction of `share`."""
    window_steps: Steps = 50
    """Steps evaluated."""
    linger_steps: Steps = 100
    """Closed after this number of steps below the share."""


class UnevenWorkLimits(_Group, frozen=True):
    """Inputs of uneven size make another rank the slowest in each step."""

    share: Share = 0.10
    """Minimum waiting, as a fraction of the step."""
    window_steps: Steps = 100
    """Steps evaluated."""
    linger_steps: Steps = 150
    """Closed after this number of steps without it."""

    MIN_STEPS: ClassVar[int] = 20
    """With fewer steps, which ranks are waited for is not known."""
    MIN_CHANGES: ClassVar[float] = 0.7
    """Changes of the last rank to arrive, as a fraction of those expected if steps were independent."""
    FOLLOWS_SHARE: ClassVar[float] = 0.5
    """Input sizes are the cause if they explain this fraction of the variance between ranks."""


class CpuStarvationLimits(_Group, frozen=True):
    """Training threads wait for CPU cores."""

    share: Share = 0.10
    """Minimum time without a core, as a fraction of the time, on at least half of a host's ranks."""
    lasting_s: Seconds = 5.0
    """Minimum duration in seconds."""
    linger_s: Seconds = 60.0
    """Closed after this time in seconds without it."""


class PausesLimits(_Group, frozen=True):
    """Garbage collection or checkpoint saves take too much of the time."""

    gc_share: Share = 0.01
    """Opened above this fraction of the time for garbage collection, waiting for other ranks' included."""
    save_share: Share = 0.05
    """Opened above this fraction of the time for checkpoint saves, waiting for another rank's included."""
    close_part: Fraction = 0.5
    """Closed below this fraction of these."""
    window_steps: Steps = 100
    """Steps evaluated."""
    linger_steps: Steps = 200
    """Closed after this number of steps below the share; longer than the gap between two pauses."""
    MAIN_SHARE: ClassVar[float] = 0.6
    """A rank, or the oldest generation, is named if it makes up this fraction of the pauses."""


class SlowLinkLimits(_Group, frozen=True):
    """The wire takes longer than earlier for the same bytes."""

    factor: Factor = 1.5
    """Minimum wire time, as a multiple of its own baseline."""
    share: Share = 0.03
    """Minimum increase of the wire time, as a fraction of the step."""
    sigmas: Sigmas = 5.0
    """Minimum increase over the noise of the baseline, in standard deviations."""
    lasting_s: Seconds = 20.0
    """Minimum duration in seconds, of the increase and of the baseline before it."""
    linger_steps: Steps = 100
    """Closed after this number of steps without it."""


class DataBoundLimits(_Group, frozen=True):
    """The ranks wait for their DataLoaders."""

    share: Share = 0.20
    """Minimum wait for data, as a fraction of the step."""
    ranks_share: Fraction = 0.5
    """Reported if more than this fraction of the ranks wait."""
    window_steps: Steps = 50
    """Steps evaluated."""
    linger_steps: Steps = 100
    """Closed after this number of steps without it."""
    FIRST_BATCH_SHARE: ClassVar[float] = 0.5
    """Fraction of the wait from which on the first batches of epochs are its cause."""
    STARVED_PERCENT: ClassVar[float] = 20.0
    """Percent of the time from which on workers that wait for a CPU core are starved."""
    BUSY_PERCENT: ClassVar[float] = 50.0
    """CPU use of a worker, in percent of a core, below which it mostly waits for storage or the network."""
    DEFAULT_WORKERS: ClassVar[int] = 4
    """Workers suggested to a rank without any where the number of cores is not known."""
    MAX_WORKERS: ClassVar[int] = 8
    """Max. number of workers suggested to a rank without any."""


class SlowdownLimits(_Group, frozen=True):
    """The whole job is slower than earlier."""

    factor: Factor = 1.10
    """Minimum time of work and wire, as a multiple of their own baseline."""
    sigmas: Sigmas = 5.0
    """Minimum increase over the noise of the baseline, in standard deviations."""
    lasting_s: Seconds = 20.0
    """Minimum duration in seconds, of the slowdown and of the baseline before it."""
    linger_steps: Steps = 150
    """Closed after this number of steps without it."""

    MIN_NOISE_SHARE: ClassVar[float] = 0.01
    """Lower bound of the noise as a fraction of work and wire: a few equal blocks do not make a job steadier."""


class UnevenBatchLimits(_Group, frozen=True):
    """Ranks train on different numbers of samples."""

    steps: Steps = 3
    """Minimum steps with different sample counts, of the last `window-steps`."""
    window_steps: Steps = 20
    """Steps evaluated."""
    linger_s: Seconds = 60.0
    """Closed after this time in seconds without it; like `stall` if ranks wait for one whose data has ended."""

    STUCK_NS: ClassVar[int] = 1_000_000_000
    """A rank that waits longer than this, in ns, in an all-reduce for a rank that has exited is stuck."""
    EXIT_CODE_NS: ClassVar[int] = 6_000_000_000
    """Time in ns between goodbye and exit code of a process, at most: torch is shut down in between."""
    LEFT_NS: ClassVar[int] = EXIT_CODE_NS + 2_000_000_000
    """Open delay in ns for a rank that left in the middle of its data: the exit code or an error may explain it."""


class SameDataLimits(_Group, frozen=True):
    """Ranks train on the same samples."""

    steps: Steps = 3
    """Minimum sampled steps in which ranks had the same batch."""
    linger_steps: Steps = 500
    """Closed after this number of steps without it."""


class DriftLimits(_Group, frozen=True):
    """The replicas differ."""

    linger_steps: Steps = 500
    """Closed after this number of steps with equal checksums."""

    NEWEST_CHECKS: ClassVar[int] = 64
    """Latest checksums that are compared."""


class MemoryLimits(_Group, frozen=True):
    """Memory of a rank, or of its GPU, keeps growing."""

    growth_bytes: Bytes = 256 << 20
    """Minimum growth of the resident memory, in bytes."""
    growth_share: Share = 0.10
    """Minimum growth of the resident memory, as a fraction of its first value."""
    least_s: Seconds = 300.0
    """Minimum time in seconds over which growth is measured."""
    gpu_part: Fraction = 0.95
    """Minimum fraction of a GPU's memory in use."""
    gpu_growth_bytes: Bytes = 64 << 20
    """Minimum growth of a GPU's memory in use, in bytes."""
    gpu_least_s: Seconds = 60.0
    """Minimum time in seconds over which growth of a GPU's memory is measured."""
    gpu_unused_part: Fraction = 0.20
    """Reported as fragmented if torch reserves and does not use this fraction of the GPU's memory."""
    linger_s: Seconds = 300.0
    """Closed after this time in seconds without growth."""

    MIN_SAMPLES: ClassVar[int] = 9
    """Minimum samples that growth is derived from: three for each third of the time."""
    MAX_SAMPLES: ClassVar[int] = 60
    """Evenly spread samples that are read, about: the rule is evaluated four times a second for every rank."""
    MIN_HALF_SHARE: ClassVar[float] = 0.25
    """Fraction of the growth that must fall into each half of the time: loading and filling caches comes to an end."""
    MAX_SEPARATE: ClassVar[int] = 3
    """More ranks than this share one alert."""


class GpuThrottleLimits(_Group, frozen=True):
    """A GPU is throttled."""

    readings: Readings = 20
    """Throttled in most of this number of readings, one per second."""
    clock_part: Fraction = 0.85
    """A clock below this fraction of the other GPUs' is a warning, also if only the power cap limits it."""
    lasting_s: Seconds = 5.0
    """Opened after this time in seconds: GPUs of a host overheat one after another and are reported together."""
    linger_s: Seconds = 60.0
    """Closed after this time in seconds without it."""

    HOST_SHARE: ClassVar[float] = 0.5
    """Fraction of a host's GPUs, and more than one, that must be held down for the host to be named."""
    MAX_SEPARATE: ClassVar[int] = 3
    """More hosts and GPUs than this share one alert."""
    MAX_PEERS: ClassVar[int] = 64
    """Ranks, evenly sampled, whose GPUs a clock is compared with: all of thousands would take too long."""
    MANY_PEERS: ClassVar[int] = 16
    """From this many GPUs on the median may include the compared one, and is computed once."""
    MIN_REASON_SHARE: ClassVar[float] = 0.5
    """A reason is named if it held the clocks in more than this fraction of the readings."""
    MIN_REPORTED: ClassVar[int] = 5
    """Readings that must carry their reasons: those in a snapshot have none."""
    NEAR_NS: ClassVar[int] = 5_000_000_000
    """A reading this close, in ns, to a span of time without one stands for it."""


class GpuErrorLimits(_Group, frozen=True):
    """The driver reports an error of a GPU."""

    linger_s: Seconds = 86_400.0
    """Closed after this time in seconds: a day, so that an error is not missed."""

    MAX_SEPARATE: ClassVar[int] = 8
    """With more GPUs than this the rest share one alert."""


class GpuIdleLimits(_Group, frozen=True):
    """Low GPU utilization while the rank trains."""

    util_part: Fraction = 0.30
    """Utilization below this fraction on average, and in the last reading."""
    readings: Readings = 30
    """Mean over this number of readings, one per second."""
    linger_s: Seconds = 60.0
    """Closed after this time in seconds without it."""

    MAX_SEPARATE: ClassVar[int] = 3
    """More ranks than this share one alert."""
    MAX_STEP_AGE_S: ClassVar[float] = 10.0
    """A rank trains if its latest step ended at most this many seconds ago."""
    MAX_STEP_AGE_STEPS: ClassVar[int] = 3
    """A rank of long steps trains if its latest step ended at most this many median steps ago."""


class LivenessLimits:
    """When a rank, or a reading of its GPU, is out of date, and when a rank seems stuck."""

    NO_HEARTBEAT_NS: Final = 2_000_000_000
    """A rank without a heartbeat for this time in ns, eight in a row, is silent."""
    LONG_IN_PHASE_NS: Final = 1_000_000_000
    """A rank that has been in one phase for this time in ns, or longer, is marked."""
    GPU_STALE_NS: Final = 10_000_000_000
    """A GPU reading older than this, in ns, does not describe the present; readings come once a second."""


class RankLostLimits(_Group, frozen=True):
    """A rank exited, or stopped sending heartbeats, without an exit message."""

    silent_s: Seconds = 5.0
    """Reported after this time in seconds without a heartbeat."""
    linger_s: Seconds = 1.0
    """Closed this time in seconds after its next heartbeat."""

    MAX_SEPARATE: ClassVar[int] = 3
    """More ranks than this share one alert."""
    ORDER_NS: ClassVar[int] = BEAT_NS
    """Ends that are at most one heartbeat interval apart, in ns, have no order."""
    SEEN_ORDER_NS: ClassVar[int] = 20_000_000
    """Ends that were observed as they happened have an order if they are further apart than this, in ns."""
    PROOF_NS: ClassVar[int] = 2 * ORDER_NS
    """A rank has outlived another if a message arrives this long, in ns, after its end: earlier ones were in flight."""
    MAX_STACK_AGE_NS: ClassVar[int] = 1_000_000_000
    """A stack that arrived longer than this, in ns, before the end does not describe it."""
    FOLLOWS_NS: ClassVar[int] = 60_000_000_000
    """A launcher ends the other ranks within this time, in ns, after the first failure."""
    KILL_DELAY_NS: ClassVar[int] = 5_000_000_000
    """A launcher sends SIGKILL at the earliest this long, in ns, after SIGTERM; an earlier kill has another cause."""
    ASKED_GAP_NS: ClassVar[int] = 1_000_000_000
    """A rank that ends on a signal longer than this, in ns, after the previous one was asked by itself."""
    MAX_CAUSES: ClassVar[int] = 64
    """First failures that later ends are attributed to, at most."""


class RankFailedLimits(_Group, frozen=True):
    """An exception or an exit code other than 0 ended a rank."""

    linger_s: Seconds = 86_400.0
    """Closed after this time in seconds: a day, because a failed rank does not come back."""

    MAX_SEPARATE: ClassVar[int] = 8
    """With more ranks than this the rest share one alert."""
    CAUSE_DELAY_NS: ClassVar[int] = 2_000_000_000
    """Open delay in ns of a complaint about a peer while others live: the peer may be about to end, or to say why."""


class StallLimits(_Group, frozen=True):
    """Ranks wait in a collective for a rank that has not joined it."""

    least_s: Seconds = 1.0
    """Minimum wait in seconds that is abnormal."""
    factor: Factor = 5.0
    """Minimum wait, as a multiple of the 99th percentile of earlier waits."""
    first_s: Seconds = 120.0
    """Minimum wait in seconds before the first waits are known: ranks compile and start one after another."""
    joined_s: Seconds = 5.0
    """Minimum wait in seconds if all ranks have joined: CPU starvation delays an operation for a while."""
    critical_s: Seconds = 10.0
    """Critical after this time in seconds, or when more than half of the timeout has passed."""
    busy_s: Seconds = 60.0
    """The same time in seconds for ranks that save a checkpoint or evaluate."""
    linger_s: Seconds = 2.0
    """Closed this time in seconds after the ranks continue."""

    WAIT_PERCENTILE: ClassVar[float] = 99.0
    """Percentile of earlier waits that `factor` is applied to."""
    NEARLY_SHARE: ClassVar[float] = 0.5
    """A wait of this fraction of an abnormal one counts as the reason why a rank is missing elsewhere."""
    MIN_WAIT_S: ClassVar[float] = 0.1
    """Shorter waits, in seconds, happen in every step and are ignored."""
    LATE_BEATS: ClassVar[int] = 2
    """A rank that missed this many heartbeats may have joined an operation without a chance to report it."""
    FRESH_BEATS: ClassVar[int] = 4
    """The last report of a rank that missed this many heartbeats is outdated."""


class DesyncLimits(_Group, frozen=True):
    """Ranks wait for each other in different collectives; `stall` decides when a wait is abnormal."""

    linger_s: Seconds = 2.0
    """Closed this time in seconds after the ranks continue."""

    REPORT_DELAY_NS: ClassVar[int] = 3_000_000_000
    """Time in ns that every rank has to report its operation before the others are compared without it."""


class TimeoutLimits(_Group, frozen=True):
    """The timeout of a process group is near, or has fired."""

    soon_s: Seconds = 60.0
    """Reported when this time in seconds or less is left."""
    soon_part: Fraction = 0.5
    """Reported only when at most this fraction of the timeout is left."""
    linger_s: Seconds = 2.0
    """Closed this time in seconds after the ranks continue."""


class LossyLimits(_Group, frozen=True):
    """Measurements were lost, or are implausible."""

    linger_s: Seconds = 60.0
    """Closed after this time in seconds without a new loss."""

    FEW_MESSAGES: ClassVar[int] = 3
    """Fewer lost messages than this are reported as information, not as a warning."""
    MAX_SEPARATE: ClassVar[int] = 8
    """More ranks than this share one alert."""


class Limits(_Group, frozen=True):
    """All groups that users can set."""

    judge: EvaluationLimits = EvaluationLimits()
    straggler: StragglerLimits = StragglerLimits()
    comm_share: CommShareLimits = CommShareLimits()
    sync_point: SyncPointLimits = SyncPointLimits()
    uneven_work: UnevenWorkLimits = UnevenWorkLimits()
    cpu_starvation: CpuStarvationLimits = CpuStarvationLimits()
    pauses: PausesLimits = PausesLimits()
    slow_link: SlowLinkLimits = SlowLinkLimits()
    data_bound: DataBoundLimits = DataBoundLimits()
    slowdown: SlowdownLimits = SlowdownLimits()
    uneven_batch: UnevenBatchLimits = UnevenBatchLimits()
    same_data: SameDataLimits = SameDataLimits()
    drift: DriftLimits = DriftLimits()
    memory: MemoryLimits = MemoryLimits()
    gpu_throttle: GpuThrottleLimits = GpuThrottleLimits()
    gpu_error: GpuErrorLimits = GpuErrorLimits()
    gpu_idle: GpuIdleLimits = GpuIdleLimits()
    rank_lost: RankLostLimits = RankLostLimits()
    rank_failed: RankFailedLimits = RankFailedLimits()
    stall: StallLimits = StallLimits()
    desync: DesyncLimits = DesyncLimits()
    timeout: TimeoutLimits = TimeoutLimits()
    lossy: LossyLimits = LossyLimits()


DEFAULTS: Final = Limits()


class AlertLimits:
    """When an open alert is updated, and when it is stale."""

    COST_FACTOR: Final = 1.5
    """A cost that has grown by this factor since it was last reported is reported again."""
    MIN_COST: Final = 0.02
    """Costs below this fraction of the job's time count as this one when their growth is measured."""
    CONFIRMING_EVALUATIONS: Final = 3
    """Another phase or pattern is accepted after this many evaluations in a row."""
    STALE_STEPS: Final = 20
    """Steps without a new occurrence after which an alert is stale."""
    STALE_MAX_STEPS: Final = 60
    """Upper bound of those steps for recurring episodes, whatever their mean gap."""
    STALE_GAPS: Final = 4
    """A recurring episode is stale after this many times its mean gap, in steps."""
    STALE_EVALUATIONS: Final = 3
    """Evaluations of the rules that must pass before an alert is stale."""
    STALE_NS: Final = 2_000_000_000
    """Time in ns that must pass before an alert is stale: rules report a while after the steps they report on."""
    LOOK_BACK_STEPS: Final = 600
    """Steps searched for the one in which the all-reduce share fell."""


class WindowLimits:
    """Which steps and ranks can be compared."""

    MIN_STEPS: Final = 10
    """Aligned steps needed for an evaluation; unusual steps are left out only if this many others remain."""
    IMPLAUSIBLE_FACTOR: Final = 10.0
    """A rank whose steps are this many times as long, or as short, as those of the others is left out."""
    MIN_MAJORITY_RANKS: Final = 3
    """With fewer live ranks than this none can be called the odd one."""


class BaselineLimits:
    """What makes an earlier steady state."""

    BLOCK_STEPS: Final = 50
    """Steps in one block of the history."""
    MIN_STEPS: Final = 20
    """Steps that the latest block must have to be compared."""
    MIN_BLOCKS: Final = 3
    """Comparable blocks that make a steady state."""


class HungStepLimits:
    """The three meanings of a hung step: in a whole run, in a window of steps, and at this moment."""

    FACTOR: Final = 4.0
    """In a whole run a hung step takes at least this many times the median step."""
    EXTRA_NS: Final = 1e9
    """In a whole run a hung step is at least this much longer, in ns: schedulers make short steps long."""
    CAUSE_PERCENT: Final = 50
    """A rank caused a hung step if its own work exceeds the median rank's by this percentage of the step."""
    WINDOW_FACTOR: Final = 20.0
    """In a window steps of this many times the median are left out, because they are reported as a hang."""
    MIN_S: Final = 4.0
    """At this moment a run is stalled if no step ended for at least this time in seconds."""
    MIN_STEPS: Final = 4
    """At this moment a run is stalled if no step ended for at least this many median steps."""
    MAX_S: Final = 10 * 365 * 86_400
    """A longer wait, in seconds, is a wrong clock."""


class ScalingLimits:
    """Which ranks are named for waiting, which speedups are believed, and which efficiencies are good."""

    WAITED_FOR_SHARE: Final = 0.75
    """Ranks are named that together caused this fraction of the waiting, if they are at most half of all ranks."""
    MIN_WAIT_SHARE: Final = 0.01
    """No rank is named for waiting below this fraction of the step."""
    MAX_EFFICIENCY: Final = 1.1
    """A higher efficiency is implausible: the baseline was slowed down."""
    GOOD_EFFICIENCY: Final = 0.9
    """An efficiency below this fraction is marked as a warning."""
    UNEVEN_FACTOR: Final = 1.5
    """A mean step of this many times the median is dominated by a few very long steps."""
    MIN_DIFFERENCE: Final = 0.05
    """Speedups by means and by medians that differ by less than this fraction are shown as one."""


class CompareLimits:
    """When two runs differ, and when their figures are means because step times have two modes."""

    CONFIDENCE: Final = 0.95
    """A difference is significant if its confidence interval of this level excludes zero."""
    MIN_STEPS: Final = 20
    """Steps that each run must have for a verdict."""
    MIN_CHANGE: Final = 0.01
    """Smallest relevant difference, as a fraction of the figure: two runs of one job hardly differ by less."""
    MIN_SHARE_CHANGE: Final = 0.005
    """Smallest relevant difference of the all-reduce share, as a fraction of the step."""
    MODES_MIN_STEPS: Final = 60
    """Steps, without the trimmed ones, that a run must have for two modes to be looked for."""
    MODES_TRIM: Final = 0.05
    """Fraction of the longest and of the shortest steps that is ignored in the search for two modes."""
    MODES_MIN_FRACTION: Final = 0.08
    """Minimum fraction of steps in the rarer mode; fewer are outliers."""
    MODES_MIN_RATIO: Final = 1.1
    """Minimum ratio of the medians of the two modes."""
    MODES_MIN_SEPARATION: Final = 0.85
    """Minimum fraction of the variance between the two modes. A trimmed normal distribution has 0.70, a uniform one
    0.75."""


class SummaryLimits:
    """What the totals of a run name as slow, and as the cause of it."""

    WARMUP_STEPS: Final = DEFAULTS.judge.warmup_steps
    """First steps of a run that are left out: compiling, caches and bucket building."""
    SLOW_SHARE: Final = 0.5
    """A column of the chart, or a phase, is slow from this fraction of the slowest one."""
    SLOW_PERCENT: Final = 20
    """A rank is slow in a step if its own work exceeds the median rank's by this percentage of the step."""
    CAUSE_SHARE: Final = 0.25
    """A phase or a hang is named for a rank's cost from this fraction of it; the rest are odd steps."""
    MAIN_SHARE: Final = 0.75
    """Where hung steps are this fraction of a cost, the rest is what odd steps cost any rank."""
    MAX_STEP_COST_SHARE: Final = 0.1
    """Cap of a rank's cost in one step, as a fraction of the median step: a few odd steps do not make a straggler."""


class VerdictLimits:
    """Which ranks and hosts the verdict on a recorded run names as slow."""

    WITH_ALERT_SHARE: Final = 0.02
    """A rank whose alerts explain its cost is named from this fraction of the run's time."""
    EXPLAINED_SHARE: Final = 0.5
    """Alerts explain a rank's cost if at least this fraction of it falls into their steps."""
    ONE_ALERT_SHARE: Final = 0.8
    """A single alert is shown if it explains this fraction of what all alerts of the rank explain."""
    OUTSTANDING_FACTOR: Final = 3.0
    """A rank without such alerts is named if it costs this many times the median of the others."""
    MIN_EVERYBODY: Final = 3
    """If this many ranks, and more than half of them, were slow, only those with an outstanding cost are named."""
    ONE_RANK_SHARE: Final = 0.5
    """A host is not named if one of its ranks alone has this fraction of its cost."""
    WHOLE_RUN_SHARE: Final = 0.9
    """Steps that are at least this fraction of a run count as the whole run."""


def limits_from(table: dict[str, Any], where: str) -> Limits:
    """Defaults with the changes of a table. Raises `UsageError` with the key and with where it was read."""
    try:
        return msgspec.convert(table, Limits)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        key = path.rstrip("`")
        raise UsageError(f"{where}: {_plain(what, key)}") from None


def changed(limits: Limits) -> dict[str, dict[str, float]]:
    """Limits that differ from the defaults of this version, by group and key as users write them."""
    defaults: dict[str, dict[str, float]] = msgspec.to_builtins(DEFAULTS)
    found: dict[str, dict[str, float]] = {}
    for group, keys in msgspec.to_builtins(limits).items():
        for key, value in keys.items():
            if value != defaults[group][key]:
                found.setdefault(group, {})[key] = value
    return found


def described(limits: Limits, group: str) -> list[dict[str, Any]]:
    """Key, value and docstring of each limit of a group."""
    found = getattr(limits, group.replace("-", "_"))
    texts = _texts(type(found).__name__)
    return [
        {"key": name.replace("_", "-"), "value": getattr(found, name), "text": texts[name]}
        for name in found.__struct_fields__
    ]


def _texts(kind: str) -> dict[str, str]:
    """Docstrings of a group's fields, from the source: Python keeps none at run time."""
    tree = ast.parse(inspect.getsource(sys.modules[__name__]))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


_VALIDATED: Final = re.compile(r"Expected `(\w+)`(?: (>=|>|<=|<) (\S+))?(?:, got `(\w+)`)?$")
_TYPES: Final = {"float": "a number", "int": "a whole number", "object": "a table of thresholds", "str": "text"}
_BOUNDS: Final = {">": "greater than", ">=": "at least", "<": "less than", "<=": "at most"}


def _plain(what: str, key: str) -> str:
    """The validator's message on a key, or on the whole table if it is empty, for users."""
    if what.startswith("Object contains unknown field"):
        unknown = what.rpartition(" ")[2].strip("`")
        table: dict[str, Any] = msgspec.to_builtins(DEFAULTS)
        if not key:
            return f"unknown rule {unknown!r}; {choices_text(unknown, list(table))}"
        return f"{key} has no threshold {unknown!r}; {choices_text(unknown, list(table[key]))}"
    if found := _VALIDATED.match(what):
        kind, bound, value, got = found.groups()
        must = f"must be {_TYPES.get(kind, kind)}"
        must += f" {_BOUNDS[bound]} {float(value):g}" if bound else ""
        what = must + (f", not {_TYPES.get(got, got)}" if got else "")
    return f"threshold {key}: {what}" if key else what
