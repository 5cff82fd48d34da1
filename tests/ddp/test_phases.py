"""Phases on real ranks are distinguished, and a wait for another rank is not counted as work."""

import time

import pytest

import ddpwatch.agent
from tests.builders.training import PHASES, loader, make, medians_ns, snapshot, train_step

NAP_S = 0.06
STEPS = 34


def napping_run(rank, world_size, *, phases, norm=False):
    """Every second step the ranks in `phases` sleep in theirs. Returns medians of the quiet and of the slow steps."""
    model, optimizer = make(norm=norm)
    agent = ddpwatch.agent.install(model)

    phase = phases.get(rank)

    def nap():
        if agent._recorder.index % 2:
            time.sleep(NAP_S)

    if phase == "forward":
        model.module.before_forward = nap
    if phase == "backward":
        model.module.before_backward = nap
    if phase == "optimizer":
        optimizer.register_step_pre_hook(lambda *_: nap())
    batches = loader(world_size, rank, batches=STEPS)
    if phase == "data":
        fetch = batches.collate_fn
        batches.collate_fn = lambda samples: (nap(), fetch(samples))[1]
    for batch, target in batches:
        if phase == "other":
            nap()
        train_step(model, optimizer, batch, target)
    steps = [step for step in snapshot(agent).steps if step.index >= 10]
    assert all(step.step_ns == sum(getattr(step, f"{name}_ns") for name in PHASES) for step in steps)
    return [medians_ns([step for step in steps if step.index % 2 == odd]) for odd in (0, 1)]


def growth_ns(quiet, slow):
    return {name: slow[name] - quiet[name] for name in quiet}


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "other"])
def test_a_sleep_lands_in_its_own_phase_and_in_the_others_sync(pool, phase):
    guilty, victim = (growth_ns(*medians) for medians in pool.run(napping_run, 2, phases={0: phase}))

    nap_ns = NAP_S * 1e9
    assert guilty[phase] > 0.5 * nap_ns
    assert all(guilty[name] < 0.4 * nap_ns for name in PHASES if name != phase), guilty
    # A rank that is late after the all-reduce of a step is waited for in the next one.
    waited_ns = -victim["sync"] if phase == "optimizer" else victim["sync"]
    assert waited_ns > 0.5 * nap_ns
    assert all(victim[name] < 0.4 * nap_ns for name in PHASES if name != "sync"), victim


def test_the_wait_in_the_buffer_broadcast_is_sync_and_not_forward(pool):
    """BatchNorm buffers are broadcast between DDP's entry and the inner module's: a late rank 0 is waited for there."""
    _, victim = (growth_ns(*medians) for medians in pool.run(napping_run, 2, phases={0: "other"}, norm=True))

    assert victim["presync"] > 0.5 * NAP_S * 1e9
    assert victim["sync"] >= victim["presync"] * 0.9
    assert victim["forward"] < 0.4 * NAP_S * 1e9


def test_two_slow_ranks_that_take_turns_are_waiting_and_not_the_wire(pool):
    """Rank 0 is late for the buffer broadcast, rank 1 for the all-reduce: both wait, and the network is idle."""
    first, second = (
        growth_ns(*medians) for medians in pool.run(napping_run, 2, phases={0: "other", 1: "backward"}, norm=True)
    )

    nap_ns = NAP_S * 1e9
    assert first["sync"] > 0.5 * nap_ns
    assert second["sync"] > 0.5 * nap_ns
    wire_ns = sum(min(growth[name] for growth in (first, second)) for name in ("presync", "postsync"))
    assert wire_ns < 0.4 * nap_ns
