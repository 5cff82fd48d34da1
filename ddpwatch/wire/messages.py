"""Message types: what a rank or a relay sends, and what a viewer records for itself."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta, Struct

from ddpwatch.wire.limits import (
    MAX_COLLECTIVES,
    MAX_ENVIRONMENT,
    MAX_FRAME_BYTES,
    MAX_LOG_LINES,
    MAX_PATHS,
    MAX_QUEUED,
    MAX_SNAP_STEPS,
    MAX_STEPS,
    MAX_THREADS,
    Count,
    Name,
    Rank,
    Text,
)
from ddpwatch.wire.message_parts import (
    MAX_POINTS,
    PHASES,
    Bucket,
    Collective,
    Comm,
    Group,
    LogLine,
    Queued,
    Step,
    SyncPoint,
    ThreadStack,
)
from ddpwatch.wire.step_table import MAX_COLUMNS, MIN_COLUMNS, UNSTATED_COLUMNS

MANY_RANKS: Final = 256
"""In larger runs agents send fewer heartbeats, and viewers keep fewer steps and evaluate the rules less often."""
BEAT_NS: Final = 250_000_000
"""Interval in ns at which an agent sends its heartbeat and the steps that have ended."""
MANY_RANKS_BEAT_NS: Final = 1_000_000_000
"""The same interval in ns in runs of more than `MANY_RANKS` ranks."""
HELLO_NS: Final = 5_000_000_000
"""Interval in ns at which an agent repeats its hello, for viewers that missed the first one."""
MAX_GPUS: Final = 16
"""GPUs of one rank."""
MAX_GPU_PROCESSES: Final = 32
"""Processes listed of one GPU."""
MAX_THROTTLE: Final = 16
"""Clock throttle reasons of one GPU."""
MAX_XIDS: Final = 16
"""Latest Xid errors of one GPU."""
MAX_GPU_MOMENTS: Final = 600
"""GPU readings in one snapshot, one a second: ten minutes."""

Percent: TypeAlias = Annotated[int, Meta(ge=0, le=100)]
WorkerPercent: TypeAlias = Annotated[int, Meta(ge=0, le=100_000)]
"""A process may have a thousand threads."""
Figure: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)] | None


def beat_ns(world_size: int) -> int:
    """Interval of heartbeats in ns in a run of this world size."""
    return BEAT_NS if world_size <= MANY_RANKS else MANY_RANKS_BEAT_NS


class GpuProcess(Struct, array_like=True, frozen=True, gc=False):
    """A process that holds memory on a GPU."""

    pid: Count
    bytes: Figure = None
    name: Name = ""


class Gpu(Struct, frozen=True, gc=False, omit_defaults=True):
    """One GPU of one rank at one moment. A figure that could not be read is None, and `absent` has the reason."""

    device: Name
    """As torch names it: `cuda:0`."""
    uuid: Name = ""
    """UUID of the GPU or the MIG instance, the same for every rank that uses it."""
    name: Name = ""
    util_percent: Percent | None = None
    """Percent of about the last second in which a kernel ran; a rank that waits inside a collective is at 100, too."""
    memory_util_percent: Percent | None = None
    """Percent of the same time in which memory was read or written."""
    used_bytes: Figure = None
    total_bytes: Figure = None
    own_bytes: Figure = None
    """The part of `used_bytes` that this rank's process holds."""
    temperature_c: Figure = None
    power_mw: Figure = None
    power_limit_mw: Figure = None
    sm_mhz: Figure = None
    sm_max_mhz: Figure = None
    memory_mhz: Figure = None
    memory_max_mhz: Figure = None
    throttle: Annotated[list[Name], Meta(max_length=MAX_THROTTLE)] = []
    """Clock throttle reasons as `nvidia-smi` names them: `sw_power_cap`, `hw_thermal_slowdown` and so on."""
    pcie_tx_bytes_s: Figure = None
    pcie_rx_bytes_s: Figure = None
    nvlink_tx_bytes_s: Figure = None
    nvlink_rx_bytes_s: Figure = None
    ecc_corrected: Figure = None
    """Memory errors since the driver was loaded; corrected ones are harmless."""
    ecc_uncorrected: Figure = None
    xids: Annotated[list[Count], Meta(max_length=MAX_XIDS)] = []
    """Xid errors since the agent started, newest last."""
    allocated_bytes: Figure = None
    """Bytes in torch's tensors; `reserved_bytes` includes what torch's allocator caches."""
    reserved_bytes: Figure = None
    peak_bytes: Figure = None
    """Maximum of `allocated_bytes` since the script last reset it."""
    processes: Annotated[list[GpuProcess], Meta(max_length=MAX_GPU_PROCESSES)] = []
    lost: bool = False
    """Whether it has fallen off the bus, so that nothing can be read."""
    absent: dict[Name, Name] = {}
    """Reason by name of a figure that could not be read: `power_mw` -> `not supported by this GPU`."""


class GpuMoment(Struct, array_like=True, frozen=True, gc=False):
    """A past reading of a GPU, for a viewer that attaches later."""

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
    """Sequence number of this rank's messages on the live topics, so that losses can be counted. Messages sent on
    demand (snapshots, stacks, buckets) carry the last number given."""


class Hello(_Message, frozen=True, tag="hello"):
    """Description of a rank. Sent at the start, every few seconds, and inside each snapshot."""

    wire_version: Count
    agent_version: Name
    run_id: Name
    run_name: Name
    attempt: Count
    """Restarts of the job as its launcher counts them."""
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
    """How the model is wrapped: `ddp`, `contains-ddp`, `fsdp2` (`fully_shard`), `fsdp1`, `replicate` (of
    torch.distributed), `deepspeed`, `pipeline`, `tensor-parallel` (DTensors), `ddp-tp` and `fsdp2-tp` (both),
    `other-ddp` (a class of that name from another package), `dataparallel`, or `plain`."""
    comm: Name = ""
    """How communication is measured: `passive`, `buckets`, `hook` (the user's, timed) or `timing` (by NCCL)."""
    clock: Name = "host"
    python: Name = ""
    torch: Name = ""
    ddp: dict[Name, Name] = {}
    """DDP's settings as text: static_graph, find_unused_parameters and so on."""
    parameters: Count = 0
    parameter_bytes: Count = 0
    unix_ns: Count = 0
    """Wall clock of the rank's host at `mono_ns`, to convert times for people; 0 = unknown."""
    cores: Count = 0
    """Cores of the host that the process may use; 0 = unknown."""
    command: Text = ""
    """The script and its arguments, without anything that looks like a secret."""
    environment: Annotated[dict[Name, Name], Meta(max_length=MAX_ENVIRONMENT)] = {}
    """Known environment variables that change how a job runs, without anything that looks like a secret."""
    replicas: Name = ""
    """Ranks that hold a replica of the model, as `ranges` writes them: those of DDP's process group. Too many to list =
    text that is equal on all of them. Empty = all ranks of the job."""


class Steps(_Message, frozen=True, tag="steps"):
    """Steps finished since the last flush that did not fit into a heartbeat, oldest first."""

    steps: Annotated[list[Step], Meta(max_length=MAX_STEPS)]


class Gpus(_Message, frozen=True, tag="gpu"):
    """The GPUs of this rank, about once a second. Read by another thread, so a heartbeat waits for no driver."""

    mono_ns: Count
    gpus: Annotated[list[Gpu], Meta(max_length=MAX_GPUS)] = []
    why: Name = ""
    """Why there are no GPUs, or none of them can be read."""


class Beat(_Message, frozen=True, tag="beat"):
    """Heartbeat, sent four times a second by a thread that does not depend on the training thread."""

    mono_ns: Count
    step: Count
    """Index of the current step."""
    phase: Annotated[int, Meta(ge=0, lt=len(PHASES))]
    phase_ns: Count
    """Time that the rank has spent in that phase so far."""
    pause: Name = ""
    groups: Annotated[list[Group], Meta(max_length=1024)] = []
    cpu_percent: Annotated[float, Meta(ge=0)] = 0.0
    rss_bytes: Count = 0
    dropped: Count = 0
    """Records overwritten in the ring buffer before they could be sent, since the start."""
    agent_cpu_ns: Count = 0
    """CPU time of the agent's own thread since the start."""
    hook_ns: Count = 0
    """Time of ddpwatch's hooks on the training thread since the start, extrapolated from the steps that were timed."""
    queued_ns: Count = 0
    """Time since its start that the training thread has waited for a core; 0 = unknown."""
    steps: Annotated[list[Step], Meta(max_length=MAX_STEPS)] = []
    """Steps finished since the last flush, oldest first, and later than those of any `Steps` before: one frame instead
    of two saves a viewer of a thousand ranks a third of the work."""
    table: Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)] = b""
    """The same steps as `pack_steps` writes them, if none of them has logged values; then `steps` is empty."""
    gpus: Gpus | None = None
    """A new GPU reading, if there is one. The heartbeat is then sent to the topic of `Gpus`."""
    table_columns: Annotated[int, Meta(ge=MIN_COLUMNS, le=MAX_COLUMNS)] = UNSTATED_COLUMNS
    """Columns of the sender's `table`; `decode` converts the table to the reader's columns."""
    activity: Name = ""
    """What the training thread does in `other`: `evaluation`, or the function of a checkpoint save; empty = unknown."""


class Note(_Message, frozen=True, tag="note"):
    """An event that a person should know of. `kind` is stable, `text` is for people."""

    kind: Name
    text: Text
    step: Count
    mono_ns: Count


class Loader(_Message, frozen=True, tag="loader"):
    """Start of a pass over a DataLoader that feeds the training."""

    step: Count
    epoch: Count
    """Index of the pass over the data, counted by ddpwatch from 0."""
    sampler: Name
    distributed: bool
    replicas: Count = 0
    shuffle: bool = False
    sampler_epoch: int = -1
    """The epoch that `set_epoch` has set in the sampler; -1 = it has none."""
    batch_size: Count = 0
    workers: Count = 0
    length: Count = 0
    pin_memory: bool | None = None
    """None = unknown."""
    prefetch_factor: Count = 0
    """Batches that each worker loads in advance; 0 = there are no workers, or unknown."""
    persistent_workers: bool | None = None
    """Whether workers live on after a pass over the data; None = unknown."""


class LoaderWorkers(_Message, frozen=True, tag="workers"):
    """CPU use of the DataLoader's worker processes over the last seconds, in percent of that time, as means of them."""

    step: Count
    mono_ns: Count
    workers: Count
    """Worker processes measured."""
    cpu_percent: WorkerPercent
    queued_percent: WorkerPercent = 0
    """Waiting for a core; 0 also if the kernel does not count it."""


class SyncPath(_Message, frozen=True, tag="path"):
    """A sequence of sync points outside DDP, sent when a step passes it for the first time."""

    step: Count
    path: Count
    """`Step.sync_path` of steps that pass it."""
    points: Annotated[list[SyncPoint], Meta(max_length=MAX_POINTS)]
    count: Count
    """Number of all its sync points."""


class Checksum(_Message, frozen=True, tag="checksum"):
    """CRC of one slice of the parameters after a step; replicas that differ have drifted apart."""

    step: Count
    parameter: Name
    offset: Count
    """First element of the slice."""
    crc: Count


class Comms(_Message, frozen=True, tag="comm"):
    """All-reduce times of earlier steps, oldest first: the backend has them some time after the step."""

    comms: Annotated[list[Comm], Meta(max_length=MAX_STEPS)]


class Buckets(_Message, frozen=True, tag="buckets"):
    """The gradient buckets of one step, sent only while a viewer subscribes to `bucket`."""

    step: Count
    buckets: Annotated[list[Bucket], Meta(max_length=MAX_STEPS)]


class Stack(_Message, frozen=True, tag="stack"):
    """Stacks of this rank's threads and its last collectives, for subscribers of `stack/<nonce>` (the training thread)
    or `stacks/<nonce>` (all threads).
    """

    step: Count
    mono_ns: Count
    threads: Annotated[list[ThreadStack], Meta(max_length=MAX_THREADS)]
    collectives: Annotated[list[Collective], Meta(max_length=MAX_COLLECTIVES)] = []
    phase: Annotated[int, Meta(ge=-1, lt=len(PHASES))] = -1
    """Phase of the training thread at that moment; -1 = unknown, or it changed meanwhile."""


class Gone(_Message, frozen=True, tag="gone"):
    """The process of a rank has ended, with or without a goodbye. Made by a viewer, never sent by a rank."""

    oom_kills: Count = 0
    """Processes of its cgroup that the kernel's OOM killer has ended while it was watched."""
    exit_code: int | None = None
    """Exit code of the process, or minus the signal that ended it; None = unknown."""
    ago_ns: Count = 0
    """Time between the end of the process, if it was observed, and this message; 0 = it was found afterwards."""


class Held(_Message, frozen=True, tag="held"):
    """What keeps a rank's process from running, or that nothing does. Made by a viewer, never sent by a rank."""

    by: Name = ""
    """`signal` = stopped, `debugger`, `disk` = waits in the kernel for a disk or driver, `nothing` = runnable."""


class LogLines(_Message, frozen=True, tag="log"):
    """New lines of a log file. Made by a viewer, never sent by a rank; `rank` and `seq` have no meaning."""

    source: Name
    lines: Annotated[list[LogLine], Meta(max_length=MAX_LOG_LINES)]
    skipped: Count = 0
    """Lines read in between that hold nothing of interest."""
    counted: bool = True
    """Whether line numbers count from the beginning of the file, or else from where reading began."""


class Relay(_Message, frozen=True, tag="relay"):
    """Heartbeat of a relay, about once a second; `rank` and `seq` have no meaning."""

    host: Name
    ended: bool = False
    """Whether the relay sees that the run is over, so that nothing more will come."""


class Bye(_Message, frozen=True, tag="bye"):
    """End of an agent: `closed` by the script, `exit` of the interpreter, `failed` by an exception of the script, or
    `off` after an error of ddpwatch. `text` has details. With `seq` 0 it was made by a viewer for a rank that had left
    in order before the viewer attached.
    """

    reason: Name
    text: Text
    mono_ns: Count
    collectives: Annotated[list[Collective], Meta(max_length=MAX_COLLECTIVES)] = []
    """The last collectives of a rank that failed, oldest first: they show which one it was in."""


class Snap(_Message, frozen=True, tag="snap"):
    """Snapshot for one subscriber that attaches late: it drops live messages up to `seq`, then follows the stream."""

    hello: Hello
    beat: Beat
    steps: Annotated[list[Step], Meta(max_length=MAX_SNAP_STEPS)]
    notes: Annotated[list[Note], Meta(max_length=64)] = []
    loaders: Annotated[list[Loader], Meta(max_length=16)] = []
    checksums: Annotated[list[Checksum], Meta(max_length=64)] = []
    sync_paths: Annotated[list[SyncPath], Meta(max_length=MAX_PATHS)] = []
    queued: Annotated[list[Queued], Meta(max_length=MAX_QUEUED)] = []
    """Oldest first: without these a late viewer would not know how busy the cores were."""
    gpus: Gpus | None = None
    gpu_moments: Annotated[list[GpuMoment], Meta(max_length=MAX_GPUS * MAX_GPU_MOMENTS)] = []
    """Oldest first."""
    workers: LoaderWorkers | None = None


Message: TypeAlias = (
    Hello | Steps | Comms | Beat | Gpus | Note | Loader | LoaderWorkers | SyncPath | Checksum
    | Buckets | Stack | Gone | Held | LogLines | Relay | Bye | Snap
)  # fmt: skip

AGENT_OFF: Final = "off"
"""Reason in the `Bye` of a rank whose agent switched itself off: its training went on."""
FAILING: Final = "failing"
"""Kind of the note sent before the `Bye` of a failed rank, with its text, in case there is no time for the `Bye`."""
TOPICS: Final[dict[type[Any], bytes]] = {
    Hello: b"hello",
    Steps: b"step",
    Comms: b"step",
    Gpus: b"gpu",
    Beat: b"beat",
    Note: b"event",
    Loader: b"event",
    LoaderWorkers: b"event",
    SyncPath: b"event",
    Checksum: b"event",
    Bye: b"event",
    Gone: b"gone",
    Held: b"gone",
    LogLines: b"log",
    Relay: b"relay",
    Buckets: b"bucket",
}
"""Topic of each message. `Snap` and `Stack` go to the topic that asked for them."""
LIVE_TOPICS: Final = (b"hello", b"step", b"beat", b"gpu", b"event")
SNAP_PREFIX: Final = b"snap/"
STACK_PREFIX: Final = b"stack/"
STACKS_PREFIX: Final = b"stacks/"
RELAY_TOPICS: Final = (TOPICS[Gone], TOPICS[Relay])
"""Topics that only a relay sends: its heartbeat, and the state of processes on its node."""
