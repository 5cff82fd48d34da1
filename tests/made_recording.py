"""Recordings without waiting: frames that were made up or kept, written the way a recorder writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpwatch import rundir
from ddpwatch.core.rank import Place
from ddpwatch.core.state import RunState
from ddpwatch.core.watch import Watch
from ddpwatch.outputs.recorder import Recorder
from ddpwatch.sources.synthetic import Scenario, frames, host_of

if TYPE_CHECKING:
    from pathlib import Path


def make_run(world_size: int, *, run_id: str = "5ec0de5ec0de5ec0", name: str = "train", hosts=None) -> rundir.RunFile:
    names = hosts or ["node-a"] * world_size
    endpoints = [rundir.Endpoint(rank, names[rank], "n", 1000 + rank, 0.0, "") for rank in range(world_size)]
    return rundir.RunFile(rundir.SCHEMA, run_id, name, "job", 0, world_size, 1_700_000_000.0, endpoints)


def write_recording(path: Path, *attempts) -> Path:
    """Each attempt is a run file and its frames."""
    recorder = Recorder(path)
    try:
        for run, frames_of_run in attempts:
            places = [Place(endpoint.rank, endpoint.host, endpoint.pid) for endpoint in run.endpoints]
            watch = Watch(RunState(run.id, run.name, run.world_size, places))
            recorder.begin(run)
            for frame in frames_of_run:
                watch.take(frame.payload, frame.received_ns)
                recorder.add(frame)
                recorder.tell(watch.book.drain(), frame.received_ns)
                recorder.rest(watch.state, frame.received_ns)
            watch.judge_now()
            recorder.tell(watch.book.drain(), watch.state.now_ns)
    finally:
        recorder.close()
    return path


def record_scenario(path: Path, scenario: Scenario, **run) -> Path:
    """A made-up run as a recording."""
    hosts = [host_of(scenario, rank) for rank in range(scenario.world_size)]
    return write_recording(path, (make_run(scenario.world_size, **{"hosts": hosts, **run}), frames(scenario)))
