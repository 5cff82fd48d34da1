"""The phases are right with every setting of DDP, and with every shape of model around it."""

import time
from statistics import median

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch.agent
from tests.builders.training import Net, snapshot, train_step

NAP_S = 0.06
STEPS = 24
BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
TARGET = torch.arange(16) % 4


class Forked(nn.Module):
    """A network with a branch that no step uses."""

    def __init__(self, *, branch):
        super().__init__()
        self.net = Net()
        self.unused = nn.Linear(8, 4) if branch else None

    def forward(self, batch):
        return self.net(batch)


class Parts(nn.Module):
    """Two DDP modules in a row, or one and a part that is not wrapped."""

    def __init__(self, *, second_wrapped):
        super().__init__()
        self.first = DistributedDataParallel(nn.Linear(8, 8))
        self.net = Net()
        self.second = DistributedDataParallel(self.net) if second_wrapped else self.net

    def forward(self, batch):
        return self.second(self.first(batch).relu())


def build(kind):
    torch.manual_seed(1)
    if kind in ("two-ddp", "ddp-and-plain"):
        model = Parts(second_wrapped=kind == "two-ddp")
        return model, model.net
    model = Forked(branch=kind == "find_unused_parameters")
    settings = {} if kind == "default" else {kind: True}
    return DistributedDataParallel(model, **settings), model.net


def dawdling(rank, world_size, *, kind):
    """Rank 0 sleeps in the backward pass of every odd step."""
    model, net = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    agent = ddpwatch.agent.install(model)
    net.before_backward = lambda: time.sleep(NAP_S if rank == 0 and agent._recorder.index % 2 else 0)
    for _ in range(STEPS):
        train_step(model, optimizer, BATCH, TARGET)
    return snapshot(agent)


@pytest.mark.parametrize(
    "kind", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view", "two-ddp", "ddp-and-plain"]
)
def test_a_slow_backward_is_the_ranks_own_and_sync_for_its_peer(pool, kind):
    grown = []
    for snap in pool.run(dawdling, 2, kind=kind):
        assert len(snap.steps) == STEPS
        assert {step.backwards for step in snap.steps} == {1}
        assert {step.samples for step in snap.steps} == {16}
        assert snap.notes == []
        assert snap.hello.kind == ("contains-ddp" if kind in ("two-ddp", "ddp-and-plain") else "ddp")
        steps = [step for step in snap.steps if step.index >= 8]
        by_phase = {}
        for name in ("forward", "backward", "sync", "other"):
            quiet, slow = (
                median(getattr(step, f"{name}_ns") for step in steps if step.index % 2 == odd) for odd in (0, 1)
            )
            by_phase[name] = slow - quiet
        grown.append(by_phase)
    guilty, victim = grown
    nap_ns = NAP_S * 1e9
    assert guilty["backward"] > 0.5 * nap_ns
    assert guilty["sync"] < 0.4 * nap_ns
    assert victim["sync"] > 0.5 * nap_ns
    assert max(victim["forward"], victim["backward"], victim["other"]) < 0.4 * nap_ns, victim
