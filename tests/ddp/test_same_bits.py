"""Training computes the same bits with ddpwatch as without it."""

import random

import pytest
import torch
from torch import nn

import ddpwatch.agent
from tests.builders.training import bits, make, train_step

STEPS = 50


def watched_and_not(rank, world_size, *, comm, steps=STEPS, **ddp):
    """Trains twice from the same start, with dropout and batch norm, and returns (without ddpwatch, with it)."""
    batches = torch.randn(steps, 8, 8, generator=torch.Generator().manual_seed(rank))
    target = torch.arange(8) % 4

    def run():
        for batch in batches:
            train_step(model, optimizer, nn.functional.dropout(batch), target)
        return bits(model), torch.get_rng_state().numpy().tobytes(), random.getstate()

    results = []
    for watched in (False, True):
        model, optimizer = make(norm=True, **ddp)
        random.seed(3)
        agent = ddpwatch.agent.install(model, comm=comm) if watched else None
        results.append(run())
    assert agent.active
    assert agent._recorder.index == steps
    assert (agent._description["comm"] == "buckets") == (comm == "buckets")
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("comm", ["auto", "buckets"])
def test_parameters_gradients_buffers_and_rng_are_the_same_to_the_bit(pool, world_size, comm):
    for without, with_agent in pool.run(watched_and_not, world_size, comm=comm):
        assert with_agent == without


@pytest.mark.parametrize("setting", ["gradient_as_bucket_view", "find_unused_parameters", "static_graph"])
def test_bits_are_the_same_with_each_setting_of_ddp(pool, setting):
    for without, with_agent in pool.run(watched_and_not, 3, comm="auto", **{setting: True}):
        assert with_agent == without


def install_and_close(rank, world_size):
    model, _ = make()
    random.seed(4)
    torch.manual_seed(4)
    states = []
    for _ in range(2):
        states.append((torch.get_rng_state().numpy().tobytes(), random.getstate()))
        ddpwatch.agent.install(model).close()
    return states


def test_install_and_close_draw_no_random_number(pool):
    for before, after in pool.run(install_and_close, 2):
        assert after == before


def uneven(rank, world_size, *, comm):
    results = []
    for watched in (False, True):
        model, optimizer = make(norm=True)
        agent = ddpwatch.agent.install(model, comm=comm) if watched else None
        generator = torch.Generator().manual_seed(rank)
        with model.join():
            for _ in range(12 if rank == 0 else 5):
                train_step(model, optimizer, torch.randn(8, 8, generator=generator), torch.arange(8) % 4)
        results.append(bits(model))
    return results, agent._recorder.index, agent.active


@pytest.mark.parametrize("comm", ["auto", "buckets"])
def test_uneven_inputs_under_join_train_through_to_the_same_bits(pool, comm):
    (long, steps, active), (short, fewer_steps, also_active) = pool.run(uneven, 2, comm=comm)
    assert long[0] == long[1]
    assert short[0] == short[1]
    assert (steps, fewer_steps) == (12, 5)
    assert active
    assert also_active
