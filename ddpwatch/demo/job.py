"""One rank of a small CPU training in which one rank is slow in backward."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import time
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddpwatch.agent

PR_SET_PDEATHSIG: Final = 1


class Lag(torch.autograd.Function):
    """The identity, whose gradient takes its time."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, seconds: float) -> torch.Tensor:
        """Pass the batch through."""
        ctx.seconds = seconds
        return batch.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Pass the gradient through, late."""
        time.sleep(ctx.seconds)
        return gradients[0], None


class Network(nn.Module):
    """Two convolutions and a classifier, big enough for a step of some ten milliseconds."""

    def __init__(self, lag_s: float) -> None:
        super().__init__()
        self.lag_s = lag_s
        self.features = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(24, 48, 3),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(48, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        features: torch.Tensor = Lag.apply(self.features(images), self.lag_s)  # type: ignore[no-untyped-call]
        scores: torch.Tensor = self.classifier(features.mean(dim=(2, 3)))
        return scores


def _die_with_parent() -> None:
    """Even a killed parent leaves no rank behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Train until the time is up, all ranks for the same number of steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", required=True, help="path of a file through which the ranks meet")
    parser.add_argument("--slow-rank", type=int, default=2)
    parser.add_argument("--lag-ms", type=float, default=25.0, help="added to the slow rank's backward pass")
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()

    _die_with_parent()
    os.environ["LOCAL_RANK"] = str(arguments.rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{arguments.store}", rank=arguments.rank, world_size=arguments.ranks
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    slow = arguments.rank == arguments.slow_rank
    model = DistributedDataParallel(Network(arguments.lag_ms / 1000 if slow else 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ddpwatch.agent.install(model, run_name="demo")

    images = TensorDataset(torch.randn(8192, 3, 16, 16), torch.randint(0, 10, (8192,)))
    sampler: DistributedSampler[Any] = DistributedSampler(images)
    loader = DataLoader(images, batch_size=16, sampler=sampler)
    deadline_s = time.monotonic() + arguments.seconds
    for epoch in range(1_000_000):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        # Rank 0 decides for all, or one rank would wait for another that has gone.
        over = torch.tensor([float(time.monotonic() > deadline_s)])
        dist.broadcast(over, src=0)
        if over.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
