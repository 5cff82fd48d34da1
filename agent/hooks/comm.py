"""When each gradient bucket was ready and when its all-reduce had ended.

Only where a DDP communication hook exists: the user's own, which is timed and otherwise left alone, or ddpwatch's,
which is registered only on request (`comm="buckets"`).
"""

from __future__ import annotations

import functools
import weakref
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.agent.guard import guarded
from ddpwatch.agent.patch import Patch
from ddpwatch.wire import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from ddpwatch.agent.recorder import Recorder

MAX_BUCKETS: Final = 4096


class BucketTimer:
    """Collects the buckets of one backward pass."""

    def __init__(self, recorder: Recorder) -> None:
        self.switch = recorder.switch
        self._recorder = recorder
        self._began_ns = 0
        # [bytes, ready, done]: lists, because the end is filled in by another thread.
        self._buckets: list[list[int]] = []

    def backward_began(self) -> None:
        """Forget what an earlier, unfinished pass left."""
        self._began_ns = perf_counter_ns()
        self._buckets = []

    @guarded
    def ready(self, bucket: Any) -> list[int] | None:
        """A bucket goes out now; the entry to complete when it has come back."""
        # DDP's pure-Python reducer passes (gradient, parameter) instead of a bucket.
        if not hasattr(bucket, "buffer") or len(self._buckets) >= MAX_BUCKETS:
            return None
        buffer = bucket.buffer()
        entry = [buffer.numel() * buffer.element_size(), perf_counter_ns(), 0]
        self._buckets.append(entry)
        # On a GPU the future completes when the work is queued, which says nothing about its end.
        return entry if buffer.device.type == "cpu" else None

    def backward_ended(self) -> None:
        """DDP has waited for all of them: what has no end yet ended just now."""
        if not self._buckets:
            return
        now_ns = perf_counter_ns()
        buckets, self._buckets = self._buckets, []
        self._recorder.buckets(
            [
                Bucket(
                    index=index,
                    bytes=size,
                    ready_ns=max(0, ready_ns - self._began_ns),
                    done_ns=max(0, (done_ns or now_ns) - self._began_ns),
                )
                for index, (size, ready_ns, done_ns) in enumerate(buckets)
            ],
            _union_ns([(ready_ns, done_ns or now_ns) for _, ready_ns, done_ns in buckets]),
        )


def _union_ns(intervals: list[tuple[int, int]]) -> int:
    """The time covered by at least one interval."""
    covered_ns = end_ns = 0
    for began_ns, ended_ns in sorted(intervals):
        covered_ns += max(0, ended_ns - max(began_ns, end_ns))
        end_ns = max(end_ns, ended_ns)
    return covered_ns


class Registrations:
    """Every communication hook that is registered after ddpwatch was imported, so that `install` finds it timed.

    torch allows one hook a model, never lets go of it, and takes it before `install` is called; so the method that
    registers it is wrapped at import. Until an agent is installed the wrapper only passes calls through.
    """

    def __init__(self) -> None:
        self.timer: BucketTimer | None = None
        self._timed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._own: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._built_in: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._patches = [
            Patch(DistributedDataParallel, "register_comm_hook", self._around_register),
            Patch(DistributedDataParallel, "_register_builtin_comm_hook", self._around_built_in),
        ]

    def kind(self, ddp: nn.Module) -> str:
        """`own`, `timed` (the user's), `untimed` (registered before the import, or built in) or nothing."""
        if ddp in self._own:
            return "own"
        if ddp in self._timed:
            return "timed"
        return "untimed" if ddp in self._built_in or ddp._comm_hooks else ""

    def own_hook(self, ddp: nn.Module) -> bool:
        """Register ddpwatch's own all-reduce hook; False if the model has one that nobody told of."""
        register: Any = ddp.register_comm_hook
        comm_hooks: Any = ddp._comm_hooks
        before = len(comm_hooks)
        try:
            register(OwnState(ddp), allreduce_hook)
        except RuntimeError:
            return False
        finally:
            # What stands in this list is written by torch.save; ours must not be.
            del comm_hooks[before:]
        self._own.add(ddp)
        return True

    def _around_register(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def register_comm_hook(ddp: nn.Module, state: object, hook: Any) -> Any:
            if not hasattr(hook, "__qualname__"):
                return original(ddp, state, hook)  # torch refuses it, in its own words
            timed = self._timing(hook)
            try:
                result = original(ddp, state, timed)
            finally:
                # DDP keeps the Python object for inspection and pickling, a refused one too: it should be the user's.
                comm_hooks: Any = ddp._comm_hooks
                if comm_hooks and comm_hooks[-1][0] is timed:
                    comm_hooks[-1] = (hook, state)
            self._timed.add(ddp)
            return result

        return register_comm_hook

    def _around_built_in(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def register_built_in(ddp: nn.Module, comm_hook_type: Any) -> Any:
            result = original(ddp, comm_hook_type)
            self._built_in.add(ddp)
            return result

        return register_built_in

    def _timing(self, hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The hook with a stamp before it and one at the end of its future, which is passed on untouched."""

        @functools.wraps(hook)
        def timed(state: Any, bucket: Any) -> Any:
            timer = self.timer
            entry = timer.ready(bucket) if timer is not None else None
            future = hook(state, bucket)
            if entry is not None and isinstance(future, torch.futures.Future):
                future.add_done_callback(functools.partial(_stamp, entry))
            return future

        return timed


def _stamp(entry: list[int], _future: Any) -> None:
    entry[2] = perf_counter_ns()


class OwnState:
    """What the all-reduce hook needs; holds the group, not the model, so that no cycle keeps the model alive."""

    def __init__(self, ddp: Any) -> None:
        self.group = ddp.process_group
        self.scale = 1.0 / ddp.process_group.size()


def allreduce_hook(state: OwnState, bucket: Any) -> Any:
    """Average one bucket as DDP does without a hook: scale first, then sum. Bit for bit the same result,
    except with `gradient_as_bucket_view=True` and `zero_grad(set_to_none=False)` where DDP divides instead.
    """
    buffer = bucket.buffer()
    buffer.mul_(state.scale)
    return state.group.allreduce([buffer]).get_future().then(_only)


# DDP reads the annotations of a hook and refuses any that it does not know, these as text among them.
allreduce_hook.__annotations__ = {}


def _only(future: Any) -> Any:
    return future.value()[0]
