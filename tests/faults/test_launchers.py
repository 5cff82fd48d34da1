"""Whatever starts the ranks: they are one run, it has a sensible name, and a restart is another one."""

import contextlib
import json
import os
import socket as sockets
import time
from contextlib import closing

import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from ddpwatch import rundir
from ddpwatch.cli.main import run as command
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.sources.find_run import find
from ddpwatch.tui.feed import Feed
from tests.builders.torch_features import needs_list_keys
from tests.builders.training import wait_for
from tests.builders.watched_training import Training
from tests.faults.viewer import find_run


def trains_under_torchrun(stop):
    """As torchrun's workers do: all are clients of the launcher's store. None fails when another is killed: they train
    each for itself.
    """
    dist.init_process_group("gloo", init_method="env://")
    Training().steps_until(stop)


def start_round(start, store, world_size, restarts, stop):
    """The ranks of one round, on as many nodes as there are numbers of restarts."""
    for key in store.list_keys():
        # gloo would connect to the addresses of the round before.
        if "default_pg" in key and "ddpwatch" not in key:
            store.delete_key(key)
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none", "DDPWATCH_BIND": "ipc",
    }  # fmt: skip
    children = []
    for rank in range(world_size):
        node = rank * len(restarts) // world_size
        own = {"RANK": str(rank), "GROUP_RANK": str(node), "TORCHELASTIC_RESTART_COUNT": str(restarts[node])}
        children.append(start(trains_under_torchrun, stop, env={**common, **own}))
    return children


def advance_until(feed, condition, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, (feed.run, feed.ended, feed.choices)
        if not feed.advance():
            time.sleep(0.005)


@needs_list_keys
def test_a_job_that_goes_on_with_more_or_fewer_ranks_is_another_run_without_those_of_before(start, run_dir, tmp_path):
    """Torchrun keeps its store, does not count restarts when nodes join or leave, and counts per node."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seen = {}
    with closing(Feed(DEFAULTS)) as feed:
        for world_size, restarts in [(2, [0, 0]), (3, [1, 1, 0]), (2, [1, 0])]:
            children = start_round(start, store, world_size, restarts, tmp_path / "never")
            pids = [child.pid for child in children]

            def is_shown(pids=pids):
                state = feed.follows.monitor.state if feed.ready else None
                if state is None or (state.step or 0) <= 2:
                    return False
                # On a busy host a rank may be late with its sign of life, and is silent for as long.
                return [(rank.pid, state.condition(rank)) for rank in state.ranks.values()] == [
                    (pid, "ok") for pid in pids
                ]

            advance_until(feed, is_shown)
            run = feed.run
            # The feed has it as it was when it was found: ranks that came later are listened to, and stand in the file.
            (now,) = (each for each in rundir.scan(run_dir)[0] if each.endpoints[0].pid in pids)
            assert now.id == run.id
            seen[run.id] = run.world_size, run.attempt, [endpoint.pid for endpoint in now.endpoints] == pids
            assert {endpoint.pid for endpoint in run.endpoints} <= set(pids)
            for child in children:
                child.kill()
            for child in children:
                child.wait()
        advance_until(feed, lambda: feed.ended)

    assert list(seen.values()) == [(2, 0, True), (3, 1, True), (2, 2, True)]
    assert feed.restarts == 2


def trains_under_slurm(port, stop):
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    Training().steps_until(stop)


def slurm(rank, job):
    """What `srun --ntasks=2` sets."""
    return {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_NODELIST": "node-a", **job,
    }  # fmt: skip


def free_port():
    with contextlib.closing(sockets.create_server(("127.0.0.1", 0))) as free:
        return free.getsockname()[1]


def test_jobs_of_slurm_are_distinguished_by_their_numbers(start, run_dir, tmp_path, capsys):
    jobs = {"4711": {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "1"}}
    jobs["4712_3"] = {"SLURM_JOB_ID": "4715", "SLURM_ARRAY_JOB_ID": "4712", "SLURM_ARRAY_TASK_ID": "3"}
    for environment in jobs.values():
        port = free_port()
        for rank in range(2):
            start(trains_under_slurm, port, tmp_path / "never", env=slurm(rank, environment))

    def both():
        runs = [run for run in rundir.scan(run_dir)[0] if len(run.endpoints) == 2]
        return {run.job: run for run in runs} if len(runs) == 2 else None

    runs = wait_for(both)
    assert runs.keys() == jobs.keys()
    assert (runs["4711"].attempt, runs["4712_3"].attempt) == (1, 0)
    assert [each.tcp_address for each in runs["4711"].endpoints] == ["", ""], "one host, as SLURM says"
    assert find("4711") == runs["4711"]
    assert command(["runs", "--json"]) == 0
    assert {each["job"] for each in json.loads(capsys.readouterr().out)} == jobs.keys()
    assert command(["runs"]) == 0
    assert "JOB" in (printed := capsys.readouterr().out)
    assert "4712_3" in printed


def is_spawned(rank, port, stop):
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(environment)
    dist.init_process_group("gloo")
    Training().steps_until(stop)


def spawns(port, stop):
    # As `spawn` does, without a new interpreter for each.
    multiprocessing.start_processes(is_spawned, (port, stop), nprocs=2, start_method="fork")


def test_ranks_that_a_script_spawns_by_itself_are_one_run_without_a_job(start, run_dir, tmp_path, capsys):
    parent = start(spawns, free_port(), tmp_path / "stop")
    run = find_run(run_dir, 2)

    assert run.job == ""
    assert [rundir.created_s(each.pid) for each in run.endpoints] == [each.pid_created_s for each in run.endpoints]
    assert parent.pid not in {each.pid for each in run.endpoints}
    assert command(["runs"]) == 0
    assert "JOB" not in capsys.readouterr().out
    (tmp_path / "stop").touch()
    assert parent.wait() == 0
