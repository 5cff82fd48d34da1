"""Buckets by the whole road: real ranks send them to a viewer that wants them, and the screen shows them."""

import time
from pathlib import Path

import torch
from torch import nn

import ddpwatch.agent
from ddpwatch import rundir
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.core.units import size
from ddpwatch.sources.frames import Frame
from ddpwatch.sources.live import Live
from ddpwatch.view.allreduce import bucket_lines
from ddpwatch.view.cells import plain
from ddpwatch.view.run_view import run_view
from tests.builders.training import train_step, wait_for

WORLD = 2
GIVE_UP_S = 90


def train_with_buckets(rank, world_size, *, stop):
    """Train until the test has seen enough; all ranks end with the same step."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 768), nn.Linear(768, 4))
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    agent = ddpwatch.agent.install(model, comm="buckets")
    enough = torch.zeros(1)
    while not enough.item():
        train_step(model, optimizer, torch.randn(16, 8), torch.arange(16) % 4)
        enough.fill_(Path(stop).exists())
        torch.distributed.all_reduce(enough)
        time.sleep(0.005)
    wait_for(lambda: not agent._recorder.want_buckets)
    return sum(parameter.numel() * 4 for parameter in model.parameters())


def follow(source, monitor, until):
    deadline_s = time.monotonic() + GIVE_UP_S
    while not until():
        assert time.monotonic() < deadline_s, "it never happened"
        item = source.poll(20)
        if isinstance(item, Frame):
            monitor.ingest(item.payload, item.received_ns)
        else:
            monitor.tick(item.now_ns)


def test_a_viewer_that_wants_buckets_gets_them_from_every_rank_and_shows_them(pool, run_dir, tmp_path):
    stop = tmp_path / "stop"
    running = pool.start(train_with_buckets, WORLD, stop=str(stop))
    try:
        path = wait_for(lambda: next(iter(run_dir.glob(f"*/{rundir.RUN_FILE}")), None), GIVE_UP_S)
        run = rundir.read(path)
        source = Live(run)
        try:
            monitor = Monitor(RunState(run.id, run.name, WORLD, [Place(e.rank, e.host, e.pid) for e in run.endpoints]))
            ranks = monitor.state.ranks
            follow(source, monitor, lambda: all(rank.steps.newest >= 5 for rank in ranks.values()))
            assert [rank.buckets for rank in ranks.values()] == [None] * WORLD

            source.want_buckets(True)
            follow(
                source,
                monitor,
                lambda: all(rank.buckets and rank.steps.has(rank.buckets.step) for rank in ranks.values()),
            )
            timeline = Timeline()
            timeline.follow(monitor.state)
            lines = [plain(line) for line in bucket_lines(run_view(monitor, timeline), 120, 12)]
            source.want_buckets(False)
            stop.touch()
            # Wait until the agents know that no viewer wants them.
            sizes = running.finish()
        finally:
            source.close()
    finally:
        stop.touch()

    for rank in ranks.values():
        assert sum(bucket.bytes for bucket in rank.buckets.buckets) == sizes[rank.rank]
    assert lines[0].startswith("rank ")
    assert f"2 buckets, {size(sizes[0])}" in lines[0]
    took_ms, gb_per_s = float(lines[2].split()[3]), float(lines[2].split()[-1])
    assert took_ms > 0
    assert gb_per_s > 0
