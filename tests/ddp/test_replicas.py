"""Replicas that drift apart and ranks that read the same samples can be seen in what the ranks publish."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch.agent
from ddpwatch.core.detectors.drift import drift
from ddpwatch.core.state.run import Place, RunState
from tests.builders.synthetic_run import look
from tests.builders.training import Net, bits, make, snapshot, train_step

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


def in_two_groups(rank, world_size, *, nudged, ignored=()):
    """Two pairs of ranks, each of which trains a model of its own with DDP."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank // 2)
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, list(ignored))
    if ignored:
        nn.init.normal_(net.first.weight, generator=torch.Generator().manual_seed(rank))
    model = DistributedDataParallel(net, process_group=groups[rank // 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    agent = ddpwatch.agent.install(model)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        train_step(model, optimizer, torch.randn(16, 8, generator=generator), TARGET)
    if rank == nudged:
        with torch.no_grad():
            net.first.weight.add_(0.5)
    for _ in range(7):
        train_step(model, optimizer, torch.randn(16, 8, generator=generator), TARGET)
    return snapshot(agent)


def findings(snaps):
    state = RunState("ab12cd34", "train", 4, [Place(rank, "node-a", 1000 + rank) for rank in range(4)])
    for snap in snaps:
        state.apply(snap, 1)
    assert all(rank.checksums for rank in state.ranks.values())
    return drift(look(state))


def test_models_of_two_process_groups_are_no_replicas_of_each_other(pool):
    snaps = pool.run(in_two_groups, 4, nudged=None)
    assert [snap.hello.replicas for snap in snaps] == ["0-1", "0-1", "2-3", "2-3"]
    assert len({snap.checksums[0].crc for snap in snaps}) == 2
    assert findings(snaps) == []


@pytest.mark.parametrize(("nudged", "ranks"), [(1, (0, 1)), (2, (2, 3))])
def test_a_replica_that_drifts_inside_its_process_group_is_found(pool, nudged, ranks):
    (finding,) = findings(pool.run(in_two_groups, 4, nudged=nudged))
    assert finding.ranks == ranks
    assert finding.message.startswith(f"ranks {ranks[0]}-{ranks[1]} differ in parameter first.weight")


def test_parameters_that_ddp_ignores_may_differ(pool):
    snaps = pool.run(in_two_groups, 4, nudged=None, ignored=["first.weight"])
    assert {snap.checksums[0].parameter for snap in snaps} == {"first.bias"}
    assert findings(snaps) == []


def two_models(rank, world_size):
    """A model of all ranks, and one of each pair."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, optimizer = make()
    second = DistributedDataParallel(nn.Linear(3, 2), process_group=groups[rank // 2])
    agent = ddpwatch.agent.install(model, optimizer=optimizer)
    ddpwatch.agent.install(second)
    for _ in range(12):
        second(torch.ones(4, 3)).sum().backward()
        train_step(model, optimizer, torch.ones(16, 8), TARGET)
    return [name for name, _ in agent._checksums._named], snapshot(agent).hello.replicas


def test_a_further_model_with_another_process_group_has_no_checksums(pool):
    for names, replicas in pool.run(two_models, 4):
        assert names == ["first.weight", "first.bias", "last.weight", "last.bias"]
        assert replicas == ""


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
