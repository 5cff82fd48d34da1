"""Real ranks that train at a steady pace until the test has seen enough."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path

import ddpwatch.agent
from tests.builders.training import loader, make, train_step

BASE_S = 0.027
"""Seconds that every rank sleeps in each step, which makes steps long without a core for each rank."""
MAX_STEPS = 3000


def napping_run(rank, world_size, *, place, steps=MAX_STEPS, guilty=-1, phase="", nap_s=0.0):
    """Train until the test has seen enough. One rank sleeps longer than the others. Returns the steps done."""
    model, optimizer = make()
    model.module.before_forward = lambda: time.sleep(BASE_S)
    batches = loader(world_size, rank, batches=steps)
    if rank == guilty and phase == "backward":
        model.module.before_backward = lambda: time.sleep(nap_s)
    if rank == guilty and phase == "data":
        fetch = batches.collate_fn
        batches.collate_fn = lambda samples: (time.sleep(nap_s), fetch(samples))[1]
    with ddpwatch.agent.install(model, run_name="napping") as agent:
        for step, (batch, target) in enumerate(batches):
            if is_over(Path(place), rank, step):
                break
            train_step(model, optimizer, batch, target)
        assert agent.active
        return agent._recorder.index


def is_over(place, rank, step):
    """Whether to stop before this step. All ranks agree: a rank one step ahead of rank 0 has synced with it."""
    last = place / "last"
    if rank == 0 and (place / "stop").exists() and not last.exists():
        (place / "draft").write_text(str(step + 1))
        (place / "draft").rename(last)
    return last.exists() and step > int(last.read_text())


@contextmanager
def training(pool, world_size, place, **arguments):
    """Real ranks that train inside the block, to their last step unless they are stopped; yields what each returns."""
    running = pool.start(napping_run, world_size, place=str(place), **arguments)
    steps = []
    try:
        yield steps
    except BaseException:
        (place / "stop").touch()
        raise
    finally:
        steps += running.finish()
