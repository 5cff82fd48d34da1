"""Pause hooks: garbage collection, checkpoint saves and evaluation, by name."""

from __future__ import annotations

import gc
import sys
from threading import Lock, get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from torch.compiler import is_compiling

from ddpwatch.agent.clock import EVALUATING, OTHER, PRESYNC, SAVING, SYNC
from ddpwatch.agent.fail_open import guarded
from ddpwatch.agent.patching import Patch
from ddpwatch.agent.torch_private import HAS_SAVE, SAVES

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.agent.hooks.forward import ForwardHooks
    from ddpwatch.agent.step_recorder import Recorder


class PauseHooks:
    """Counts time in the garbage collector, and makes saves and evaluations of the training thread phases of its clock.

    A collection on any thread holds the GIL, so it counts, unless the training thread waits in `sync` or saves
    meanwhile. A save counts where it interrupts `other`, and once if one function calls another.
    """

    def __init__(self, recorder: Recorder, forward: ForwardHooks) -> None:
        self.switch = recorder.switch
        self._recorder = recorder
        self._forward = forward
        self._began_ns = 0
        self._patches: dict[tuple[str, str, str], Patch] = {}
        self._patching = Lock()
        self._removed = False
        self.wrap_imported()
        if not HAS_SAVE:
            self._wrap("torch", "", "save", "torch.save")
        # One object, because each access to a method makes a new one, and `remove` compares.
        self._callback = self._on_collection
        gc.callbacks.append(self._callback)

    def wrap_imported(self) -> None:
        """Wrap the functions of modules that have been imported meanwhile; also called by the agent's thread."""
        with self._patching:
            for place in SAVES:
                if place[:3] not in self._patches and not self._removed:
                    self._wrap(*place)

    def remove(self) -> None:
        """Remove every wrapper and the callback."""
        with self._patching:
            self._removed = True
            for patch in self._patches.values():
                patch.undo()
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    def _wrap(self, module: str, owner: str, name: str, called: str) -> None:
        found: Any = sys.modules.get(module)
        if owner:
            found = getattr(found, owner, None)
        if getattr(found, name, None) is not None:
            self._patches[module, owner, name] = Patch(found, name, lambda original: self._around(original, called))

    def _around(self, original: Callable[..., Any], called: str) -> Callable[..., Any]:
        def save(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._save_began(called):
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._save_ended()

        return save

    @guarded
    def _save_began(self, called: str) -> bool:
        recorder = self._recorder
        phase = recorder.clock.phase
        if phase not in (OTHER, EVALUATING) or get_ident() != (self._forward.thread_id or recorder.thread):
            return False
        recorder.save_name = called
        recorder.clock.switch(SAVING)
        return True

    @guarded
    def _save_ended(self) -> None:
        # Not back to an evaluation: a save follows one, and does not interrupt it.
        if self._recorder.clock.phase == SAVING:
            self._recorder.clock.switch(OTHER)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        # Without `guarded`, which costs more than all of this; Python reports an error of a callback and goes on.
        if phase == "start":
            self._began_ns = perf_counter_ns()
            return
        recorder = self._recorder
        current = recorder.clock.phase
        if not self._began_ns or not self.switch.on or current in (SAVING, SYNC) or current >= PRESYNC:
            return
        took_ns = perf_counter_ns() - self._began_ns
        recorder.gc_ns += took_ns
        if info["generation"] == 2:
            recorder.gc_full_ns += took_ns
