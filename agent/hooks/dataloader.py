"""DataLoader hooks: time `next()` on its iterator, and describe its sampler at each pass."""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from torch.compiler import is_compiling
from torch.utils.data import DistributedSampler, RandomSampler

from ddpwatch.agent.batch_tensors import first_tensor
from ddpwatch.agent.clock import DATA, OTHER
from ddpwatch.agent.fail_open import guarded
from ddpwatch.agent.patching import Patch
from ddpwatch.agent.torch_private import LOADER_ITERATOR, batches_yielded, index_sampler, loader_workers
from ddpwatch.wire import Loader

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.agent.hooks.forward import ForwardHooks
    from ddpwatch.agent.step_recorder import Recorder

MAX_COUNT: Final = 2**62
"""Upper limit of a `wire.Count`."""


class LoaderHooks:
    """Counts the training thread's waits for its DataLoader as `data`; ignores evaluation and other threads."""

    def __init__(self, recorder: Recorder, forward: ForwardHooks) -> None:
        self.switch = recorder.switch
        self._recorder = recorder
        self._forward = forward
        self._passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
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
        if trainer != get_ident() or not self._forward.training():
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
    value = _ask(owner, name)
    return value if type(value) is int and 0 <= value <= MAX_COUNT else 0


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except Exception:  # noqa: BLE001 - as above
        return 0
