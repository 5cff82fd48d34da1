"""The whole road of an alert: real ranks, one of them slow, and what `ddpwatch watch` says about them meanwhile."""

import pytest

from tests.builders.watch_process import Watcher
from tests.ddp.napping_run import training

STEP_S = 0.03


def groundless(watcher, besides=()):
    """Ranks blamed although nothing was wrong with them. Other tests run on the same cores: a rank that the kernel
    left waiting for one really was slow, and the alert says so.
    """
    blamed = [change for change in watcher.of("straggler") if change["ranks"] != [*besides]]
    return [change for change in blamed if "cores" not in change["evidence"]]


@pytest.mark.parametrize(("world_size", "guilty", "phase", "part"), [(4, 2, "backward", 0.5), (2, 1, "data", 0.2)])
def test_a_slow_rank_is_named_with_its_phase_and_no_other_rank_is(
    pool, forker, run_dir, tmp_path, world_size, guilty, phase, part
):
    slow = {"guilty": guilty, "phase": phase, "nap_s": part * STEP_S}
    with Watcher(forker, run_dir, "napping") as watcher:
        with training(pool, world_size, tmp_path, **slow) as steps:
            reported = watcher.wait_for(lambda change: change["rule"] == "straggler" and change["phase"] == phase)
            (tmp_path / "stop").touch()
        assert watcher.finish() == 0

    assert len(set(steps)) == 1
    assert reported["event"] in {"opened", "changed"}
    assert reported["ranks"] == [guilty]
    assert f"rank {guilty} slow in {phase}" in reported["message"]
    assert groundless(watcher, besides=[guilty]) == []
    assert "all ranks have exited" in watcher.stderr


def test_healthy_ranks_are_not_blamed(pool, forker, run_dir, tmp_path):
    # This threshold reports any communication at all, which shows that rules were evaluated.
    with Watcher(forker, run_dir, "napping", "--limit", "comm-share.share=0.0001") as watcher:
        with training(pool, 2, tmp_path, steps=150) as steps:
            watcher.wait_for(lambda change: change["rule"] == "comm-share")
        assert watcher.finish() == 0

    assert steps == [150, 150]
    assert groundless(watcher) == []
