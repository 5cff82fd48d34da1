"""A training whose rank 2 never gets its next shard: what the recording `hang` is made of.

python train.py RANK WORLD_SIZE STORE
"""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ddpwatch.agent

BATCH = 16
GOOD_STEPS = 150
STEP_S = 0.03


class Shards(Dataset):
    """Samples that lie on a file server, which stops answering one of the ranks."""

    def __init__(self, rank):
        self.rank, self.read = rank, 0

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        self.read += 1
        if self.rank == 2 and self.read > GOOD_STEPS * BATCH:
            self.read_shard(index)
        return torch.ones(64), index % 4

    def read_shard(self, _index):
        time.sleep(3600)


def main():
    rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=10),
    )
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ddpwatch.agent.install(model, run_name="train")
    data = Shards(rank)
    for batch, target in DataLoader(data, BATCH, sampler=DistributedSampler(data, world_size, rank)):
        time.sleep(STEP_S)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()


main()
