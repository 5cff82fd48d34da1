"""What `install` makes of models that are wrapped late, or not at all."""

import torch
from torch.nn.parallel import DistributedDataParallel

import ddpwatch.agent
from tests.builders.training import Net, make, snapshot, train_step

BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
TARGET = torch.arange(16) % 4


def plain(rank, world_size, *, wrapped_later):
    torch.manual_seed(1)
    model = Net()
    agent = ddpwatch.agent.install(model)
    if wrapped_later:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        train_step(model, optimizer, BATCH, TARGET)
    return snapshot(agent)


def test_an_unwrapped_model_in_a_job_of_several_ranks_is_noted(pool):
    for snap in pool.run(plain, 2, wrapped_later=False):
        (note,) = snap.notes
        assert note.kind == "not-wrapped"
        assert "2 ranks" in note.text
        assert snap.hello.kind == "plain"
        assert [step.backwards for step in snap.steps] == [1] * 3


def test_a_model_wrapped_after_install_is_measured_as_the_ddp_model_it_is(pool):
    for snap in pool.run(plain, 2, wrapped_later=True):
        assert snap.notes == []
        assert (snap.hello.kind, snap.hello.model) == ("ddp", "Net")
        assert snap.hello.ddp["static_graph"] == "False"
        assert [(step.backwards, step.samples) for step in snap.steps] == [(1, 16)] * 3
        assert all(step.sync_ns and step.presync_ns for step in snap.steps)


def described(rank, world_size):
    model, _ = make()
    return snapshot(ddpwatch.agent.install(model, run_name="mine")).hello


def test_hello_describes_the_model_and_the_job(pool):
    for rank, hello in enumerate(pool.run(described, 2)):
        assert (hello.rank, hello.world_size, hello.backend) == (rank, 2, "gloo")
        assert (hello.model, hello.kind, hello.comm, hello.device) == ("Net", "ddp", "passive", "cpu")
        assert hello.run_name == "mine"
        assert hello.parameters == sum(parameter.numel() for parameter in Net().parameters())
        assert hello.parameter_bytes == 4 * hello.parameters
