"""The same training in one process and in two, recorded off their real sockets, compared and exported."""

import json
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import ddpwatch.agent
from ddpwatch import rundir
from ddpwatch.cli.main import run
from ddpwatch.recording.writer import Recorder
from ddpwatch.session.run_follower import RunFollower
from tests.builders.fake_rank import short_directory
from tests.builders.training import loader, make, train_step, wait_for

pytestmark = pytest.mark.timeout(240)

MAX_S = 200.0
"""Seconds within which even a run on an overloaded machine is over."""
STEPS = 32
NAP_S = 0.01
TIMES = 2
"""Step time of the slow rank, in longest steps of the run of one rank: then no mean step of two ranks is shorter. No
fixed number of seconds would be safe, because a rank may wait for a core.
"""


def train(rank, world_size, *, culprit, lag_s, stop):
    """A step takes 10 ms, on the culprit the lag more; then stay until all was recorded."""
    model, optimizer = make()
    ddpwatch.agent.install(model, run_name="compared")
    model.module.before_forward = lambda: time.sleep(NAP_S)
    if rank == culprit:
        model.module.before_backward = lambda: time.sleep(lag_s)
    for batch, target in loader(world_size, rank, batches=STEPS):
        train_step(model, optimizer, batch, target)
    wait_for(Path(stop).exists, MAX_S)


def record(pool, folder, world_size, **slow):
    """The recording, and how long its longest step was after the first."""
    path, stop = folder / f"{world_size}.ddpw", folder / f"stop-{world_size}"
    with short_directory() as base:
        running = pool.start(train, world_size, env={"DDPWATCH_RUN_DIR": str(base)}, stop=str(stop), **slow)
        found = wait_for(lambda: [one for one in rundir.scan(base)[0] if len(one.endpoints) == world_size], MAX_S)
        recorder = Recorder(path)
        with closing(recorder), closing(RunFollower(found[0], recorder=recorder)) as follower:
            while not follower.ended:
                follower.advance()
                follower.drain()
                if min(rank.steps.newest for rank in follower.monitor.state.ranks.values()) >= STEPS - 1:
                    stop.touch()
        running.finish()
    steps = follower.monitor.state.ranks[0].steps
    return path, np.diff(steps.column("end_ns", steps.indices())).max() / 1e9


@pytest.fixture(scope="module")
def paths(_session_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    one, longest_s = record(_session_pool, folder, 1, culprit=-1, lag_s=0.0)
    two, _ = record(_session_pool, folder, 2, culprit=1, lag_s=TIMES * longest_s)
    return one, two


def test_two_processes_are_compared_with_one_and_the_slow_one_is_named(paths, capsys):
    one, two = map(str, paths)

    code = run(["compare", one, two, "--baseline", one, "--json"])

    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert [found[side]["world_size"] for side in "ab"] == [1, 2]
    assert found["decided_by"] == "samples_per_s_rank"
    assert found["verdict"] == "slower"
    scaling = found["b"]["scaling"]
    assert 0.0 < scaling["efficiency"] < 0.8
    assert scaling["speedup"] == pytest.approx(2 * scaling["efficiency"], abs=1e-3)
    assert sum(scaling["parts"].values()) == pytest.approx(1 - scaling["efficiency"], abs=1e-3)
    assert scaling["waited_for"] == [1]
    assert max(scaling["parts"], key=scaling["parts"].__getitem__) in {"waiting", "compute"}
    assert found["a"]["scaling"]["efficiency"] == pytest.approx(1.0)


def test_a_gate_fails_on_the_slower_one(paths, capsys):
    assert run(["compare", *map(str, paths), "--max-slowdown", "5%"]) == 4
    written = capsys.readouterr()
    assert "waiting for rank 1" in written.out
    assert "failed: at most 5% slower" in written.err


def test_its_steps_are_exported(paths, capsys):
    assert run(["export", str(paths[1]), "--to", "csv", "-o", "-"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 * STEPS


def test_a_run_of_two_is_no_baseline(paths):
    assert run(["compare", *map(str, paths), "--baseline", str(paths[1])]) == 2
