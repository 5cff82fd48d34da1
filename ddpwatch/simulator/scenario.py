"""Synthetic step durations of all ranks of a run, with chosen noise and faults.

Simulates synchronous DDP: each rank works by itself, then waits in the all-reduce for the last one to arrive. Work
after the all-reduce (the optimizer) delays the rank in the next step, as in a real job.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

PROFILE: Final = {"data": 0.05, "forward": 0.27, "backward": 0.50, "optimizer": 0.08, "other": 0.05}
"""Fractions of a typical step by phase; the rest is its wire time."""
RANKS_PER_HOST: Final = 8
ALWAYS: Final = 1
"""Period of a fault that affects every step."""
EVALUATION_STEPS: Final = 10.0
"""Duration of an evaluation in steps."""
INPUT_ELEMENTS: Final = 1 << 16
"""Elements of a typical input."""
BURST_S: Final = 0.7
"""Mean duration of a burst of CPU starvation, in seconds of healthy steps; its own steps take two to three times as
long."""
SLICE_MS: Final = 3.0
"""Time slice of the scheduler."""
POINT_SHARE: Final = 0.01
"""Wire time of a collective that the script calls, as a fraction of a healthy step."""
MAX_STARVED: Final = 0.6
"""Largest fraction of the time without a core."""
_PHASES: Final = wire.PHASES
_SYNC: Final = _PHASES.index("sync")
_COMPUTE: Final = [_PHASES.index("forward"), _PHASES.index("backward")]
_BACKWARD: Final = _PHASES.index("backward")
_OPTIMIZER: Final = _PHASES.index("optimizer")
_BEFORE_BACKWARD: Final = [_PHASES.index(phase) for phase in ("data", "forward", "other")]


@dataclass(frozen=True)
class Fault:
    """A slowdown of some ranks."""

    ranks: tuple[int, ...]
    phase: str
    size: float
    """Time added to each affected step, as a fraction of a healthy step."""
    onset: int = 60
    """First affected step."""
    every: int = ALWAYS
    """Period in steps: one affected step in each."""
    burst: tuple[int, int] | None = None
    """Alternating numbers of affected and unaffected steps; None = no pauses."""

    def hits(self, steps: int) -> NDArray[np.bool_]:
        """Which steps are affected."""
        since = np.arange(steps) - self.onset
        hit: NDArray[np.bool_] = (since >= 0) & (since % self.every == 0)
        if self.burst is not None:
            on, off = self.burst
            hit &= since % (on + off) < on
        return hit


@dataclass(frozen=True)
class Segment:
    """Part of a schedule: a stretch of a run with the same faults throughout."""

    length: float
    """In steps, or in seconds where a clock drives the schedule."""
    faults: tuple[Fault, ...] = ()
    """Their onset must be 0: a segment may be entered at any step."""


def segment_at(schedule: Sequence[Segment], position: float) -> tuple[int, float]:
    """Index of the segment at a position of a schedule that repeats forever, and the rest of its length."""
    into = position % sum(segment.length for segment in schedule)
    for number, segment in enumerate(schedule):
        if into < segment.length:
            return number, segment.length - into
        into -= segment.length
    return len(schedule) - 1, 0.0


def default_schedule(world_size: int) -> tuple[Segment, ...]:
    """Healthy segments, alternating with a rank that waits for data, one that is slow in backward and, with three or
    more hosts, a slow host.
    """
    if world_size == 1:
        return (Segment(200),)
    late, slow = world_size // 3, 2 * world_size // 3
    schedule = (
        Segment(200),
        Segment(250, (Fault((late,), "data", 0.35, onset=0),)),
        Segment(200),
        Segment(250, (Fault((slow,), "backward", 0.25, onset=0),)),
    )
    hosts = world_size // RANKS_PER_HOST
    if hosts < 3:
        return schedule
    hot = tuple(range(hosts // 2 * RANKS_PER_HOST, (hosts // 2 + 1) * RANKS_PER_HOST))
    heat = tuple(Fault(hot, phase, size, onset=0) for phase, size in (("forward", 0.06), ("backward", 0.12)))
    return (*schedule, Segment(200), Segment(250, heat))


@dataclass(frozen=True)
class Scenario:
    """Parameters of a synthetic run: its ground truth."""

    world_size: int
    steps: int = 200
    step_ms: float = 100.0
    noise: float = 0.02
    """Sigma of the log-normal factor of each phase of each step."""
    spikes: float = 0.004
    """Fraction of a rank's steps with a garbage collection pause."""
    drift: float = 0.002
    """Random walk of the whole job's speed, per step."""
    evaluate_every: int = 0
    """Interval in steps at which all ranks evaluate for the time of ten steps; 0 = never."""
    uneven: float = 0.0
    """Sigma of the log-normal size of each rank's input in each step, which forward and backward follow."""
    starved: float = 0.0
    """Mean fraction of the time that a rank waits for a CPU core, in bursts of `BURST_S` that move between ranks."""
    collective_after: str = ""
    """Phase after which the script calls a collective in each step: `forward`, `optimizer`, or none."""
    batch: int = 32
    ranks_per_host: int = RANKS_PER_HOST
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    profile: dict[str, float] = field(default_factory=lambda: dict(PROFILE))

    def phases_ns(self) -> NDArray[np.int64]:
        """All durations as (rank, phase, step); the phases in the order of `wire.PHASES`."""
        rng = np.random.default_rng(self.seed)
        shape = (self.world_size, len(_PHASES), self.steps)
        share = np.array([self.profile.get(phase, 0.0) for phase in _PHASES])
        pace = np.exp(np.cumsum(rng.normal(0.0, self.drift, self.steps)))
        work = share[None, :, None] * np.exp(rng.normal(0.0, self.noise, shape)) * pace
        spike = rng.random((self.world_size, self.steps)) < self.spikes
        work[:, _PHASES.index("other")] += spike * rng.uniform(0.1, 0.6, spike.shape)
        evaluates = np.array([self.evaluates_in(index) for index in range(self.steps)])
        work[:, _PHASES.index("other")] += (
            evaluates * EVALUATION_STEPS * np.exp(rng.normal(0.0, self.noise, spike.shape))
        )
        for fault in self.faults:
            added = fault.hits(self.steps) * fault.size * np.exp(rng.normal(0.0, self.noise, self.steps))
            work[list(fault.ranks), _PHASES.index(fault.phase)] += added
        work[:, _COMPUTE] *= (self.input_elements() / INPUT_ELEMENTS)[:, None]
        work[:, _PHASES.index("backward")] += self.queued_ns() / (self.step_ms * 1e6)
        work[:, _SYNC] = self._sync(rng, work) + self._script_sync(work)
        durations: NDArray[np.int64] = (work * self.step_ms * 1e6).astype(np.int64)
        return durations

    def input_elements(self) -> NDArray[np.int64]:
        """(rank, step): size of the inputs."""
        rng = np.random.default_rng((self.seed, 1))
        sizes = np.exp(rng.normal(0.0, self.uneven, (self.world_size, self.steps)))
        elements: NDArray[np.int64] = (INPUT_ELEMENTS * sizes).astype(np.int64)
        return elements

    def queued_ns(self) -> NDArray[np.int64]:
        """(rank, step): time without a core. A burst starves each rank by another share, in whole time slices."""
        rng = np.random.default_rng((self.seed, 2))
        burst_steps = max(1.0, BURST_S * 1e3 / self.step_ms)
        bursts = 1 + rng.poisson(1.0 / burst_steps, self.steps).cumsum()
        shares = np.minimum(rng.exponential(self.starved, (self.world_size, bursts[-1] + 1)), MAX_STARVED)[:, bursts]
        slices = rng.poisson(shares / (1.0 - shares) * self.step_ms / SLICE_MS)
        queued: NDArray[np.int64] = (slices * (SLICE_MS * 1e6)).astype(np.int64)
        return queued

    def evaluates_in(self, index: int) -> bool:
        """Whether a step contains an evaluation."""
        return bool(self.evaluate_every) and index % self.evaluate_every == self.evaluate_every - 1

    def script_sync_ns(self, durations_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """(rank, step): the part of `sync` in the script's collective, from the durations of all phases."""
        step_ns = self.step_ms * 1e6
        sync_ns: NDArray[np.int64] = (self._script_sync(durations_ns / step_ns) * step_ns).astype(np.int64)
        return sync_ns

    def _script_sync(self, work: FloatArray) -> FloatArray:
        """Time of each rank in the script's collective: until the last rank arrives, plus the wire time."""
        if not self.collective_after:
            return np.zeros((self.world_size, self.steps))
        after_forward = self.collective_after == "forward"
        arrival = self._before_backward(work) if after_forward else work[:, _OPTIMIZER]
        sync: FloatArray = arrival.max(axis=0) - arrival + POINT_SHARE
        return sync

    def _before_backward(self, work: FloatArray) -> FloatArray:
        """Own work since the last sync point: the optimizer delays a rank in the next step."""
        before: FloatArray = work[:, _BEFORE_BACKWARD].sum(axis=1)
        if self.collective_after != "optimizer":
            before[:, 1:] += work[:, _OPTIMIZER, :-1]
        return before

    def _sync(self, rng: np.random.Generator, work: FloatArray) -> FloatArray:
        """Time of each rank in the all-reduce: until the last rank arrives, plus the wire time."""
        arrival = work[:, _BACKWARD]
        if self.collective_after != "forward":
            arrival = arrival + self._before_backward(work)
        wire_share = max(0.0, 1.0 - sum(self.profile.values()))
        on_wire = wire_share * np.exp(rng.normal(0.0, self.noise, self.steps))
        sync: FloatArray = arrival.max(axis=0) - arrival + on_wire
        return sync


def simulated_step(
    index: int,
    end_ns: int,
    phases: Sequence[int],
    batch: int,
    *,
    flags: int = 0,
    busy_ns: int = 0,
    comm_bytes: int = 0,
    input_elements: int = 0,
) -> wire.Step:
    """One step of one rank; the phases in nanoseconds, in the order of `wire.PHASES`."""
    data_ns, forward_ns, backward_ns, sync_ns, optimizer_ns, other_ns = phases
    return wire.Step(
        index, end_ns, data_ns, forward_ns, backward_ns, sync_ns, optimizer_ns, other_ns, samples=batch, batch=batch,
        backwards=1, flags=flags, busy_ns=busy_ns, comm_bytes=comm_bytes, input_elements=input_elements,
    )  # fmt: skip
