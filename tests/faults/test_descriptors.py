"""File descriptors: a lack of them crashes no training, and the agent closes those that it opens."""

import contextlib
import os
import resource
import threading

import pytest
from torch.nn.parallel import DistributedDataParallel

import ddpwatch.agent
from ddpwatch import wire
from ddpwatch.agent.resource_limits import Wake
from tests.builders.training import loader, make, train_step, wait_for
from tests.builders.watched_training import Training, join_group
from tests.faults.viewer import Viewer, contiguous, find_run


def open_now() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


def leave_free(count: int) -> list[int]:
    """Open descriptors until only `count` more can be opened; returns those opened."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, most))
    opened = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(count):
        os.close(opened.pop())
    return opened


def trains_with_few(store, free):
    join_group(store, 0, 1)
    opened = leave_free(free)
    training = Training(DistributedDataParallel)
    training.steps(30)
    wait_for(lambda: not training.agent.active)
    training.steps(30)
    print("trained", training.taken)
    # What torch does when a process exits may have to read a folder of modules.
    for handle in opened:
        os.close(handle)


@pytest.mark.parametrize("free", [0, 1, 3, 9, 25])
def test_without_free_descriptors_training_goes_on_and_one_line_says_why(start, tmp_path, run_dir, free):
    child = start(trains_with_few, str(tmp_path / "store"), free)

    assert child.wait() == 0
    said, trained = child.output().splitlines()
    assert "switched off, training goes on" in said
    assert trained == "trained 60"
    assert not list(run_dir.iterdir())


def runs_out_for_a_while(scarce, plenty, stop):
    training = Training()
    wait_for(lambda: training.agent._publisher.address)
    training.steps_until(scarce)
    opened = leave_free(4)
    training.steps_until(plenty)
    for handle in opened:
        os.close(handle)
    training.steps_until(stop)
    assert training.agent.active
    os._exit(0)


def test_a_viewer_that_attaches_when_descriptors_have_run_out_waits_and_crashes_no_rank(start, run_dir, tmp_path):
    """Left to itself, libzmq aborts the process when it cannot accept a connection."""
    scarce, plenty, stop = (tmp_path / name for name in ("scarce", "plenty", "stop"))
    child = start(runs_out_for_a_while, scarce, plenty, stop)
    run = find_run(run_dir)
    address = run.endpoints[0].address
    with Viewer(address) as early:
        early.read(early.trained())
        scarce.touch()
        early.read(lambda early: [note.kind for note in early.of(wire.Note)] == ["descriptors"])
    with Viewer(address) as late:
        wait_for(lambda: not list(run_dir.iterdir()))
        late.refused(times=3)
        assert not child.ended()
        plenty.touch()
        late.read(late.trained(2))
        assert contiguous(late.steps())
        assert find_run(run_dir).id == run.id == late.snap.hello.run_id
        stop.touch()
        assert child.wait() == 0

    assert child.output() == ""


def installs_and_closes(rank, world_size, *, times):
    """Descriptors open after each closing."""
    model, optimizer = make()
    batch, target = next(iter(loader(world_size, rank, batches=1)))
    counts = [open_now()]
    for _ in range(times):
        agent = ddpwatch.agent.install(model)
        train_step(model, optimizer, batch, target)
        wait_for(lambda agent=agent: agent._publisher.address)
        agent.close()
        assert [thread.name for thread in threading.enumerate() if "ddpwatch" in thread.name] == []
        counts.append(open_now())
    return counts


def test_closing_gives_back_every_thread_and_descriptor_time_after_time(pool, run_dir):
    for counts in pool.run(installs_and_closes, 2, times=20):
        assert max(counts) == counts[0], counts
    assert not list(run_dir.iterdir())


def test_a_late_stop_does_not_write_into_a_file_that_took_over_the_descriptor(tmp_path):
    wake = Wake()
    wake.close()
    with (tmp_path / "checkpoint").open("wb") as first, (tmp_path / "second").open("wb") as second:
        wake.call()
        wake.close()
        assert not first.closed
        assert not second.closed

    assert (tmp_path / "checkpoint").read_bytes() == (tmp_path / "second").read_bytes() == b""
