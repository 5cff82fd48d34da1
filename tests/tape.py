"""Recordings for tests: what real ranks once said (`tests/recordings`), followed and recorded as if it came now."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

from recordings.make import HERE, RUN_ID, WORLD, read

from ddpwatch import rundir
from ddpwatch.outputs.recorder import Recorder
from ddpwatch.outputs.watching import Following
from ddpwatch.sources.frames import Frame, Tick

if TYPE_CHECKING:
    from pathlib import Path

    from ddpwatch.core.watch import Watch

UNIX_NS = 1_790_000_000_000_000_000
"""When the first frame of a tape came."""
SECOND_NS = 1_000_000_000
AGAIN_ID = "a9a195ec0de5ec0d"


class Heard:
    """A source whose frames are all there already."""

    def __init__(self, frames: list[Frame]) -> None:
        self.frames = frames
        self.known, self.here, self.refused = set(range(WORLD)), set(), {}
        self._next = 0

    def poll(self, _timeout_ms: int) -> Frame | Tick:
        if self._next == len(self.frames):
            return Tick(self.frames[-1].received_ns)
        self._next += 1
        return self.frames[self._next - 1]

    def want_buckets(self, wanted: bool) -> None:
        """It has none."""

    def want_stacks(self, ranks: frozenset[int]) -> None:
        """It has those that were asked for then."""

    def close(self) -> None:
        """There is nothing to let go of."""


def run_file(run_id: str = RUN_ID) -> rundir.RunFile:
    endpoints = [rundir.Endpoint(rank, "node-a", "node", 1000 + rank, 0.0, "ipc:///secret") for rank in range(WORLD)]
    return rundir.RunFile(rundir.SCHEMA, run_id, "demo", "job", 0, WORLD, UNIX_NS / 1e9, endpoints)


def heard(name: str, *, later_s: float = 0.0, upto_s: float | None = None) -> list[Frame]:
    """The frames of a recorded run, so much later, and not those after so long."""
    frames = read(HERE / f"{name}.msgpack.gz")
    return [
        frame._replace(received_ns=frame.received_ns + int(later_s * SECOND_NS))
        for frame in frames
        if upto_s is None or frame.received_ns <= upto_s * SECOND_NS
    ]


def record(recorder: Recorder, frames: list[Frame], run_id: str = RUN_ID) -> Watch:
    """Follow the frames and record them, as `attach --record` does; how the run stood at the end."""
    with closing(Following(run_file(run_id), source=Heard(frames), recorder=recorder)) as following:
        # By the clock of the frames, and not by that of this machine.
        recorder._due_ns = 0
        following.advance(0)
        while not following.idle:
            following.advance(0)
            following.drain()
            while recorder._backlog and not recorder.trouble:
                # As in real time, where each second is written before the next has come.
                time.sleep(0.001)
        following.watch.judge_now()
        following.drain()
        return following.watch


def recorder_at(path: Path) -> Recorder:
    """A recorder whose clock says the same every time."""
    recorder = Recorder(path)
    recorder._unix_ns = UNIX_NS
    return recorder


def tape(path: Path, *names: str, upto_s: float | None = None) -> list[Watch]:
    """Record these runs one after another into a file; how each stood at its end."""
    with closing(recorder_at(path)) as recorder:
        return [
            record(recorder, heard(name, later_s=100 * number, upto_s=upto_s), RUN_ID if not number else AGAIN_ID)
            for number, name in enumerate(names)
        ]
