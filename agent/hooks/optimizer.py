"""Optimizer hooks: stamp the optimizer phase, and end the step.

A GAN steps two optimizers in one iteration, a sharded optimizer steps another inside its own step, and DeepSpeed steps
one optimizer several times, each time with another part of the parameters; still each iteration is one step. So one
optimizer leads, and only the end of its step with the same part of the parameters ends ours.
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
    else the first one seen. Another takes over when it has stepped twice and the leader has not; likewise another part
    of the leader's parameters.
    """

    def __init__(self, recorder: Recorder, models: list[weakref.ref[nn.Module]]) -> None:
        self.switch = recorder.switch
        self._recorder = recorder
        self._models = models
        self._named = False
        self._leader: weakref.ref[Optimizer] | None = None
        self._leader_owns = False
        self._leader_part = 0
        """First parameter of the leader in the step that leads, by id; 0 = it has not stepped yet."""
        self._rivals: set[tuple[int, int]] = set()
        """Optimizers that have stepped since the leader did, each with its first parameter, by id."""
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
        self._ended_steps += 1
        # An optimizer fused into backward steps in the middle of it; backward continues afterwards.
        self._update(optimizer, then=self._phase_before)

    def _leads(self, optimizer: Optimizer) -> bool:
        leader = self._leader() if self._leader is not None else None
        part = _first_parameter(optimizer)
        this = id(optimizer), part
        rival = this in self._rivals
        if leader is optimizer:
            # After a backward pass it is another iteration, whichever parameters it updates.
            if self._leader_part not in (0, part) and not rival and not self._recorder.backwards:
                self._rivals.add(this)
                return False
            self._leader_part = part
            self._rivals.clear()
            return True
        if leader is not None:
            if self._named:
                return False
            if self._leader_owns and not rival:
                self._rivals.add(this)
                return False
        owns = self._owns(optimizer)
        overtaken = rival and (owns or not self._leader_owns)
        if leader is None or overtaken or (owns and not self._leader_owns):
            self._leader = weakref.ref(optimizer)
            self._leader_owns = owns
            self._leader_part = part
            self._rivals.clear()
            return True
        self._rivals.add(this)
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
        self._update(optimizer, skipped=True, then=self._recorder.clock.phase)

    def _update(self, optimizer: Optimizer, *, skipped: bool = False, then: int) -> None:
        """Go on in the phase `then`, and in the next step if this optimizer leads."""
        if not self.manual and self._leads(optimizer):
            self._recorder.close_step(skipped=skipped, then=then)
        else:
            self._recorder.clock.switch(then)
            self._recorder.updated()


def _first_parameter(optimizer: Optimizer) -> int:
    """The id of the first parameter that the optimizer holds at the moment; 0 = none."""
    return next((id(group["params"][0]) for group in optimizer.param_groups if group["params"]), 0)
