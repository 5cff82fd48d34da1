"""Sequences of uneven length on real ranks: their sizes are measured, and nobody is blamed for the waiting."""

import random
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch.agent
from ddpwatch.core.detectors.straggler import straggler
from ddpwatch.core.detectors.uneven_work import uneven_work
from tests.builders.synthetic_run import look, make_run, only
from tests.builders.training import snapshot

STEPS = 60
BATCH = 2
TOKEN_S = 0.0002
"""Seconds that a token takes in the forward pass: without a core, so that a busy machine changes little."""


class Reader(nn.Module):
    """Embeds tokens, and takes longer for more of them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 4)

    def forward(self, input_ids=None, attention_mask=None):
        time.sleep(TOKEN_S * input_ids.shape[1])
        return self.embedding(input_ids).sum() * attention_mask.sum()


def reading_run(rank, world_size):
    """Train on sequences of random lengths. Returns the steps, and the lengths."""
    model = DistributedDataParallel(Reader())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    chance = random.Random(rank)
    lengths = [chance.choice((32, 64, 128, 256)) for _ in range(STEPS)]
    with ddpwatch.agent.install(model) as agent:
        for length in lengths:
            ids = torch.ones(BATCH, length, dtype=torch.long)
            model(input_ids=ids, attention_mask=torch.ones_like(ids)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(agent).steps, lengths


def test_the_waiting_for_the_longest_sequence_of_each_step_is_found(pool):
    runs = pool.run(reading_run, 2)
    for steps, lengths in runs:
        assert [step.input_elements for step in steps] == [BATCH * length for length in lengths]

    context = look(make_run({rank: steps for rank, (steps, _) in enumerate(runs)}))
    finding = only(uneven_work(context))
    assert finding.ranks == ()
    assert finding.evidence["follows_size_percent"] > 50
    assert [each for each in straggler(context) if each.proven] == []
