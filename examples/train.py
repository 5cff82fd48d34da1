"""The usual DDP loop, with the one line that makes it visible.

Start it with `torchrun --standalone --nproc-per-node 2 examples/train.py`, and look at it from another terminal with
`ddpwatch status`. It trains for some minutes; EPOCHS=1 in the environment makes it short.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddpwatch.agent


def main() -> None:
    """Train a small image classifier on random images."""
    if "RANK" not in os.environ:
        raise SystemExit(__doc__)
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    network = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    ).to(device)
    model = DistributedDataParallel(network, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    agent = ddpwatch.agent.install(model)  # <- the one line

    data = TensorDataset(torch.randn(2048, 3, 32, 32), torch.randint(0, 10, (2048,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    for epoch in range(int(os.environ.get("EPOCHS", "100"))):
        sampler.set_epoch(epoch)
        for number, (images, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), targets.to(device))
            loss.backward()
            if number == 0:  # not in every step: `item` waits for the GPU
                agent.log(loss=loss.item())
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
