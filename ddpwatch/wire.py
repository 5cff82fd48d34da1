"""The one format between the agent in the training process and everything that watches it.

A frame is two ZeroMQ parts, `[topic, payload]`. The topic exists for ZeroMQ's subscription filter; the payload
is msgpack of one tagged struct and tells everything, the topic included.

Rules of evolution:
- a new field goes last and has a default; a field never changes its type, meaning or unit;
- `array_like` structs only ever grow at the end;
- a new kind of message gets a new tag: an old reader counts it as `UnknownMessage` and goes on;
- `WIRE_VERSION` moves only when an old reader would misunderstand, and then it refuses by name.

Messages hold no cycles, so Python's garbage collector need not look at them (`gc=False`): there are very many.

Units: durations and clocks are integers in nanoseconds (`_ns`), sizes in bytes. `mono_ns` is a monotonic clock of
the sender's host and is never compared between hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, get_args

import msgspec
from msgspec import Meta, Struct

from ddpwatch.errors import BadFrame, UnknownMessage

if TYPE_CHECKING:
    from collections.abc import Iterable

WIRE_VERSION: Final = 1
MAX_FRAME_BYTES: Final = 1 << 20
MAX_TOPIC_BYTES: Final = 64
MAX_SNAP_STEPS: Final = 600
MAX_FRAMES: Final = 48
MAX_THREADS: Final = 32
MAX_COLLECTIVES: Final = 16
MAX_LOG_LINES: Final = 256
MAX_LOG_CHARS: Final = 2000

PHASES: Final = ("data", "forward", "backward", "sync", "optimizer", "other")

SKIPPED: Final = 1
"""Flag of a step: the optimizer was not stepped (a GradScaler found inf or nan)."""
PAUSED: Final = 2
"""Flag of a step: part of it was spent inside `agent.pause(...)`."""
EVALUATED: Final = 4
"""Flag of a step: the model ran without training in it (evaluation)."""

# The largest integer that fits numpy's int64 on the viewer's side.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=2**20)]
Name: TypeAlias = Annotated[str, Meta(max_length=200)]
Text: TypeAlias = Annotated[str, Meta(max_length=4000)]


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


class _Message(Struct, frozen=True, tag_field="t", kw_only=True, gc=False):
    rank: Rank
    seq: Count
    """Counts this rank's messages on the live topics, so that a gap is a loss that can be counted. What is sent on
    demand (snapshots, buckets) stands outside the count and carries the last number given."""


class Hello(_Message, frozen=True, tag="hello"):
    """Who this rank is. Sent at the start, every few seconds, and inside each snapshot."""

    wire_version: Count
    agent_version: Name
    run_id: Name
    run_name: Name
    attempt: Count
    """Restart count of the job as its launcher counts it."""
    world_size: Annotated[int, Meta(ge=1, lt=2**20)]
    local_rank: Rank
    host: Name
    pid: Count
    started_unix_ns: Count
    mono_ns: Count
    backend: Name = ""
    device: Name = ""
    model: Name = ""
    kind: Name = ""
    """`ddp`, `contains-ddp`, `dataparallel` or `plain`."""
    comm: Name = ""
    """How communication is measured: `passive`, `buckets` or `hook` (the user's own, timed)."""
    clock: Name = "host"
    python: Name = ""
    torch: Name = ""
    ddp: dict[Name, Name] = {}
    """DDP's settings as text: bucket_cap_mb, static_graph, find_unused_parameters and so on."""
    parameters: Count = 0
    parameter_bytes: Count = 0
    unix_ns: Count = 0
    """The wall clock of the rank's host at `mono_ns`, to tell people when something was; 0 = not told."""


class Steps(_Message, frozen=True, tag="steps"):
    """The steps finished since the last flush, oldest first."""

    steps: Annotated[list[Step], Meta(max_length=4096)]


class Beat(_Message, frozen=True, tag="beat"):
    """Sign of life, sent four times a second by a thread that does not need the training thread."""

    mono_ns: Count
    step: Count
    """The step under way."""
    phase: Annotated[int, Meta(ge=0, lt=len(PHASES))]
    phase_ns: Count
    """How long the rank has been in that phase."""
    pause: Name = ""
    groups: Annotated[list[Group], Meta(max_length=1024)] = []
    cpu_percent: Annotated[float, Meta(ge=0)] = 0.0
    rss_bytes: Count = 0
    dropped: Count = 0
    """Records overwritten in the ring before they could be sent, since the start."""
    agent_cpu_ns: Count = 0
    """CPU time of the agent's own thread since the start."""
    hook_ns: Count = 0
    """Time of ddpwatch's hooks on the training thread since the start, estimated from the steps that were timed."""


class Note(_Message, frozen=True, tag="note"):
    """Something happened that a person should know. `kind` is stable, `text` is for reading."""

    kind: Name
    text: Text
    step: Count
    mono_ns: Count


class Loader(_Message, frozen=True, tag="loader"):
    """A DataLoader began a pass that feeds the training."""

    step: Count
    epoch: Count
    """Which pass over the data this is, counted by ddpwatch from 0."""
    sampler: Name
    distributed: bool
    replicas: Count = 0
    shuffle: bool = False
    sampler_epoch: int = -1
    """What `set_epoch` left in the sampler; -1 = it has no such thing."""
    batch_size: Count = 0
    workers: Count = 0
    length: Count = 0


class Checksum(_Message, frozen=True, tag="checksum"):
    """The bits of one slice of the parameters after a step; equal on all ranks, or the replicas drift."""

    step: Count
    parameter: Name
    offset: Count
    """First element of the slice."""
    crc: Count


class Buckets(_Message, frozen=True, tag="buckets"):
    """The gradient buckets of one step, sent only while somebody subscribes to `bucket`."""

    step: Count
    buckets: Annotated[list[Bucket], Meta(max_length=4096)]


class Stack(_Message, frozen=True, tag="stack"):
    """What the threads of this rank are doing, and its last operations; sent only while somebody subscribes to
    `stack/<nonce>`, or `stacks/<nonce>` for all threads.
    """

    step: Count
    mono_ns: Count
    threads: Annotated[list[ThreadStack], Meta(max_length=MAX_THREADS)]
    collectives: Annotated[list[Collective], Meta(max_length=MAX_COLLECTIVES)] = []


class Gone(_Message, frozen=True, tag="gone"):
    """A viewer's own word, never sent by a rank: its process has ended and has not said goodbye."""

    oom_kills: Count = 0
    """Processes of its control group that the kernel has killed for their memory while it was watched."""


class LogLine(Struct, array_like=True, frozen=True, gc=False):
    """One line of a log file."""

    number: Count
    text: Annotated[str, Meta(max_length=MAX_LOG_CHARS)]


class LogLines(_Message, frozen=True, tag="log"):
    """A viewer's own word, never sent by a rank: a log file that it watches has grown. Rank and number say nothing."""

    source: Name
    lines: Annotated[list[LogLine], Meta(max_length=MAX_LOG_LINES)]
    skipped: Count = 0
    """Lines that were read as well and say nothing."""


class Bye(_Message, frozen=True, tag="bye"):
    """The agent ends: `closed` by the script, `exit` of the interpreter, `failed` when an exception of the script's
    ended that, or `off` after an error of its own. `text` says more. With `seq` 0 it is a viewer's own word on a rank
    that had left in order before the viewer came.
    """

    reason: Name
    text: Text
    mono_ns: Count


class Snap(_Message, frozen=True, tag="snap"):
    """All that a late viewer needs, for one subscriber: drop live messages up to `seq`, then follow the stream."""

    hello: Hello
    beat: Beat
    steps: Annotated[list[Step], Meta(max_length=MAX_SNAP_STEPS)]
    notes: Annotated[list[Note], Meta(max_length=64)] = []
    loaders: Annotated[list[Loader], Meta(max_length=16)] = []
    checksums: Annotated[list[Checksum], Meta(max_length=64)] = []


Message: TypeAlias = Hello | Steps | Beat | Note | Loader | Checksum | Buckets | Stack | Gone | LogLines | Bye | Snap

TOPICS: Final[dict[type[Any], bytes]] = {
    Hello: b"hello",
    Steps: b"step",
    Beat: b"beat",
    Note: b"event",
    Loader: b"event",
    Checksum: b"event",
    Bye: b"event",
    Gone: b"gone",
    LogLines: b"log",
    Buckets: b"bucket",
}
"""Where each message is published. `Snap` and `Stack` are absent: they go to the topic that asked for them."""
LIVE_TOPICS: Final = (b"hello", b"step", b"beat", b"event")
SNAP_PREFIX: Final = b"snap/"
STACK_PREFIX: Final = b"stack/"
STACKS_PREFIX: Final = b"stacks/"


class _Tag(Struct):
    t: str


_KNOWN_TAGS: Final = frozenset(kind.__struct_config__.tag for kind in get_args(Message))
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)
_tag_decoder: Final = msgspec.msgpack.Decoder(_Tag)


def fit(text: str, most: int = 200) -> str:
    """Text of the sender's own as it may go onto the wire: bounded, and valid Unicode whatever a file name held."""
    return text[:most].encode("utf-8", "replace").decode("utf-8")


def ranges(ranks: Iterable[int], most: int = 200) -> str:
    """Ranks in few letters: `0-3,8`. Empty if even that is too long."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return text if len(text) <= most else ""


def encode(message: Message) -> bytes:
    """One message as the payload of a frame."""
    return _encoder.encode(message)


def decode(payload: bytes | memoryview) -> Message:
    """The message in a payload from outside. Raises `BadFrame` or `UnknownMessage`, and nothing else."""
    if len(payload) > MAX_FRAME_BYTES:
        raise BadFrame(f"frame of {len(payload)} bytes; at most {MAX_FRAME_BYTES} are read")
    try:
        message: Message = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _why_unreadable(payload, error) from None
    version = message.wire_version if isinstance(message, Hello) else WIRE_VERSION
    if version > WIRE_VERSION:
        raise BadFrame(f"wire version {version}; this ddpwatch reads up to {WIRE_VERSION}: upgrade the viewer")
    return message


def _why_unreadable(payload: bytes | memoryview, error: Exception) -> BadFrame | UnknownMessage:
    try:
        tag = _tag_decoder.decode(payload).t
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BadFrame(str(error))
    return BadFrame(str(error)) if tag in _KNOWN_TAGS else UnknownMessage(f"message kind {tag[:40]!r} is not known")
