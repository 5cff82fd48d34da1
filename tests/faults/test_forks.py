"""A process forked from the training has nothing to do with the agent, in whatever way it ends."""

import os
import sys

import pytest

from ddpwatch import wire
from tests.builders.training import snapshot, wait_for
from tests.builders.watched_training import Training
from tests.faults.viewer import Viewer, contiguous, find_run


def forks(stop, how):
    training = Training()
    training.steps(10)
    pid_before = snapshot(training.agent).hello.pid
    child = os.fork()
    if not child:
        assert not training.agent.active
        training.steps(3)
        training.agent.close()
        if how == "sys.exit":
            sys.exit(5)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    training.steps_until(stop)
    assert snapshot(training.agent).hello.pid == pid_before == os.getpid()
    assert training.agent.active
    os._exit(0)


@pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
def test_a_forked_child_that_ends_takes_nothing_of_the_parents_along(start, run_dir, tmp_path, how):
    parent = start(forks, tmp_path / "stop", how)
    run = find_run(run_dir)
    with Viewer(run.endpoints[0].address) as viewer:
        viewer.read(lambda viewer: viewer.live and viewer.snap is not None and viewer.steps()[-1:] > [50])
        assert (run_dir / run.id / "run.json").exists()
        assert (run_dir / run.id / "0.sock").exists()
        (tmp_path / "stop").touch()
        assert parent.wait() == 0

    assert parent.output() == ""
    assert not viewer.of(wire.Bye)
    assert contiguous([message.seq for message in viewer.live])
    assert contiguous(viewer.steps())


def installs_in_the_child(stop):
    """As a launcher does that forks its ranks from a process where ddpwatch is at work."""
    parent = Training()
    first = snapshot(parent.agent).hello
    if os.fork():
        parent.steps_until(stop)
        os._exit(0)
    child = Training()
    child.steps(5)
    second = snapshot(child.agent)
    assert second.hello.run_id != first.run_id
    assert [step.index for step in second.steps] == list(range(5))
    print("child is watched")
    os._exit(0)


def test_a_forked_child_may_be_watched_itself(start, tmp_path):
    parent = start(installs_in_the_child, tmp_path / "stop")
    wait_for(parent.output)
    (tmp_path / "stop").touch()

    assert parent.output() == "child is watched\n"
    assert parent.wait() == 0
