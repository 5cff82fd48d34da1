"""Structs inside messages: step, process group, stack, collective, log line. Each is encoded as an array."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from ddpwatch.wire.limits import MAX_FRAMES, MAX_LOG_CHARS, Count, Name

PHASES: Final = ("data", "forward", "backward", "sync", "optimizer", "other")

SKIPPED: Final = 1
"""Flag of a step in which the optimizer was skipped (a GradScaler found inf or nan)."""
PAUSED: Final = 2
"""Flag of a step that was partly inside `agent.pause(...)`."""
EVALUATED: Final = 4
"""Flag of a step in which the model also ran without training (evaluation)."""
HOST_TIMED: Final = 8
"""Flag of a step whose phases a CUDA clock could time on the host only (graph capture, GPU too far behind): they show
when work was enqueued, not when it ran."""
MAX_POINTS: Final = 6
"""Sync points of a step outside DDP that are measured one by one; the time of further ones is summed."""
ALL_POINTS: Final = (1 << (MAX_POINTS + 1)) - 1
"""Bits of `Step.sync_path`, one for each of these points and the last for all further ones."""


class Step(Struct, array_like=True, frozen=True, gc=False):
    """One finished step of one rank. The six phases add up to the step exactly."""

    index: Count
    """Number of the step since `install`, from 0; ranks are aligned by it."""
    end_ns: Count
    """Monotonic clock of the rank's host at the end of the step."""
    data_ns: Count
    forward_ns: Count
    backward_ns: Count
    sync_ns: Count
    """Exposed communication: not hidden behind computation."""
    optimizer_ns: Count
    other_ns: Count
    presync_ns: Count = 0
    """The part of `sync_ns` before the forward pass (buffer broadcast, bucket rebuild, join)."""
    samples: Count = 0
    """Samples of this rank, summed over the micro-batches of the step; 0 = unknown."""
    batch: Count = 0
    """Samples of the largest micro-batch of the step."""
    backwards: Count = 0
    """Backward passes in the step: the micro-batches of gradient accumulation."""
    flags: Count = 0
    fingerprint: Count = 0
    """Sampled checksum of the CPU batch; 0 = not taken in this step."""
    busy_ns: Count = 0
    """Time with a gradient all-reduce in flight; 0 = bucket timing is off."""
    comm_bytes: Count = 0
    """Gradient bytes all-reduced; 0 = bucket timing is off."""
    hook_ns: Count = 0
    """Time of ddpwatch's hooks on the training thread; 0 = not measured in this step."""
    values: dict[Name, float] | None = None
    """Values the script passed to `agent.log(...)`."""
    point1_ns: Count = 0
    """The part of `sync_ns` at the first sync point outside DDP: a collective that the script calls. The same for the
    further ones, in their order."""
    point2_ns: Count = 0
    point3_ns: Count = 0
    point4_ns: Count = 0
    point5_ns: Count = 0
    point6_ns: Count = 0
    more_points_ns: Count = 0
    """The part of `sync_ns` at sync points outside DDP beyond these."""
    sync_path: Count = 0
    """Identifies the sequence of sync points outside DDP: ranks with the same one passed the same operations. Its
    lowest `MAX_POINTS + 1` bits are set for points that all ranks leave together. 0 = there were none."""
    input_elements: Count = 0
    """Elements of the model's first input, or of its token ids, summed over the forward passes; 0 = unknown."""
    gc_ns: Count = 0
    """Time of Python's garbage collector outside `sync`, in whichever phase; 0 = none, or unknown."""
    gc_full_ns: Count = 0
    """The part of `gc_ns` in collections of the oldest generation."""
    save_ns: Count = 0
    """The part of `other_ns` in checkpoint saves; 0 = none, or unknown."""
    eval_ns: Count = 0
    """The part of `other_ns` in evaluations; 0 = none, or unknown."""

    @property
    def step_ns(self) -> int:
        """Step time: the sum of its phases, by definition."""
        return self.data_ns + self.forward_ns + self.backward_ns + self.sync_ns + self.optimizer_ns + self.other_ns

    @property
    def self_ns(self) -> int:
        """Self time: the step without waiting for other ranks."""
        return self.step_ns - self.sync_ns


class SyncPoint(Struct, array_like=True, frozen=True, gc=False):
    """A place in the script, or in a framework, where the training thread waits in a collective."""

    op: Name
    """Function of torch.distributed; of FSDP what it is for, such as `parameter all-gather`."""
    place: Name
    """File and line of the script; or the framework that waits there: `FSDP`, `replicate`, `DTensor`, `pipeline` or
    `DeepSpeed`."""
    phase: Annotated[int, Meta(ge=0, lt=len(PHASES))]
    """Phase of the step that it interrupts."""


class Queued(Struct, array_like=True, frozen=True, gc=False):
    """Time that the training thread has waited for a core, at one moment."""

    mono_ns: Count
    queued_ns: Count


class Group(Struct, array_like=True, frozen=True, gc=False):
    """Progress of this rank in one process group."""

    name: Name
    size: Count
    enqueued: Count
    """Sequence number of the last collective that this rank has joined."""
    completed: Count | None = None
    """Sequence number of the last collective that has completed; None = not recorded."""
    members: Name = ""
    """Ranks of the group as `ranges` writes them; empty = all ranks of the job, or too many to list."""
    op: Name = ""
    """The oldest operation in flight. It and the fields below are only set once it takes long."""
    bytes: Count = 0
    shape: Name = ""
    """Sizes and types of its tensors; ranks that differ in it are out of sync."""
    age_ns: Count = 0
    """Time in flight so far; 0 = no operation is in flight."""
    timeout_ns: Count = 0
    """Time in flight after which the process group ends the job; 0 = unknown."""
    error: Name = ""
    """Error found by the backend's watchdog."""


class Comm(Struct, array_like=True, frozen=True, gc=False):
    """All-reduce time of a step, as the backend reports it after the step."""

    index: Count
    """Index of the step."""
    busy_ns: Count
    bytes: Count


class Bucket(Struct, array_like=True, frozen=True, gc=False):
    """One gradient bucket of one step; clocks count from the start of the backward pass."""

    index: Count
    bytes: Count
    ready_ns: Count
    done_ns: Count
    """0 = the end could not be observed."""


class StackFrame(Struct, array_like=True, frozen=True, gc=False):
    """One call on a stack."""

    function: Name
    file: Name
    line: Count


class ThreadStack(Struct, array_like=True, frozen=True, gc=False):
    """The stack of one thread, innermost call first."""

    name: Name
    training: bool
    """Whether it is the training thread."""
    frames: Annotated[list[StackFrame], Meta(max_length=MAX_FRAMES)]


class Collective(Struct, array_like=True, frozen=True, gc=False):
    """One collective that this rank has joined."""

    group: Name
    seq: Count
    op: Name
    shape: Name
    done: bool
    bytes: Count = 0


class LogLine(Struct, array_like=True, frozen=True, gc=False):
    """One line of a log file."""

    number: Count
    text: Annotated[str, Meta(max_length=MAX_LOG_CHARS)]
