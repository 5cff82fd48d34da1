"""What `install` makes of models that are wrapped late, or not at all."""

import pytest
import torch
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ddpwatch.agent
from ddpwatch.agent.model_info import SAME_SAMPLES
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


def of_kind(rank, world_size, *, kind, early):
    """A few steps of a model that is wrapped in another way than by DDP, before or after `install`."""
    torch.manual_seed(1)
    model = Net()
    agent = ddpwatch.agent.install(model) if early else None
    root = wrapped(model, kind, world_size)
    agent = agent or ddpwatch.agent.install(root)
    optimizer = torch.optim.SGD(root.parameters(), lr=0.01)
    passes = pipeline(model, rank, world_size) if kind == "pipeline" else lambda: loss_of(root).backward()
    for _ in range(12):
        passes()
        optimizer.step()
        optimizer.zero_grad()
    assert agent.active
    return snapshot(agent)


def loss_of(model):
    return torch.nn.functional.cross_entropy(model(BATCH), TARGET)


def wrapped(model, kind, world_size):
    if kind in ("fsdp2", "fsdp2-tp", "tensor-parallel"):
        shard(model, kind, world_size)
    elif kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif kind == "replicate":
        return replicate(model)
    elif kind == "deepspeed":
        return deepspeed_engine(model)
    elif kind == "other-ddp":
        return type("DistributedDataParallel", (Wrapper,), {"__module__": "apex.parallel"})(model)
    return model


def shard(model, kind, world_size):
    rows = {"fsdp2": world_size, "fsdp2-tp": 2, "tensor-parallel": 1}[kind]
    mesh = init_device_mesh("cpu", (rows, world_size // rows), mesh_dim_names=("data", "tensor"))
    if kind != "fsdp2":
        parallelize_module(model, mesh["tensor"], {"first": ColwiseParallel(), "last": RowwiseParallel()})
        model.forward = lambda batch: model.last(model.first(batch).relu())
    if kind != "tensor-parallel":
        fully_shard = torch.distributed.fsdp.fully_shard
        for module in (model.first, model.last, model):
            fully_shard(module, mesh=mesh["data"])


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, batch):
        return self.module(batch)


def deepspeed_engine(model):
    """A stand-in of DeepSpeed's engine: a class of that name, in a module of that name."""
    code = "from tests.ddp.test_model_kinds import Wrapper\nclass DeepSpeedEngine(Wrapper):\n"
    code += "    def forward(self, batch):\n        return self.module(batch)\n"
    names = {"__name__": "deepspeed.runtime.engine"}
    exec(code, names)
    return names["DeepSpeedEngine"](model)


def pipeline(model, rank, world_size):
    """One step of a pipeline with two stages; the second one has the loss."""
    model.last = torch.nn.Linear(32, 8)
    stage = PipelineStage(model, rank, world_size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    return lambda: schedule.step(BATCH) if rank == 0 else schedule.step(target=BATCH)


@pytest.mark.parametrize(
    ("kind", "early", "world_size"),
    [
        ("fsdp2", False, 2), ("fsdp2", True, 2), ("fsdp1", False, 2), ("fsdp1", True, 2), ("tensor-parallel", False, 2),
        ("fsdp2-tp", False, 4), ("deepspeed", False, 2), ("deepspeed", True, 2), ("other-ddp", False, 2),
        ("replicate", False, 2), ("pipeline", False, 2),
    ],
)  # fmt: skip
def test_another_wrapper_is_recognized_and_nothing_false_is_said_about_it(pool, kind, early, world_size):
    if kind.startswith("fsdp2") and not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("needs torch 2.6")
    for snap in pool.run(of_kind, world_size, kind=kind, early=early):
        assert (snap.hello.kind, snap.hello.model) == (kind, "Net")
        shares_samples = kind in SAME_SAMPLES
        assert [note.kind for note in snap.notes] == (["same-samples"] if shares_samples else [])
        assert {step.samples for step in snap.steps} == {0 if shares_samples else 16}
        assert snap.checksums == []
        assert len(snap.steps) == 12
        if kind in ("fsdp2", "fsdp2-tp"):
            assert snap.hello.parameters == sum(parameter.numel() for parameter in Net().parameters())
