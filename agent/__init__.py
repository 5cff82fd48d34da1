"""The training side of ddpwatch. One line in the script: `ddpwatch.agent.install(model)`.

Here: everything that runs inside a training process. Hooks stamp a clock, the step recorder keeps finished steps, and
one thread publishes them over ZeroMQ. Not here: anything that evaluates or displays; the viewer does that.

Read `agent` (what `install` sets up), `hooks`, `step_recorder`, `publisher`, then `heartbeat` and `process_groups`
(what makes a hang visible), `registration` and `rendezvous` (how a viewer finds the run).
"""

from __future__ import annotations

import atexit
import os
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Final

from torch.optim import Optimizer

from ddpwatch.agent.agent import Agent, NoAgent
from ddpwatch.agent.cuda_clock import clock_for
from ddpwatch.agent.fail_open import Switch
from ddpwatch.agent.hooks.comm import CommHookRegistry
from ddpwatch.agent.model_info import kind_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Agent", "NoAgent", "install"]

_COMM = ("auto", "buckets", "timing")
_CLOCK = ("auto", "host")
_disabled = os.environ.get("DDPWATCH_DISABLE", "").strip().lower() not in ("", "0", "false", "no", "off")
# At import, because a communication hook is registered before the model is passed to `install`.
_comm_hooks = None if _disabled else CommHookRegistry()
_current: Agent | None = None
_FINALIZER_PRIORITY: Final = 1000
"""Above that of other finalizers, so that the agent closes first."""


def install(
    model: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    run_name: str | None = None,
    comm: str = "auto",
    clock: str = "auto",
) -> Agent | NoAgent:
    """Measure the training of `model` and publish it for `ddpwatch attach`.

    A second call in the same process returns the same agent, which then watches both models. An error of ddpwatch
    itself is printed in one line on stderr, and an agent that does nothing is returned.

    Args:
        model: A DistributedDataParallel module, a module that contains some, a sharded one, or a plain one.
        optimizer: The optimizer whose step ends a training step, if there are several; otherwise it is found.
        run_name: Name in `ddpwatch runs`; by default `DDPWATCH_RUN_NAME`, or the script's file name.
        comm: `"buckets"` times each gradient bucket with a communication hook; `"timing"` has NCCL time its
            all-reduces without a hook, but not together with CUDA graphs. `"auto"` registers nothing.
        clock: `"host"` uses the host's clock even for a model on a GPU, where phases then show when work was queued.
            `"auto"` uses CUDA events there. The first call in a process decides.

    Returns:
        The agent; or a `NoAgent`, which has the same methods, if ddpwatch is disabled or could not start.

    Raises:
        TypeError: If `model`, `optimizer` or `run_name` is of another type.
        ValueError: If `comm` or `clock` has another value.

    Example:
        >>> model = DistributedDataParallel(network)
        >>> agent = ddpwatch.agent.install(model, run_name="resnet50")
    """
    global _current  # noqa: PLW0603 - one agent a process, by design
    kind = kind_of(model)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is of type {type(optimizer).__name__}; it can be a torch.optim.Optimizer or None")
    if run_name is not None and not isinstance(run_name, str):
        raise TypeError(f"run_name is of type {type(run_name).__name__}; it can be a text or None")
    for name, value, choices in (("comm", comm, _COMM), ("clock", clock, _CLOCK)):
        if value not in choices:
            raise ValueError(f"{name} is {value!r}; it can be one of {', '.join(map(repr, choices))}")
    if _comm_hooks is None:
        return NoAgent()
    agent = None
    try:
        if _current is not None:
            if _current.active:
                _current.watch(model, kind, optimizer, comm)
                return _current
            _current.close()  # an agent that switched itself off has left its wrappers in place
        agent = Agent(_comm_hooks, run_name, clock_for(model, clock), only_host=clock == "host")
        agent.watch(model, kind, optimizer, comm)
        agent.start()
    except Exception as error:  # noqa: BLE001 - training goes on without ddpwatch, whatever the reason
        Switch().trip("install", error)
        if agent is not None:
            agent.close()
        return NoAgent()
    _current = agent
    _hook_process_exit()
    return agent


def _hook_process_exit() -> None:
    # A child of multiprocessing may exit without `atexit`, but runs finalizers while an exception is in flight.
    if parent_process() is not None:
        Finalize(None, _at_exit, exitpriority=_FINALIZER_PRIORITY)


def _at_exit() -> None:
    if _current is not None:
        _current.end()


def _in_forked_child() -> None:
    global _current  # noqa: PLW0603 - as above
    if _current is not None:
        _current.deactivate_in_child()
        _current = None


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_forked_child)
