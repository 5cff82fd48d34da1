"""torch.compile around, inside and without DDP: the agent changes no bit and no graph, and the steps are recorded.

What is measured depends on what still runs as Python:

- DDP(compile(net)) and compile(DDP(net)): everything; torch itself leaves DDP's own seams to Python;
- a plain module that was compiled before it was installed: everything, around the compiled call;
- a plain module that is compiled after it was installed: steps, data and optimizer. Its forward and backward pass
  are inside the compiled call, where nothing of ddpwatch runs, and count as `other`.
"""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch.agent
from tests.builders.training import bits, snapshot

BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
STEPS = 3
KEEPS_GRAPHS = hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
"""Whether this torch lets ddpwatch keep functions out of a graph. If not, compile(DDP(...)) has two more graph breaks,
and phases only if the compiled model was installed.
"""


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, batch):
        return self.last(self.first(batch).relu())


def compiled(rank, world_size, *, around, fullgraph, installed):
    """Trains without an agent and with one; returns bits, graph breaks and compiled frames of both, and a snapshot."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    def compile_(module):
        return torch.compile(module, backend="aot_eager", fullgraph=fullgraph)

    results = []
    for watched in (False, True):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(1)
        net = Small()
        inner = compile_(net) if around == "ddp-around" else net
        model = inner if around == "plain" else DistributedDataParallel(inner)
        if watched and installed == "before":
            agent = ddpwatch.agent.install(model)
        if around != "ddp-around":
            model = compile_(model)
        if watched and installed == "after":
            agent = ddpwatch.agent.install(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(BATCH).square().mean().backward()
            optimizer.step()
        results.append((bits(net), sum(counters["graph_break"].values()), dict(counters["frames"])))
    snap = snapshot(agent)
    assert agent.active
    torch._dynamo.reset()
    return results, snap


CASES = [
    ("ddp-around", False, "after"),
    ("ddp-inside", False, "before"),
    ("ddp-inside", False, "after"),
    ("plain", True, "before"),
    ("plain", True, "after"),
]


@pytest.mark.parametrize(("around", "fullgraph", "installed"), CASES)
def test_a_compiled_model_trains_to_the_same_bits_with_the_same_graphs(pool, around, fullgraph, installed):
    answers = pool.run(compiled, 2, around=around, fullgraph=fullgraph, installed=installed, timeout_s=100)
    inside = (around, installed) == ("plain", "before")
    for (without, with_agent), snap in answers:
        if around == "ddp-inside" and not KEEPS_GRAPHS:
            assert with_agent[0] == without[0]
            continue
        assert with_agent == without
        assert [(step.backwards, step.samples) for step in snap.steps] == [(0, 0) if inside else (1, 16)] * STEPS
        assert all(bool(step.forward_ns and step.backward_ns) is not inside for step in snap.steps)
        assert all(step.optimizer_ns for step in snap.steps)
        assert around == "plain" or all(step.sync_ns for step in snap.steps)
        assert snap.hello.model == "Small"
