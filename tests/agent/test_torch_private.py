"""Private names of torch: in one file, with what is missing without each; none of them takes the rest with it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpwatch.agent import torch_private
from ddpwatch.agent.clock import BACKWARD, FORWARD, HostClock
from ddpwatch.agent.fail_open import Switch
from ddpwatch.agent.hooks import backward as backward_hooks
from ddpwatch.agent.hooks import forward as forward_hooks
from ddpwatch.agent.hooks.comm import BucketTimer
from ddpwatch.agent.patching import Patch
from ddpwatch.agent.step_recorder import Recorder
from ddpwatch.agent.torch_private import NAMES, PrivateName, missing_names

AGENT = Path(torch_private.__file__).parent
ALLOWED = {"_getframe", "_current_frames", "_fields_", "_nvmlGetFunctionPointer", "_ddpwatch_times_itself", "_id"}
"""Private names of Python, ctypes and NVML's binding, a mark of ddpwatch, and the end of a variable's name."""
PRIVATE = re.compile(r"_[A-Za-z]\w*")


def private_names(path: Path) -> set[str]:
    """Private names in a file that are not attributes of its own classes: as attributes, imports or strings."""
    tree = ast.parse(path.read_text())
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    slots = {
        id(constant)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__"
        for constant in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in {"self", "cls"} | classes:
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names} | set(str(node.module).split("."))
        elif isinstance(node, ast.Import):
            found |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in slots:
            found |= set(re.split(r"[./]", node.value)) if " " not in node.value else set()
    return {name for name in found if PRIVATE.fullmatch(name)} - ALLOWED


def test_no_other_file_of_the_agent_has_a_private_name_of_torch():
    files = [path for path in AGENT.rglob("*.py") if path.name != "torch_private.py"]

    assert len(files) > 30
    assert {path.name: names for path in files if (names := private_names(path))} == {}


def test_every_private_name_in_the_file_is_in_the_table():
    listed = {part for each in NAMES for part in each.name.split(".")}
    own = {"_orig_mod", "_ddp_params_and_buffers_to_ignore", "_asdict", "_functions", "_flatten"}

    assert private_names(AGENT / "torch_private.py") - listed - own == set()


def test_this_torch_has_what_its_version_should_have():
    assert [each for each in missing_names() if each.expected] == []
    assert all(each.use and each.without for each in NAMES)


def test_a_missing_name_is_reported_if_the_build_should_have_it():
    names = [
        PrivateName("torch._C._no_such_name", "a test", "nothing is tested"),
        PrivateName("torch._C._from_the_future", "a test", "nothing is tested", since=(99, 0)),
        PrivateName("torch.utils.data.dataloader._BaseDataLoaderIter._num_yielded", "a test", "nothing is tested"),
    ]
    found = missing_names(names)

    assert [(each.name, each.since, each.expected) for each in found] == [
        ("torch._C._no_such_name", "2.4", True),
        ("torch._C._from_the_future", "99.0", False),
    ]


def test_what_torch_lacks_is_not_wrapped():
    class Owner:
        pass

    for owner in (Owner, None):
        Patch(owner, "_gone", lambda original: original).undo()

    assert not hasattr(Owner, "_gone")


@pytest.fixture
def single_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def recorder():
    return Recorder(HostClock(), Switch())


def one_step(recorder, model):
    """Forward and backward of a watched model."""
    hooks = backward_hooks.BackwardHooks(recorder, BucketTimer(recorder))
    forward = forward_hooks.ForwardHooks(recorder, hooks, lambda _model: None)
    forward.watch(model)
    try:
        model(torch.ones(1, 2)).sum().backward()
    finally:
        forward.remove()
        hooks.remove()


def phases_of_a_step(recorder) -> tuple[int, int]:
    """The phase inside of forward and the one inside of backward, of a plain model."""
    seen = []

    class Layer(nn.Linear):
        def forward(self, batch):
            seen.append(recorder.clock.phase)
            output = super().forward(batch)
            output.register_hook(lambda _gradient: seen.append(recorder.clock.phase))
            return output

    model = nn.Sequential(Layer(2, 2), nn.ReLU())
    one_step(recorder, model)
    assert recorder.switch.on
    return seen[0], seen[1]


def test_with_all_names_both_phases_are_measured(recorder):
    assert phases_of_a_step(recorder) == (FORWARD, BACKWARD)


def test_without_callbacks_of_autograd_forward_is_still_measured(recorder, monkeypatch):
    monkeypatch.setattr(backward_hooks, "HAS_CALLBACKS", False)
    in_forward, in_backward = phases_of_a_step(recorder)

    assert in_forward == FORWARD
    assert in_backward != BACKWARD


def test_without_the_dict_of_hooks_backward_is_still_measured(recorder, monkeypatch):
    monkeypatch.setattr(torch_private, "_HAS_HOOK_DICT", False)

    assert phases_of_a_step(recorder) == (FORWARD, BACKWARD)


@pytest.mark.parametrize("name", ["PRE_FORWARD", "POST_FORWARD"])
def test_without_its_methods_ddp_is_watched_as_any_model(recorder, monkeypatch, name, single_rank):
    monkeypatch.setattr(forward_hooks, name, "_gone")
    seen = []
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model.module.register_forward_pre_hook(lambda *_: seen.append(recorder.clock.phase))
    one_step(recorder, model)

    assert seen == [FORWARD]
    assert recorder.backwards == 1
    assert recorder.switch.on


# Those that torch itself does not need in this job. Before the agent is imported, as in a torch without them.
POOR_TORCH = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
c10d = torch._C._distributed_c10d
for owner, names in (
    (torch._C, "_current_autograd_node _cuda_getDevice _cuda_isCurrentStreamCapturing"),
    (c10d, "_dump_fr_trace _dump_nccl_trace"),
    (c10d.ProcessGroup, "_get_sequence_number_for_group _device_types _enable_collectives_timing monitored_barrier"),
    (dist.distributed_c10d, "_get_default_store"),
    (DistributedDataParallel, "_register_builtin_comm_hook"),
):
    for name in names.split():
        if hasattr(owner, name):
            delattr(owner, name)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
import ddpwatch.agent
from ddpwatch.agent.torch_private import missing_names
from tests.builders.training import snapshot
assert len(missing_names()) > 5, missing_names()
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters())
agent = ddpwatch.agent.install(model)
for batch in DataLoader(torch.ones(8, 2), batch_size=2):
    loss = model(batch).sum()
    dist.all_reduce(loss.detach())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
snap = snapshot(agent)
print(agent.active, [bool(step.data_ns and step.forward_ns and step.backward_ns) for step in snap.steps])
print(sum(note.kind == "torch" for note in snap.notes) == sum(each.expected for each in missing_names()))
agent.close()
dist.destroy_process_group()
"""


def test_a_torch_without_most_of_them_is_still_measured(run_dir, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", POOR_TORCH, str(tmp_path / "store")], capture_output=True, text=True, check=False
    )

    assert (done.stdout, done.stderr) == ("True [True, True, True, True]\nTrue\n", "")
