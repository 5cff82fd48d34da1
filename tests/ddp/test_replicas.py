"""Replicas that drift apart and ranks that read the same samples can be seen in what the ranks publish."""

import torch

import ddpwatch.agent
from tests.builders.training import bits, make, snapshot, train_step

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


def optimizer_in_backward(rank, world_size, *, watched):
    """Each parameter is updated by a hook as soon as its gradient is there, which is before DDP averages it."""
    model, _ = make()
    agent = ddpwatch.agent.install(model) if watched else None
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.05)

        def update(_parameter, own=own):
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(12):
        torch.nn.functional.cross_entropy(model(torch.randn(16, 8, generator=generator)), TARGET).backward()
    return snapshot(agent).checksums[0].crc if agent is not None else bits(model)


def test_replicas_whose_optimizer_runs_in_a_hook_of_backward_do_differ_and_are_seen(pool):
    assert len(set(pool.run(optimizer_in_backward, 2, watched=False))) == 2
    assert len(set(pool.run(optimizer_in_backward, 2, watched=True))) == 2
