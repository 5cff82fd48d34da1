"""Whatever a model takes and returns, its backward pass and its batch are seen."""

import dataclasses
import warnings
from collections import OrderedDict, UserDict

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch.agent
from tests.builders.training import snapshot

BATCH = torch.randn(6, 8, generator=torch.Generator().manual_seed(5))


@dataclasses.dataclass
class Record:
    name: str
    logits: torch.Tensor


class Attributes:
    def __init__(self, logits):
        self.logits = logits


class ModelOutput(OrderedDict):
    """As Hugging Face has it: a dictionary whose keys are attributes too."""

    def __getattr__(self, name):
        return self[name]


LINE_PATTERNS = {
    "tensor": (lambda y: y, lambda o: o),
    "tuple": (lambda y: (None, y), lambda o: o[1]),
    "list": (lambda y: [y, 3], lambda o: o[0]),
    "dict": (lambda y: {"logits": y, "name": "x"}, lambda o: o["logits"]),
    "dataclass": (lambda y: Record("x", y), lambda o: o.logits),
    "object": (Attributes, lambda o: o.logits),
    "model output": (lambda y: ModelOutput(logits=y), lambda o: o.logits),
    "nested": (lambda y: {"heads": [(Record("x", y),)]}, lambda o: o["heads"][0][0].logits),
    "distribution": (lambda y: torch.distributions.Normal(y, 1.0), lambda o: o.loc),
}
TAKES = {
    "positional": lambda x: ((x,), {}),
    "keyword": lambda x: ((), {"batch": x}),
    "dict": lambda x: (({"mask": None, "batch": x},), {}),
    "batch encoding": lambda x: ((UserDict(batch=x),), {}),
    "scalar first": lambda x: ((torch.tensor(2.0), x), {}),
}


class Shaped(nn.Module):
    """Returns its output in whatever shape was chosen last."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.wrap = LINE_PATTERNS["tensor"][0]
        self.free = nn.Parameter(torch.zeros(3))

    def forward(self, *args, batch=None):
        if batch is None:
            batch = args[-1]
        if not isinstance(batch, torch.Tensor):
            batch = batch["batch"]
        return self.wrap(self.layer(batch) + self.free.sum())


def shaped(rank, world_size):
    torch.manual_seed(1)
    model = DistributedDataParallel(Shaped())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    agent = ddpwatch.agent.install(model)
    for wrap, unwrap in LINE_PATTERNS.values():
        model.module.wrap = wrap
        unwrap(model(BATCH)).sum().backward()
        optimizer.step()
    model.module.wrap = LINE_PATTERNS["tensor"][0]
    for give in TAKES.values():
        args, kwargs = give(BATCH)
        model(*args, **kwargs).sum().backward()
        optimizer.step()
    return snapshot(agent)


def test_the_backward_pass_and_the_batch_are_seen_in_every_shape(pool):
    names = [*LINE_PATTERNS, *TAKES]
    for snap in pool.run(shaped, 2):
        assert {name: step.backwards for name, step in zip(names, snap.steps, strict=True)} == dict.fromkeys(names, 1)
        assert {name: step.batch for name, step in zip(names, snap.steps, strict=True)} == dict.fromkeys(names, 6)
        assert snap.notes == []


class Hidden:
    """Keeps its tensor where it cannot be found."""

    __slots__ = ("_get",)

    def __init__(self, logits):
        self._get = lambda: logits


def unseen(rank, world_size):
    torch.manual_seed(1)
    model = DistributedDataParallel(Shaped())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    agent = ddpwatch.agent.install(model)
    model.module.wrap = Hidden
    for _ in range(3):
        model(BATCH)._get().sum().backward()
        optimizer.step()
    return snapshot(agent), agent.active


def test_an_output_that_shows_no_tensor_is_said_once_and_breaks_nothing(pool):
    for snap, active in pool.run(unseen, 2):
        assert [note.kind for note in snap.notes] == ["blind"]
        assert [step.backwards for step in snap.steps] == [0] * 3
        assert active


def gives_itself_away(rank, world_size):
    """A model that returns its own parameter; returns the hooks left on it, and what saving an output warned of."""
    torch.manual_seed(1)
    model = DistributedDataParallel(Shaped())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    agent = ddpwatch.agent.install(model)
    model.module.wrap = lambda y: (y, model.module.free)
    for _ in range(3):
        logits, _free = model(BATCH)
        logits.sum().backward()
        optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.save(logits, "/dev/null")
    warned = [str(warning.message) for warning in caught if "hook" in str(warning.message)]
    return model.module.free._backward_hooks, warned, [step.backwards for step in snapshot(agent).steps]


def test_a_parameter_in_the_output_keeps_no_hook_and_an_output_can_be_saved(pool):
    for hooks, warned, backwards in pool.run(gives_itself_away, 2):
        assert not hooks
        assert warned == []
        assert backwards == [1] * 3
