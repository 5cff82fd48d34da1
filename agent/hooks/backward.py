"""Backward hooks: stamp the backward pass, and the exposed communication after it.

DDP queues its finalization, which waits for the all-reduces, on the autograd engine near the end of backward. A
callback queued at the first output gradient runs before it, when local computation has ended; a callback queued from
that one runs after DDP's wait.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import unserializable_hook

from ddpwatch.agent.batch_tensors import tensors
from ddpwatch.agent.clock import BACKWARD, SYNC
from ddpwatch.agent.fail_open import guarded
from ddpwatch.agent.patching import run_as_python

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
        # With what it calls: all guarded hooks share one code object, that of `guarded`.
        run_as_python(BackwardHooks._began, with_all_it_calls=True)
        run_as_python(BackwardHooks._gradient_arrived)

    def forward_began(self) -> None:
        """Begin a forward pass: an earlier backward pass that raised is over."""
        self._under_way = False

    def watch(self, output: Any) -> bool:
        """Hook the first gradient of an output; False if no tensor in it takes one."""
        found = False
        # Most models return one tensor, and searching costs more than the hook.
        for tensor in (output,) if isinstance(output, Tensor) else tensors(output):
            # A parameter that is returned unchanged would keep the hook forever, and one more with every step.
            if not tensor.is_leaf:
                _on_gradient(tensor, self._gradient_arrived)
                found = True
        return found

    def probe(self, output: Any, arrived: Callable[[Tensor], None]) -> None:
        """Call `arrived` when a gradient reaches this output, without counting a backward pass."""
        for tensor in tensors(output):
            if not tensor.is_leaf:
                _on_gradient(tensor, arrived)

    # Marked, because saving an output would warn of a hook that is not the user's.
    @unserializable_hook  # type: ignore[untyped-decorator]  # torch does not type it
    def _gradient_arrived(self, _gradient: Tensor) -> None:
        if not self._under_way:
            self._began()

    @guarded
    def _began(self) -> None:
        self._under_way = True
        self._recorder.clock.switch(BACKWARD)
        self._recorder.backward_began()
        if self._recorder.backwards == MANY_BACKWARDS and not self._recorder.index:
            self._recorder.note("no-steps", NO_STEPS)
        self._timer.backward_began()
        Variable._execution_engine.queue_callback(self._computed)

    # Engine callbacks run under the streams that were current at backward(), even on autograd's thread, and after these
    # wait for the streams of the gradients (GraphTask::exec_post_processing). So an event recorded here follows all of
    # local backward, and one in `_finished` follows the all-reduces that DDP's callback between the two has made the
    # stream wait for: the gap is exposed communication.
    @guarded
    def _computed(self) -> None:
        self._recorder.clock.switch(SYNC)
        Variable._execution_engine.queue_callback(self._finished)

    @guarded
    def _finished(self) -> None:
        self._recorder.clock.switch(self._recorder.rest)
        self._under_way = False
        self._timer.backward_ended()


def _on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """`tensor.register_hook` without the unused handle, which takes a fifth of the time.

    Torch never uses the key -1, so hooks of the user do not collide with it.
    """
    if tensor._backward_hooks is not None or type(tensor) is not Tensor:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch does not type it
        return
    hooks: Any = OrderedDict()
    tensor._backward_hooks = hooks
    node: Any = tensor.grad_fn
    node._register_hook_dict(tensor)
    hooks[-1] = hook
