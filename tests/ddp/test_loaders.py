"""DataLoaders: worker processes have no agent, and the loader's settings are reported."""

import multiprocessing
import time
from statistics import median

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import ddpwatch.agent
from ddpwatch.agent.clock import OTHER
from tests.builders.training import loader, make, snapshot, train_step

NAP_S = 0.04
TARGET = torch.arange(8) % 4


class Reporting(Dataset):
    """Each sample shows whether the process it was made in has an agent, and whether its hooks would run."""

    def __init__(self, count, agent):
        self.count = count
        self.agent = agent

    def __len__(self):
        return self.count

    def __getstate__(self):
        return {"count": self.count, "agent": None}

    def __getitem__(self, index):
        clean = ddpwatch.agent._current is None and (self.agent is None or not self.agent.active)
        in_child = multiprocessing.parent_process() is not None and torch.utils.data.get_worker_info() is not None
        return torch.full((8,), float(index)), torch.tensor([clean, in_child])


def with_workers(rank, world_size, *, method, persistent):
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    train_step(model, optimizer, torch.randn(8, 8), TARGET)
    method = method if rank == 0 else "fork"  # a spawned worker imports torch again: one is enough
    daemon = multiprocessing.current_process()._config
    daemon["daemon"] = False  # the pool's ranks are daemons, which may not have children
    try:
        batches = DataLoader(
            Reporting(32, agent),
            batch_size=8,
            num_workers=2 if method == "fork" else 1,
            multiprocessing_context=method,
            persistent_workers=persistent,
        )
        reports = []
        for _ in range(2):
            for batch, report in batches:
                reports.append(report)
                train_step(model, optimizer, batch, TARGET)
        del batches
    finally:
        daemon["daemon"] = True
    return torch.cat(reports).tolist(), snapshot(agent), agent.active


@pytest.mark.parametrize(("method", "persistent"), [("fork", False), ("fork", True), ("spawn", True)])
def test_worker_processes_have_no_agent_and_their_batches_are_data_time(pool, method, persistent):
    for reports, snap, active in pool.run(with_workers, 2, method=method, persistent=persistent):
        assert reports == [[True, True]] * 64
        assert active
        fed = snap.steps[1:]
        assert [(step.samples, step.backwards) for step in fed] == [(8, 1)] * 8
        assert all(step.data_ns for step in fed)
        assert [reported.epoch for reported in snap.loaders] == [0, 1]
        assert {reported.workers for reported in snap.loaders} <= {1, 2}


def reported_loaders(rank, world_size):
    """One pass over each kind of loader; returns what was reported, by name."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    data = TensorDataset(torch.randn(16, 8), torch.arange(16) % 4)
    distributed = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loaders = {
        "distributed": DataLoader(data, batch_size=4, sampler=distributed),
        "shuffled": DataLoader(data, batch_size=4, shuffle=True, drop_last=True),
        "in order": DataLoader(data, batch_size=8),
        "list of batches": DataLoader(data, batch_sampler=[[0, 1], [2, 3]]),
        "list as sampler": DataLoader(data, batch_size=2, sampler=[3, 4, 5, 6]),
        "no batching": DataLoader(data, batch_size=None),
        "stream": DataLoader(Stream(), batch_size=2),
        "odd": DataLoader(data, batch_sampler=Odd()),
    }
    for name, batches in loaders.items():
        for epoch in range(2):
            if name == "distributed":
                distributed.set_epoch(epoch + 5)
            for batch, target in batches:
                train_step(model, optimizer, batch.view(-1, 8), target.view(-1))
    snap = snapshot(agent)
    assert agent.active
    return dict(zip([(name, epoch) for name in loaders for epoch in range(2)], snap.loaders, strict=True))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(8), torch.tensor(1))] * 4)


class Odd:
    """A batch sampler that is unhashable, does not know its length, and has settings of an unheard-of kind."""

    __hash__ = None
    epoch = 2**70
    shuffle = torch.zeros(3)

    @property
    def sampler(self):
        raise ValueError("none")

    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        raise AttributeError("ask later")


def test_a_loaders_sampler_epoch_and_size_are_reported(pool):
    for rank, reported in enumerate(pool.run(reported_loaders, 2)):
        for epoch in range(2):
            message = reported["distributed", epoch]
            assert (message.sampler, message.distributed, message.replicas) == ("DistributedSampler", True, 2), rank
            assert (message.epoch, message.sampler_epoch, message.shuffle) == (epoch, epoch + 5, True)
            assert (message.batch_size, message.length, message.workers) == (4, 2, 0)
            message = reported["shuffled", epoch]
            assert (message.sampler, message.distributed, message.shuffle) == ("RandomSampler", False, True)
            assert (message.epoch, message.sampler_epoch, message.length) == (epoch, -1, 4)
            message = reported["in order", epoch]
            assert (message.sampler, message.distributed, message.shuffle) == ("SequentialSampler", False, False)
        assert reported["list of batches", 0].sampler == "list"
        assert (reported["odd", 1].sampler, reported["odd", 1].length) == ("Odd", 0)


def slow_loader(rank, world_size):
    """A loader in the main process that dawdles every other batch, and an error of the user's in the middle."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    batches = loader(world_size, rank, batches=12)
    collate = batches.collate_fn
    batches.collate_fn = lambda samples: (time.sleep(NAP_S if agent._recorder.index % 2 else 0), collate(samples))[1]
    for batch, target in batches:
        train_step(model, optimizer, batch, target)

    def fail(_samples):
        raise FileNotFoundError("sample 7")

    batches.collate_fn = fail
    with pytest.raises(FileNotFoundError, match="sample 7"):
        next(iter(batches))
    return snapshot(agent).steps, agent._recorder.clock.phase


def test_waiting_for_the_loader_is_data_time_and_its_error_passes(pool):
    for steps, phase in pool.run(slow_loader, 2):
        quiet, slow = (median(step.data_ns for step in steps if step.index % 2 == odd) for odd in (0, 1))
        assert slow - quiet > 0.5 * NAP_S * 1e9
        assert phase == OTHER  # the wait is over


def dispatched(rank, world_size):
    """Rank 0 loads a batch for each rank, as Accelerate's dispatcher does; what it sends is beside the point."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    batches = iter(DataLoader(TensorDataset(torch.randn(8 * 4 * world_size, 8)), batch_size=8))
    for _ in range(4):
        batch = torch.zeros(8, 8)
        if rank == 0:
            batch = [next(batches)[0] for _ in range(world_size)][rank]
        train_step(model, optimizer, batch, TARGET)
    return [(step.samples, step.batch) for step in snapshot(agent).steps]


def test_batches_that_one_rank_loads_for_all_count_where_they_are_trained_on(pool):
    assert pool.run(dispatched, 2) == [[(8, 8)] * 4] * 2
