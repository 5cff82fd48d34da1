"""A run whose ranks listen on TCP, and a viewer on a host that has none of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from ddpwatch.core.state.run import RunState
from ddpwatch.sources.frames import Frame
from ddpwatch.sources.live import Live
from tests.builders.watched_training import Training

if TYPE_CHECKING:
    from ddpwatch import rundir

TCP = {"DDPWATCH_BIND": "tcp", "DDPWATCH_HOST": "127.0.0.1"}


def trains(stop):
    Training().steps_until(stop)


def elsewhere(run: rundir.RunFile, **changed) -> rundir.RunFile:
    """The run as its ticket is read on a host that has none of its ranks."""
    endpoints = [msgspec.structs.replace(each, node="elsewhere", **changed) for each in run.endpoints]
    return msgspec.structs.replace(run, endpoints=endpoints)


def follow(run, until, timeout_s=30.0) -> RunState:
    state = RunState(run.id, run.name, run.world_size)
    live = Live(run)
    try:
        deadline_s = time.monotonic() + timeout_s
        while not until(state):
            assert time.monotonic() < deadline_s, live.refused
            item = live.poll(20)
            if isinstance(item, Frame):
                state.ingest(item.payload, item.received_ns)
    finally:
        live.close()
    return state
