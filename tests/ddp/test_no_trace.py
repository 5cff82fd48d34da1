"""ddpwatch leaves no trace: not in copies, not in checkpoints, not in torch after `close`, not in memory."""

import copy
import gc
import io
import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data.dataloader import _BaseDataLoaderIter

import ddpwatch.agent
from tests.builders.training import Net, make, snapshot, train_step

BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
TARGET = torch.arange(16) % 4


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch):
        return self.layer(batch)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def remains(model):
    """Everything of a model that is copied or written."""
    return saved(model), saved(copy.deepcopy(model)), sorted(model.__dict__), list(model.state_dict())


def saving(rank, world_size, *, comm):
    """What can be saved of a DDP model and of a plain one, before install, while training, and after close."""
    torch.manual_seed(1)
    wrapped, plain = DistributedDataParallel(Small()), Small()

    def everything():
        for model in (wrapped, plain):
            model.zero_grad(set_to_none=True)
        return remains(wrapped), remains(wrapped.module), remains(plain)

    # One step first, because DDP writes to itself in it; and without a rate, so that nothing changes.
    steps = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (wrapped, plain)]
    if comm == "auto":
        train_step(wrapped, steps[0], BATCH, TARGET)
        train_step(wrapped, steps[0], BATCH, TARGET)
    found = [everything()]
    agent = ddpwatch.agent.install(wrapped, comm=comm)
    ddpwatch.agent.install(plain)
    found.append(everything())
    for model, optimizer in zip((wrapped, plain), steps, strict=True):
        for _ in range(3):
            train_step(model, optimizer, BATCH, TARGET)
    found.append(everything())
    agent.close()
    found.append(everything())
    return found


def test_copies_and_checkpoints_are_the_same_to_the_byte(pool):
    for before, installed, trained, closed in pool.run(saving, 2, comm="auto"):
        assert installed == before
        assert trained == before
        assert closed == before


def test_checkpoints_hold_nothing_of_ddpwatchs_own_hook(pool):
    for before, *later in pool.run(saving, 2, comm="buckets"):
        assert b"ddpwatch" not in repr(later).encode()
        assert [found[1:] for found in later] == [before[1:]] * 3


OWNERS = (DistributedDataParallel, _BaseDataLoaderIter, torch.amp.GradScaler, Net, nn.Linear, nn.Module)


def closing(rank, world_size):
    """Names in torch's classes that are not the same object after close, and hooks that are still there."""
    before = [dict(vars(owner)) for owner in OWNERS]
    hooks_before = [dict(hooks) for hooks in global_hooks()]
    model, optimizer = make()
    plain = nn.Linear(8, 4)
    agent = ddpwatch.agent.install(model)
    ddpwatch.agent.install(plain)
    ddpwatch.agent.install(Net())
    train_step(model, optimizer, BATCH, TARGET)
    during = changed(before)
    agent.close()
    return (
        during,
        changed(before),
        [dict(hooks) == past for hooks, past in zip(global_hooks(), hooks_before, strict=True)],
    )


def global_hooks():
    return optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks


def changed(before):
    names = []
    for owner, past in zip(OWNERS, before, strict=True):
        now = vars(owner)
        names += [
            f"{owner.__name__}.{name}"
            for name in sorted(now.keys() | past.keys())
            if now.get(name) is not past.get(name) and name not in ("__doc__", "__static_attributes__")
        ]
    return names


def test_close_gives_every_class_its_own_methods_back(pool):
    for during, after, hooks_as_before in pool.run(closing, 2):
        assert during == [
            "DistributedDataParallel._post_forward",
            "DistributedDataParallel._pre_forward",
            "_BaseDataLoaderIter.__next__",
            "GradScaler.step",
            "Net.__call__",
            "Linear.__call__",
        ]
        assert after == []
        assert hooks_as_before == [True, True]


def forgetting(rank, world_size, *, comm):
    model, optimizer = make()
    plain = Small()
    agent = ddpwatch.agent.install(model, comm=comm)
    ddpwatch.agent.install(plain)
    for _ in range(12):
        train_step(model, optimizer, BATCH, TARGET)
    train_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), BATCH, TARGET)
    gone = [weakref.ref(thing) for thing in (model, model.module, optimizer, plain, plain.layer.weight)]
    del model, optimizer, plain
    gc.collect()
    return [reference() is None for reference in gone], agent.active


def test_the_agent_keeps_no_model_alive(pool):
    assert pool.run(forgetting, 2, comm="auto") == [([True] * 5, True)] * 2


def test_the_agents_own_hook_keeps_no_model_alive(pool):
    assert pool.run(forgetting, 2, comm="buckets") == [([True] * 5, True)] * 2


def long_run(rank, world_size):
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    counts = []
    for step in range(220):
        train_step(model, optimizer, BATCH, TARGET)
        if step in (19, 219):
            gc.collect()
            counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert len(snapshot(agent).steps) == 220
    return counts


def test_no_tensor_is_kept_from_step_to_step(pool):
    for early, late in pool.run(long_run, 2):
        assert late == early
