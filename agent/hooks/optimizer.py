"""Optimizer hooks: stamp the optimizer phase, and end the step.

A GAN steps two optimizers in one iteration, and a sharded optimizer steps another inside its own step; still each
iteration is one step. So one optimizer leads, and only the end of its step ends ours.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpwatch.agent.clock import EVALUATING, OPTIMIZER, OTHER
from ddpwatch.agent.fail_open import guarded
from ddpwatch.agent.patching import Patch, run_as_python

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    from ddpwatch.agent.step_recorder import Recorder


class OptimizerHooks:
    """Follows every `optimizer.step()` of the process through torch's global hooks, and `GradScaler.step`.

    The leader is the optimizer passed to `install`, else the first one seen that holds parameters of a watched model,
    else the first one seen. Another takes over when it has stepped twice and the leader has not.
    """

    def __init__(self, recorder: Recorder, models: list[weakref.ref[nn.Module]]) -> None:
        self.switch = recorder.switch
        self._recorder = recorder
        self._models = models
        self._named = False
        self._leader: weakref.ref[Optimizer] | None = None
        self._leader_owns = False
        self._rivals: set[int] = set()
        """Optimizers that have stepped since the leader did."""
        # By id: a step that raised stays open, and must not keep an optimizer and its parameters alive.
        self._open: int | None = None
        self._nested: set[int] = set()
        """Optimizers that have stepped inside the open step."""
        self._phase_before = OTHER
        self.manual = False
        """Whether the script calls `agent.step()` itself, so that optimizers end no step."""
        self._ended_steps = 0

        def before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            if not is_compiling():
                self._began(optimizer)

        def after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            if not is_compiling():
                self._ended(optimizer)

        run_as_python(before)
        run_as_python(after)
        self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        self._patch = Patch(GradScaler, "step", self._around_scaler)

    def lead(self, optimizer: Optimizer) -> None:
        """Make this optimizer the leader for good."""
        self._leader = weakref.ref(optimizer)
        self._named = True

    def remove(self) -> None:
        """Remove the hooks. Not from inside a hook: torch would be iterating over the list."""
        for handle in self._handles:
            handle.remove()
        self._patch.undo()

    @guarded
    def _began(self, optimizer: Optimizer) -> None:
        this = id(optimizer)
        if self._open is None:
            phase = self._recorder.clock.phase
            self._phase_before = OTHER if phase == EVALUATING else phase
        elif this != self._open and this not in self._nested:
            self._nested.add(this)
            return
        # An optimizer that steps twice inside the same open step is not nested: that step raised and never ended.
        self._open = this
        self._nested.clear()
        self._recorder.rest = OPTIMIZER
        self._recorder.clock.switch(OPTIMIZER)

    @guarded
    def _ended(self, optimizer: Optimizer) -> None:
        if self._open != id(optimizer):
            return
        self._open = None
        self._recorder.rest = OTHER
        # An optimizer fused into backward steps in the middle of it; backward continues afterwards.
        self._recorder.clock.switch(self._phase_before)
        self._ended_steps += 1
        self._update(optimizer)

    def _leads(self, optimizer: Optimizer) -> bool:
        leader = self._leader() if self._leader is not None else None
        if leader is optimizer:
            self._rivals.clear()
            return True
        rival = id(optimizer) in self._rivals
        if leader is not None:
            if self._named:
                return False
            if self._leader_owns and not rival:
                self._rivals.add(id(optimizer))
                return False
        owns = self._owns(optimizer)
        overtaken = rival and (owns or not self._leader_owns)
        if leader is None or overtaken or (owns and not self._leader_owns):
            self._leader = weakref.ref(optimizer)
            self._leader_owns = owns
            self._rivals.clear()
            return True
        self._rivals.add(id(optimizer))
        return False

    def _owns(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer holds a parameter of a watched model."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        models = [model for model in (reference() for reference in self._models) if model is not None]
        return any(id(parameter) in held for model in models for parameter in model.parameters())

    def _around_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            ended_before = self._ended_steps
            result = original(scaler, optimizer, *args, **kwargs)
            if self._ended_steps == ended_before and not is_compiling():
                self._skipped(optimizer)
            return result

        return step

    @guarded
    def _skipped(self, optimizer: Optimizer) -> None:
        """End the step although the scaler found inf or nan and skipped the optimizer."""
        self._update(optimizer, skipped=True)

    def _update(self, optimizer: Optimizer, *, skipped: bool = False) -> None:
        if not self.manual and self._leads(optimizer):
            self._recorder.close_step(skipped=skipped)
        else:
            self._recorder.updated()
