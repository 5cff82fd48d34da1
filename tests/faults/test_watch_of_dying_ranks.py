"""`ddpwatch watch` says which rank has died and of what, and ends with a verdict that scripts understand."""

import os
import signal
import sys
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.outputs.report.data import gather
from ddpwatch.recording.reader import Recording
from ddpwatch.session.playback import Playback
from ddpwatch.view.cells import plain
from ddpwatch.view.outcome_text import ending_lines
from ddpwatch.view.verdict import verdict
from tests.builders.hanging_job import NAMING
from tests.builders.torch_features import needs_gloo_recorder
from tests.builders.training import wait_for
from tests.builders.watch_process import Watcher
from tests.builders.watched_training import Training, join_group

ENDED_BADLY = 4


def trains(rank, store, never, world_size=2):
    join_group(str(store), rank, world_size)
    Training(DistributedDataParallel).steps_until(never)


def raises_in_the_middle(rank, store, flag):
    trains(rank, store, flag)
    raise ValueError("the user's own")


@pytest.fixture
def watcher(forker, run_dir):
    """Its threshold reports any communication at all, so that a test knows when rules were evaluated."""
    with Watcher(forker, run_dir, "--limit", "comm-share.share=0.0001") as watcher:
        yield watcher


def wait_until_rules_are_evaluated(watcher):
    assert watcher.wait_for(lambda change: change["rule"] == "comm-share")["event"] == "opened"


def test_a_rank_that_raises_is_reported_with_its_exception(start, watcher, tmp_path):
    start(trains, 0, tmp_path / "store", tmp_path / "never")
    failing = start(raises_in_the_middle, 1, tmp_path / "store", tmp_path / "flag")
    wait_until_rules_are_evaluated(watcher)
    (tmp_path / "flag").touch()

    reported = watcher.wait_for(lambda change: change["rule"] == "rank-failed" and change["ranks"] == [1])
    assert failing.wait() == 1
    assert watcher.finish() == ENDED_BADLY
    assert reported["event"] == "opened"
    assert reported["severity"] == "critical"
    assert "rank 1 raised ValueError: the user's own" in reported["message"]
    assert reported["evidence"]["text"].startswith("ValueError: the user's own")
    assert watcher.of("rank-lost") == []
    assert [change["ranks"] for change in watcher.of("rank-failed") if change["severity"] == "critical"] == [[1]]
    assert "ended badly: rank 1 failed: ValueError: the user's own; rank 0 after it; " in watcher.stderr


def exits_in_the_middle(rank, store, flag, code, world_size):
    trains(rank, store, flag, world_size)
    sys.exit(code)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("code", [0, 3])
def test_the_rank_that_exits_early_is_named_and_not_those_that_lost_the_connection_to_it(
    start, watcher, tmp_path, code, world_size
):
    leaves = world_size - 1
    victims = [start(trains, rank, tmp_path / "store", tmp_path / "never", world_size) for rank in range(leaves)]
    leaver = start(exits_in_the_middle, leaves, tmp_path / "store", tmp_path / "flag", code, world_size)
    wait_until_rules_are_evaluated(watcher)
    (tmp_path / "flag").touch()

    assert leaver.wait() == code
    assert [victim.wait() for victim in victims] == [1] * leaves
    assert watcher.finish() == ENDED_BADLY
    critical = [change for change in watcher.changes if change["severity"] == "critical"]
    assert [(change["event"], change["ranks"]) for change in critical] == [("opened", [leaves])], critical
    assert critical[0]["rule"] == ("rank-failed" if code else "uneven-batch")
    how = f"exited with code {code}" if code else "left the job early"
    assert f"ended badly: rank {leaves} {how}; rank" in watcher.stderr


def test_an_interrupt_of_all_ranks_is_one_alert(start, watcher, tmp_path):
    ranks = [start(trains, rank, tmp_path / "store", tmp_path / "never") for rank in range(2)]
    wait_until_rules_are_evaluated(watcher)
    for rank in ranks:
        rank.kill(signal.SIGINT)

    assert watcher.finish() == ENDED_BADLY
    critical = [change for change in watcher.changes if change["severity"] == "critical"]
    assert [change["event"] for change in critical if change["event"] != "changed"] == ["opened"], critical
    assert "were interrupted (Ctrl-C, SIGINT)" in critical[-1]["message"]
    assert "were interrupted (Ctrl-C, SIGINT)" in watcher.stderr
    assert "ddpwatch/agent" not in critical[-1]["evidence"]["text"]


def test_a_rank_that_is_killed_is_reported_as_lost(start, watcher, tmp_path):
    start(trains, 0, tmp_path / "store", tmp_path / "never")
    killed = start(trains, 1, tmp_path / "store", tmp_path / "never")
    wait_until_rules_are_evaluated(watcher)
    killed.kill(signal.SIGKILL)

    reported = watcher.wait_for(lambda change: change["rule"] == "rank-lost")
    assert watcher.finish() == ENDED_BADLY
    assert reported["event"] == "opened"
    assert all(change["ranks"] == [1] for change in watcher.of("rank-lost"))
    assert all(1 not in change["ranks"] for change in watcher.of("rank-failed"))
    assert "rank 1 was killed (SIGKILL); rank 0 after it" in watcher.stderr


def test_the_signal_that_has_ended_a_rank_is_in_the_recording_for_reports_and_replays(start, forker, run_dir, tmp_path):
    file = tmp_path / "run.ddpw"
    with Watcher(forker, run_dir, "--limit", "comm-share.share=0.0001", "--record", str(file)) as watcher:
        start(trains, 0, tmp_path / "store", tmp_path / "never")
        killed = start(trains, 1, tmp_path / "store", tmp_path / "never")
        wait_until_rules_are_evaluated(watcher)
        killed.kill(signal.SIGKILL)
        assert watcher.finish() == ENDED_BADLY

    with closing(Recording(file)) as recorded:
        report = gather(recorded, recorded.attempts[-1])
    said = verdict(report.state, report.outcome, report.aggregate, report.alerts).text
    assert said == "Ended badly: rank 1 was killed (SIGKILL); rank 0 after it."
    assert said.removeprefix("Ended badly: ").rstrip(".") in watcher.stderr, "the same as the watcher has printed"
    with closing(Playback(Recording(file), playing=False)) as playback:
        playback.seek(playback.reel.at(playback.reel.total_ns))
        playback.catch_up()
        monitor = playback.follows.monitor
        lines = ending_lines(monitor.state, outcome_of(monitor.state, monitor.book.open.values()), 120)
        assert any("rank 1: was killed (SIGKILL) without reporting an error" in plain(line) for line in lines)


def test_of_four_ranks_the_one_that_is_killed_is_singled_out(start, watcher, tmp_path):
    ranks = [start(trains, rank, tmp_path / "store", tmp_path / "never", 4) for rank in range(4)]
    wait_until_rules_are_evaluated(watcher)
    ranks[2].kill(signal.SIGKILL)

    lost = watcher.wait_for(lambda change: change["rule"] == "rank-lost")
    for survivor in (0, 1, 3):
        assert ranks[survivor].wait() == 1, "its connection has broken"
    assert watcher.finish() == ENDED_BADLY
    critical = [change for change in watcher.changes if change["severity"] == "critical"]
    (after,) = watcher.of("rank-failed")[-1:]
    assert (lost["ranks"], lost["severity"], lost["event"]) == ([2], "critical", "opened")
    assert [(change["rule"], change["ranks"]) for change in critical] == [("rank-lost", [2])]
    assert after["severity"] == "info"
    assert after["ranks"] == [0, 1, 3]
    assert after["message"].startswith("ranks 0-1, 3 failed because rank 2 was lost")


def test_of_ranks_that_the_launcher_ends_in_the_same_moment_the_one_that_was_killed_is_singled_out(
    start, watcher, tmp_path
):
    ranks = [start(trains, rank, tmp_path / "store", tmp_path / "never", 4) for rank in range(4)]
    wait_until_rules_are_evaluated(watcher)
    ranks[1].kill(signal.SIGKILL)
    for rank in (3, 0, 2):
        ranks[rank].kill(signal.SIGTERM)

    assert watcher.finish() == ENDED_BADLY
    reported = [change for change in watcher.changes if change["rule"] in {"rank-lost", "rank-failed"}]
    assert [change["ranks"] for change in reported if change["severity"] == "critical"] == [[1]], reported
    assert "was killed (SIGKILL)" in reported[0]["message"]
    assert all("rank 1" in change["message"] for change in reported), reported


def trains_until(rank, store, flag, world_size=3):
    """All ranks see the flag in the same step."""
    join_group(str(store), rank, world_size)
    training = Training(DistributedDataParallel)
    begins = torch.zeros(1)
    while not begins[0]:
        training.steps(1)
        begins[0] = os.path.exists(flag)
        dist.broadcast(begins, 0)
    return training


def ends_early(rank, store, flag, reported):
    """Rank 1 runs out of data of unknown length. It leaves when the wait of the others was reported."""
    training = trains_until(rank, store, flag)
    if rank == 1:
        training.agent.close()
        wait_for(lambda: os.path.exists(reported))
    else:
        training.steps_until(str(flag) + ".never")


def test_data_of_unknown_length_that_ends_early_is_one_alert_also_when_the_others_lose_their_connections(
    start, watcher, tmp_path
):
    reported = tmp_path / "reported"
    for rank in range(3):
        start(ends_early, rank, tmp_path / "store", tmp_path / "flag", reported)
    wait_until_rules_are_evaluated(watcher)
    (tmp_path / "flag").touch()
    assert watcher.wait_for(lambda change: change["rule"] == "uneven-batch")["ranks"] == [1]
    reported.touch()

    assert watcher.finish() == ENDED_BADLY
    bad = [change for change in watcher.changes if change["severity"] == "critical" and change["event"] == "opened"]
    assert [(change["rule"], change["ranks"]) for change in bad] == [("uneven-batch", [1])], bad
    after = watcher.of("rank-failed")[-1]
    assert (after["severity"], after["ranks"]) == ("info", [0, 2])


def leaves_one_out(rank, store, flag):
    """Gloo aborts a rank that receives more than it expects; the script is wrong on rank 1."""
    trains_until(rank, store, flag)
    if rank != 1:
        dist.all_reduce(torch.ones(7))
    dist.all_reduce(torch.ones(70_000))


@needs_gloo_recorder
def test_a_rank_that_gloo_aborts_is_not_blamed_for_the_collective_that_another_has_left_out(start, watcher, tmp_path):
    ranks = [start(leaves_one_out, rank, tmp_path / "store", tmp_path / "flag") for rank in range(3)]
    wait_until_rules_are_evaluated(watcher)
    (tmp_path / "flag").touch()
    codes = [rank.wait() for rank in ranks]

    assert watcher.finish() == ENDED_BADLY
    assert -signal.SIGABRT in codes
    critical = [change for change in watcher.changes if change["severity"] == "critical"]
    assert [(change["rule"], change["ranks"]) for change in critical] == [("desync", [1])], critical
    assert "all_reduce" in critical[0]["message"]
    assert "leaves_one_out" in critical[0]["message"]


def leaves_one_out_in_a_log(rank, store, flag, log):
    os.dup2(os.open(f"{log}{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    leaves_one_out(rank, store, flag)


@needs_gloo_recorder
def test_an_abort_whose_reason_is_in_a_watched_log_is_reported_once(start, forker, run_dir, tmp_path):
    """Gloo's line is read before the ranks have reported their collectives."""
    log = tmp_path / "stderr-"
    with Watcher(forker, run_dir, "--limit", "comm-share.share=0.0001", "--log", f"{log}*") as watcher:
        for rank in range(3):
            start(leaves_one_out_in_a_log, rank, tmp_path / "store", tmp_path / "flag", str(log))
        wait_until_rules_are_evaluated(watcher)
        (tmp_path / "flag").touch()

        assert watcher.finish() == ENDED_BADLY
        reported = [change for change in watcher.changes if change["rule"] in NAMING and change["severity"] != "info"]
    assert any("Received data size" in file.read_text() for file in tmp_path.glob("stderr-*"))
    assert [(change["event"], change["rule"], change["ranks"]) for change in reported] == [("opened", "desync", [1])], (
        reported
    )
    assert "Received data size" in reported[0]["evidence"].get("line_1", "")
