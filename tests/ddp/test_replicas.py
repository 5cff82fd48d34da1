"""Replicas that drift apart and ranks that read the same samples can be seen in what the ranks publish."""

import torch

import ddpwatch.agent
from tests.builders.training import make, snapshot, train_step

TARGET = torch.arange(16) % 4


def sampled(rank, world_size, *, same_data, nudged):
    """Twelve steps without a learning rate; `nudged` is the rank whose first parameter moves by one ulp."""
    model, optimizer = make(lr=0.0)
    agent = ddpwatch.agent.install(model)
    generator = torch.Generator().manual_seed(0 if same_data else rank)
    if rank == nudged:
        with torch.no_grad():
            weight = model.module.first.weight.view(-1)
            weight[0] = torch.nextafter(weight[0], torch.tensor(10.0))
    for _ in range(12):
        train_step(model, optimizer, torch.randn(16, 8, generator=generator), TARGET)
    snap = snapshot(agent)
    return [step.fingerprint for step in snap.steps], [
        (reported.step, reported.parameter, reported.offset, reported.crc) for reported in snap.checksums
    ]


def test_the_same_batch_has_the_same_fingerprint_and_equal_replicas_equal_checksums(pool):
    (prints, sums), (other_prints, other_sums) = pool.run(sampled, 2, same_data=True, nudged=None)
    assert prints == other_prints
    assert len(set(prints)) == 12
    assert sums == other_sums
    assert [taken[:3] for taken in sums] == [(9, "first.weight", 0)]


def test_different_batches_have_different_fingerprints_and_a_replica_off_by_one_ulp_is_seen(pool):
    (prints, sums), (other_prints, other_sums) = pool.run(sampled, 2, same_data=False, nudged=1)
    assert not set(prints) & set(other_prints)
    assert sums[0][:3] == other_sums[0][:3]
    assert sums[0][3] != other_sums[0][3]
