"""What messages hold: a step, a process group, a call, a collective. Each goes onto the wire as an array."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from ddpwatch.wire.types import MAX_FRAMES, MAX_LOG_CHARS, Count, Name

PHASES: Final = ("data", "forward", "backward", "sync", "optimizer", "other")

SKIPPED: Final = 1
"""Flag of a step: the optimizer was not stepped (a GradScaler found inf or nan)."""
PAUSED: Final = 2
"""Flag of a step: part of it was spent inside `agent.pause(...)`."""
EVALUATED: Final = 4
"""Flag of a step: the model ran without training in it (evaluation)."""


class Step(Struct, array_like=True, frozen=True, gc=False):
    """One finished step of one rank. The six phases add up to the step exactly."""

    index: Count
    """Steps are counted from 0 at `install`; ranks are aligned by this number."""
    end_ns: Count
    """Monotonic clock of the rank's host at the end of the step."""
    data_ns: Count
    forward_ns: Count
    backward_ns: Count
    sync_ns: Count
    """Exposed communication: what the rank could not hide behind computing."""
    optimizer_ns: Count
    other_ns: Count
    presync_ns: Count = 0
    """The part of `sync_ns` spent before the forward pass (buffer broadcast, bucket rebuild, join)."""
    samples: Count = 0
    """Samples this rank took in, summed over the micro-batches of the step; 0 = could not be told."""
    batch: Count = 0
    """The largest micro-batch of the step."""
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
    """What ddpwatch's own hooks cost the training thread in this step; 0 = not timed in this step."""
    values: dict[Name, float] | None = None
    """What the script gave to `agent.log(...)`."""

    @property
    def step_ns(self) -> int:
        """The whole step: the sum of its phases, by definition."""
        return self.data_ns + self.forward_ns + self.backward_ns + self.sync_ns + self.optimizer_ns + self.other_ns

    @property
    def self_ns(self) -> int:
        """The rank's own work, without waiting for anybody."""
        return self.step_ns - self.sync_ns


class Group(Struct, array_like=True, frozen=True, gc=False):
    """How far this rank got in one process group."""

    name: Name
    size: Count
    enqueued: Count
    """Sequence number of the last collective this rank has joined."""
    completed: Count | None = None
    """That of the last one that has completed; None = not recorded."""
    members: Name = ""
    """Ranks of the group, as `ranges` writes them; empty = all ranks of the job, or too many to tell."""
    op: Name = ""
    """The oldest operation that has not completed. It and what follows is told only while one lasts long."""
    bytes: Count = 0
    shape: Name = ""
    """Sizes and types of what it is about; ranks that do not agree on it have lost each other."""
    age_ns: Count = 0
    """How long it has been in flight; 0 = nothing is."""
    timeout_ns: Count = 0
    """After so long in flight the process group ends the job; 0 = not known."""
    error: Name = ""
    """What the backend's own watchdog has found."""


class Comm(Struct, array_like=True, frozen=True, gc=False):
    """What the backend has told of a step's all-reduces after the step was over."""

    index: Count
    """Of the step."""
    busy_ns: Count
    bytes: Count


class Bucket(Struct, array_like=True, frozen=True, gc=False):
    """One gradient bucket of one step; clocks count from the start of the backward pass."""

    index: Count
    bytes: Count
    ready_ns: Count
    done_ns: Count
    """0 = the end could not be seen."""


class StackFrame(Struct, array_like=True, frozen=True, gc=False):
    """One call that is under way."""

    function: Name
    file: Name
    line: Count


class ThreadStack(Struct, array_like=True, frozen=True, gc=False):
    """The calls that one thread is in, the innermost first."""

    name: Name
    training: bool
    """Whether it is the thread that trains."""
    frames: Annotated[list[StackFrame], Meta(max_length=MAX_FRAMES)]


class Collective(Struct, array_like=True, frozen=True, gc=False):
    """One operation that this rank has joined."""

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
