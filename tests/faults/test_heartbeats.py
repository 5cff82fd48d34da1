"""The beat goes on when the training does not."""

import os
import subprocess
import sys
from itertools import pairwise

import ddpwatch.agent
from ddpwatch import wire
from ddpwatch.agent.clock import HostClock
from ddpwatch.agent.fail_open import Switch
from ddpwatch.agent.heartbeat import HeartbeatReader
from ddpwatch.agent.step_recorder import Recorder
from tests.builders.training import loader, make, train_step, wait_for
from tests.faults.viewer import Viewer, find_run

# Late enough for the hooks to have been timed, which not every step is.
HANGS_AT = 40


def hangs(rank, world_size, *, go):
    """Rank 1 does not reach a certain step until a file exists."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    batch, target = next(iter(loader(world_size, rank, batches=1)))
    for number in range(HANGS_AT + 10):
        if rank == 1 and number == HANGS_AT:
            wait_for(lambda: os.path.exists(go))
        train_step(model, optimizer, batch, target)
    return agent._recorder.index


def test_a_rank_stuck_in_a_collective_goes_on_beating_and_the_missing_one_is_one_behind(pool, run_dir, tmp_path):
    running = pool.start(hangs, 2, go=tmp_path / "go")
    run = find_run(run_dir, 2)
    with Viewer(run.endpoints[0].address) as waiting, Viewer(run.endpoints[1].address) as missing:
        for viewer in (waiting, missing):
            viewer.read(lambda viewer: len([beat for beat in viewer.of(wire.Beat) if beat.step == HANGS_AT]) >= 4)
        (tmp_path / "go").touch()
        assert running.finish() == [HANGS_AT + 10] * 2

    stuck, late = ([beat for beat in viewer.of(wire.Beat) if beat.step == HANGS_AT] for viewer in (waiting, missing))
    assert {wire.PHASES[beat.phase] for beat in stuck[1:]} == {"sync"}
    assert _grows([beat.phase_ns for beat in stuck[1:]])
    assert {wire.PHASES[beat.phase] for beat in late[1:]} == {"other"}
    assert _grows([beat.phase_ns for beat in late[1:]])
    joined, not_joined = stuck[-1].groups, late[-1].groups
    assert [group.size for group in joined] == [group.size for group in not_joined] == [2]
    assert joined[0].name == not_joined[0].name
    assert joined[0].enqueued == not_joined[0].enqueued + 1


def test_a_heartbeat_has_the_resources_of_the_process_and_of_the_agent(pool, run_dir, tmp_path):
    running = pool.start(hangs, 2, go=tmp_path / "go")
    with Viewer(find_run(run_dir, 2).endpoints[1].address) as viewer:
        viewer.read(viewer.has(wire.Beat, 4))
        (tmp_path / "go").touch()
        running.finish()

    beats = viewer.of(wire.Beat)
    assert all(beat.rss_bytes > 10 << 20 for beat in beats)
    assert any(beat.cpu_percent > 0 for beat in beats)  # it polls for the file
    assert _grows([beat.agent_cpu_ns for beat in beats])
    assert beats[-1].hook_ns > 0
    assert not any(beat.dropped for beat in beats)


def worked() -> bool:
    """Use a core for a moment: a thread that needs none does not wait for one either."""
    return bool(sum(range(100_000)))


def test_a_heartbeat_has_the_time_that_the_training_thread_waited_for_a_core():
    core = max(os.sched_getaffinity(0))
    forever = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    recorder = Recorder(HostClock(), Switch())
    pulse = HeartbeatReader(recorder)
    before = os.sched_getaffinity(0)
    other = subprocess.Popen([sys.executable, "-c", forever])
    try:
        os.sched_setaffinity(0, {core})
        earlier = pulse.beat(0, 0)
        wait_for(lambda: worked() and pulse.beat(0, 0).queued_ns - earlier.queued_ns > 50_000_000)
    finally:
        os.sched_setaffinity(0, before)
        other.kill()
        other.wait()
        pulse.close()


def _grows(numbers) -> bool:
    return all(earlier < later for earlier, later in pairwise(numbers))
