"""Recordings without waiting: synthetic or kept frames, written as a recorder writes them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpwatch import rundir, wire
from ddpwatch.core.alerts.model import Alert, AlertEvent, Finding, Moment, Severity
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.recording.writer import Recorder
from ddpwatch.sources.frames import Frame
from tests.builders.fake_rank import make_beat, make_hello, make_step
from tests.builders.scenario_frames import frames, host_of

if TYPE_CHECKING:
    from pathlib import Path

    from ddpwatch.simulator.scenario import Scenario

RUN_ID = "5ec0de5ec0de5ec0"


def make_run(world_size: int, *, run_id: str = RUN_ID, name: str = "train", hosts=None) -> rundir.RunFile:
    names = hosts or ["node-a"] * world_size
    endpoints = [rundir.Endpoint(rank, names[rank], "n", 1000 + rank, 0.0, "") for rank in range(world_size)]
    return rundir.RunFile(rundir.SCHEMA, run_id, name, "job", 0, world_size, 1_700_000_000.0, endpoints)


def write_recording(path: Path, *attempts) -> Path:
    """Each attempt is a run file and its frames."""
    recorder = Recorder(path)
    try:
        for run, frames_of_run in attempts:
            places = [Place(endpoint.rank, endpoint.host, endpoint.pid) for endpoint in run.endpoints]
            monitor = Monitor(RunState(run.id, run.name, run.world_size, places))
            recorder.begin(run)
            for frame in frames_of_run:
                monitor.ingest(frame.payload, frame.received_ns)
                recorder.add([frame], [wire.claimed_rank(frame.payload)])
                recorder.add_events(monitor.book.drain(), frame.received_ns)
                recorder.flush(monitor.state, frame.received_ns)
            monitor.evaluate_now()
            recorder.add_events(monitor.book.drain(), monitor.state.now_ns)
    finally:
        recorder.close()
    return path


def record_scenario(path: Path, scenario: Scenario, **run) -> Path:
    """A synthetic run as a recording."""
    hosts = [host_of(scenario, rank) for rank in range(scenario.world_size)]
    return write_recording(path, (make_run(scenario.world_size, **{"hosts": hosts, **run}), frames(scenario)))


def record(path, frames, world, *, alerts=(), run=None, finished=False):
    """Write the frames, and these alerts as if they had opened at the end; no rule is evaluated. `finished` = with a
    last checkpoint, as at the end of a run.
    """
    recorder = Recorder(path)
    try:
        recorder.begin(run or make_run(world))
        # By the clock of the frames: the first portion is due at once.
        recorder._due_ns = 0
        state = RunState(RUN_ID, "train", world)
        for frame in frames:
            recorder.add([frame], [wire.claimed_rank(frame.payload)])
            state.ingest(frame.payload, frame.received_ns)
            recorder.flush(state, frame.received_ns)
        recorder.add_events([AlertEvent("opened", alert) for alert in alerts], state.now_ns)
        if finished:
            recorder.finish(state, state.now_ns)
    finally:
        recorder.close()
    return path


def record_hung_steps(path):
    """Three ranks; at step 30, the others wait 6 s for rank 1."""
    reported = [frame(make_hello(rank, 1, world_size=3, started_unix_ns=0), 1) for rank in range(3)]
    for first in range(0, 500, 10):
        for rank in range(3):
            long = {"other" if rank == 1 else "sync": 6000}
            steps = [make_step(index, **(long if index == 30 else {})) for index in range(first, first + 10)]
            reported.append(frame(make_beat(rank, first + 2, step=first + 10, steps=steps), (first + 1) * 10**8))
    return record(path, reported, 3)


def frame(message, at_ns=0):
    return Frame(wire.TOPICS.get(type(message), b"stack/0"), wire.encode(message), at_ns)


def measured(scenario):
    """The frames of a simulated run that is not marked as simulated."""
    for each in frames(scenario):
        message = wire.decode(each.payload)
        if isinstance(message, wire.Hello):
            message = wire.Hello(
                **{**{n: getattr(message, n) for n in message.__struct_fields__}, "agent_version": "1"}
            )
        yield each._replace(payload=wire.encode(message))


def straggler(rank, since=70, closed=None, cost=0.2, **changed):
    """An alert on a slow rank."""
    fields = {
        "rule": "straggler", "severity": Severity.WARNING, "subject": f"rank {rank}", "ranks": (rank,),
        "phase": "backward", "cost": cost, "message": f"rank {rank} is slow", "advice": "Look at it.",
    }  # fmt: skip
    moment = Moment(since, since * 10**8, 0)
    end = None if closed is None else replace(moment, step=closed, now_ns=closed * 10**8)
    return Alert(Finding(**{**fields, **changed}), moment, end or moment, end)
