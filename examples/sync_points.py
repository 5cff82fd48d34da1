"""Training loops with collectives of their own, in which the others wait for a slow rank outside of DDP.

All ranks of such a loop take the same time, because each waits for the slowest in a collective that the script calls.
Start one with a slow rank, and look at it from another terminal with `ddpwatch status` or `ddpwatch attach`:

    torchrun --standalone --nproc-per-node 2 examples/sync_points.py --pattern metric-before --slow-rank 1

Look at the alert `straggler`: it names rank 1, with the phase of `--slow-phase`. The all-reduce screen lists the
collective by its name and line in this file, with the time it costs. Without `--slow-rank` no rank is named. It trains
for some minutes; STEPS=100 in the environment makes it short. Patterns:

    metric-before   averages the loss with all_reduce before backward
    metric-after    averages it after the optimizer's step
    contrastive     gathers the embeddings of all ranks in the loss
    norm            averages statistics inside forward, as SyncBatchNorm does on GPUs
    barrier         ends each step with a barrier
    objects         gathers a dictionary of metrics every 10 steps
    checkpointing   has a frozen layer and reentrant activation checkpointing, as LoRA does: no collective of its own,
                    and still gradients are averaged in a backward pass inside of another
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import ddpwatch.agent

PATTERNS = ("metric-before", "metric-after", "contrastive", "norm", "barrier", "objects", "checkpointing")
PHASES = ("data", "forward", "backward", "optimizer", "other")
STEP_S = 0.02
"""Work of each rank in a step, in seconds."""
SLOW_S = 0.03
"""Time that the slow rank takes longer, in seconds."""


class Slowness:
    """Makes one rank slow in one phase."""

    def __init__(self, rank: int | None, phase: str) -> None:
        self.phase = phase if rank == dist.get_rank() else None

    def __call__(self, phase: str) -> None:
        """Sleep if this rank is slow in this phase."""
        if phase == self.phase:
            time.sleep(SLOW_S)


class Network(nn.Module):
    """A classifier with the parts that the patterns need."""

    def __init__(self, pattern: str, slow: Slowness) -> None:
        super().__init__()
        self.pattern, self.slow = pattern, slow
        self.first = nn.Linear(64, 128)
        self.block = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
        self.last = nn.Linear(128, 10)
        if pattern == "checkpointing":
            self.first.requires_grad_(requires_grad=False)
            self.last.requires_grad_(requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits of a batch."""
        time.sleep(STEP_S)
        self.slow("forward")
        hidden = self.first(batch)
        if self.pattern == "norm":
            mean = hidden.detach().mean(dim=0)
            dist.all_reduce(mean)
            hidden = hidden - mean / dist.get_world_size()
        if self.pattern == "checkpointing":
            hidden = checkpoint(self.block, hidden.requires_grad_(), use_reentrant=True)
        else:
            hidden = self.block(hidden)
        hidden.register_hook(lambda _gradient: self.slow("backward"))
        return self.last(hidden)


def contrastive(output: torch.Tensor) -> torch.Tensor:
    """Similarity to the outputs of all ranks, of which each sample shall resemble its own."""
    everywhere = [torch.empty_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, output.detach())
    similarity = output @ torch.cat(everywhere).T
    own = dist.get_rank() * len(output) + torch.arange(len(output))
    return nn.functional.cross_entropy(similarity, own)


def averaged(loss: torch.Tensor) -> torch.Tensor:
    """Mean of the loss over all ranks, as it is logged."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def train(pattern: str, slow: Slowness, steps: int) -> None:
    """Train for this many steps."""
    model = DistributedDataParallel(Network(pattern, slow))
    optimizer = torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: slow("optimizer"))

    ddpwatch.agent.install(model, run_name=pattern)

    def load(_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        slow("data")
        return torch.randn(32, 64), torch.randint(0, 10, (32,))

    for number, (batch, target) in enumerate(DataLoader(range(steps), batch_size=None, collate_fn=load)):
        slow("other")
        optimizer.zero_grad()
        output = model(batch)
        loss = contrastive(output) if pattern == "contrastive" else nn.functional.cross_entropy(output, target)
        if pattern == "metric-before":
            averaged(loss)
        loss.backward()
        optimizer.step()
        if pattern == "metric-after":
            averaged(loss)
        elif pattern == "barrier":
            dist.barrier()
        elif pattern == "objects" and number % 10 == 0:
            dist.all_gather_object([None] * dist.get_world_size(), {"loss": loss.item(), "step": number})


def main() -> None:
    """Train with the pattern of the command line."""
    if "RANK" not in os.environ:
        raise SystemExit(__doc__)
    parser = argparse.ArgumentParser()
    parser.add_argument("--pattern", choices=PATTERNS, default=PATTERNS[0])
    parser.add_argument("--slow-rank", type=int)
    parser.add_argument("--slow-phase", choices=PHASES, default="forward")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(options.pattern, Slowness(options.slow_rank, options.slow_phase), int(os.environ.get("STEPS", "5000")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
