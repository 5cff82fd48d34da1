"""How long each step's all-reduces took, as torch's flight recorder tells: no hook, but asked for by the user.

`duration_ms` stands in a record once NCCL's own events have been read by torch, some time after the step. It holds the
wait for the other ranks, too. The all-reduces of one process group run one after another, so their sum is the time in
which one was in flight.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from bisect import bisect_left
from dataclasses import dataclass
from math import prod
from time import monotonic, perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from ddpwatch.wire import Comm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ddpwatch.wire import Step

DTYPE_BYTES: Final = {
    "Double": 8, "Long": 8, "ComplexFloat": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2,
}  # fmt: skip
EVERY_S: Final = 1.0
SHARE: Final = 200
"""Reading the whole recorder holds Python's lock; afterwards it is left alone for so many times as long."""
MAX_STEPS: Final = 600
SETTLED_NS: Final = 2_000_000_000
"""Torch marks a record as done a moment before it adds the duration."""
SAFE_TORCH: Final = (2, 8)
NO_GLOO: Final = "gloo does not tell how long its operations take; comm='buckets' measures it."
NO_NCCL: Final = "the model's process group is of {backend}, which does not tell how long its operations take."
TOO_OLD: Final = "this torch cannot time NCCL's operations; it takes one that was built with NCCL."
NO_RECORD: Final = "torch's flight recorder is off; set TORCH_NCCL_TRACE_BUFFER_SIZE=2000 before the training."
# The recorder asks each event of an operation that is under way, and older torch frees them at the same time in its
# watchdog's thread. With the cache they are never freed; it is on by default in newer ones.
UNSAFE: Final = (
    "before torch 2.8 its flight recorder may only be read all the time with TORCH_NCCL_CUDA_EVENT_CACHE=1 "
    "(2.6 and newer); comm='buckets' works without."
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One all-reduce in the record."""

    record: int
    created_unix_ns: int
    bytes: int
    duration_ns: int | None
    """None = it has not ended, or nobody took its time."""
    over: bool
    """Torch is done with it, and adds nothing but the duration."""


def operations(dump: dict[str, Any], groups: Iterable[str]) -> list[Operation]:
    """The all-reduces of some process groups in a dump of any torch since 2.4, in the order they were queued."""
    wanted = set(groups)
    found = []
    for entry in dump.get("entries", []):
        group = entry.get("process_group") or ("",)
        if str(group[0]) not in wanted or "all_reduce" not in str(entry.get("profiling_name", "")):
            continue
        duration_ms = entry.get("duration_ms")
        found.append(
            Operation(
                record=int(entry.get("record_id") or 0),
                created_unix_ns=int(entry.get("time_created_ns") or 0),
                bytes=_bytes(entry),
                duration_ns=None if duration_ms is None else max(0, int(float(duration_ms) * 1e6)),
                over=bool(entry.get("retired")),
            )
        )
    return sorted(found, key=lambda operation: operation.record)


def _bytes(entry: dict[str, Any]) -> int:
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    return sum(
        prod(size) * DTYPE_BYTES.get(str(dtypes[k]) if k < len(dtypes) else "", 1) for k, size in enumerate(sizes)
    )


@dataclass
class NcclTimes:
    """Asks the flight recorder about once a second, once it has been enabled. Lives in the agent's thread."""

    dump: Callable[..., bytes] | None = None
    groups: tuple[str, ...] = ()
    """Names of the process groups that are timed; none = not enabled."""
    _next_s: float = 0.0
    _reported: int = -1
    """The last step that was told, or given up."""

    def enable(self, groups: Iterable[Any]) -> str:
        """Let NCCL time these process groups from now on; empty, or why that cannot be done. On the training thread."""
        self.dump = self.dump or getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace", None)
        chosen = list(groups)
        for group in chosen:
            kind = str(dist.get_backend(group))
            if "nccl" not in kind:
                return NO_GLOO if "gloo" in kind else NO_NCCL.format(backend=kind)
        if self.dump is None or not all(hasattr(group, "_enable_collectives_timing") for group in chosen):
            return TOO_OLD
        if why := _hindrance(os.environ, _release(torch.__version__)):
            return why
        for group in chosen:
            group._enable_collectives_timing()
        world: Any = dist.distributed_c10d._world
        self.groups = tuple(str(world.pg_names.get(group, "")) for group in chosen)
        return ""

    def poll(self, steps: Sequence[Step]) -> list[Comm]:
        """What has become known of these steps since the last time; empty if it is too early to ask again."""
        began_s = monotonic()
        if not self.groups or self.dump is None or began_s < self._next_s:
            return []
        found: list[Operation] = []
        with contextlib.suppress(Exception):  # a dump that cannot be had now may be had later
            reported = pickle.loads(self.dump(True, False, False))  # noqa: S301 - from this process
            found = operations(reported, self.groups)
        took_s = monotonic() - began_s
        self._next_s = began_s + max(EVERY_S, SHARE * took_s)
        return self.take(found, steps, time_ns() - perf_counter_ns())

    def take(self, found: Sequence[Operation], steps: Sequence[Step], unix_offset_ns: int) -> list[Comm]:
        """The steps whose all-reduces are all over and timed. `unix_offset_ns` leads from the steps' clock to the
        wall clock, which the record has.

        A step is told once, in order. One that the record does not cover from its beginning is left out.
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
                break  # and nothing after it: steps are told in order
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
    return operation.over and latest.created_unix_ns - operation.created_unix_ns >= SETTLED_NS


def _hindrance(environment: Mapping[str, str], version: tuple[int, int]) -> str:
    """What in the environment of the training forbids it."""
    size = environment.get("TORCH_FR_BUFFER_SIZE") or environment.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
    if size == "0" or (not size and version < (2, 6)):
        return NO_RECORD
    cache = environment.get("TORCH_NCCL_CUDA_EVENT_CACHE", "").lower()
    kept = cache in ("1", "true", "y", "yes") if cache else version >= SAFE_TORCH
    return "" if kept and version >= (2, 6) else UNSAFE


def _release(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
