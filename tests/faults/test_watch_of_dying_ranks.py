"""`ddpwatch watch` says which rank has died and of what, and ends with a verdict that scripts understand."""

import signal

import pytest
from alone import Training, join_group
from torch.nn.parallel import DistributedDataParallel
from watcher import Watcher

ENDED_BADLY = 4


def trains(rank, store, never):
    join_group(str(store), rank, 2)
    Training(DistributedDataParallel).steps_until(never)


def raises_in_the_middle(rank, store, flag):
    trains(rank, store, flag)
    raise ValueError("the user's own")


@pytest.fixture
def watcher(run_dir):
    """Its limit is such that any communication at all is told: so a test knows when it has come to judging."""
    with Watcher(run_dir, "--limit", "comm-share.share=0.0001") as watcher:
        yield watcher


def wait_until_it_judges(watcher):
    assert watcher.wait_for(lambda change: change["rule"] == "comm-share")["event"] == "opened"


def test_a_rank_that_raises_is_told_with_its_exception(start, watcher, tmp_path):
    start(trains, 0, tmp_path / "store", tmp_path / "never")
    failing = start(raises_in_the_middle, 1, tmp_path / "store", tmp_path / "flag")
    wait_until_it_judges(watcher)
    (tmp_path / "flag").touch()

    told = watcher.wait_for(lambda change: change["rule"] == "rank-failed" and change["ranks"] == [1])
    assert failing.wait() == 1
    assert watcher.finish() == ENDED_BADLY
    assert told["event"] == "opened"
    assert told["severity"] == "critical"
    assert "rank 1 was ended by ValueError: the user's own" in told["message"]
    assert told["evidence"]["text"].startswith("ValueError: the user's own")
    assert watcher.of("rank-lost") == []
    assert "ended badly" in watcher.stderr


def test_a_rank_that_is_killed_is_told_as_lost(start, watcher, tmp_path):
    start(trains, 0, tmp_path / "store", tmp_path / "never")
    killed = start(trains, 1, tmp_path / "store", tmp_path / "never")
    wait_until_it_judges(watcher)
    killed.kill(signal.SIGKILL)

    told = watcher.wait_for(lambda change: change["rule"] == "rank-lost")
    assert watcher.finish() == ENDED_BADLY
    assert told["event"] == "opened"
    assert all(change["ranks"] == [1] for change in watcher.of("rank-lost"))
    assert all(1 not in change["ranks"] for change in watcher.of("rank-failed"))
    assert "rank 1 lost" in watcher.stderr
