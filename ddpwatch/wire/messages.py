"""Everything that is said: by a rank, by a relay, or by a viewer to itself.

What is told of GPUs. A figure that could not be read is None, and `absent` has its name and the reason.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta, Struct

from ddpwatch.wire.step_table import MAX_COLUMNS, MIN_COLUMNS, UNSTATED_COLUMNS
from ddpwatch.wire.structs import PHASES, Bucket, Collective, Comm, Group, LogLine, Step, ThreadStack
from ddpwatch.wire.types import (
    MAX_COLLECTIVES,
    MAX_ENVIRONMENT,
    MAX_FRAME_BYTES,
    MAX_LOG_LINES,
    MAX_SNAP_STEPS,
    MAX_STEPS,
    MAX_THREADS,
    Count,
    Name,
    Rank,
    Text,
)

MAX_GPUS: Final = 16
"""Of one rank."""
MAX_GPU_PROCESSES: Final = 32
MAX_THROTTLE: Final = 16
MAX_XIDS: Final = 16
MAX_GPU_MOMENTS: Final = 600

Percent: TypeAlias = Annotated[int, Meta(ge=0, le=100)]
Figure: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)] | None


class GpuProcess(Struct, array_like=True, frozen=True, gc=False):
    """A process that holds memory of a GPU."""

    pid: Count
    bytes: Figure = None
    name: Name = ""


class Gpu(Struct, frozen=True, gc=False, omit_defaults=True):
    """One GPU of one rank at one moment."""

    device: Name
    """As torch names it: `cuda:0`."""
    uuid: Name = ""
    """Of the GPU, or of the MIG instance: the same GPU has the same one for every rank that uses it."""
    name: Name = ""
    util_percent: Percent | None = None
    """Share of the last second or so in which a kernel ran; a rank that waits inside a collective is at 100, too."""
    memory_util_percent: Percent | None = None
    """Share of it in which memory was read or written."""
    used_bytes: Figure = None
    total_bytes: Figure = None
    own_bytes: Figure = None
    """Of it, what this rank's process holds."""
    temperature_c: Figure = None
    power_mw: Figure = None
    power_limit_mw: Figure = None
    sm_mhz: Figure = None
    sm_max_mhz: Figure = None
    memory_mhz: Figure = None
    memory_max_mhz: Figure = None
    throttle: Annotated[list[Name], Meta(max_length=MAX_THROTTLE)] = []
    """Why clocks are held down, in the words of `nvidia-smi`: `sw_power_cap`, `hw_thermal_slowdown` and so on."""
    pcie_tx_bytes_s: Figure = None
    pcie_rx_bytes_s: Figure = None
    nvlink_tx_bytes_s: Figure = None
    nvlink_rx_bytes_s: Figure = None
    ecc_corrected: Figure = None
    """Errors of the memory since the driver was loaded; corrected ones harm nobody."""
    ecc_uncorrected: Figure = None
    xids: Annotated[list[Count], Meta(max_length=MAX_XIDS)] = []
    """Errors that the driver has told since the agent began, the latest last."""
    allocated_bytes: Figure = None
    """By torch's tensors; what torch has reserved and does not use is in the next one."""
    reserved_bytes: Figure = None
    peak_bytes: Figure = None
    """The most that was allocated since the script last reset it."""
    processes: Annotated[list[GpuProcess], Meta(max_length=MAX_GPU_PROCESSES)] = []
    lost: bool = False
    """It has fallen off the bus: nothing of it can be read any more."""
    absent: dict[Name, Name] = {}
    """By name of a figure that could not be read, why: `power_mw` -> `not supported by this GPU`."""


class GpuMoment(Struct, array_like=True, frozen=True, gc=False):
    """What is remembered of a GPU for a viewer that comes later."""

    mono_ns: Count
    device: Name
    util_percent: Percent | None = None
    memory_util_percent: Percent | None = None
    used_bytes: Figure = None
    temperature_c: Figure = None
    power_mw: Figure = None
    sm_mhz: Figure = None


class _Message(Struct, frozen=True, tag_field="t", kw_only=True, gc=False, omit_defaults=True):
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
    """How communication is measured: `passive`, `buckets`, `hook` (the user's own, timed) or `timing` (NCCL's own)."""
    clock: Name = "host"
    python: Name = ""
    torch: Name = ""
    ddp: dict[Name, Name] = {}
    """DDP's settings as text: bucket_cap_mb, static_graph, find_unused_parameters and so on."""
    parameters: Count = 0
    parameter_bytes: Count = 0
    unix_ns: Count = 0
    """The wall clock of the rank's host at `mono_ns`, to tell people when something was; 0 = not told."""
    cores: Count = 0
    """Of the host, those that the process may run on; 0 = not told."""
    command: Text = ""
    """The script and its arguments, without what looks like a secret."""
    environment: Annotated[dict[Name, Name], Meta(max_length=MAX_ENVIRONMENT)] = {}
    """Variables that change how a job runs, from a list of known ones; nothing that looks like a secret."""


class Steps(_Message, frozen=True, tag="steps"):
    """Steps finished since the last flush that found no room in a beat, oldest first."""

    steps: Annotated[list[Step], Meta(max_length=MAX_STEPS)]


class Gpus(_Message, frozen=True, tag="gpu"):
    """The GPUs of this rank, about once a second. Measured apart from the beat that brings them, which waits for no
    driver.
    """

    mono_ns: Count
    gpus: Annotated[list[Gpu], Meta(max_length=MAX_GPUS)] = []
    why: Name = ""
    """Why there are none, or nothing of them can be read."""


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
    queued_ns: Count = 0
    """Time since its start in which the training thread could have run and had no core; 0 = not told."""
    steps: Annotated[list[Step], Meta(max_length=MAX_STEPS)] = []
    """Finished since the last flush, oldest first, and later than those of any `Steps` before: one frame instead of two
    is a third less for a viewer of a thousand ranks."""
    table: Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)] = b""
    """The same as `pack_steps` writes them, if the script has logged nothing in them; then `steps` is empty."""
    gpus: Gpus | None = None
    """If they have been read since the last beat. It goes to the topic of `Gpus` then, so that they can be found."""
    table_columns: Annotated[int, Meta(ge=MIN_COLUMNS, le=MAX_COLUMNS)] = UNSTATED_COLUMNS
    """Numbers in a row of `table`, as the sender writes it. `decode` brings the table to the reader's own columns."""


class Note(_Message, frozen=True, tag="note"):
    """Something happened that a person should know. `kind` is stable, `text` is for reading.

    `failing` goes before a `Bye` that takes a moment to be made: its text, should there be no time for more.
    """

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


class Comms(_Message, frozen=True, tag="comm"):
    """Time in all-reduce of steps that were told before, oldest first: a backend tells it some time after the step."""

    comms: Annotated[list[Comm], Meta(max_length=MAX_STEPS)]


class Buckets(_Message, frozen=True, tag="buckets"):
    """The gradient buckets of one step, sent only while somebody subscribes to `bucket`."""

    step: Count
    buckets: Annotated[list[Bucket], Meta(max_length=MAX_STEPS)]


class Stack(_Message, frozen=True, tag="stack"):
    """What the threads of this rank are doing, and its last operations; sent only while somebody subscribes to
    `stack/<nonce>`, or `stacks/<nonce>` for all threads.
    """

    step: Count
    mono_ns: Count
    threads: Annotated[list[ThreadStack], Meta(max_length=MAX_THREADS)]
    collectives: Annotated[list[Collective], Meta(max_length=MAX_COLLECTIVES)] = []
    phase: Annotated[int, Meta(ge=-1, lt=len(PHASES))] = -1
    """In which the thread that trains was at that moment; -1 = not told, or it went on to another meanwhile."""


class Gone(_Message, frozen=True, tag="gone"):
    """A viewer's own word, never sent by a rank: its process has ended, without a goodbye or after it."""

    oom_kills: Count = 0
    """Processes of its control group that the kernel has killed for their memory while it was watched."""
    exit_code: int | None = None
    """Of its process, minus the signal if one ended it; None = the system does not tell."""
    ago_ns: Count = 0
    """How long before this word the end was seen, as it happened; 0 = it was only found afterwards."""


class Held(_Message, frozen=True, tag="held"):
    """A viewer's own word, never sent by a rank: what keeps its process from running, or that nothing does."""

    by: Name = ""
    """`signal` = it was stopped by one, `debugger`, `disk` = it waits in the kernel for a disk or a driver, `nothing` =
    it lives and may run."""


class LogLines(_Message, frozen=True, tag="log"):
    """A viewer's own word, never sent by a rank: a log file that it watches has grown. Rank and number say nothing."""

    source: Name
    lines: Annotated[list[LogLine], Meta(max_length=MAX_LOG_LINES)]
    skipped: Count = 0
    """Lines that were read as well and say nothing."""
    counted: bool = True
    """Whether numbers count from the beginning of the file; else from where reading began."""


class Relay(_Message, frozen=True, tag="relay"):
    """A relay's own word, about once a second: it is there. Rank and number say nothing."""

    host: Name
    ended: bool = False
    """Whether the run is over, as far as can be seen from there: nothing more will come."""


class Bye(_Message, frozen=True, tag="bye"):
    """The agent ends: `closed` by the script, `exit` of the interpreter, `failed` when an exception of the script's
    ended that, or `off` after an error of its own. `text` says more. With `seq` 0 it is a viewer's own word on a rank
    that had left in order before the viewer came.
    """

    reason: Name
    text: Text
    mono_ns: Count
    collectives: Annotated[list[Collective], Meta(max_length=MAX_COLLECTIVES)] = []
    """Of a rank that failed, its last operations, oldest first: they tell in which one it was."""


class Snap(_Message, frozen=True, tag="snap"):
    """All that a late viewer needs, for one subscriber: drop live messages up to `seq`, then follow the stream."""

    hello: Hello
    beat: Beat
    steps: Annotated[list[Step], Meta(max_length=MAX_SNAP_STEPS)]
    notes: Annotated[list[Note], Meta(max_length=64)] = []
    loaders: Annotated[list[Loader], Meta(max_length=16)] = []
    checksums: Annotated[list[Checksum], Meta(max_length=64)] = []
    gpus: Gpus | None = None
    gpu_moments: Annotated[list[GpuMoment], Meta(max_length=MAX_GPUS * MAX_GPU_MOMENTS)] = []
    """Oldest first."""


Message: TypeAlias = (
    Hello
    | Steps
    | Comms
    | Beat
    | Gpus
    | Note
    | Loader
    | Checksum
    | Buckets
    | Stack
    | Gone
    | Held
    | LogLines
    | Relay
    | Bye
    | Snap
)

FAILING: Final = "failing"
"""The kind of note that goes before the `Bye` of a rank that failed."""
TOPICS: Final[dict[type[Any], bytes]] = {
    Hello: b"hello",
    Steps: b"step",
    Comms: b"step",
    Gpus: b"gpu",
    Beat: b"beat",
    Note: b"event",
    Loader: b"event",
    Checksum: b"event",
    Bye: b"event",
    Gone: b"gone",
    Held: b"gone",
    LogLines: b"log",
    Relay: b"relay",
    Buckets: b"bucket",
}
"""Where each message is published. `Snap` and `Stack` are absent: they go to the topic that asked for them."""
LIVE_TOPICS: Final = (b"hello", b"step", b"beat", b"gpu", b"event")
SNAP_PREFIX: Final = b"snap/"
STACK_PREFIX: Final = b"stack/"
STACKS_PREFIX: Final = b"stacks/"
RELAY_TOPICS: Final = (TOPICS[Gone], TOPICS[Relay])
"""What only a relay sends: itself, and what it sees of processes on its node."""
