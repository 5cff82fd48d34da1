"""Activation checkpointing on real ranks: the wait for a slow rank is sync, whichever backward pass DDP ends in."""

import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddpwatch.agent
from tests.builders.training import Nap, bits, medians_ns, nothing, snapshot

NAP_S = 0.06
STEPS = 24


class Adapted(nn.Module):
    """A frozen layer and trained ones in one checkpointed block, as with LoRA."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.frozen = nn.Linear(8, 32).requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.last = nn.Linear(32, 4).requires_grad_(False)
        self.reentrant = reentrant
        self.before_backward = nothing

    def forward(self, batch):
        hidden = self.frozen(batch).requires_grad_()
        hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return self.last(Nap.apply(hidden, nothing, self.before_backward))


def checkpointed_run(rank, world_size, *, reentrant, slow=None, watched=True):
    torch.manual_seed(1)
    model = DistributedDataParallel(Adapted(reentrant=reentrant))
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)
    agent = ddpwatch.agent.install(model) if watched else None
    steps = iter(range(STEPS))
    number = 0
    if rank == slow:
        model.module.before_backward = lambda: time.sleep(NAP_S if number % 2 else 0)
    for number in steps:
        optimizer.zero_grad()
        model(torch.full((4, 8), float(rank + number))).square().mean().backward()
        optimizer.step()
    if agent is None:
        return bits(model)
    made = [step for step in snapshot(agent).steps if step.index >= 4]
    quiet, late = (medians_ns([step for step in made if step.index % 2 == odd]) for odd in (0, 1))
    return {name: late[name] - quiet[name] for name in quiet}, bits(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_wait_for_a_slow_rank_is_sync_and_not_backward(pool, reentrant):
    (guilty, _), (victim, _) = pool.run(checkpointed_run, 2, reentrant=reentrant, slow=0)

    assert guilty["backward"] > 0.5 * NAP_S * 1e9
    assert victim["sync"] > 0.5 * NAP_S * 1e9
    assert victim["backward"] < 0.4 * NAP_S * 1e9


def test_parameters_and_gradients_have_the_same_bits_as_without_the_agent(pool):
    watched = pool.run(checkpointed_run, 2, reentrant=True)
    alone = pool.run(checkpointed_run, 2, reentrant=True, watched=False)

    assert [each for _, each in watched] == alone
