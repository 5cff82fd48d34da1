"""The usual DDP loop, with the one line that makes it visible.

Start it with `torchrun --standalone --nproc-per-node 2 examples/train.py`, and look at it from another terminal with
`ddpwatch status`.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddpwatch.agent


def main() -> None:
    """Train a small classifier on made-up data."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    model = DistributedDataParallel(network, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    agent = ddpwatch.agent.install(model)  # <- the one line

    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(int(os.environ.get("EPOCHS", "100"))):
        sampler.set_epoch(epoch)
        for number, (batch, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch.to(device)), target.to(device))
            loss.backward()
            if number == 0:  # not in every step: `item` waits for the GPU
                agent.log(loss=loss.item())
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
