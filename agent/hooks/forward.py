"""Forward hooks: stamp the forward pass of watched models, and DDP's communication before it."""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.utils.hooks import unserializable_hook

from ddpwatch.agent.batch_tensors import first_tensor, input_elements
from ddpwatch.agent.clock import EVALUATING, FORWARD, OTHER, PRESYNC
from ddpwatch.agent.fail_open import guarded
from ddpwatch.agent.patching import Patch, WeakIdSet
from ddpwatch.agent.torch_private import COPY_INPUTS, POST_FORWARD, PRE_FORWARD, is_tracing
from ddpwatch.wire import EVALUATED

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from ddpwatch.agent.hooks.backward import BackwardHooks
    from ddpwatch.agent.step_recorder import Recorder


class ForwardHooks:
    """Wraps DDP's `_pre_forward` and `_post_forward`, and `__call__` of each root that is not a DDP module itself.

    The wrappers sit on classes, so that models can be copied and saved without them. In a compiled region they vanish
    (`is_compiling` is a constant to the compiler), so they break no graph.
    """

    def __init__(self, recorder: Recorder, backward: BackwardHooks, on_first: Callable[[nn.Module], None]) -> None:
        """`on_first` is called with each model in its first training forward, after DDP's own set-up."""
        self.switch = recorder.switch
        self._on_first = on_first
        self._recorder = recorder
        self._backward = backward
        self._roots = WeakIdSet()
        self._ddps = WeakIdSet()
        self.models: list[weakref.ref[nn.Module]] = []
        """The user's modules: inside each DDP module, or the root if there is none."""
        self._in_root = False
        self._in_ddp: int | None = None
        """Id of the DDP module whose forward pass is running."""
        self._probing = False
        self._trains_in_eval = False
        self._blind = False
        self.thread_id: int | None = None
        """The training thread: the one that last ran a watched model."""
        self._patches: list[Patch] = []
        self._sees_ddp = all(hasattr(DistributedDataParallel, name) for name in (PRE_FORWARD, POST_FORWARD))
        """Whether this torch has both methods; without them DDP is watched like any other root."""
        if self._sees_ddp:
            self._patches += [
                Patch(DistributedDataParallel, PRE_FORWARD, self._around_pre_forward),
                Patch(DistributedDataParallel, POST_FORWARD, self._around_post_forward),
                # The copy of the inputs to the GPU is the last part of `_pre_forward`, and no communication.
                Patch(distributed, COPY_INPUTS, self._around_copy),
            ]
        self._patched: set[type] = set()
        self._started = WeakIdSet()

    def watch(self, root: nn.Module) -> None:
        """Watch this model, and every DDP module in it."""
        ddps = [module for module in root.modules() if isinstance(module, DistributedDataParallel)]
        for ddp in ddps:
            self._ddps.add(ddp)
        self.models += [weakref.ref(ddp.module) for ddp in ddps] or [weakref.ref(root)]
        if isinstance(root, DistributedDataParallel) and self._sees_ddp:
            return
        self._roots.add(root)
        owner = type(root)
        if owner not in self._patched:
            self._patched.add(owner)
            self._patches.append(Patch(owner, "__call__", self._around_call, compiled=True))

    def remove(self) -> None:
        """Remove every wrapper."""
        for patch in self._patches:
            patch.undo()

    def training(self) -> bool:
        """Whether training is running: gradients are enabled, and a watched model is in training mode."""
        if not torch.is_grad_enabled():
            return False
        return self._trains_in_eval or any(
            model.training for model in (reference() for reference in self.models) if model is not None
        )

    def evaluating(self) -> None:
        """Begin an evaluation of the training thread, if none has begun: it lasts until training goes on."""
        recorder = self._recorder
        if recorder.clock.phase == OTHER and get_ident() == (self.thread_id or recorder.thread):
            recorder.clock.switch(EVALUATING)

    def _around_pre_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def pre_forward(ddp: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
            entered = not is_compiling() and self._ddp_entered(ddp, inputs, kwargs)
            result = original(ddp, *inputs, **kwargs)
            if entered:
                self._ddp_ready(ddp)
            return result

        return pre_forward

    def _around_copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def copy_inputs(*args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                self._copy_began()
            return original(*args, **kwargs)

        return copy_inputs

    @guarded
    def _copy_began(self) -> None:
        if self._recorder.clock.phase == PRESYNC and get_ident() == self.thread_id:
            self._recorder.clock.switch(FORWARD)

    def _around_post_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def post_forward(ddp: nn.Module, output: Any) -> Any:
            result = original(ddp, output)
            if not is_compiling() and (self._in_ddp or self._probing):
                self._ddp_left(ddp, result)
            return result

        return post_forward

    def _around_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(root: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(root, *inputs, **kwargs)
            if not self._root_entered(root, inputs, kwargs):
                result = original(root, *inputs, **kwargs)
                if self._probing:
                    self._probe(result)
                return result
            try:
                result = original(root, *inputs, **kwargs)
            except BaseException:
                self._root_left(None)
                raise
            self._root_left(result)
            return result

        return call

    @guarded
    def _ddp_entered(self, ddp: nn.Module, inputs: Any, kwargs: Any) -> bool:
        if id(ddp) not in self._ddps.ids:
            if id(ddp.module) not in self._roots.ids:
                return self._companion_entered(ddp)
            # The model was wrapped in DDP after `install`.
            self._ddps.add(ddp)
        # Still set if the previous forward pass raised.
        self._in_ddp = None
        if not self._in_root and not self._is_training_call(ddp):
            return False
        self._recorder.clock.switch(PRESYNC)
        self._in_ddp = id(ddp)
        if not self._in_root:
            self._begin(inputs, kwargs)
        return True

    def _companion_entered(self, ddp: nn.Module) -> bool:
        """Time another DDP model that the training thread trains, such as the discriminator of a GAN.

        Ranks wait for each other in its all-reduces too. Batches, steps and checksums are those of the watched models.
        """
        inside_watched = self._recorder.clock.phase == FORWARD
        if inside_watched or not (ddp.training and torch.is_grad_enabled()) or get_ident() != self.thread_id:
            return False
        self._recorder.clock.switch(PRESYNC)
        self._in_ddp = id(ddp)
        self._backward.forward_began()
        return True

    @guarded
    def _ddp_ready(self, ddp: nn.Module) -> None:
        if id(ddp) in self._ddps.ids and id(ddp) not in self._started.ids:
            self._start(ddp)
        self._recorder.clock.switch(FORWARD)

    @guarded
    def _ddp_left(self, ddp: nn.Module, output: Any) -> None:
        if self._in_ddp != id(ddp):
            if self._probing and id(ddp) in self._ddps.ids:
                self._probe(output)
            return
        self._in_ddp = None
        if self._in_root:
            self._backward.watch(output)
            return
        if id(ddp) in self._ddps.ids:
            self._watch_output(output)
        else:
            self._backward.watch(output)
        self._recorder.clock.switch(OTHER)

    @guarded
    def _root_entered(self, root: nn.Module, inputs: Any, kwargs: Any) -> bool:
        if id(root) not in self._roots.ids or self._in_root or self._in_ddp or not self._is_training_call(root):
            return False
        if id(root) not in self._started.ids:
            self._start(root)
        self._recorder.clock.switch(FORWARD)
        self._in_root = True
        self._begin(inputs, kwargs)
        return True

    @guarded
    def _root_left(self, output: Any) -> None:
        self._in_root = False
        self._in_ddp = None
        if output is not None:
            self._watch_output(output)
        self._recorder.clock.switch(OTHER)

    def _is_training_call(self, model: nn.Module) -> bool:
        """Whether this call is training; evaluation counts as `other` and sets a flag of the step."""
        if is_tracing():
            return False  # in torch.jit.trace even a size is a tensor, and reading it warns
        if torch.is_grad_enabled() and (model.training or self._trains_in_eval):
            return True
        self._recorder.flags |= EVALUATED
        self.evaluating()
        # Some train with frozen layers in eval mode: a gradient that comes back distinguishes this from evaluation.
        self._probing = torch.is_grad_enabled()
        return False

    @guarded
    def _probe(self, output: Any) -> None:
        self._probing = False
        self._backward.probe(output, self._learn_training_in_eval)

    @unserializable_hook  # type: ignore[untyped-decorator]  # torch does not type it
    def _learn_training_in_eval(self, _gradient: Tensor) -> None:
        self._trains_in_eval = True

    def _start(self, model: nn.Module) -> None:
        self._started.add(model)
        self._on_first(model)

    def _begin(self, inputs: Any, kwargs: Any) -> None:
        self.thread_id = get_ident()
        self._backward.forward_began()
        tensor = first_tensor(inputs)
        if tensor is None and kwargs:
            tensor = first_tensor(kwargs)
        if tensor is not None:
            recorder = self._recorder
            recorder.add_forward_batch(tensor.shape[0])
            recorder.input_elements += input_elements(tensor, inputs, kwargs)
            if recorder.wants_fingerprint:
                recorder.see(tensor)

    def _watch_output(self, output: Any) -> None:
        if not self._backward.watch(output) and not self._blind:
            self._blind = True
            self._recorder.note(
                "blind",
                "No tensor in the model's output requires a gradient. "
                "Backward and all-reduce cannot be timed separately and are counted as other.",
            )
