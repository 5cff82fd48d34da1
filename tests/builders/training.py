"""What the scenarios train, and how they read back what the agent published about it."""

from __future__ import annotations

import secrets
import time
from statistics import median

import torch
import zmq
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddpwatch import wire

PHASES = wire.PHASES


class Nap(torch.autograd.Function):
    """The identity, with a callable in its forward and backward."""

    @staticmethod
    def forward(ctx, tensor, before_forward, before_backward):
        ctx.before_backward = before_backward
        before_forward()
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.before_backward()
        return gradient, None, None


class Net(nn.Module):
    """A small classifier that can be made slow in forward or backward while it runs."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.last = nn.Linear(32, 4)
        self.before_forward = self.before_backward = nothing

    def forward(self, batch):
        hidden = self.norm(self.first(batch)).relu()
        return self.last(Nap.apply(hidden, self.before_forward, self.before_backward))


def nothing() -> None:
    pass


def make(*, norm: bool = False, lr: float = 0.05, **ddp):
    """A DDP model and its optimizer, the same on all ranks."""
    torch.manual_seed(1)
    model = DistributedDataParallel(Net(norm=norm), **ddp)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def loader(world_size: int, rank: int, *, batches: int, batch: int = 16, **arguments) -> DataLoader:
    generator = torch.Generator().manual_seed(2)
    count = batches * batch * world_size
    data = TensorDataset(torch.randn(count, 8, generator=generator), torch.randint(0, 4, (count,), generator=generator))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=batch, sampler=sampler, **arguments)


def train_step(model, optimizer, batch, target) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch), target).backward()
    optimizer.step()


def bits(model) -> bytes:
    """Parameters and gradients, to the last bit."""
    return b"".join(
        tensor.detach().contiguous().numpy().tobytes()
        for parameter in model.parameters()
        for tensor in (parameter, parameter.grad)
        if tensor is not None
    ) + b"".join(buffer.numpy().tobytes() for buffer in model.buffers())


def wait_for(condition, timeout_s: float = 30.0):
    """The first true value of `condition()`; fails when there is none in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, "the condition did not come true"
        time.sleep(0.01)
    return value


def snapshot(agent) -> wire.Snap:
    """What a viewer that attaches now is given by this rank, over its real socket."""
    return snapshot_at(wait_for(lambda: agent._publisher.address))


def snapshot_at(address: str) -> wire.Snap:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.connect(address)
        socket.subscribe(wire.SNAP_PREFIX + secrets.token_hex(8).encode())
        assert socket.poll(30_000), "no snapshot came"
        _topic, payload = socket.recv_multipart()
    snap = wire.decode(payload)
    assert isinstance(snap, wire.Snap)
    return snap


def medians_ns(steps: list[wire.Step]) -> dict[str, float]:
    """The median of each phase, and of the parts of sync before the forward pass and after backward."""
    found = {name: median(getattr(step, f"{name}_ns") for step in steps) for name in [*PHASES, "presync"]}
    return found | {"postsync": median(step.sync_ns - step.presync_ns for step in steps)}
