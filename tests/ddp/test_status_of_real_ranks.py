"""The whole road: real ranks, real sockets, and the numbers that `ddpwatch status` prints about them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ddpwatch.agent
from tests.builders.fake_rank import short_directory
from tests.builders.terminal import Terminal
from tests.builders.training import loader, make, train_step, wait_for

LAG_S = 0.25
"""Longer than what the all-reduce of so small a model takes on a busy machine."""
STEPS = 40
MAX_S = 600.0
"""How long the ranks stay for all the tests; how long those take says how busy the machine is."""
README = Path(__file__).parents[2] / "README.md"
JSON_PAGE = README.parent / "docs" / "json.md"


def slow_in_backward(rank, world_size, *, culprit, done, stop):
    """Train with one slow rank, say that it is done, then stay until the test has seen enough."""
    model, optimizer = make(norm=True)
    agent = ddpwatch.agent.install(model, run_name="slow")
    if rank == culprit:
        model.module.before_backward = lambda: time.sleep(LAG_S)
    for batch, target in loader(world_size, rank, batches=STEPS):
        train_step(model, optimizer, batch, target)
    (Path(done) / str(rank)).touch()
    wait_for(Path(stop).exists, MAX_S)
    return agent.active


def ddpwatch_command(run_dir, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ddpwatch", *arguments],
        env={**os.environ, "DDPWATCH_RUN_DIR": str(run_dir)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def status(run_dir, *, steps: int) -> dict | None:
    """What `ddpwatch status --json` prints, once all ranks are in it with enough steps."""
    result = ddpwatch_command(run_dir, "status", "--json")
    if result.returncode:
        return None
    found = json.loads(result.stdout)
    done = [rank["step"] or 0 for rank in found["ranks"]]
    return found if len(done) == found["run"]["world_size"] and min(done) >= steps else None


@pytest.fixture(scope="module")
def slow_dir(_session_pool, tmp_path_factory):
    """The run directory of four ranks, rank 1 slow in backward, that have done their steps and wait for the tests."""
    done, stop = tmp_path_factory.mktemp("done"), tmp_path_factory.mktemp("slow") / "stop"
    with short_directory() as path:
        env = {"DDPWATCH_RUN_DIR": str(path)}
        running = _session_pool.start(slow_in_backward, 4, env=env, culprit=1, done=str(done), stop=str(stop))
        try:
            # Before that, each look at it would be the start of a command for nothing.
            wait_for(lambda: len(list(done.iterdir())) == 4, timeout_s=90)
            yield path
        finally:
            stop.touch()
        assert running.finish() == [True] * 4


@pytest.fixture(scope="module")
def slow_run(slow_dir):
    """What `ddpwatch status --json` prints about it."""
    return wait_for(lambda: status(slow_dir, steps=STEPS), timeout_s=90)


def test_the_slow_rank_has_the_largest_self_and_the_others_the_large_wait(slow_run):
    ranks = {rank["rank"]: rank for rank in slow_run["ranks"]}

    assert slow_run["allreduce"]["wait_share"] > slow_run["allreduce"]["wire_share"]
    assert max(ranks, key=lambda rank: ranks[rank]["self_ms"]) == 1
    assert min(ranks, key=lambda rank: ranks[rank]["wait_ms"]) == 1
    assert all(ranks[rank]["wait_ms"] > 0.7 * LAG_S * 1000 for rank in (0, 2, 3))
    assert all(ranks[rank]["backward_ms"] < 0.3 * LAG_S * 1000 for rank in (0, 2, 3))
    # Their steps are equally long: that is why wall times show nothing.
    steps_ms = [rank["step_ms"] for rank in ranks.values()]
    assert max(steps_ms) < 1.2 * min(steps_ms)


def test_every_rank_is_shown_with_what_it_is(slow_run):
    assert slow_run["run"] | {"id": ""} == {
        "id": "", "name": "slow", "backend": "gloo", "world_size": 4, "hosts": 1, "state": "live",
    }  # fmt: skip
    assert slow_run["effective_batch"] == 4 * 16
    assert [rank["batch"] for rank in slow_run["ranks"]] == [16] * 4
    assert all(rank["rss_bytes"] > 0 and rank["lost"] == 0 for rank in slow_run["ranks"])
    phases = ("data_ms", "forward_ms", "backward_ms", "sync_ms", "optimizer_ms", "other_ms")
    for rank in slow_run["ranks"]:
        assert all(rank[phase] is not None and rank[phase] >= 0 for phase in phases)


def shape(value):
    """Keys and nesting, without the values."""
    if isinstance(value, dict):
        # What a rule has as evidence is its own affair.
        return {key: shape(item) if key != "evidence" else "value" for key, item in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__ if value == [] else "value"


def test_the_documentation_shows_the_object_that_is_printed(slow_run):
    shown = JSON_PAGE.read_text().partition("<!-- json -->")[2].partition("<!-- /json -->")[0]
    example = json.loads(shown.partition("```json")[2].partition("```")[0])

    # Which alerts are open depends on how busy the machine is; their keys do not.
    assert [alert.keys() for alert in slow_run["alerts"]] == [example["alerts"][0].keys()] * len(slow_run["alerts"])
    assert shape(example | {"alerts": []}) == shape(slow_run | {"alerts": []})


def test_the_first_commands_of_the_readme_work(slow_run, slow_dir):
    block = next(block for block in README.read_text().split("```") if "ddpwatch status  " in block)
    commands = [line.partition("#")[0].split()[1:] for line in block.strip().splitlines()]

    assert commands == [["attach"], ["status"]]
    with Terminal([sys.executable, "-m", "ddpwatch", "attach"], env={"DDPWATCH_RUN_DIR": str(slow_dir)}) as terminal:
        terminal.wait_for("overview", 60)
        terminal.send("q")
        assert terminal.wait_for_end(60) == 0
    for command in (["status"], ["runs"], ["rules"], ["doctor"], ["stacks"]):
        result = ddpwatch_command(slow_dir, *command)
        assert (result.returncode, result.stderr) == (0, ""), command
        assert result.stdout


def test_stacks_show_where_the_ranks_are_and_refuse_a_rank_that_does_not_exist(slow_run, slow_dir):
    reported = json.loads(ddpwatch_command(slow_dir, "stacks", "--rank", "1", "--all", "--json").stdout)

    (rank,) = reported
    assert rank["rank"] == 1
    assert [thread["training"] for thread in rank["threads"]].count(True) == 1
    assert rank["threads"][0]["frames"]
    refused = ddpwatch_command(slow_dir, "stacks", "--rank", "77")
    assert refused.returncode == 2
    assert "no rank 77 in this run" in refused.stderr
