"""The whole road of an alert: real ranks, one of them slow, and what `ddpwatch watch` says about them meanwhile."""

import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from training import loader, make, train_step
from watcher import Watcher

import ddpwatch.agent

BASE_S = 0.027
"""Every rank sleeps so long in each step: it is long without needing a core for each of them."""
STEP_S = 0.03
MOST_STEPS = 3000


def napping_run(rank, world_size, *, place, steps=MOST_STEPS, guilty=-1, phase="", nap_s=0.0):
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
    """Whether this step is no longer done. All ranks agree: who is in the step after rank 0's has met it since."""
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


def groundless(watcher, besides=()):
    """Who is blamed although nothing was wrong with them. Other tests run on the same cores: a rank that the kernel
    left waiting for one really was slow, and the alert says so.
    """
    blamed = [change for change in watcher.of("straggler") if change["ranks"] != [*besides]]
    return [change for change in blamed if "cores" not in change["evidence"]]


@pytest.mark.parametrize(("world_size", "guilty", "phase", "part"), [(4, 2, "backward", 0.5), (2, 1, "data", 0.2)])
def test_a_slow_rank_is_named_with_its_phase_and_nobody_else_is(
    pool, forker, run_dir, tmp_path, world_size, guilty, phase, part
):
    slow = {"guilty": guilty, "phase": phase, "nap_s": part * STEP_S}
    with Watcher(forker, run_dir, "napping") as watcher:
        with training(pool, world_size, tmp_path, **slow) as steps:
            told = watcher.wait_for(lambda change: change["rule"] == "straggler" and change["phase"] == phase)
            (tmp_path / "stop").touch()
        assert watcher.finish() == 0

    assert len(set(steps)) == 1
    assert told["event"] in {"opened", "changed"}
    assert told["ranks"] == [guilty]
    assert f"rank {guilty} is slow in {phase}" in told["message"]
    assert groundless(watcher, besides=[guilty]) == []
    assert "its ranks said goodbye" in watcher.stderr


def test_healthy_ranks_are_not_blamed(pool, forker, run_dir, tmp_path):
    # With such a limit any communication at all is told, which shows that there was judging.
    with Watcher(forker, run_dir, "napping", "--limit", "comm-share.share=0.0001") as watcher:
        with training(pool, 2, tmp_path, steps=150) as steps:
            watcher.wait_for(lambda change: change["rule"] == "comm-share")
        assert watcher.finish() == 0

    assert steps == [150, 150]
    assert groundless(watcher) == []
