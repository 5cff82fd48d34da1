"""What viewers get, whenever they attach and however many; and what they cannot do to the training."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import zmq

import ddpwatch.agent
from ddpwatch import wire
from tests.builders.training import loader, make, snapshot_at, train_step, wait_for
from tests.builders.watched_training import Training
from tests.faults.viewer import Viewer, contiguous, find_run


def trains_on(rank, world_size, *, stop, pause_s=0.0):
    """Train until the file exists. Returns steps taken, steps counted, and whether the agent is still active."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    batch, target = next(iter(loader(world_size, rank, batches=1)))
    for taken in range(1, 100_000):
        train_step(model, optimizer, batch, target)
        time.sleep(pause_s)
        if taken % 50 == 0 and _agreed(stop):
            break
    return taken, agent._recorder.index, agent.active


def _agreed(stop) -> bool:
    """Whether to stop, the same answer on all ranks."""
    here = torch.tensor([float(os.path.exists(stop))])
    dist.all_reduce(here, op=dist.ReduceOp.MIN)
    return bool(here.item())


@pytest.fixture
def training(pool, run_dir, tmp_path):
    """The run of two ranks that train until the test is over."""
    running = pool.start(trains_on, 2, stop=tmp_path / "stop", pause_s=0.0005)
    try:
        yield find_run(run_dir, 2)
    finally:
        (tmp_path / "stop").touch()
        for taken, counted, active in running.finish():
            assert active
            assert taken == counted


def follow(viewer, steps: int):
    """Read until this number of further steps has arrived."""
    aim = (viewer.steps() or [0])[-1] + steps
    viewer.read(lambda viewer: viewer.steps()[-1:] >= [aim])


def attach(address, step: int = 0) -> Viewer:
    """A viewer with its history, attached at the given step or later."""
    wait_for(lambda: snapshot_at(address).beat.step >= step)
    viewer = Viewer(address)
    viewer.read(lambda viewer: viewer.snap is not None)
    return viewer


def test_a_late_viewer_gets_the_last_steps_and_then_all_that_follow(training):
    for endpoint in training.endpoints:
        # Late enough that the first steps are dropped.
        with attach(endpoint.address, wire.MAX_SNAP_STEPS + 100) as viewer:
            follow(viewer, 300)

        assert len(viewer.snap.steps) == wire.MAX_SNAP_STEPS
        assert contiguous(viewer.steps()), "the history and the stream do not join"
        assert contiguous([viewer.snap.seq, *(message.seq for message in viewer.live)])
        assert viewer.snap.hello.rank == endpoint.rank
        assert viewer.snap.hello.pid == endpoint.pid


def test_several_viewers_at_once_all_see_everything(training):
    address = training.endpoints[0].address
    with attach(address) as first, attach(address) as second, attach(address) as third:
        for viewer in (first, second, third):
            follow(viewer, 200)

    for viewer in (first, second, third):
        assert contiguous(viewer.steps())
        assert contiguous([viewer.snap.seq, *(message.seq for message in viewer.live)])


def test_a_viewer_gets_only_the_topics_it_subscribes_to(training):
    with Viewer(training.endpoints[0].address, topics=[b"beat"], history=False) as viewer:
        viewer.read(lambda viewer: len(viewer.live) >= 3)

    assert {type(message) for message in viewer.live} == {wire.Beat}


def garbage_subscriptions():
    return [b"\x01garbage-%d" % k for k in range(10_000)]


def snapshot_requests():
    return [b"\x01snap/%d" % k for k in range(100)]


def overlong_topics():
    return [b"\x01snap/" + bytes(size) for size in (60, 200, 4000)]


def large_messages():
    return [b"\x07" + bytes(2 << 20)] * 3


def plain_messages():
    return [b"", b"\x00", b"\x07stop", b"\x01", b"\xff" * 64] * 100


@pytest.mark.parametrize(
    "messages", [garbage_subscriptions, snapshot_requests, overlong_topics, large_messages, plain_messages]
)
def test_a_hostile_viewer_costs_the_training_nothing_and_the_others_no_message(training, messages):
    address = training.endpoints[0].address
    with attach(address) as witness, zmq.Context() as context, context.socket(zmq.XSUB) as hostile:
        hostile.linger = 0
        hostile.rcvhwm = 10
        hostile.connect(address)
        for message in messages():
            hostile.send(message)
        follow(witness, 200)
        with attach(address) as newcomer:
            follow(newcomer, 100)
        follow(witness, 50)

    assert contiguous([witness.snap.seq, *(message.seq for message in witness.live)])
    assert contiguous(newcomer.steps())


def logs_long_names(stop):
    training = Training()
    while not os.path.exists(stop):
        training.agent.log(**{f"{k}-" + "ж" * 198: k for k in range(16)})
        training.steps(1)


def test_long_figures_of_the_script_are_cut_into_frames_that_a_viewer_takes(start, run_dir, tmp_path):
    start(logs_long_names, tmp_path / "stop")
    address = find_run(run_dir).endpoints[0].address
    with attach(address, step=400) as viewer:
        follow(viewer, 400)

    assert 10 < len(viewer.snap.steps) < 400, "the history has to be shortened to fit"
    assert contiguous(viewer.steps())
    assert len(viewer.snap.steps[-1].values) == 16


def waits_for_peers(stop):
    """The launcher promises a second rank, which does not start for a long time."""
    training = Training()
    for _ in range(5000):
        training.agent.step()
    assert not training.agent._publisher.address
    os.environ["WORLD_SIZE"] = "1"
    training.steps_until(stop)


def test_steps_that_were_overwritten_before_the_rank_was_published_are_counted(start, run_dir, tmp_path):
    start(waits_for_peers, tmp_path / "stop", env={"WORLD_SIZE": "2"})
    with attach(find_run(run_dir).endpoints[0].address) as viewer:
        assert viewer.snap.beat.dropped == 5000 - 4096
        assert contiguous(viewer.steps())
