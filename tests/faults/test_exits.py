"""However the training ends, it ends as it would have without ddpwatch, and the next one tidies up after it."""

import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from ddpwatch import rundir, wire
from ddpwatch.agent import publisher
from tests.builders.training import wait_for
from tests.builders.watched_training import Training
from tests.faults.viewer import Viewer, contiguous, find_run


def exits_in_a_step(flag):
    training = Training()
    training.steps_until(flag)
    training.half_a_step()
    sys.exit(7)


def raises_in_a_step(flag):
    training = Training()
    training.steps_until(flag)
    training.half_a_step()
    raise ValueError("the user's own")


@pytest.mark.parametrize(
    ("end", "code", "last_words"), [(exits_in_a_step, 7, ""), (raises_in_a_step, 1, "ValueError: the user's own\n")]
)
def test_the_interpreter_ends_as_ever_and_viewers_hear_the_last_word(start, run_dir, tmp_path, end, code, last_words):
    child = start(end, tmp_path / "go")
    run = find_run(run_dir)
    with Viewer(run.endpoints[0].address) as viewer:
        viewer.read(viewer.trained(2))
        (tmp_path / "go").touch()
        viewer.read(viewer.has(wire.Bye))

    assert child.wait() == code
    (bye,) = viewer.of(wire.Bye)
    assert bye.reason == ("failed" if last_words else "exit")
    assert bye.text.startswith(last_words)
    assert bool(last_words) == ("test_exits.py" in bye.text and "raises_in_a_step" in bye.text)
    assert isinstance(viewer.live[-1], wire.Bye)
    assert contiguous([message.seq for message in viewer.live])
    assert contiguous(viewer.steps())
    assert child.output().endswith(last_words)
    assert bool(last_words) == bool(child.output())
    assert "ddpwatch:" not in child.output()
    assert not list(run_dir.iterdir())


def is_a_child(end, flag):
    """As scripts do that start their ranks themselves."""
    child = multiprocessing.get_context("fork").Process(target=end, args=(flag,))
    child.start()
    child.join()
    sys.exit(child.exitcode)


def ends_for_torch(_number, end, flag):
    end(flag)


def is_a_child_of_torch(end, flag):
    torch.multiprocessing.start_processes(ends_for_torch, (end, flag), nprocs=1, start_method="fork")


@pytest.mark.xfail(
    sys.version_info >= (3, 14),
    reason="from Python 3.14 on, finalizers of multiprocessing run after the exception is handled",
)
@pytest.mark.parametrize("launcher", [is_a_child, is_a_child_of_torch])
@pytest.mark.parametrize(
    ("end", "last_words"), [(raises_in_a_step, "ValueError: the user's own\n"), (exits_in_a_step, "SystemExit: 7\n")]
)
def test_a_child_of_multiprocessing_reports_what_has_ended_it(start, run_dir, tmp_path, launcher, end, last_words):
    child = start(launcher, end, tmp_path / "go")
    run = find_run(run_dir)
    with Viewer(run.endpoints[0].address) as viewer:
        viewer.read(viewer.trained(1))
        (tmp_path / "go").touch()
        viewer.read(viewer.has(wire.Bye))

    assert child.wait() in {1, 7}
    (bye,) = viewer.of(wire.Bye)
    assert (bye.reason, bye.text.startswith(last_words)) == ("failed", True), bye.text
    assert "test_exits.py" in bye.text
    assert not list(run_dir.iterdir())


def returns(flag):
    Training().steps_until(flag)


def test_a_child_of_multiprocessing_that_returns_ends_in_order(start, run_dir, tmp_path):
    child = start(is_a_child, returns, tmp_path / "go")
    with Viewer(find_run(run_dir).endpoints[0].address) as viewer:
        viewer.read(viewer.trained(1))
        (tmp_path / "go").touch()
        viewer.read(viewer.has(wire.Bye))

    assert child.wait() == 0
    assert viewer.of(wire.Bye)[0].reason == "exit"


def keeps_the_signals(flag):
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    training = Training()
    wait_for(lambda: training.agent._publisher.address)
    training.steps(1)
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before
    training.steps_until(flag)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_kills_as_ever_and_the_stale_run_is_pruned_later(start, run_dir, tmp_path, number):
    child = start(keeps_the_signals, tmp_path / "never")
    run = find_run(run_dir)
    with Viewer(run.endpoints[0].address) as viewer:
        viewer.read(viewer.trained(1))  # by then the signals were looked at
    assert rundir.prune(run_dir) == [], "a live run was pruned"

    child.kill(number)

    assert child.wait() == -number
    assert [each.id for each in rundir.scan(run_dir)[0]] == [run.id], "no rank had time to clean up"
    assert rundir.prune(run_dir) == [run.id]
    assert not list(run_dir.iterdir())


def test_a_killed_process_that_was_not_reaped_is_dead(start, run_dir, tmp_path):
    """In a container whose init process does not reap, zombies stay forever."""
    child = start(keeps_the_signals, tmp_path / "never")
    run = find_run(run_dir)
    os.kill(child.pid, signal.SIGKILL)  # and no `wait`: the process stays in the table

    wait_for(lambda: not rundir.alive(run.endpoints[0], rundir.node_id()))
    assert os.path.exists(f"/proc/{child.pid}")
    assert rundir.prune(run_dir) == [run.id]


def trains_until(flag):
    wire.beat_ns = lambda _world_size: 1_000_000  # hundreds of messages a second fill every queue soon
    training = Training()
    training.steps_until(flag, pause_s=0.001)
    print("complete:", training.agent._recorder.index == training.taken)


def looks_away(address, seen):
    """A viewer that stops reading, as after Ctrl-Z, until it is continued; then it looks for a gap."""
    with Viewer(address) as viewer:
        viewer.read(viewer.has(wire.Beat))
        os.kill(os.getpid(), signal.SIGSTOP)
        viewer.read(lambda viewer: not contiguous([message.seq for message in viewer.live]))
        seen.touch()


def test_a_stalled_viewer_delays_no_rank_and_later_sees_what_it_lost(start, run_dir, tmp_path):
    stop, seen = tmp_path / "stop", tmp_path / "seen"
    child = start(trains_until, stop)
    address = find_run(run_dir).endpoints[0].address
    stuck, stuck_to_the_end = start(looks_away, address, seen), start(looks_away, address, tmp_path / "-")
    wait_for(lambda: _state(stuck.pid) == _state(stuck_to_the_end.pid) == "T")
    with Viewer(address) as viewer:
        # Far more than the sockets' queues and the kernel hold for stalled viewers.
        viewer.read(lambda viewer: len(viewer.live) > 4000)
        assert contiguous([message.seq for message in viewer.live]), "one viewer's trouble is another's loss"
        assert contiguous(viewer.steps())
        stuck.kill(signal.SIGCONT)
        wait_for(seen.exists)
        stop.touch()
        viewer.read(viewer.has(wire.Bye))

    assert child.wait() == 0
    assert child.output() == "complete: True\n"
    assert _state(stuck_to_the_end.pid) == "T"


def keeps_the_store(port):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.with_suffix(".draft").write_text(str(store.port))
    port.with_suffix(".draft").rename(port)
    signal.pause()


class Thaws:
    """Lets a process go on when it is forgotten."""

    def __init__(self, pid):
        self.pid = pid

    def __del__(self, kill=os.kill, number=signal.SIGCONT, sleep=time.sleep):
        kill(self.pid, number)
        sleep(0.2)  # the rest of the interpreter's end is short: the thread must have come back by then


def ends_while_the_store_stands_still(keeper, port):
    store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    os.kill(keeper, signal.SIGSTOP)
    training = Training(DistributedDataParallel)
    training.steps(5)
    assert training.agent._publisher.is_alive()
    publisher.STOP_S = 0.01
    # The store answers while ddpwatch waits for it, or else when the interpreter is already being taken apart.
    sys.late = Thaws(keeper)
    thaw = threading.Timer(0.1, os.kill, (keeper, signal.SIGCONT))
    thaw.daemon = True
    thaw.start()
    sys.exit(7)


def test_a_store_that_answers_late_does_not_spoil_the_end(start, run_dir, tmp_path):
    keeper = start(keeps_the_store, tmp_path / "port")
    wait_for((tmp_path / "port").exists)
    child = start(ends_while_the_store_stands_still, keeper.pid, tmp_path / "port")

    assert child.wait() == 7
    assert child.output() == ""


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
