"""Evaluation between steps is distinguished from training, and training in eval mode from evaluation."""

import time
from statistics import median

import pytest
import torch

import ddpwatch.agent
from ddpwatch import wire
from tests.builders.training import PHASES, loader, make, snapshot, train_step

NAP_S = 0.08
BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
TARGET = torch.arange(16) % 4


def evaluating(rank, world_size, *, through, grad):
    """After every fourth step an evaluation, slow in its loader and in its forward pass on both ranks."""
    model, optimizer = make(norm=True)
    agent = ddpwatch.agent.install(model)
    held_out = loader(world_size, rank, batches=2)
    collate = held_out.collate_fn
    held_out.collate_fn = lambda samples: (time.sleep(NAP_S / 4), collate(samples))[1]
    for step, (batch, target) in enumerate(loader(world_size, rank, batches=12)):
        train_step(model, optimizer, batch, target)
        if step % 4 == 3:
            model.eval()
            model.module.before_forward = lambda: time.sleep(NAP_S / 4)
            with torch.set_grad_enabled(grad):
                for sample, _ in held_out:
                    (model if through == "ddp" else model.module)(sample)
            model.module.before_forward = lambda: None
            model.train()
    train_step(model, optimizer, BATCH, TARGET)
    return snapshot(agent)


@pytest.mark.parametrize(("through", "grad"), [("ddp", False), ("ddp", True), ("inner", False)])
def test_evaluation_is_other_time_and_takes_no_samples(pool, through, grad):
    for snap in pool.run(evaluating, 2, through=through, grad=grad):
        evaluated = [step for step in snap.steps if step.index in (4, 8, 12)]
        quiet = [step for step in snap.steps if step.index in (2, 6, 10)]
        grown_ns = {
            name: median(getattr(step, f"{name}_ns") for step in evaluated)
            - median(getattr(step, f"{name}_ns") for step in quiet)
            for name in PHASES
        }
        assert grown_ns["other"] > 0.6 * NAP_S * 1e9
        assert max(grown_ns["data"], grown_ns["forward"]) < 0.4 * NAP_S * 1e9, grown_ns
        assert {step.samples for step in snap.steps} == {16}
        assert len(snap.loaders) == 1  # the training's; the three passes over the held-out data are not reported
        marked = [step.index for step in snap.steps if step.flags & wire.EVALUATED]
        assert marked == ([4, 8, 12] if through == "ddp" else [])


def frozen(rank, world_size):
    model, optimizer = make(norm=True)
    agent = ddpwatch.agent.install(model)
    model.eval()
    model.module.before_forward = lambda: time.sleep(NAP_S / 4)
    for batch, target in loader(world_size, rank, batches=5):
        train_step(model, optimizer, batch, target)
    return snapshot(agent).steps


def test_training_in_eval_mode_is_learnt_from_the_first_gradient(pool):
    for steps in pool.run(frozen, 2):
        assert len(steps) == 5
        assert [step.backwards for step in steps] == [0, 1, 1, 1, 1]
        assert all(step.forward_ns > 0.9 * NAP_S / 4 * 1e9 for step in steps[1:])
        assert all(step.data_ns for step in steps[1:])
        assert [step.flags for step in steps[1:]] == [0] * 4


def interrupted(rank, world_size):
    """A forward pass that raises, an evaluation, and on with the training."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    train_step(model, optimizer, BATCH, TARGET)

    def fail():
        raise ZeroDivisionError

    model.module.before_forward = fail
    with pytest.raises(ZeroDivisionError):
        model(BATCH)
    model.module.before_forward = lambda: None
    with torch.no_grad():
        model(BATCH)
    train_step(model, optimizer, BATCH, TARGET)
    return snapshot(agent)


def test_a_forward_pass_that_raises_leaves_nothing_behind(pool):
    for snap in pool.run(interrupted, 2):
        assert snap.notes == []
        assert [(step.backwards, step.flags) for step in snap.steps] == [(1, 0), (1, wire.EVALUATED)]
