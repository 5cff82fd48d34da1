"""The agent that `install` returns: owner of all hooks and threads of ddpwatch in a training process."""

from __future__ import annotations

import contextlib
import os
import weakref
from functools import partial
from numbers import Real
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpwatch import rundir
from ddpwatch.agent.clock import BACKWARD, SYNC
from ddpwatch.agent.cuda_clock import CudaClock, gpu_of
from ddpwatch.agent.exit_reason import failure
from ddpwatch.agent.fail_open import Switch, guarded
from ddpwatch.agent.hooks.backward import BackwardHooks
from ddpwatch.agent.hooks.collectives import CollectiveHooks
from ddpwatch.agent.hooks.comm import BucketTimer
from ddpwatch.agent.hooks.dataloader import LoaderHooks
from ddpwatch.agent.hooks.forward import ForwardHooks
from ddpwatch.agent.hooks.optimizer import OptimizerHooks
from ddpwatch.agent.hooks.pauses import PauseHooks
from ddpwatch.agent.model_info import (
    HOST_CLOCK,
    SAME_SAMPLES,
    WAITS_IN_PYTHON,
    WHOLE_PARAMETERS,
    describe,
    kind_of,
    kind_of_callers,
    not_wrapped,
    remarks,
    replicas_of,
)
from ddpwatch.agent.parameter_checksum import Checksums
from ddpwatch.agent.publisher import Publisher
from ddpwatch.agent.registration import identify, script_name
from ddpwatch.agent.step_recorder import Recorder
from ddpwatch.agent.torch_private import missing_names
from ddpwatch.wire import PAUSED, fit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.optim import Optimizer
    from typing_extensions import Self

    from ddpwatch.agent.clock import HostClock
    from ddpwatch.agent.hooks.comm import CommHookRegistry


class Agent:
    """Measures the training of this process and publishes it. In a step it never blocks, raises or changes a result."""

    def __init__(
        self, comm_hooks: CommHookRegistry, run_name: str | None, clock: HostClock, *, only_host: bool = False
    ) -> None:
        self.switch = Switch(f" rank {identify().rank}")
        self._pid = os.getpid()
        self._closed = False
        self._comm_hooks = comm_hooks
        self._roots: list[weakref.ref[nn.Module]] = []
        self._description: dict[str, Any] = {}
        self._recorder = Recorder(clock, self.switch)
        self._publisher = Publisher(
            self._recorder, lambda: self._description, rundir.base_path(), run_name or script_name()
        )
        # Hooks last, so that none is left in place if anything before them fails.
        self._timer = BucketTimer(self._recorder)
        self._backward = BackwardHooks(self._recorder, self._timer)
        self._forward = ForwardHooks(self._recorder, self._backward, self._on_first_forward)
        self._optimizers = OptimizerHooks(self._recorder, self._forward.models)
        self._loaders = LoaderHooks(self._recorder, self._forward)
        self._collectives = CollectiveHooks(self._recorder, self._forward)
        self._pauses = PauseHooks(self._recorder, self._forward)
        self._publisher.every_hello = (self._pauses.wrap_imported, self._loaders.measure_workers)
        if clock.name == CudaClock.name:
            self._collectives.watch_launches()
        self._recorder.checksums = self._checksums = Checksums(self._forward.models)
        self._recorder.memory = self._publisher.telemetry.memory
        self._wants_buckets = False
        self._wants_timing = False
        self._only_host = only_host
        self._noted: set[str] = set()
        """Kinds of notes on models that were sent."""
        comm_hooks.timer = self._timer

    @property
    def active(self) -> bool:
        """Whether it measures: not closed, and not switched off by an error of its own."""
        return self.switch.on and not self._closed

    def step(self) -> None:
        """End a step manually, in a loop without a `torch.optim` optimizer. From then on only this ends steps."""
        self._optimizers.manual = True
        self._end_step()

    def log(self, **values: float) -> None:
        """Attach the script's own numbers to the current step, such as `loss.item()` every now and then.

        A step ends with `optimizer.step()`: a value logged after it belongs to the next step. Tensors are refused,
        because reading one from a GPU would make the training wait for it.

        Args:
            **values: Numbers by name; at most 16 names a step.

        Example:
            >>> agent.log(loss=0.25)
        """
        self._log(values)

    @contextlib.contextmanager
    def pause(self, why: str) -> Iterator[None]:
        """Mark slow work that is intended, so that it is not reported as a hang.

        Args:
            why: Shown in place of the phase.

        Example:
            >>> with agent.pause("checkpoint"):
            ...     torch.save(model.state_dict(), path)
        """
        before = self._recorder.pause
        reason = fit(str(why)) or "pause"
        self._pause("pause", reason, reason)
        try:
            yield
        finally:
            self._pause("resume", reason, before)

    def close(self) -> None:
        """Remove every hook, send what is left, and end the thread. The agent does nothing afterwards.

        Waits up to 2 s for the thread.
        """
        self._shut("closed")

    def __enter__(self) -> Self:
        """Use as `with install(model): ...`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close, and let an exception pass."""
        self.close()

    def watch(self, model: nn.Module, kind: str, optimizer: Optimizer | None, comm: str) -> None:
        """Watch one more model of this process; the first one describes the run."""
        if optimizer is not None:
            self._optimizers.lead(optimizer)
        if comm == "buckets":
            self._wants_buckets = True
        elif comm == "timing":
            self._wants_timing = True
        if any(root() is model for root in self._roots):
            return
        self._roots.append(weakref.ref(model))
        self._forward.watch(model)
        self._publisher.telemetry.watch(model)
        if not self._description:
            self._describe(model, kind)
        self._adapt(model, kind, self._recorder.clock.name)

    def start(self) -> None:
        """Begin to publish."""
        for missing in missing_names():
            if missing.expected:
                self._recorder.note("torch", f"torch {torch.__version__} has no {missing.name}: {missing.without}")
        self._publisher.start()

    def end(self) -> None:
        """Close at interpreter exit, and report the exception that caused it, if any."""
        text = None
        with contextlib.suppress(Exception):  # the user's exception class may fail to format itself
            text = failure()
        self._shut("exit" if text is None else "failed", text or "", at_exit=True)

    def _shut(self, reason: str, text: str = "", *, at_exit: bool = False) -> None:
        """Close once, and only in the process that the agent was made in."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for hooks in (
            self._forward, self._backward, self._loaders, self._collectives, self._optimizers, self._pauses,
        ):  # fmt: skip
            with contextlib.suppress(Exception):
                hooks.remove()
        if self._comm_hooks.timer is self._timer:
            self._comm_hooks.timer = None
        with contextlib.suppress(Exception):
            # No CUDA call while the interpreter exits, nor from a thread other than the training thread.
            self._recorder.finish(ask=not at_exit and get_ident() == self._forward.thread_id)
        with contextlib.suppress(Exception):
            self._publisher.stop(reason, text, at_exit=at_exit)
        self.switch.on = False

    def deactivate_in_child(self) -> None:
        """Do nothing in a forked child: the thread and the sockets are the parent's."""
        self._closed = True
        self.switch.on = False

    @guarded
    def _end_step(self) -> None:
        self._recorder.close_step()

    @guarded
    def _log(self, values: dict[str, Any]) -> None:
        found = {name: _number(value) for name, value in values.items()}
        numbers = {fit(name): number for name, number in found.items() if number is not None}
        self._recorder.log(numbers)
        refused = [name for name, number in found.items() if number is None]
        if refused:
            self._recorder.note("log", f"agent.log takes numbers only; not shown: {fit(', '.join(refused), 400)}")

    @guarded
    def _pause(self, kind: str, why: str, now: str) -> None:
        self._recorder.pause = now
        self._recorder.flags |= PAUSED
        self._recorder.note(kind, why)

    def _on_first_forward(self, model: nn.Module) -> None:
        """Finish the set-up of a model; only now is it known whether it is wrapped in DDP and has a hook."""
        self._publisher.telemetry.watch(model)  # it may have moved to a GPU meanwhile
        self._choose_clock()
        kind = kind_of(model)
        if kind == "plain":
            kind = kind_of_callers() or kind
        ddp = model if isinstance(model, DistributedDataParallel) else None
        # It may have been wrapped or sharded since `install`.
        if kind != self._description["kind"] and self._roots[0]() is (model if ddp is None else ddp.module):
            self._describe(model, kind)
        self._adapt(model, kind)
        if ddp is not None:
            if replicas_of(ddp) != self._description["replicas"]:
                self._checksums.leave_out(ddp.module)
            self._set_up_buckets(ddp)
            self._set_up_timing(ddp)
        elif kind.startswith("fsdp2") and "cuda" in (self._description["clock"], self._recorder.clock.name):
            self._collectives.watch_fsdp()
        elif text := not_wrapped(kind):
            self._recorder.note("not-wrapped", text)

    def _describe(self, model: nn.Module, kind: str) -> None:
        before = self._description
        comm, clock = before.get("comm", "passive"), before.get("clock", self._recorder.clock.name)
        self._description = describe(model, kind, comm, clock)
        self._backward.last_phase = BACKWARD if kind in WAITS_IN_PYTHON else SYNC

    def _adapt(self, model: nn.Module, kind: str, clock: str = "") -> None:
        """Leave out what cannot be measured in this kind of training, and send the notes on it."""
        if kind in SAME_SAMPLES:
            self._recorder.counts_samples = False
        if kind not in WHOLE_PARAMETERS:
            self._recorder.checksums = None
        self._note_once(remarks(model, kind, clock))

    def _note_once(self, notes: list[tuple[str, str]]) -> None:
        for kind, text in notes:
            if kind not in self._noted:
                self._noted.add(kind)
                self._recorder.note(kind, text)

    def _choose_clock(self) -> None:
        """Change to the CUDA clock if the model has moved to a GPU: the host cannot see when its work runs."""
        root = self._roots[0]()
        device = gpu_of(root) if root is not None and self._recorder.clock.name == "host" else None
        if device is None:
            return
        if not self._only_host:
            self._recorder.successor = partial(CudaClock, device)
            self._collectives.watch_launches()
            self._description = {**self._description, "clock": CudaClock.name}
        else:
            self._note_once([("host-clock", HOST_CLOCK)])

    def _set_up_buckets(self, ddp: DistributedDataParallel) -> None:
        found = self._comm_hooks.kind(ddp)
        if found == "own" or (self._wants_buckets and not found and self._comm_hooks.own_hook(ddp)):
            self._description = {**self._description, "comm": "buckets"}
        elif found == "timed":
            self._description = {**self._description, "comm": "hook"}
        elif self._wants_buckets:
            self._recorder.note(
                "comm",
                "Bucket times are not available: the model's communication hook is built into torch, "
                "or was registered before ddpwatch.agent was imported.",
            )

    def _set_up_timing(self, ddp: DistributedDataParallel) -> None:
        if not self._wants_timing:
            return
        if why := self._publisher.nccl_times.enable(ddp.process_group):
            self._recorder.note("comm", f"All-reduce times are not available: {why}")
        else:
            self._description = {**self._description, "comm": "timing"}


def _number(value: Any) -> float | None:
    # Asked first: float() of a tensor would wait for its GPU.
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


class NoAgent:
    """Does nothing, with the same methods: what `install` returns when ddpwatch is disabled or could not start."""

    active = False

    def step(self) -> None:
        """Nothing."""

    def log(self, **values: float) -> None:
        """Nothing."""

    @contextlib.contextmanager
    def pause(self, why: str) -> Iterator[None]:  # noqa: ARG002 - the signature is Agent's
        """Nothing."""
        yield

    def close(self) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        """Nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing; an exception passes."""
