"""The message format between the agent in a training process and everything that watches it.

A frame is two ZeroMQ parts, `[topic, payload]`. The topic is for ZeroMQ's subscription filter; the payload is msgpack
of one tagged struct and is complete without the topic. Here: messages, their limits and their encoding. Not here:
sockets and the meaning of what was received. Begin with `messages`.

Rules of evolution:
- a new field goes last and has a default; a field never changes its type, meaning or unit;
- `array_like` structs only grow at the end; packed rows of steps state their number of columns (`step_table`);
- a new kind of message gets a new tag: an old reader counts it as `UnknownMessage` and goes on;
- `WIRE_VERSION` changes only when an old reader would misunderstand; the old reader then refuses with a clear error.

Messages hold no reference cycles, so the garbage collector skips them (`gc=False`): there are very many.

Units: durations and clocks are integers in nanoseconds (`_ns`), sizes in bytes. `mono_ns` is a monotonic clock of
the sender's host and is never compared between hosts.
"""

from __future__ import annotations

from ddpwatch.wire.codec import claimed_rank, decode, encode
from ddpwatch.wire.limits import (
    MAX_COLLECTIVES,
    MAX_ENVIRONMENT,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    MAX_LOG_CHARS,
    MAX_LOG_LINES,
    MAX_PATHS,
    MAX_QUEUED,
    MAX_SNAP_STEPS,
    MAX_THREADS,
    MAX_TOPIC_BYTES,
    NO_MESSAGE,
    WIRE_VERSION,
    Count,
    Name,
    Rank,
    Text,
    fit,
    ranges,
)
from ddpwatch.wire.message_parts import (
    ALL_POINTS,
    EVALUATED,
    HOST_TIMED,
    MAX_POINTS,
    PAUSED,
    PHASES,
    SKIPPED,
    Bucket,
    Collective,
    Comm,
    Group,
    LogLine,
    Queued,
    StackFrame,
    Step,
    SyncPoint,
    ThreadStack,
)
from ddpwatch.wire.messages import (
    AGENT_OFF,
    BEAT_NS,
    FAILING,
    HELLO_NS,
    LIVE_TOPICS,
    MANY_RANKS,
    MAX_GPU_MOMENTS,
    MAX_GPU_PROCESSES,
    MAX_GPUS,
    MAX_THROTTLE,
    MAX_XIDS,
    RELAY_TOPICS,
    SNAP_PREFIX,
    STACK_PREFIX,
    STACKS_PREFIX,
    TOPICS,
    Beat,
    Buckets,
    Bye,
    Checksum,
    Comms,
    Figure,
    Gone,
    Gpu,
    GpuMoment,
    GpuProcess,
    Gpus,
    Held,
    Hello,
    Loader,
    LoaderWorkers,
    LogLines,
    Message,
    Note,
    Percent,
    Relay,
    Snap,
    Stack,
    Steps,
    SyncPath,
    beat_ns,
)
from ddpwatch.wire.step_table import (
    MAX_COLUMNS,
    MIN_COLUMNS,
    STEP_BYTES,
    STEP_COLUMNS,
    STEP_DEFAULTS,
    pack_steps,
    step_of,
    unpack_steps,
)

__all__ = [
    "AGENT_OFF", "ALL_POINTS", "BEAT_NS", "EVALUATED", "FAILING", "HELLO_NS", "HOST_TIMED", "LIVE_TOPICS",
    "MANY_RANKS", "MAX_COLLECTIVES", "MAX_COLUMNS",
    "MAX_ENVIRONMENT", "MAX_FRAMES", "MAX_FRAME_BYTES", "MAX_GPUS", "MAX_GPU_MOMENTS", "MAX_GPU_PROCESSES",
    "MAX_LOG_CHARS", "MAX_LOG_LINES", "MAX_PATHS", "MAX_POINTS", "MAX_QUEUED", "MAX_SNAP_STEPS", "MAX_THREADS",
    "MAX_THROTTLE", "MAX_TOPIC_BYTES", "MAX_XIDS",
    "MIN_COLUMNS", "NO_MESSAGE", "PAUSED", "PHASES", "RELAY_TOPICS", "SKIPPED", "SNAP_PREFIX", "STACKS_PREFIX",
    "STACK_PREFIX", "STEP_BYTES", "STEP_COLUMNS", "STEP_DEFAULTS", "TOPICS", "WIRE_VERSION", "Beat", "Bucket",
    "Buckets", "Bye", "Checksum", "Collective", "Comm", "Comms", "Count", "Figure", "Gone", "Gpu", "GpuMoment",
    "GpuProcess", "Gpus", "Group", "Held", "Hello", "Loader", "LoaderWorkers", "LogLine", "LogLines", "Message", "Name",
    "Note", "Percent", "Queued", "Rank", "Relay", "Snap", "Stack", "StackFrame", "Step", "Steps", "SyncPath",
    "SyncPoint", "Text", "ThreadStack", "beat_ns", "claimed_rank",
    "decode", "encode", "fit", "pack_steps", "ranges", "step_of", "unpack_steps",
]  # fmt: skip
