"""Recordings for tests: the frames of real ranks, or made-up ones, followed and recorded as a live run is."""

from __future__ import annotations

import time
from contextlib import closing

from recordings.make import HERE, RUN_ID, WORLD, read

from ddpwatch import rundir
from ddpwatch.outputs.recorder import Recorder
from ddpwatch.outputs.watching import Following
from ddpwatch.sources.frames import Tick

SECRET = "tcp://10.1.2.3:5555"


class Listed:
    """A source whose frames are known before; ticks follow, as long as it is asked."""

    def __init__(self, frames, world=WORLD, ticks_ns=()):
        self.known, self.here, self.refused = set(range(world)), set(), {}
        self._items = [*frames, *map(Tick, ticks_ns)]
        self._last_ns = self._items[-1][-1] if self._items else time.monotonic_ns()
        self._items.reverse()

    @property
    def left(self):
        return len(self._items)

    def poll(self, timeout_ms):
        return self._items.pop() if self._items else Tick(self._last_ns)

    def want_buckets(self, wanted):
        pass

    def want_stacks(self, ranks):
        pass

    def close(self):
        pass


def real_frames(name="slow-backward", at_ns=None):
    """Frames of a real run of four ranks, as if they came from now on."""
    began_ns = time.monotonic_ns() if at_ns is None else at_ns
    return [frame._replace(received_ns=began_ns + frame.received_ns) for frame in read(HERE / f"{name}.msgpack.gz")]


def run_file(run_id=RUN_ID, world=WORLD, **changed):
    endpoints = [
        rundir.Endpoint(rank=rank, host="node-a", node="n", pid=1000 + rank, pid_created_s=0.0, address=SECRET)
        for rank in range(world)
    ]
    fields = {"schema": 1, "name": "demo", "job": "job", "attempt": 0, "started_unix_s": 0.0, "endpoints": endpoints}
    return rundir.RunFile(id=run_id, world_size=world, **{**fields, **changed})


def record(recorder, frames, run=None, ticks_ns=()):
    """Follow the frames to their end; what was told."""
    source = Listed(frames, ticks_ns=ticks_ns)
    with closing(Following(run or run_file(), source=source, recorder=recorder)) as following:
        while source.left:
            following.advance()
        following.watch.judge_now()
        return following.drain()


def tape(path, frames=None, **options):
    """A recording that is finished; what was told."""
    with closing(Recorder(path, **options)) as recorder:
        return record(recorder, real_frames() if frames is None else frames)
