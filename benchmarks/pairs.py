"""Two ways of doing the same thing, measured in turn, so that a busy machine slows both."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import tempfile
from itertools import pairwise
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.agent import Agent, install

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Block = tuple[float, float]
"""p10 and median of a block of steps, in microseconds."""


def alone() -> None:
    """A process group of one, and a run directory of our own."""
    place = tempfile.mkdtemp(prefix="ddpw-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    os.environ["DDPWATCH_RUN_DIR"] = f"{place}/run"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)


def small_model(layers: int = 2, **ddp: object) -> tuple[DistributedDataParallel, torch.optim.Optimizer, torch.Tensor]:
    """A model whose step is short, so that whatever is added to it shows."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(64, 64), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*parts), **ddp)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(16, 64)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """One step."""
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()


def block(step: Callable[[], None], steps: int, warm_up: int = 30) -> Block:
    """p10 and median of some steps."""
    for _ in range(warm_up):
        step()
    times_ns = []
    for _ in range(steps):
        began_ns = perf_counter_ns()
        step()
        times_ns.append(perf_counter_ns() - began_ns)
    times_ns.sort()
    return times_ns[steps // 10] / 1e3, times_ns[steps // 2] / 1e3


def installed(model: nn.Module, step: Callable[[], None], comm: str = "auto") -> Agent:
    """An agent that measures and listens: its start, which happens once in a run, is not what is priced here."""
    agent = install(model, comm=comm)
    assert isinstance(agent, Agent)
    while agent.active and not agent._publisher.address:
        step()
    assert agent.active, "the agent has switched itself off; there is nothing to measure"
    return agent


def added(with_it: list[Block], without: list[Block]) -> list[tuple[str, float, float, float]]:
    """By statistic: what was added, the noise, and the base. Pairs are neighbours in time."""
    rows = []
    for index, name in enumerate(("p10", "median")):
        differences = [on[index] - off[index] for on, off in zip(with_it, without, strict=True)]
        between_equals = [a[index] - b[index] for a, b in pairwise(without)]
        rows.append((name, median(differences), noise(between_equals), median(off[index] for off in without)))
    return rows


def noise(differences: Sequence[float]) -> float:
    """How far from zero the median of differences between equals may come out: 95 of 100 samples stay within."""
    chance = random.Random(0)
    medians = sorted(abs(median(chance.choices(differences, k=len(differences)))) for _ in range(1000))
    return medians[950]


def row(what: str, figure: str, budget: str, holds: bool, noise: str = "") -> None:
    """Print one line of the table."""
    print(f"{'ok  ' if holds else 'OVER'}  {what:<58} {figure:>14}   budget {budget:<10} {noise}", flush=True)
