"""What one step is: accumulation, skipped steps, several optimizers, closures."""

import contextlib
import time
from statistics import median

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch.agent
from ddpwatch import wire
from ddpwatch.agent.clock import PRESYNC, SYNC
from tests.builders.training import Net, loader, make, medians_ns, snapshot, train_step

NAP_S = 0.06
BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
TARGET = torch.arange(16) % 4


def loss_of(model):
    return nn.functional.cross_entropy(model(BATCH), TARGET)


def accumulating(rank, world_size, *, micro=4, steps=20):
    """Rank 0 dawdles in the second micro-batch of every odd step, where nothing is synchronised."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    syncs_ns = []

    def sync_ns():
        agent._recorder.clock.switch(agent._recorder.clock.phase)
        return agent._recorder.clock._totals[SYNC] + agent._recorder.clock._totals[PRESYNC]

    batches = iter(loader(world_size, rank, batches=micro * steps))
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            batch, target = next(batches)
            if rank == 0 and part == 1 and step % 2:
                time.sleep(NAP_S)
            with model.no_sync() if part < micro - 1 else contextlib.nullcontext():
                nn.functional.cross_entropy(model(batch), target).backward()
            if part == micro - 2:
                syncs_ns.append(sync_ns())
        optimizer.step()
    return snapshot(agent).steps, syncs_ns


def test_micro_batches_under_no_sync_are_one_step_and_only_the_last_one_waits(pool):
    _, (steps, unsynced_ns) = pool.run(accumulating, 2)

    assert len(steps) == 20
    assert {(step.backwards, step.samples, step.batch) for step in steps} == {(4, 64, 16)}
    nap_ns = NAP_S * 1e9
    quiet_ns, slow_ns = (median(step.sync_ns for step in steps[2:] if step.index % 2 == odd) for odd in (0, 1))
    assert slow_ns - quiet_ns > 0.5 * nap_ns
    assert median(unsynced_ns[1::2]) < 0.1 * nap_ns


def no_sync(rank, world_size):
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    for _ in range(3):
        with model.no_sync():
            loss_of(model).backward()
        loss_of(model).backward()
        optimizer.step()
    return snapshot(agent).steps


def test_backward_passes_under_no_sync_are_counted(pool):
    for steps in pool.run(no_sync, 2):
        assert [(step.backwards, step.samples, step.batch) for step in steps] == [(2, 32, 16)] * 3


def scaled(rank, world_size):
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model) * (float("inf") if step in (2, 3) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [(step.index, step.flags) for step in snapshot(agent).steps]


def test_a_step_that_the_grad_scaler_skips_is_counted_and_marked(pool):
    for steps in pool.run(scaled, 2):
        assert steps == [(k, wire.SKIPPED if k in (2, 3) else 0) for k in range(6)]


def gan(rank, world_size, *, iterations, n_critic=1, leader=None, generator_first=False):
    """Two DDP models with an optimizer each; returns the agent's step count after every iteration."""
    torch.manual_seed(1)
    models = {name: DistributedDataParallel(Net()) for name in ("critic", "generator")}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in models.items()}
    agent = ddpwatch.agent.install(models["critic"])
    again = ddpwatch.agent.install(models["generator"], optimizer=optimizers.get(leader))
    assert again is agent
    order = ["critic"] * n_critic + ["generator"]
    counts = []
    for _ in range(iterations):
        for name in reversed(order) if generator_first else order:
            train_step(models[name], optimizers[name], BATCH, TARGET)
        counts.append(agent._recorder.index)
    return counts, [step.backwards for step in snapshot(agent).steps]


def test_two_optimizers_in_one_iteration_make_one_step(pool):
    for counts, backwards in pool.run(gan, 2, iterations=5):
        assert counts == [1, 2, 3, 4, 5]
        assert backwards == [1, 2, 2, 2, 2]  # the generator's pass belongs to the step that the critic's ends


def test_the_optimizer_named_at_install_ends_the_steps(pool):
    for counts, backwards in pool.run(gan, 2, iterations=4, leader="generator"):
        assert counts == [1, 2, 3, 4]
        assert backwards == [2, 2, 2, 2]


def test_a_critic_that_steps_more_often_ends_a_step_each_time(pool):
    for counts, _ in pool.run(gan, 2, iterations=4, n_critic=3):
        assert counts == [3, 6, 9, 12]


def test_an_optimizer_that_steps_twice_as_often_as_the_leader_takes_over(pool):
    for counts, _ in pool.run(gan, 2, iterations=4, n_critic=3, generator_first=True):
        assert counts == [3, 6, 9, 12]


def gan_that_shows_its_batches_often(rank, world_size, *, passes):
    """A discriminator sees real and fake samples, then the fake ones again; there is no DataLoader."""
    torch.manual_seed(1)
    generator, critic = (DistributedDataParallel(nn.Linear(8, 8)) for _ in range(2))
    generator_optimizer, critic_optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.01) for model in (generator, critic)
    )
    agent = ddpwatch.agent.install(generator, optimizer=generator_optimizer)
    ddpwatch.agent.install(critic)
    for _ in range(3):
        fake = generator(BATCH)
        losses = [critic(BATCH).square().mean(), critic(fake.detach()).square().mean()]
        if passes == 1:
            losses = [sum(losses)]
        for loss in losses:
            loss.backward()
        critic_optimizer.step()
        critic(fake).square().mean().backward()
        generator_optimizer.step()
    return [(step.samples, step.batch) for step in snapshot(agent).steps]


@pytest.mark.parametrize("passes", [1, 2])
def test_a_batch_that_is_shown_to_several_models_is_counted_once(pool, passes):
    for steps in pool.run(gan_that_shows_its_batches_often, 2, passes=passes):
        assert steps == [(16, 16)] * 3


def gan_with_one_model_installed(rank, world_size, *, watched):
    """Rank 1 is slow in the forward pass of one of two models, of which one is passed to `install`."""
    models = {name: DistributedDataParallel(nn.Linear(8, 8)) for name in ("generator", "critic")}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in models.items()}
    agent = ddpwatch.agent.install(models[watched])

    def slow(*_):
        time.sleep(NAP_S if rank == 1 else 0)

    models["critic"].module.register_forward_pre_hook(slow)
    for _ in range(8):
        fake = models["generator"](BATCH)
        optimizers["critic"].zero_grad()
        (models["critic"](fake.detach()).mean() - models["critic"](BATCH).mean()).backward()
        optimizers["critic"].step()
        optimizers["generator"].zero_grad()
        models["critic"](fake).mean().backward()
        optimizers["generator"].step()
    snap = snapshot(agent)
    # The critic's optimizer ends the first step, until that of the watched model is seen.
    steps = snap.steps[2:]
    return medians_ns(steps), {(step.samples, step.batch) for step in steps}, snap.notes


@pytest.mark.parametrize("watched", ["generator", "critic"])
def test_ranks_that_wait_in_a_model_that_was_not_installed_are_in_sync(pool, watched):
    (innocent, counted, notes), (guilty, *_) = pool.run(gan_with_one_model_installed, 2, watched=watched)

    assert counted == {(16, 16)}
    assert not notes
    assert guilty["forward"] - innocent["forward"] > 2 * NAP_S * 1e9
    assert innocent["sync"] - guilty["sync"] > 2 * NAP_S * 1e9


def sharded(rank, world_size):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns at import of something deprecated in torch

    model, _ = make()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    agent = ddpwatch.agent.install(model)
    counts = []
    for _ in range(4):
        train_step(model, optimizer, BATCH, TARGET)
        counts.append(agent._recorder.index)
    return counts


def test_an_optimizer_that_steps_another_inside_its_own_step_ends_one_step(pool):
    assert pool.run(sharded, 2) == [[1, 2, 3, 4]] * 2


def unrelated(rank, world_size):
    model, optimizer = make()
    other = nn.Linear(2, 1)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    agent = ddpwatch.agent.install(model)

    def step_other():
        other(torch.ones(1, 2)).sum().backward()
        other_optimizer.step()

    step_other()
    before = agent._recorder.index
    train_step(model, optimizer, BATCH, TARGET)
    counts = [agent._recorder.index - before]
    for _ in range(3):
        for _ in range(3):
            step_other()
        train_step(model, optimizer, BATCH, TARGET)
        counts.append(agent._recorder.index - before)
    return counts


def test_an_optimizer_of_something_else_ends_no_step_once_the_models_own_is_seen(pool):
    assert pool.run(unrelated, 2) == [[1, 2, 3, 4]] * 2


def closures(rank, world_size):
    """Forward and backward inside `optimizer.step(closure)`, as Lightning does it; the update itself is slow."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        time.sleep(NAP_S)
        return loss

    for _ in range(4):
        optimizer.step(closure)
    searching = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.1)

    def quick_closure():
        searching.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    searching_agent = ddpwatch.agent.install(model, optimizer=searching)
    for _ in range(2):
        searching.step(quick_closure)
    assert searching_agent is agent
    return snapshot(agent).steps


def test_a_step_whose_closure_runs_the_passes_is_one_step_and_what_follows_them_is_optimizer(pool):
    for steps in pool.run(closures, 2):
        assert [step.backwards for step in steps[:4]] == [1] * 4
        assert [step.backwards > 1 for step in steps[4:]] == [True] * 2
        assert all(step.forward_ns and step.backward_ns and step.sync_ns for step in steps)
        assert min(step.optimizer_ns for step in steps[:4]) > 0.9 * NAP_S * 1e9
        assert median(step.other_ns for step in steps[1:4]) < 0.5 * NAP_S * 1e9


class Careful(torch.optim.SGD):
    """A subclass whose step calls its parent's, which torch hooks a second time; it can be made to fail."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise FloatingPointError("no")
        return super().step(closure)


def failing(rank, world_size, *, same):
    model, plain = make()
    agent = ddpwatch.agent.install(model)
    train_step(model, plain, BATCH, TARGET)
    first, second = (Careful(model.parameters(), lr=0.01) for _ in range(2))
    again_by = first if same else second
    counts = []
    for optimizer in (first, *[again_by] * 5):
        optimizer.fails = not counts
        with contextlib.suppress(FloatingPointError):
            train_step(model, optimizer, BATCH, TARGET)
        optimizer.fails = False
        time.sleep(NAP_S)
        counts.append(agent._recorder.index)
    return counts, snapshot(agent).steps


@pytest.mark.parametrize("same", [True, False])
def test_an_optimizer_step_that_raises_does_not_confuse_those_that_follow(pool, same):
    for counts, steps in pool.run(failing, 2, same=same):
        assert counts[0] == 1  # the failed step ends nothing
        assert counts[-1] - counts[-3] == 2
        assert min(step.other_ns for step in steps[-2:]) > 0.9 * NAP_S * 1e9  # the pause after a step


def in_parts(rank, world_size, *, stage):
    """One optimizer that is stepped part by part, as DeepSpeed's ZeRO stages do it."""
    model, _ = make()
    agent = ddpwatch.agent.install(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.01)
    for _ in range(6):
        loss_of(model).backward()
        if stage == 2:
            whole = optimizer.param_groups
            for group in whole:
                optimizer.param_groups = [group]
                optimizer.step()
            optimizer.param_groups = whole
        else:
            held = [(group, group["params"]) for group in optimizer.param_groups]
            for group, _ in held:
                group["params"] = []
            for group, mine in held:
                for parameter in mine:
                    group["params"] = [parameter]
                    optimizer.step()
                group["params"] = []
            for group, mine in held:
                group["params"] = mine
        optimizer.zero_grad()
    return snapshot(agent).steps


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_that_is_stepped_part_by_part_ends_one_step_an_iteration(pool, stage):
    for steps in pool.run(in_parts, 2, stage=stage):
        assert [step.backwards for step in steps] == [1] * 6
        assert all(step.optimizer_ns for step in steps)


def block_by_block(rank, world_size):
    """Another half of the parameters in every iteration."""
    model, _ = make()
    agent = ddpwatch.agent.install(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters[:2], lr=0.01)
    for number in range(6):
        loss_of(model).backward()
        optimizer.param_groups[0]["params"] = parameters[2:] if number % 2 else parameters[:2]
        optimizer.step()
    return snapshot(agent).steps


def test_an_optimizer_with_other_parameters_in_every_iteration_ends_a_step_each_time(pool):
    assert [len(steps) for steps in pool.run(block_by_block, 2)] == [6, 6]
