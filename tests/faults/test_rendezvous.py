"""The ranks of a job find each other, whatever started them, and keep jobs and attempts apart."""

import os
import signal
import stat

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddpwatch.agent
from ddpwatch import rundir, wire
from tests.builders.launchers import torchrun
from tests.builders.torch_features import needs_list_keys
from tests.builders.training import make, snapshot, wait_for
from tests.builders.watched_training import Training, join_group
from tests.faults.viewer import Viewer, find_run


def is_watched(rank, world_size, *, go):
    model, _ = make()
    agent = ddpwatch.agent.install(model)
    hello = snapshot(agent).hello
    wait_for(lambda: os.path.exists(go))
    return hello.rank, hello.pid, hello.run_id, hello.world_size, hello.backend


def test_all_ranks_are_in_one_private_file_with_their_processes(pool, run_dir, tmp_path):
    running = pool.start(is_watched, 4, go=tmp_path / "go")
    run = find_run(run_dir, 4)
    directory = run_dir / run.id
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "run.json").stat().st_mode) == 0o600
    assert sorted(path.name for path in directory.iterdir()) == ["0.sock", "1.sock", "2.sock", "3.sock", "run.json"]
    (tmp_path / "go").touch()
    seen = running.finish()

    assert [endpoint.rank for endpoint in run.endpoints] == [0, 1, 2, 3]
    assert [endpoint.pid for endpoint in run.endpoints] == [rank.pid for rank in running.ranks]
    assert seen == [(rank, running.ranks[rank].pid, run.id, 4, "gloo") for rank in range(4)]
    assert not list(run_dir.iterdir()), "the last one to leave takes the directory away"


def trains_in_a_group(store, rank, world_size, stop):
    join_group(store, rank, world_size)
    Training(DistributedDataParallel).steps_until(stop)


def test_two_jobs_on_one_host_are_two_runs_and_the_dead_one_is_pruned(start, run_dir, tmp_path):
    jobs = [
        [start(trains_in_a_group, str(tmp_path / job), rank, 2, tmp_path / "never") for rank in range(2)]
        for job in ("first", "second")
    ]
    runs = wait_for(lambda: _whole(run_dir, 2))
    for child in jobs[0]:
        child.kill()
        child.wait()

    dead, alive = ([child.pid for child in job] for job in jobs)
    by_pids = {tuple(endpoint.pid for endpoint in run.endpoints): run.id for run in runs}
    assert by_pids.keys() == {tuple(dead), tuple(alive)}
    assert rundir.prune(run_dir) == [by_pids[tuple(dead)]]
    assert [run.id for run in rundir.scan(run_dir)[0]] == [by_pids[tuple(alive)]]


def _whole(run_dir, count):
    runs = [run for run in rundir.scan(run_dir)[0] if len(run.endpoints) == run.world_size]
    return runs if len(runs) == count else None


def starts_alone_then_joins(store, rank, world_size, go, alone, stop):
    training = Training()
    hello = snapshot(training.agent).hello
    assert (hello.rank, hello.world_size) == (0, 1)
    training.agent.log(text="no number")  # a note that has to change its rank with the process
    alone.write_text(hello.run_id)
    training.steps_until(go)
    join_group(store, rank, world_size)
    training.steps_until(stop)
    note = snapshot(training.agent).notes[-1]
    assert note.rank == rank
    print("fine")


def test_a_script_without_a_group_is_a_run_of_its_own_until_it_joins_one(start, run_dir, tmp_path):
    go, stop = tmp_path / "go", tmp_path / "stop"
    alone = [tmp_path / f"alone-{rank}" for rank in range(2)]
    children = [
        start(starts_alone_then_joins, str(tmp_path / "store"), rank, 2, go, alone[rank], stop) for rank in range(2)
    ]
    before = wait_for(lambda: _whole(run_dir, 2))
    assert {run.world_size for run in before} == {1}
    wait_for(lambda: all(path.exists() and path.read_text() for path in alone))
    assert {run.id for run in before} == {path.read_text() for path in alone}
    with Viewer(before[0].endpoints[0].address) as viewer:
        viewer.read(viewer.trained())
        go.touch()
        viewer.read(viewer.has(wire.Bye))
    run = find_run(run_dir, 2)  # the only one: both directories are gone
    stop.touch()

    assert [child.wait() for child in children] == [0, 0]
    assert [child.output() for child in children] == ["fine\n", "fine\n"]
    assert run.id not in {run.id for run in before}
    assert [endpoint.pid for endpoint in run.endpoints] == [child.pid for child in children]


def joins_late(store, rank, world_size, looked, go, stop):
    training = Training()
    home = training.agent._publisher._registration
    looks = []
    find = home.find

    def count_and_find():
        looks.append(1)
        if len(looks) == 3:
            looked.touch()
        return find()

    home.find = count_and_find
    training.steps_until(go)
    join_group(store, rank, world_size)
    training.steps_until(stop)


def test_ranks_that_expect_peers_publish_nothing_until_they_have_met(start, run_dir, tmp_path):
    go, stop = tmp_path / "go", tmp_path / "stop"
    looked = [tmp_path / f"looked-{rank}" for rank in range(2)]
    for rank in range(2):
        expects = {"WORLD_SIZE": "2", "RANK": str(rank)}
        start(joins_late, str(tmp_path / "store"), rank, 2, looked[rank], go, stop, env=expects)
    wait_for(lambda: all(path.exists() for path in looked))
    assert not list(run_dir.iterdir())
    go.touch()

    run = find_run(run_dir, 2)
    with Viewer(run.endpoints[1].address) as viewer:
        viewer.read(lambda viewer: viewer.snap is not None)
    assert viewer.snap.steps[0].index == 0, "what was measured while waiting is kept"


def joins_over_tcp(rank, port, watched):
    """One of two ranks whose store lives in rank 0's process. It trains alone, so that it can outlive the other."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.with_suffix(".draft").write_text(str(store.port))
        port.with_suffix(".draft").rename(port)
    else:
        wait_for(port.exists)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if watched:
        Training().steps_until("/nowhere")
    signal.pause()


def test_the_store_may_die_once_the_ranks_have_met(start, run_dir, tmp_path):
    keeper, survivor = (start(joins_over_tcp, rank, tmp_path / "port", True) for rank in range(2))
    run = find_run(run_dir, 2)
    keeper.kill()
    keeper.wait()

    with Viewer(run.endpoints[1].address) as viewer:
        viewer.read(viewer.trained(4))
    assert not survivor.ended()
    assert "\nddpwatch" not in f"\n{survivor.output()}", "the agent had something to complain about"


def test_a_rank_whose_peer_has_no_agent_is_watched_all_the_same_even_when_the_store_dies(start, run_dir, tmp_path):
    keeper, survivor = (start(joins_over_tcp, rank, tmp_path / "port", rank == 1) for rank in range(2))
    (run,) = wait_for(lambda: rundir.scan(run_dir)[0])
    assert [endpoint.rank for endpoint in run.endpoints] == [1]
    assert run.world_size == 2
    with Viewer(run.endpoints[0].address) as viewer:
        viewer.read(viewer.trained(2))
        keeper.kill()
        keeper.wait()
        viewer.read(viewer.trained(8))
    assert "\nddpwatch" not in f"\n{survivor.output()}", "the agent had something to complain about"


def loses_its_file(stop):
    Training().steps_until(stop)


def test_a_run_file_that_was_cleaned_away_comes_back(start, run_dir, tmp_path):
    """Programs that tidy /tmp take files that were not touched for days."""
    start(loses_its_file, tmp_path / "never")
    run = find_run(run_dir)
    (run_dir / run.id / "run.json").unlink()

    assert find_run(run_dir) == run


TORCHRUN_SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import ddpwatch.agent
from ddpwatch import rundir

# torchrun keeps its store over a restart: gloo would connect to the addresses of the first attempt.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
clean = "clean-" + os.environ["TORCHELASTIC_RESTART_COUNT"]
if os.environ["RANK"] == "0":
    for key in store.list_keys():
        if "default_pg" in key and "ddpwatch" not in key:
            store.delete_key(key)
    store.set(clean, "")
store.wait([clean])
dist.init_process_group("gloo")
# No DDP and no optimizer, which import half of torch once more: the rendezvous does not depend on them.
model = torch.nn.Linear(2, 2)
agent = ddpwatch.agent.install(model)
base, rank = rundir.base_path(), dist.get_rank()
while True:
    runs = [run for run in rundir.scan(base)[0] if len(run.endpoints) == 2 and run.endpoints[rank].pid == os.getpid()]
    done = torch.tensor([float(len(runs) == 1)])
    dist.all_reduce(done, op=dist.ReduceOp.MIN)
    if done.item():
        break
run = runs[0]
with open(f"{sys.argv[1]}/seen-{run.attempt}-{rank}", "w") as file:
    print(run.id, run.job, run.name, *(endpoint.rank for endpoint in run.endpoints), file=file)
if run.attempt == 0 and rank == 1:
    os._exit(3)
if run.attempt == 0:
    time.sleep(60)
"""


@needs_list_keys
def test_a_restart_by_torchrun_is_a_new_run_of_the_same_job(zygote, run_dir, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN_SCRIPT)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    env = {"DDPWATCH_RUN_DIR": str(run_dir)}
    code, printed = torchrun(zygote, [*options, str(script), str(tmp_path)], env)

    assert code == 0, printed
    seen = {path.name: path.read_text().split() for path in tmp_path.glob("seen-*")}
    assert seen.keys() == {"seen-0-0", "seen-0-1", "seen-1-0", "seen-1-1"}
    assert seen["seen-0-0"] == seen["seen-0-1"]
    assert seen["seen-1-0"] == seen["seen-1-1"]
    first, second = seen["seen-0-0"], seen["seen-1-0"]
    assert first[0] != second[0]
    assert first[1:] == second[1:] == [first[1], "train", "0", "1"]
    assert first[1], "the launcher's name for the job"
    rundir.prune(run_dir)
    assert not list(run_dir.iterdir())
