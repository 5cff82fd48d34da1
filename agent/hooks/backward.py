"""Backward hooks: stamp the backward pass, and the exposed communication after it.

DDP queues its finalization, which waits for the all-reduces, on the autograd engine near the end of backward. A
callback queued at the first output gradient runs before it, when local computation has ended; a callback queued from
that one runs after DDP's wait. Reentrant activation checkpointing runs backward passes inside of backward, each with
callbacks of its own, and DDP may finish in one of those: they are bracketed in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.hooks import unserializable_hook

from ddpwatch.agent.batch_tensors import tensors
from ddpwatch.agent.clock import BACKWARD, SYNC
from ddpwatch.agent.fail_open import guarded
from ddpwatch.agent.patching import Patch, run_as_python
from ddpwatch.agent.torch_private import HAS_CALLBACKS, current_autograd_node, on_gradient, queue_callback

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.agent.hooks.comm import BucketTimer
    from ddpwatch.agent.step_recorder import Recorder

MANY_BACKWARDS: Final = 1000
"""Backward passes without an optimizer step after which a note is sent, once."""
NO_STEPS: Final = (
    f"{MANY_BACKWARDS} backward passes without an optimizer step. If optimizer.step() is compiled, or parameters are "
    "updated by hand, call agent.step() at the end of each iteration."
)


class BackwardHooks:
    """Stamps backward passes that start from watched outputs. Its hooks return None, so no gradient changes."""

    def __init__(self, recorder: Recorder, timer: BucketTimer) -> None:
        self.switch = recorder.switch
        self._recorder = recorder
        self._timer = timer
        self._under_way = False
        self.last_phase = SYNC
        """Phase of what the engine's callbacks do after local computation: DDP waits there; FSDP does not."""
        self._nested = False
        """Whether the callbacks of a nested backward pass are queued."""
        self._patch = Patch(torch.autograd, "backward", self._around_backward)
        # With what it calls: all guarded hooks share one code object, that of `guarded`.
        run_as_python(BackwardHooks._began, with_all_it_calls=True)
        run_as_python(BackwardHooks._gradient_arrived)

    def remove(self) -> None:
        """Remove the wrapper."""
        self._patch.undo()

    def forward_began(self) -> None:
        """Begin a forward pass: an earlier backward pass that raised is over."""
        self._under_way = self._nested = False

    def watch(self, output: Any) -> bool:
        """Hook the first gradient of an output; False if no tensor in it takes one."""
        if not HAS_CALLBACKS:
            return True  # the end of backward cannot be seen
        found = False
        # Most models return one tensor, and searching costs more than the hook.
        for tensor in (output,) if isinstance(output, Tensor) else tensors(output):
            # A parameter that is returned unchanged would keep the hook forever, and one more with every step.
            if not tensor.is_leaf:
                on_gradient(tensor, self._gradient_arrived)
                found = True
        return found

    def probe(self, output: Any, arrived: Callable[[Tensor], None]) -> None:
        """Call `arrived` when a gradient reaches this output, without counting a backward pass."""
        for tensor in tensors(output):
            if not tensor.is_leaf:
                on_gradient(tensor, arrived)

    # Marked, because saving an output would warn of a hook that is not the user's.
    @unserializable_hook  # type: ignore[untyped-decorator]  # torch does not type it
    def _gradient_arrived(self, _gradient: Tensor) -> None:
        if not self._under_way:
            self._began()

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._under_way and not is_compiling():
                self._watch_nested(tensors)
            return original(tensors, *args, **kwargs)

        return backward

    @guarded
    def _watch_nested(self, roots: Any) -> None:
        """Bracket the end of a backward pass that begins inside of another."""
        if current_autograd_node() is None:
            return  # not inside of one: the last one raised
        self._nested = False
        for tensor in tensors(roots):
            if not tensor.is_leaf:
                on_gradient(tensor, self._nested_gradient_arrived)

    @unserializable_hook  # type: ignore[untyped-decorator]  # torch does not type it
    def _nested_gradient_arrived(self, _gradient: Tensor) -> None:
        if not self._nested:
            self._nested_began()

    @guarded
    def _nested_began(self) -> None:
        self._nested = True
        queue_callback(self._nested_computed)

    @guarded
    def _nested_computed(self) -> None:
        self._recorder.clock.switch(self.last_phase)
        queue_callback(self._nested_finished)

    @guarded
    def _nested_finished(self) -> None:
        self._recorder.clock.switch(BACKWARD)

    @guarded
    def _began(self) -> None:
        self._under_way = True
        self._recorder.clock.switch(BACKWARD)
        self._recorder.backward_began()
        if self._recorder.backwards == MANY_BACKWARDS and not self._recorder.index:
            self._recorder.note("no-steps", NO_STEPS)
        self._timer.backward_began()
        queue_callback(self._computed)

    # Engine callbacks run under the streams that were current at backward(), even on autograd's thread, and after these
    # wait for the streams of the gradients (GraphTask::exec_post_processing). So an event recorded here follows all of
    # local backward, and one in `_finished` follows the all-reduces that DDP's callback between the two has made the
    # stream wait for: the gap is exposed communication.
    @guarded
    def _computed(self) -> None:
        self._recorder.clock.switch(self.last_phase)
        queue_callback(self._finished)

    @guarded
    def _finished(self) -> None:
        self._recorder.clock.switch(self._recorder.rest)
        self._under_way = False
        self._timer.backward_ended()
