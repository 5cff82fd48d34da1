"""Feeds a RunState from a source until a condition holds."""

from __future__ import annotations

import time

from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.sources.frames import Frame

GIVE_UP_S = 30


def make_state(run_file):
    return RunState(
        run_file.id, run_file.name, run_file.world_size, [Place(e.rank, e.host, e.pid) for e in run_file.endpoints]
    )


def follow(source, state, until):
    """Feed the state until the condition holds."""
    deadline_s = time.monotonic() + GIVE_UP_S
    while not until():
        assert time.monotonic() < deadline_s, "it never happened"
        item = source.poll(20)
        if isinstance(item, Frame):
            for frame in (item, *source.poll_ready(3)):
                state.ingest(frame.payload, frame.received_ns)
        else:
            state.tick(item.now_ns)
