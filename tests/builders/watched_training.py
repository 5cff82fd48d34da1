"""A training in one process, for processes that are to be killed, forked or starved."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn

import ddpwatch.agent
from tests.builders.training import Net, train_step


class Training:
    """A model that is watched, and steps on request."""

    def __init__(self, wrap=lambda model: model) -> None:
        torch.manual_seed(1)
        self.model = wrap(Net())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.agent = ddpwatch.agent.install(self.model)
        self.taken = 0

    def steps(self, count: int) -> None:
        for _ in range(count):
            train_step(self.model, self.optimizer, torch.ones(4, 8), torch.zeros(4, dtype=torch.long))
            self.taken += 1

    def steps_until(self, flag, pause_s: float = 0.002) -> None:
        """Go on until the file is there, at the pace of a small real job."""
        while not os.path.exists(flag):
            self.steps(1)
            time.sleep(pause_s)

    def half_a_step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(torch.ones(4, 8)), torch.zeros(4, dtype=torch.long)).backward()


def join_group(store: str, rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
