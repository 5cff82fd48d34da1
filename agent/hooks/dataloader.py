"""DataLoader hooks: time `next()` on its iterator, and describe its sampler at each pass."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

from torch.compiler import is_compiling
from torch.utils.data import DistributedSampler, RandomSampler

from ddpwatch.agent.batch_tensors import first_tensor
from ddpwatch.agent.clock import DATA, OTHER
from ddpwatch.agent.fail_open import guarded
from ddpwatch.agent.patching import Patch
from ddpwatch.agent.torch_private import LOADER_ITERATOR, batches_yielded, index_sampler, loader_setting, loader_workers
from ddpwatch.wire import Loader, LoaderWorkers

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.agent.hooks.forward import ForwardHooks
    from ddpwatch.agent.step_recorder import Recorder

MAX_COUNT: Final = 2**62
"""Upper limit of a `wire.Count`."""
MAX_PERCENT: Final = 100_000
"""Upper limit of a percentage in `LoaderWorkers`."""
MAX_WORKERS: Final = 64
"""Worker processes whose CPU use is measured."""
TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
"""Nanoseconds in a tick of the kernel's process times."""


class LoaderHooks:
    """Counts the training thread's waits for its DataLoader as `data`; ignores evaluation and other threads."""

    def __init__(self, recorder: Recorder, forward: ForwardHooks) -> None:
        self.switch = recorder.switch
        self._recorder = recorder
        self._forward = forward
        self._passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._worker_pids: list[int] = []
        """Worker processes of the latest pass over the data."""
        self._usage: dict[int, tuple[int, int, int]] = {}
        """By process id: when it was measured, and the result of `_cpu_times`."""
        self._patch = Patch(LOADER_ITERATOR, "__next__", self._around_next)

    def remove(self) -> None:
        """Restore the DataLoader's method."""
        self._patch.undo()

    def _around_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def next_batch(iterator: Any) -> Any:
            if is_compiling() or not self._before_next(iterator):
                return original(iterator)
            try:
                batch = original(iterator)
            except BaseException:
                # StopIteration at the end of an epoch, or the user's error: the wait is over in both cases.
                self._after_next(None)
                raise
            self._after_next(batch)
            return batch

        return next_batch

    @guarded
    def _before_next(self, iterator: Any) -> bool:
        # Until a model has run, the thread that installed the agent counts as the training thread.
        trainer = self._forward.thread_id or self._recorder.thread
        if trainer != get_ident():
            return False
        if not self._forward.training():
            self._forward.evaluating()
            return False
        if batches_yielded(iterator) == 0:
            self._pass_began(iterator)
        self._recorder.clock.switch(DATA)
        return True

    @guarded
    def _after_next(self, batch: Any) -> None:
        self._recorder.clock.switch(OTHER)
        tensor = first_tensor(batch)
        if tensor is None:
            return
        self._recorder.add_loader_batch(tensor.shape[0])
        if self._recorder.wants_fingerprint:
            self._recorder.see(tensor)

    def _pass_began(self, iterator: Any) -> None:
        by_batch = index_sampler(iterator)
        sampler = _ask(by_batch, "sampler")
        if sampler is None:
            sampler = by_batch
        replicas = max(
            _count(owner, name) for owner in (sampler, by_batch) for name in ("num_replicas", "num_processes")
        )
        sampler_epoch = _ask(sampler, "epoch")
        shuffle = _ask(sampler, "shuffle")
        self._recorder.event(
            Loader,
            epoch=self._passes_before(by_batch),
            sampler=type(sampler).__name__[:200],
            distributed=isinstance(sampler, DistributedSampler) or replicas > 0,
            replicas=replicas,
            shuffle=shuffle is True or isinstance(sampler, RandomSampler),
            sampler_epoch=sampler_epoch if type(sampler_epoch) is int and sampler_epoch <= MAX_COUNT else -1,
            batch_size=_count(by_batch, "batch_size"),
            workers=loader_workers(iterator),
            length=_length(by_batch),
            pin_memory=_flag(loader_setting(iterator, "pin_memory")),
            prefetch_factor=_as_count(loader_setting(iterator, "prefetch_factor")),
            persistent_workers=_flag(loader_setting(iterator, "persistent_workers")),
        )
        workers = list(loader_setting(iterator, "workers") or ())[:MAX_WORKERS]
        self._worker_pids = [pid for pid in (_ask(worker, "pid") for worker in workers) if type(pid) is int]

    def measure_workers(self) -> None:
        """Report the CPU use of the worker processes since the last call; called by the agent's thread."""
        now_ns = perf_counter_ns()
        before, self._usage = self._usage, {}
        for pid in self._worker_pids:
            if (used := _cpu_times(pid)) is not None:
                self._usage[pid] = (now_ns, *used)
        pairs = [(before[pid], usage) for pid, usage in self._usage.items() if pid in before]
        if not pairs:
            return
        span_ns = sum(last[0] - first[0] for first, last in pairs)
        cpu_ns, queued_ns = (sum(last[k] - first[k] for first, last in pairs) for k in (1, 2))
        self._recorder.event(
            LoaderWorkers,
            mono_ns=now_ns,
            workers=len(pairs),
            cpu_percent=max(0, min(round(100 * cpu_ns / span_ns), MAX_PERCENT)),
            queued_percent=max(0, min(round(100 * queued_ns / span_ns), MAX_PERCENT)),
        )

    def _passes_before(self, index_sampler: Any) -> int:
        try:
            passes = self._passes.get(index_sampler, 0)
            self._passes[index_sampler] = passes + 1
        except Exception:  # noqa: BLE001 - a plain list of batches has neither a hash nor weak references
            return 0
        return passes


# A sampler is often the user's class: whatever it returns or raises is not an error of ddpwatch.


def _ask(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001 - as above
        return None


def _count(owner: Any, name: str) -> int:
    return _as_count(_ask(owner, name))


def _as_count(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= MAX_COUNT else 0


def _flag(value: Any) -> bool | None:
    return value if type(value) is bool else None


def _cpu_times(pid: int) -> tuple[int, int] | None:
    """Nanoseconds that all threads of a process have run, and that its main thread has waited for a core; None = the
    process is gone.
    """
    try:
        # The name in parentheses may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        run_ns = (int(fields[11]) + int(fields[12])) * TICK_NS
    except (OSError, ValueError, IndexError):
        return None
    try:
        queued_ns = int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):  # not every kernel has it
        queued_ns = 0
    return run_ns, queued_ns


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except Exception:  # noqa: BLE001 - as above
        return 0
