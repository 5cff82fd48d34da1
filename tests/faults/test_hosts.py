"""A job on four hosts: watched from each of them, while links break and come back and a host is lost."""

import json
import os
import time
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpwatch import rundir
from tests.builders.training import wait_for
from tests.builders.watched_training import Training
from tests.faults import cluster

HOSTS, LOCAL = 4, 2
WORLD = HOSTS * LOCAL


@pytest.fixture
def hosts():
    if why := cluster.why_not():
        pytest.skip(why)
    with cluster.Cluster(HOSTS) as made:
        yield made


def trains_on(place, rank, master, faults):
    """One rank. It is slow, or stops, while a file of its number is among the `faults`."""
    cluster.move_to(place)
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(LOCAL)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % LOCAL), "TORCHELASTIC_RUN_ID": "cluster"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{master}:29500", rank=rank, world_size=WORLD)
    training = Training(DistributedDataParallel)
    inner = training.model.module

    def before_backward():
        if (faults / f"slow-{rank}").exists():
            time.sleep(0.04)

    inner.before_backward = before_backward
    while not (faults / "stop").exists():
        while (faults / f"hang-{rank}").exists():
            time.sleep(0.02)
        training.steps(1)
        time.sleep(0.02)
    dist.destroy_process_group()


def looks_once(place, reported):
    """`ddpwatch status --json` on a host."""
    from ddpwatch.cli.main import run

    cluster.move_to(place)
    code = run(["status", "--json", "--timeout", "20"])
    reported.touch()
    raise SystemExit(code)


def follows(place, reported, faults):
    """Watches on a host and writes down every change of an alert, and in between what is known of the ranks."""
    from ddpwatch.session.run_follower import RunFollower
    from ddpwatch.sources.find_run import find
    from ddpwatch.view.alerts.format import event_object

    cluster.move_to(place)
    run = find(None)
    with closing(RunFollower(run)) as follower, open(reported, "a", buffering=1) as file:
        due_s = 0.0
        while not (faults / "look-no-more").exists():
            follower.advance()
            for event in follower.drain():
                change = event_object(event, run_id=run.id, run_name=run.name)
                file.write(json.dumps(change) + "\n")
            if time.monotonic() > due_s:
                due_s = time.monotonic() + 0.2
                file.write(json.dumps({"known": _ranks(follower.monitor.state)}) + "\n")


def _ranks(state):
    return {
        number: [state.condition(rank), rank.steps.newest, _holes(rank), rank.lost]
        for number, rank in state.ranks.items()
    }


def _holes(rank):
    indices = rank.steps.indices().tolist()
    return indices[-1] - indices[0] + 1 - len(indices) if indices else 0


class ViewerLog:
    """What the viewer has written so far."""

    def __init__(self, path):
        self._path = path

    def lines(self):
        text = self._path.read_text() if self._path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def ranks(self):
        """As they were last known, by number: condition, newest step, steps that are missing, messages lost."""
        known = [line["known"] for line in self.lines() if "known" in line]
        return {int(number): rank for number, rank in known[-1].items()} if known else {}

    def alert(self, rule, event, text=""):
        """The latest change of this kind that has this in its message."""
        found = [
            line
            for line in self.lines()
            if line.get("rule") == rule and line["event"] == event and text in line["message"]
        ]
        return found[-1] if found else None


@pytest.mark.timeout(180)
def test_four_hosts_are_watched_from_each_of_them_through_faults_of_ranks_links_and_hosts(start, hosts, tmp_path):
    master = hosts.address("node-a")
    reported = ViewerLog(tmp_path / "log")
    ranks = [start(trains_on, hosts.place(hosts.hosts[rank // LOCAL]), rank, master, tmp_path) for rank in range(WORLD)]
    for host in hosts.hosts:
        _see_all_ranks(ranks, lambda host=host: rundir.scan(hosts.run_dir(host))[0])

    # From each host the whole job is seen.
    looks = {host: start(looks_once, hosts.place(host), tmp_path / f"looked-{host}") for host in hosts.hosts}
    for host, look in looks.items():
        assert look.wait(60) == 0, look.output()
        status = json.loads(look.output())
        assert status["run"]["hosts"] == HOSTS, host
        assert {rank["host"] for rank in status["ranks"]} == set(hosts.hosts)
        assert {rank["state"] for rank in status["ranks"]} == {"ok"}

    viewer = start(follows, hosts.place("node-a"), tmp_path / "log", tmp_path)
    wait_for(lambda: len(reported.ranks()) == WORLD and all(rank[1] >= 0 for rank in reported.ranks().values()), 60)

    # A slow rank and one that stops are named with their hosts.
    (tmp_path / "slow-5").touch()
    slow = wait_for(lambda: reported.alert("straggler", "opened", "rank 5 (node-c)"), 60)
    assert slow["ranks"] == [5]
    (tmp_path / "slow-5").unlink()
    (tmp_path / "hang-2").touch()
    stall = wait_for(lambda: reported.alert("stall", "opened", "rank 2 (node-b)"), 60)
    assert stall["ranks"] == [2]
    (tmp_path / "hang-2").unlink()
    wait_for(lambda: reported.alert("stall", "closed"), 60)

    # A host that cannot be reached is reported; when it is back, nothing of its history is missing.
    hosts.cut("node-d")
    gone = wait_for(lambda: reported.alert("rank-lost", "opened"), 60)
    assert gone["ranks"] == [6, 7]
    assert "host node-d (ranks 6-7) is down or unreachable: no heartbeat from its 2 ranks" in gone["message"]
    hosts.mend("node-d")
    wait_for(lambda: reported.alert("rank-lost", "closed"), 60)
    step = reported.ranks()[0][1]
    wait_for(lambda: all(rank[1] > step + 5 for rank in reported.ranks().values()), 60)
    wait_for(lambda: all(rank[2:] == [0, 0] for rank in reported.ranks().values()), 60)
    assert not any(child.ended() for child in ranks), "training goes on"

    # A bad line makes it slow, and no more.
    with hosts.bad_line("node-b", loss=0.2, delay_s=0.05) as was_used:
        assert was_used()
        step = reported.ranks()[2][1]
        wait_for(lambda: reported.ranks()[2][1] > step + 2, 120)
    wait_for(lambda: all(rank[2:] == [0, 0] for rank in reported.ranks().values()), 60)
    assert not any(child.ended() for child in ranks), "training goes on"

    # A host that is lost for good takes the training with it, and not the view.
    for child in ranks[4:6]:
        child.kill()
    wait_for(lambda: reported.alert("rank-lost", "opened", "host node-c (ranks 4-5)"), 60)
    (tmp_path / "look-no-more").touch()
    assert viewer.wait(60) == 0, viewer.output()
    assert all("\nddpwatch" not in f"\n{child.output()}" for child in ranks), "agents had nothing to complain about"


def _see_all_ranks(ranks, scan):
    def look():
        assert not any(child.ended() for child in ranks), [child.output() for child in ranks]
        return any(len(run.endpoints) == WORLD and all(each.tcp_address for each in run.endpoints) for run in scan())

    wait_for(look, 60)
