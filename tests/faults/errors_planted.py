"""A training that runs through every hook of the agent, and errors to plant into it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import pkgutil
from unittest import mock

import torch
import zmq
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import distributed
from torch.utils.checkpoint import checkpoint

import ddpwatch.agent
import ddpwatch.agent.hooks
from ddpwatch import wire
from ddpwatch.agent.agent import Agent
from ddpwatch.agent.clock import HostClock
from ddpwatch.agent.fail_open import guarded
from ddpwatch.agent.heartbeat import HeartbeatReader
from ddpwatch.agent.hooks.dataloader import LoaderHooks
from ddpwatch.agent.parameter_checksum import Checksums
from ddpwatch.agent.registration import RunRegistration
from ddpwatch.agent.rendezvous import Rendezvous
from ddpwatch.agent.step_recorder import Recorder, Ring
from tests.builders.training import bits, loader, make, wait_for

STEPS = 30


def guarded_methods() -> list[tuple[type, str]]:
    """Every hook: whatever wears the `guarded` wrapper."""
    modules = [
        importlib.import_module(f"ddpwatch.agent.hooks.{found.name}")
        for found in pkgutil.iter_modules(ddpwatch.agent.hooks.__path__)
    ]
    classes = {
        kind
        for module in modules
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__
    }
    wrapper = guarded(lambda: None).__code__
    return sorted(
        ((kind, name) for kind in {Agent, *classes} for name, member in vars(kind).items() if _code(member) is wrapper),
        key=str,
    )


def _code(member: object) -> object:
    return getattr(member, "__code__", None)


# Called by the hooks, on the training thread.
INSIDE = [(Recorder, "close_step"), (HostClock, "switch"), (Checksums, "after_step"), (Ring, "push")]
# Called by the agent's thread.
PUBLISHING = [
    (wire, "encode"),
    (zmq.Socket, "send_multipart"),
    (HeartbeatReader, "beat"),
    (HeartbeatReader, "__init__"),
    (RunRegistration, "find"),
    (RunRegistration, "open"),
    (RunRegistration, "hello"),
    (RunRegistration, "refresh"),
    (Rendezvous, "__init__"),
    (Rendezvous, "announce"),
    (LoaderHooks, "measure_workers"),
]
SITES = {f"{owner.__name__}.{name}": (owner, name) for owner, name in [*guarded_methods(), *INSIDE, *PUBLISHING]}


class Root(nn.Module):
    """A model that contains a DDP one, with a checkpointed part before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch):
        return self.inner(checkpoint(torch.clone, batch.requires_grad_(), use_reentrant=True))


def train(rank, world_size, install) -> tuple[bytes, object]:
    """Thirty steps with everything in them that has a hook: the parameters' bits, and the agent."""
    ddp, optimizer = make()
    ddp.register_comm_hook(None, allreduce_hook)
    model = Root(ddp)
    agent = install(model)
    scaler = torch.amp.GradScaler("cpu")
    for number, (batch, target) in enumerate(loader(world_size, rank, batches=STEPS)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), target)
        if number == 3:
            loss = loss * float("inf")  # the scaler skips this step
        torch.distributed.all_reduce(loss.detach().clone())
        # As DDP copies its inputs to a GPU.
        distributed._to_kwargs((batch,), {}, torch.device("cpu"), False)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        agent.log(loss=number)
        if number == 12:
            with agent.pause("evaluation"):
                model.eval()
                model(batch)
                model.train()
        if number == 14:
            torch.save(ddp.state_dict(), io.BytesIO())
        if number == 20:
            agent.step()
    return bits(model), agent


def untouched(rank, world_size) -> bytes:
    """The result of the training without ddpwatch."""
    result, _ = train(rank, world_size, lambda model: ddpwatch.agent.NoAgent())
    return result


def planted(rank, world_size, *, site) -> dict:
    """The same training with an error in one place of ddpwatch."""
    owner, name = SITES[site]
    original = inspect.getattr_static(owner, name)

    def fail(*_args, **_kwargs):
        raise RuntimeError("planted")

    fail.__qualname__ = site
    replacement = guarded(fail) if _code(original) is guarded(fail).__code__ else fail
    with mock.patch.object(owner, name, replacement):
        return watched(rank, world_size)


def watched(rank, world_size) -> dict:
    """The training with ddpwatch, which is expected to switch itself off."""
    said, still = io.StringIO(), True
    with contextlib.redirect_stderr(said):
        result, agent = train(rank, world_size, ddpwatch.agent.install)
        if isinstance(agent, Agent):
            wait_for(lambda: not agent.active)
            agent._publisher.join(30)
            before = _traces(agent)
            agent.log(loss=1)
            agent.step()
            still = _traces(agent) == before
        agent.close()
    return {"bits": result, "said": said.getvalue(), "active": agent.active, "still": still}


def _traces(agent: Agent) -> tuple:
    recorder = agent._recorder
    return recorder.index, recorder.switch.cost_ns, recorder.clock.since_ns, len(recorder.steps._records)
