"""Step recorder: hooks fill in the current step, and finished steps go to the agent's thread through ring buffers."""

from __future__ import annotations

import zlib
from collections import deque
from threading import get_ident, get_native_id
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from ddpwatch.agent.batch_tensors import fingerprint
from ddpwatch.agent.clock import (
    BACKWARD,
    DATA,
    EVALUATING,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PRESYNC,
    SAVING,
    SYNC,
    SYNC_POINTS,
)
from ddpwatch.agent.cuda_clock import CudaClock
from ddpwatch.wire import (
    ALL_POINTS,
    HOST_TIMED,
    MAX_PATHS,
    MAX_POINTS,
    PAUSED,
    SKIPPED,
    Note,
    Step,
    SyncPath,
    SyncPoint,
    fit,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ddpwatch.agent.clock import HostClock
    from ddpwatch.agent.fail_open import Switch
    from ddpwatch.agent.gpu.allocator import TorchMemory
    from ddpwatch.agent.hooks.collectives import Site
    from ddpwatch.agent.parameter_checksum import Checksums

T = TypeVar("T")


class Ring(Generic[T]):
    """A ring buffer that never blocks: when it is full, the oldest record is overwritten and counted as dropped."""

    __slots__ = ("_records", "dropped")

    def __init__(self, size: int) -> None:
        self._records: deque[T] = deque(maxlen=size)
        self.dropped = 0

    def push(self, record: T) -> None:
        """Add a record; called by the training thread only."""
        if len(self._records) == self._records.maxlen:
            self.dropped += 1
        self._records.append(record)

    def drain(self, max_records: int) -> list[T]:
        """Take up to `max_records`, oldest first; called by the agent's thread only."""
        taken: list[T] = []
        while len(taken) < max_records:
            try:
                taken.append(self._records.popleft())
            except IndexError:
                break
        return taken


Record: TypeAlias = tuple[int, tuple[list[int], int], tuple[Any, ...], tuple[int, int, int, int], int]
"""A finished step: its index, what the clock's `cut` returned, the fields of `Step` from `samples` to `values`, those
from `sync_path` to `gc_full_ns`, and flags that were not known when it ended."""

RING_STEPS: Final = 4096
"""Finished steps that wait for the publisher; beyond that the oldest are dropped."""
RING_EVENTS: Final = 256
"""Notes, checksums and other events that wait for the publisher."""
MAX_VALUES: Final = 16
"""Names of values that a script may log in one step."""
FINGERPRINT_ALL_UNTIL: Final = 16
"""Every batch is fingerprinted in the steps before this one."""
FINGERPRINT_EVERY: Final = 8
"""Steps between fingerprints afterwards."""
COST_EVERY: Final = 16
"""Steps between those in which hooks are timed."""
HOST_TIMED_TEXT: Final = (
    "Some steps have no GPU times: a CUDA graph was captured in them, they had too many phases, or the GPU was too far "
    "behind. Their phases show when work was enqueued, not when it ran."
)


class Recorder:
    """Collects the current step, and puts finished ones into the ring buffer.

    Called by the training thread, and by autograd's threads while the training thread waits in `backward()`: never by
    two at once, so there is no lock. The agent's thread only reads.
    """

    def __init__(self, clock: HostClock, switch: Switch) -> None:
        self.clock = clock
        self.switch = switch
        self.steps: Ring[Record] = Ring(RING_STEPS)
        self._cuda_clock = clock if isinstance(clock, CudaClock) else None
        self.successor: Callable[[], CudaClock] | None = None
        """Creates the clock that replaces the current one at the next step."""
        self._waiting: deque[Record] = deque()
        """Steps that a CUDA clock has cut and not settled, oldest first, in the order of the clock's own."""
        self._noted_host_timed = False
        self.events: Ring[tuple[type[Any], dict[str, Any]]] = Ring(RING_EVENTS)
        self.checksums: Checksums | None = None
        self.memory: TorchMemory | None = None
        self.index = 0
        self.rest = OTHER
        """Phase after a backward pass: `other`, or `optimizer` if a closure runs it inside the optimizer's step."""
        self.pause = ""
        self.save_name = ""
        """The function of the latest checkpoint save."""
        self.thread = get_ident()
        """Python's id of the training thread."""
        self.thread_id = get_native_id()
        """The kernel's id of the training thread."""
        self.counts_samples = True
        """Whether the samples of this rank are its own, so that they add up to the batch of the job."""
        self.want_buckets = False
        """Whether a viewer subscribes to buckets; set by the agent's thread."""
        self._values: dict[str, float] = {}
        self._paths: set[int] = set()
        """Sequences of sync points that were described."""
        self._reset()

    def _reset(self) -> None:
        self.loader_samples = 0
        self.loader_batch = 0
        self.forward_batch = 0
        self.backwards = 0
        self.input_elements = 0
        """Size of the model's inputs so far."""
        self._forward_samples = 0
        self._fresh_samples = 0
        self._pass_samples = 0
        self._update_samples = 0
        self.flags = PAUSED if self.pause else 0
        self.fingerprint = 0
        self.wants_fingerprint = self.index < FINGERPRINT_ALL_UNTIL or self.index % FINGERPRINT_EVERY == 0
        """Whether to take a fingerprint of this step's batch."""
        self.busy_ns = 0
        self.comm_bytes = 0
        self.sync_points = 0
        """Sync points outside DDP so far."""
        self._path: list[tuple[Site, int]] = []
        """The first of them, each with the phase that it interrupted."""
        self._path_checksum = 0
        self.gc_ns = 0
        self.gc_full_ns = 0
        self._unsplit = 0
        """One bit for each point at which ranks may leave before others have joined; the last one for all further
        points."""
        self._cost_before_ns = self.switch.cost_ns
        # Not the first steps: they include work that is done once.
        self.switch.timed = self.index % COST_EVERY == COST_EVERY - 1

    def add_loader_batch(self, batch: int) -> None:
        """Count a batch that a DataLoader gave to the training thread."""
        self.loader_samples += batch
        if batch > self.loader_batch:
            self.loader_batch = batch

    def add_forward_batch(self, batch: int) -> None:
        """Count a batch that was passed to a watched model."""
        self._forward_samples += batch
        if batch > self._fresh_samples:
            self._fresh_samples = batch
            if batch > self.forward_batch:
                self.forward_batch = batch

    def backward_began(self) -> None:
        """Count a backward pass: forward passes before it had the same samples, later ones have new samples."""
        self.backwards += 1
        self._pass_samples += self._fresh_samples
        self._fresh_samples = 0

    def updated(self) -> None:
        """Note an optimizer step: another optimizer in this step trains on the same samples."""
        if self._pass_samples and not 0 < self._update_samples <= self._pass_samples:
            self._update_samples = self._pass_samples
        self._pass_samples = 0

    def add_sync_point(self, site: Site, phase: int) -> int:
        """Count a sync point outside DDP of the training thread, which interrupts `phase`; returns its number."""
        number = self.sync_points
        if site.merges and (site, phase) in self._path:
            return self._path.index((site, phase))
        self.sync_points += 1
        if number < MAX_POINTS:
            self._path.append((site, phase))
        if not site.splits:
            self._unsplit |= 1 << min(number, MAX_POINTS)
        self._path_checksum = zlib.crc32(site.code, self._path_checksum)
        return number

    def _sync_path(self) -> int:
        """Identify the sync points of this step, of which there is at least one, and describe them when they are passed
        for the first time.
        """
        path = (self._path_checksum << (MAX_POINTS + 1)) | (ALL_POINTS & ~self._unsplit)
        if path not in self._paths and len(self._paths) < MAX_PATHS:
            self._paths.add(path)
            points = [SyncPoint(fit(site.op), fit(site.place), min(phase, OTHER)) for site, phase in self._path]
            self.event(SyncPath, path=path, points=points, count=self.sync_points)
        return path

    def _samples(self) -> int:
        """Samples that this step trained on."""
        # A loader counts each sample once; a GAN's discriminator sees the same batch three times.
        samples = self.loader_samples or self._update_samples or self._forward_samples
        # A loader may also be read ahead, or by one rank for all, as Accelerate's dispatcher does. What the model has
        # not seen does not count, if its batches are the loader's: its first dimension may be another one.
        return min(samples, self._forward_samples) if self.forward_batch == self.loader_batch else samples

    def see(self, tensor: Tensor) -> None:
        """Take the fingerprint of this step's batch, once."""
        self.wants_fingerprint = False
        self.fingerprint = fingerprint(tensor)

    def log(self, values: dict[str, float]) -> None:
        """Keep the script's values for this step, up to `MAX_VALUES` names."""
        for name, value in values.items():
            if name in self._values or len(self._values) < MAX_VALUES:
                self._values[name] = value

    def note(self, kind: str, text: str) -> None:
        """Queue a note for viewers."""
        self.event(Note, kind=kind, text=text)

    def event(self, message: type[Any], **fields: Any) -> None:
        """Queue a message of the given type; the agent's thread adds the rank and sequence number."""
        self.events.push((message, {"step": self.index, "mono_ns": self.clock.since_ns, **fields}))

    def close_step(self, *, skipped: bool = False, then: int | None = None) -> None:
        """End the current step and begin the next one in the phase `then`, or in the current phase."""
        self.updated()
        record: Record = (
            self.index,
            self.clock.cut(self.clock.phase if then is None else then),
            (
                self._samples() if self.counts_samples else 0,
                self.forward_batch or self.loader_batch,
                self.backwards,
                self.flags | SKIPPED if skipped else self.flags,
                self.fingerprint,
                self.busy_ns,
                self.comm_bytes,
                self.switch.cost_ns - self._cost_before_ns,
                self._values or None,
            ),
            (self._sync_path() if self.sync_points else 0, self.input_elements, self.gc_ns, self.gc_full_ns),
            0,
        )
        if self._cuda_clock is None:
            self.steps.push(record)
        else:
            self._wait(record, self._cuda_clock)
        if self.successor is not None:
            self._change_clock(self.successor())
        if self.checksums is not None:
            self.checksums.after_step(self)
        if self.memory is not None:
            self.memory.after_step()
        self.index += 1
        if self._values:
            self._values = {}
        self._reset()

    def _change_clock(self, clock: CudaClock) -> None:
        # From the same stamp, so that no time between two steps is lost.
        clock.phase, clock.since_ns = self.clock.phase, self.clock.since_ns
        self.clock = self._cuda_clock = clock
        self.successor = None

    def finish(self, *, ask: bool) -> None:
        """Publish the steps that wait for the GPU. `ask` = CUDA may be called, on the training thread."""
        if self._cuda_clock is not None:
            self._publish_steps(self._cuda_clock.finish(ask=ask))

    def _wait(self, record: Record, clock: CudaClock) -> None:
        """Hold a step back until its times are final, because they must not change in the agent's thread."""
        self._waiting.append(record)
        settled = clock.settle()
        self._publish_steps(settled)
        if not all(settled) and not self._noted_host_timed:
            self._noted_host_timed = True
            self.note("host-timed", HOST_TIMED_TEXT)

    def _publish_steps(self, settled: list[bool]) -> None:
        """Publish the steps that a CUDA clock has settled, each with the GPU's times or else with a flag."""
        for timed in settled:
            record = self._waiting.popleft()
            self.steps.push(record if timed else (*record[:-1], HOST_TIMED))


def to_step(record: Record) -> Step:
    """Convert a record to a message, in the agent's thread, where time does not matter."""
    index, (ns, end_ns), (samples, batch, backwards, flags, *rest), last, late_flags = record
    sync_ns = ns[SYNC] + sum(ns[PRESYNC:])
    other_ns = ns[OTHER] + ns[SAVING] + ns[EVALUATING]
    phases = ns[DATA], ns[FORWARD], ns[BACKWARD], sync_ns, ns[OPTIMIZER], other_ns
    counts = samples, batch, backwards, flags | late_flags
    pauses = ns[SAVING], ns[EVALUATING]
    fields: tuple[Any, ...] = (*phases, ns[PRESYNC], *counts, *rest, *ns[SYNC_POINTS:], *last, *pauses)
    return Step(index, end_ns, *fields)
