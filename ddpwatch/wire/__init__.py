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

from ddpwatch.wire.codec import claimed_rank, decode, encode
from ddpwatch.wire.fields import (
    MAX_COLLECTIVES,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    MAX_LOG_CHARS,
    MAX_LOG_LINES,
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
from ddpwatch.wire.gpu import (
    MAX_GPU_MOMENTS,
    MAX_GPU_PROCESSES,
    MAX_GPUS,
    MAX_THROTTLE,
    MAX_XIDS,
    Figure,
    Gpu,
    GpuMoment,
    GpuProcess,
    Percent,
)
from ddpwatch.wire.messages import (
    FAILING,
    LIVE_TOPICS,
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
    Gone,
    Gpus,
    Held,
    Hello,
    Loader,
    LogLines,
    Message,
    Note,
    Relay,
    Snap,
    Stack,
    Steps,
)
from ddpwatch.wire.packed import STEP_BYTES, STEP_COLUMNS, pack_steps, unpack_steps
from ddpwatch.wire.parts import (
    EVALUATED,
    PAUSED,
    PHASES,
    SKIPPED,
    Bucket,
    Collective,
    Comm,
    Group,
    LogLine,
    StackFrame,
    Step,
    ThreadStack,
)

__all__ = [
    "EVALUATED",
    "FAILING",
    "LIVE_TOPICS",
    "MAX_COLLECTIVES",
    "MAX_FRAMES",
    "MAX_FRAME_BYTES",
    "MAX_GPUS",
    "MAX_GPU_MOMENTS",
    "MAX_GPU_PROCESSES",
    "MAX_LOG_CHARS",
    "MAX_LOG_LINES",
    "MAX_SNAP_STEPS",
    "MAX_THREADS",
    "MAX_THROTTLE",
    "MAX_TOPIC_BYTES",
    "MAX_XIDS",
    "NO_MESSAGE",
    "PAUSED",
    "PHASES",
    "RELAY_TOPICS",
    "SKIPPED",
    "SNAP_PREFIX",
    "STACKS_PREFIX",
    "STACK_PREFIX",
    "STEP_BYTES",
    "STEP_COLUMNS",
    "TOPICS",
    "WIRE_VERSION",
    "Beat",
    "Bucket",
    "Buckets",
    "Bye",
    "Checksum",
    "Collective",
    "Comm",
    "Comms",
    "Count",
    "Figure",
    "Gone",
    "Gpu",
    "GpuMoment",
    "GpuProcess",
    "Gpus",
    "Group",
    "Held",
    "Hello",
    "Loader",
    "LogLine",
    "LogLines",
    "Message",
    "Name",
    "Note",
    "Percent",
    "Rank",
    "Relay",
    "Snap",
    "Stack",
    "StackFrame",
    "Step",
    "Steps",
    "Text",
    "ThreadStack",
    "claimed_rank",
    "decode",
    "encode",
    "fit",
    "pack_steps",
    "ranges",
    "unpack_steps",
]
