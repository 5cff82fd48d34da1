"""One rank of a small CPU training with the demo's schedule of faults, or with one rank that is slow throughout."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import time
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

import ddpwatch.agent
from ddpwatch.demo.fault_schedule import (
    DIRECTIVE_STEPS,
    LAG,
    WORK_S,
    Directive,
    Director,
    make_schedule,
    pace_for,
    work_for,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PR_SET_PDEATHSIG: Final = 1
"""Option of prctl(2): the signal that the kernel sends when the parent dies."""
FORWARD_FRACTION: Final = 1 / 3
"""Fraction of a step's work in forward; backward takes the rest."""
PROBES: Final = 24
"""Number of all-reduces that are timed before training."""


class Device(torch.autograd.Function):
    """The identity, which sleeps in both directions, as layers do whose work is done by an accelerator.

    With real work, four ranks would compete for the cores of a small machine, and each would be slow in turn.
    """

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, work_s: float, lag_s: float) -> torch.Tensor:
        """Pass the batch through after a delay."""
        ctx.backward_s = work_s * (1 - FORWARD_FRACTION) + lag_s
        time.sleep(work_s * FORWARD_FRACTION)
        return batch.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Pass the gradient through after a delay, including the lag."""
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Network(nn.Module):
    """Two convolutions and a classifier, with an accelerator's delay between them."""

    def __init__(self, work_s: float) -> None:
        super().__init__()
        self.work_s = work_s
        """Seconds of forward and backward together."""
        self.lag_s = 0.0
        """Seconds added to backward."""
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            # Without buffers, which DDP would broadcast before each step: a healthy demo should communicate little.
            nn.GroupNorm(3, 12),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(24, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        features: torch.Tensor = Device.apply(self.features(images), self.work_s, self.lag_s)  # type: ignore[no-untyped-call]
        scores: torch.Tensor = self.classifier(features.mean(dim=(2, 3)))
        return scores


def _die_with_parent() -> None:
    """Have the kernel kill this rank with its parent."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class LaggingCollate:
    """Collates samples after a delay: what a slow disk does to a DataLoader."""

    def __init__(self) -> None:
        self.lag_s = 0.0

    def __call__(self, samples: list[Any]) -> Any:
        """The batch."""
        time.sleep(self.lag_s)
        return default_collate(samples)


def _samples() -> TensorDataset:
    """Images whose mean color determines their class, so that the loss falls."""
    images = torch.randn(8192, 3, 16, 16) + torch.randn(8192, 3, 1, 1)
    return TensorDataset(images, (images.mean(dim=(2, 3)) @ torch.randn(3, 10)).argmax(dim=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", required=True, help="path of the rendezvous file")
    parser.add_argument(
        "--slow-rank",
        type=int,
        help="rank that is slow in backward throughout, -1 = none  [default: as in the schedule]",
    )
    parser.add_argument("--lag-ms", type=float, default=25.0, help="added to the slow rank's backward pass")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pace", type=float, help="speed of the schedule  [default: fits into --seconds]")
    parser.add_argument("--lag", type=float, default=LAG, help="added to the schedule's slow rank, in healthy steps")
    return parser.parse_args()


def main() -> None:
    """Train until the time is up, all ranks for the same number of steps."""
    arguments = _arguments()
    rank, ranks = arguments.rank, arguments.ranks
    _die_with_parent()
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{arguments.store}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pace = arguments.pace or pace_for(arguments.seconds)
    work_s = WORK_S if arguments.slow_rank is not None else work_for(_reduce_s(), pace)
    network, collate = Network(work_s), LaggingCollate()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    agent = ddpwatch.agent.install(model, run_name="demo")

    images = _samples()
    sampler: DistributedSampler[Any] = DistributedSampler(images)
    loader = DataLoader(images, batch_size=16, sampler=sampler, collate_fn=collate)
    schedule = make_schedule(arguments.lag)
    # One tensor for all broadcasts, alive as long as the group: freeing a temporary one in gloo's thread takes the GIL,
    # which the main thread holds (before torch 2.8) while it ends the group and waits for that thread.
    shared = torch.empty(len(Directive._fields), dtype=torch.float64)
    director = Director(time.monotonic(), arguments.seconds, pace, schedule)
    for step, (batch, target) in enumerate(_batches(loader, sampler)):
        if step % DIRECTIVE_STEPS == 0:
            directive = _broadcast(director, shared)
            if directive.over:
                break
            if arguments.slow_rank is None:
                collate.lag_s = directive.lag_in("data", rank, ranks, schedule)
                network.lag_s = directive.lag_in("backward", rank, ranks, schedule)
            elif rank == arguments.slow_rank:
                network.lag_s = arguments.lag_ms / 1000
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()  # type: ignore[no-untyped-call]
        # Before the step ends, so that it belongs to this one and not to the next.
        agent.log(loss=loss.item())
        optimizer.step()
    dist.destroy_process_group()


def _batches(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Iterator[Any]:
    """Batches of one epoch after another."""
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def _reduce_s() -> float:
    """Median duration of an all-reduce here, the maximum over all ranks."""
    spent_s = []
    small = torch.zeros(4096)
    for _ in range(PROBES):
        began_s = time.monotonic()
        dist.all_reduce(small)
        spent_s.append(time.monotonic() - began_s)
    median_s = torch.tensor([median(spent_s)], dtype=torch.float64)
    dist.all_reduce(median_s, op=dist.ReduceOp.MAX)
    return float(median_s.item())


def _broadcast(director: Director, shared: torch.Tensor) -> Directive:
    """Rank 0 decides for all, or one rank would wait for another that has exited."""
    shared.copy_(torch.tensor(director.next_directive(time.monotonic()), dtype=shared.dtype))
    dist.broadcast(shared, src=0)
    return Directive(*shared.tolist())


if __name__ == "__main__":
    main()
