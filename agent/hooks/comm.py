"""DDP communication hooks: time when each gradient bucket was ready, and when its all-reduce ended.

The user's hook is wrapped with timing and otherwise unchanged; ddpwatch's own all-reduce hook is registered only on
request (`comm="buckets"`). Without either there are no bucket times.
"""

from __future__ import annotations

import functools
import weakref
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.agent.fail_open import guarded
from ddpwatch.agent.patching import Patch
from ddpwatch.agent.torch_private import REGISTER_BUILT_IN_HOOK, backend_for, comm_hooks
from ddpwatch.wire import Bucket, Buckets

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from ddpwatch.agent.step_recorder import Recorder

MAX_BUCKETS: Final = 4096
"""Buckets kept of one backward pass; further ones are not timed."""


class BucketTimer:
    """Collects the buckets of one backward pass."""

    def __init__(self, recorder: Recorder) -> None:
        self.switch = recorder.switch
        self._recorder = recorder
        self._began_ns = 0
        # [bytes, ready, done] as lists, because another thread fills in the end.
        self._buckets: list[list[int]] = []
        self._unseen = False
        """Whether the end of some bucket cannot be observed."""

    def backward_began(self) -> None:
        """Discard the buckets of an earlier, unfinished pass."""
        self._began_ns = perf_counter_ns()
        self._buckets = []
        self._unseen = False

    @guarded
    def ready(self, buffer: Tensor) -> list[int] | None:
        """Record a bucket that is being sent; the entry to `stamp` at its end, if that can be observed."""
        if len(self._buckets) >= MAX_BUCKETS:
            return None
        entry = [buffer.nbytes, perf_counter_ns(), 0]
        self._buckets.append(entry)
        # On a GPU the future completes when the work is queued, not when it ends.
        if buffer.is_cpu:
            return entry
        self._unseen = True
        return None

    def backward_ended(self) -> None:
        """Add up the buckets. DDP has waited for all of them: one without an end has ended just now."""
        if not self._buckets:
            return
        now_ns = perf_counter_ns()
        buckets, self._buckets = self._buckets, []
        busy_ns = end_ns = comm_bytes = 0
        # Buckets are sent in order, so one sweep gives the union of their intervals.
        for entry in buckets:
            size, ready_ns, done_ns = entry
            done_ns = done_ns or now_ns
            comm_bytes += size
            if done_ns > end_ns:
                busy_ns += done_ns - max(ready_ns, end_ns)
                end_ns = done_ns
        recorder = self._recorder
        # For GPU work the host's times would not match `sync`, which is measured by the GPU's clock.
        recorder.busy_ns += 0 if self._unseen else busy_ns
        recorder.comm_bytes += comm_bytes
        if recorder.want_buckets:
            began_ns = self._began_ns
            described = [
                Bucket(index, size, ready_ns=max(0, ready_ns - began_ns), done_ns=max(0, done_ns - began_ns))
                for index, (size, ready_ns, done_ns) in enumerate(buckets)
            ]
            recorder.event(Buckets, buckets=described)


def _stamp(entry: list[int]) -> None:
    entry[2] = perf_counter_ns()


OWN: Final = "_ddpwatch_times_itself"


class CommHookRegistry:
    """Wraps `register_comm_hook`, so that hooks registered after the import of ddpwatch are timed.

    torch allows one hook per model, which cannot be removed and is registered before `install`; so the method is
    wrapped at import. Until an agent is installed, the wrapper only passes calls through.
    """

    def __init__(self) -> None:
        self.timer: BucketTimer | None = None
        self._kinds: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._patches = [
            Patch(DistributedDataParallel, "register_comm_hook", self._around_register),
            Patch(DistributedDataParallel, REGISTER_BUILT_IN_HOOK, self._around_built_in),
        ]

    def kind(self, ddp: nn.Module) -> str:
        """The model's hook: `own`, `timed` (the user's), `untimed` (built in or registered earlier) or empty."""
        return self._kinds.get(ddp) or ("untimed" if comm_hooks(ddp) else "")

    def own_hook(self, ddp: nn.Module) -> bool:
        """Register ddpwatch's own all-reduce hook; False if the model has an unknown hook."""
        register: Any = ddp.register_comm_hook
        listed = comm_hooks(ddp)
        if listed is None:
            return False  # torch.save might write our hook
        before = len(listed)
        try:
            register(None, self._allreduce_hook(ddp.process_group))
        except RuntimeError:
            return False
        finally:
            # torch.save writes this list; our hook must not be in it.
            del listed[before:]
        self._kinds[ddp] = "own"
        return True

    def _around_register(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def register_comm_hook(ddp: nn.Module, state: object, hook: Any) -> Any:
            # Our own hook stamps by itself; one without a name is refused by torch.
            if not hasattr(hook, "__qualname__") or hasattr(hook, OWN):
                return original(ddp, state, hook)
            timed = self._timing(hook)
            try:
                result = original(ddp, state, timed)
            finally:
                # DDP keeps the object for inspection and pickling, even a refused one: it should be the user's.
                listed = comm_hooks(ddp)
                if listed and listed[-1][0] is timed:
                    listed[-1] = (hook, state)
            self._kinds[ddp] = "timed"
            return result

        return register_comm_hook

    def _around_built_in(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def register_built_in(ddp: nn.Module, comm_hook_type: Any) -> Any:
            result = original(ddp, comm_hook_type)
            self._kinds[ddp] = "untimed"
            return result

        return register_built_in

    def _timing(self, hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Wrap a hook with a stamp before it and one at the end of its future, which is returned unchanged."""

        @functools.wraps(hook)
        def timed(state: Any, bucket: Any) -> Any:
            timer = self.timer
            # DDP's pure-Python reducer passes (gradient, parameter) instead of a bucket.
            entry = timer.ready(bucket.buffer()) if timer is not None and hasattr(bucket, "buffer") else None
            future = hook(state, bucket)
            if entry is not None and isinstance(future, torch.futures.Future):
                future.add_done_callback(lambda _future: _stamp(entry))
            return future

        return timed

    def _allreduce_hook(self, group: Any) -> Callable[[Any, Any], Any]:
        """An all-reduce hook that averages as DDP does without one: scale first, then sum.

        The result is the same bit by bit, except with `gradient_as_bucket_view=True` and
        `zero_grad(set_to_none=False)`, where DDP divides instead. It holds the group and not the model, because torch
        never frees a hook and a cycle would keep the model alive.
        """
        prepared: dict[tuple[torch.device, torch.dtype], tuple[Any, Any]] = {}

        # Without annotations: DDP checks those of a hook, and refuses them as strings, which they are in this file.
        def allreduce_hook(_state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            buffer = bucket.buffer()
            timer = self.timer
            entry = timer.ready(buffer) if timer is not None else None
            kind = (buffer.device, buffer.dtype)
            if kind not in prepared:
                prepared[kind] = _backend_and_factor(group, *kind)
            backend, scale = prepared[kind]

            def finished(future: Any) -> Any:
                if entry is not None:
                    _stamp(entry)
                # A failed all-reduce raises here, and DDP must get the error.
                return future.value()[0]

            buffer.mul_(scale)
            return backend.allreduce([buffer]).get_future().then(finished)

        setattr(allreduce_hook, OWN, True)
        return allreduce_hook


def _backend_and_factor(group: Any, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """The backend and the scale factor for buckets of one device and type, in their cheapest form.

    Calling the backend directly takes half the time of the group's dispatcher, and a tensor as the factor saves two
    thirds of a multiplication; but in a narrow type a tensor would be rounded where a Python float is not.
    """
    factor = 1.0 / group.size()
    wide = device.type == "cpu" and dtype in (torch.float32, torch.float64)
    return backend_for(group, device), torch.tensor(factor, dtype=dtype) if wide else factor
