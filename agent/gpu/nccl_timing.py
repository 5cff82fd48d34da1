"""All-reduce times of each step from torch's flight recorder, if the user asks for them with `comm="timing"`.

A record gets its `duration_ms` some time after the step, when torch has read NCCL's events. It includes the wait for
other ranks. The all-reduces of one process group run one after another, so their sum is the time with one in flight.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from bisect import bisect_left
from dataclasses import dataclass
from time import monotonic, perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from ddpwatch.agent.process_groups import entry_bytes, entry_group
from ddpwatch.agent.torch_private import enable_timing, nccl_recorder, world
from ddpwatch.wire import Comm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddpwatch.wire import Step

EVERY_S: Final = 1.0
"""Shortest interval in seconds between two reads of the flight recorder."""
REST_FACTOR: Final = 200
"""Pause between two reads of the flight recorder, in durations of a read, because reading holds the GIL."""
MAX_STEPS: Final = 600
"""Latest steps that are matched with operations after one read."""
SETTLED_NS: Final = 2_000_000_000
"""Nanoseconds after which a retired record gets no duration; torch adds it a moment after it retires the record."""
SAFE_TORCH: Final = (2, 8)
NO_GLOO: Final = "gloo does not report how long its operations take; comm='buckets' measures it."
NO_NCCL: Final = "the model's process group uses {backend}, which does not report how long its operations take."
TOO_OLD: Final = "this torch cannot time NCCL's operations; use one that is built with NCCL."
NO_RECORD: Final = "torch's flight recorder is off; set TORCH_NCCL_TRACE_BUFFER_SIZE=2000 before training."
# The recorder queries the events of operations in flight, and older torch frees them at the same time in its watchdog's
# thread. With the cache they are never freed; newer torch has it on by default.
UNSAFE: Final = (
    "before torch 2.8 the flight recorder can be read continuously only with TORCH_NCCL_CUDA_EVENT_CACHE=1 "
    "(2.6 and newer); comm='buckets' works without it."
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One all-reduce in the flight recorder."""

    record: int
    created_unix_ns: int
    bytes: int
    duration_ns: int | None
    """None = it has not ended, or was not timed."""
    retired: bool
    """Whether torch adds nothing but the duration."""


def operations(dump: dict[str, Any], group: str) -> list[Operation]:
    """The all-reduces of a process group in a dump of any torch since 2.4, in the order they were queued."""
    found = []
    for entry in dump.get("entries", []):
        if entry_group(entry) != group or "all_reduce" not in str(entry.get("profiling_name", "")):
            continue
        duration_ms = entry.get("duration_ms")
        found.append(
            Operation(
                record=int(entry.get("record_id") or 0),
                created_unix_ns=int(entry.get("time_created_ns") or 0),
                bytes=entry_bytes(entry),
                duration_ns=None if duration_ms is None else max(0, int(float(duration_ms) * 1e6)),
                retired=bool(entry.get("retired")),
            )
        )
    return sorted(found, key=lambda operation: operation.record)


@dataclass
class NcclTimes:
    """Reads the flight recorder about once a second after it was enabled. In the agent's thread."""

    dump: Callable[..., bytes] | None = None
    group: str | None = None
    """Name of the process group that is timed; None = not enabled."""
    _next_s: float = 0.0
    _reported: int = -1
    """Index of the last step that was reported or given up."""

    def enable(self, group: Any) -> str:
        """Let NCCL time a process group, on the training thread. Returns the reason if that is not possible."""
        self.dump = self.dump or nccl_recorder()
        kind = str(dist.get_backend(group))
        if "nccl" not in kind:
            return NO_GLOO if "gloo" in kind else NO_NCCL.format(backend=kind)
        if self.dump is None:
            return TOO_OLD
        if why := _hindrance(os.environ, _release(torch.__version__)):
            return why
        tables = world()
        if tables is None or not enable_timing(group):
            return TOO_OLD
        self.group = str(tables.pg_names.get(group, ""))
        return ""

    def poll(self, steps: Sequence[Step]) -> list[Comm]:
        """Times of these steps that have become known since the last call; empty if it is too early to read again."""
        began_s = monotonic()
        if self.group is None or self.dump is None or began_s < self._next_s:
            return []
        found: list[Operation] = []
        with contextlib.suppress(Exception):  # a dump that fails may work later
            dump = pickle.loads(self.dump(True, False, False))  # noqa: S301 - from this process
            found = operations(dump, self.group)
        took_s = monotonic() - began_s
        self._next_s = began_s + max(EVERY_S, REST_FACTOR * took_s)
        return self.take(found, steps, time_ns() - perf_counter_ns())

    def take(self, found: Sequence[Operation], steps: Sequence[Step], unix_offset_ns: int) -> list[Comm]:
        """Times of the steps whose all-reduces have all ended, each once and in order.

        `unix_offset_ns` converts the steps' clock to the wall clock of the records. A step that the records do not
        cover from its beginning is left out.
        """
        if not found:
            return []
        recent = [step for step in steps if step.index > self._reported][-MAX_STEPS:]
        ends_ns = [step.end_ns + unix_offset_ns for step in recent]
        of_step: dict[int, list[Operation]] = {}
        for operation in found:
            k = bisect_left(ends_ns, operation.created_unix_ns)
            if k < len(recent):
                of_step.setdefault(k, []).append(operation)
        comms = []
        for k, step in enumerate(recent):
            own = of_step.get(k, [])
            if not all(_settled(operation, found[-1]) for operation in own):
                break
            self._reported = step.index
            began_ns = ends_ns[k - 1] if k else ends_ns[k] - step.step_ns
            covered = found[0].created_unix_ns <= began_ns
            if own and covered and all(operation.duration_ns is not None for operation in own):
                busy_ns = sum(operation.duration_ns or 0 for operation in own)
                comms.append(Comm(step.index, busy_ns, sum(operation.bytes for operation in own)))
        return comms


def _settled(operation: Operation, latest: Operation) -> bool:
    if operation.duration_ns is not None:
        return True
    return operation.retired and latest.created_unix_ns - operation.created_unix_ns >= SETTLED_NS


def _hindrance(environment: Mapping[str, str], version: tuple[int, int]) -> str:
    """The reason why the flight recorder cannot be used, by environment and torch version; empty = it can."""
    size = environment.get("TORCH_FR_BUFFER_SIZE") or environment.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
    if size == "0" or (not size and version < (2, 6)):
        return NO_RECORD
    cache = environment.get("TORCH_NCCL_CUDA_EVENT_CACHE", "").lower()
    kept = cache in ("1", "true", "y", "yes") if cache else version >= SAFE_TORCH
    return "" if kept and version >= (2, 6) else UNSAFE


def _release(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
