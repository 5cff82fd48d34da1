"""A recording of chosen frames and alerts, written by the real recorder."""

from __future__ import annotations

from dataclasses import replace

from ddpwatch import rundir, wire
from ddpwatch.core.alerts import Alert, AlertEvent, Finding, Moment, Severity
from ddpwatch.core.state import RunState
from ddpwatch.outputs.recorder import Recorder
from ddpwatch.sources.frames import Frame
from ddpwatch.sources.synthetic import frames as frames_of

RUN_ID = "5ec0de5ec0de5ec0"


def run_file(world, name="train", run_id=RUN_ID, **changed):
    endpoints = [rundir.Endpoint(rank, "node-a", "n", 1000 + rank, 0.0, "ipc:///x") for rank in range(world)]
    fields = {"schema": 1, "name": name, "job": "job", "attempt": 0, "started_unix_s": 1.7e9, "endpoints": endpoints}
    return rundir.RunFile(id=run_id, world_size=world, **{**fields, **changed})


def record(path, frames, world, *, alerts=(), run=None):
    """Write the frames, and alerts as if they had been told at the end."""
    recorder = Recorder(path)
    try:
        recorder.begin(run or run_file(world))
        # By the clock of the frames: the first portion is due at once.
        recorder._due_ns = 0
        state = RunState(RUN_ID, "train", world)
        for frame in frames:
            recorder.add(frame)
            state.take(frame.payload, frame.received_ns)
            recorder.rest(state, frame.received_ns)
        recorder.tell([AlertEvent("opened", alert) for alert in alerts], state.now_ns)
    finally:
        recorder.close()
    return path


def frame(message, at_ns=0):
    return Frame(wire.TOPICS.get(type(message), b"stack/0"), wire.encode(message), at_ns)


def measured(scenario):
    """The frames of a made-up run that does not say that it is one."""
    for each in frames_of(scenario):
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
