"""Recordings for tests: what real ranks once said (`tests/recordings`), followed and recorded as if it came now."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ddpwatch import rundir
from ddpwatch.recording.writer import Recorder
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.sources.frames import Frame, Tick
from tests.recordings.make import HERE, RUN_ID, WORLD, read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.alerts.model import AlertEvent
    from ddpwatch.core.monitor import Monitor

UNIX_NS = 1_790_000_000_000_000_000
"""When the first frame of a tape came."""
SECOND_NS = 1_000_000_000
AGAIN_ID = "a9a195ec0de5ec0d"
SECRET = "tcp://10.1.2.3:5555"
"""The address of every rank: no recording may contain it."""


class ReceivedFrames:
    """A source whose frames are all there already; ticks follow, as long as it is asked."""

    def __init__(self, frames: list[Frame], ticks_ns: Sequence[int] = ()) -> None:
        self._items: list[Frame | Tick] = [*frames, *map(Tick, ticks_ns)]
        self.known, self.here, self.refused = set(range(WORLD)), set(), {}
        self._next = 0

    @property
    def left(self) -> int:
        return len(self._items) - self._next

    def poll(self, _timeout_ms: int) -> Frame | Tick:
        if not self.left:
            return Tick(self._items[-1][-1] if self._items else time.monotonic_ns())
        self._next += 1
        return self._items[self._next - 1]

    def poll_ready(self, most: int) -> list[Frame]:
        """One by one, so that the number of those that are left is known after each."""
        return []

    def want_buckets(self, wanted: bool) -> None:
        """It has none."""

    def want_stacks(self, ranks: frozenset[int]) -> None:
        """It has those that were asked for then."""

    def close(self) -> None:
        """There is nothing to let go of."""


def run_file(run_id: str = RUN_ID, **changed: Any) -> rundir.RunFile:
    endpoints = [rundir.Endpoint(rank, "node-a", "node", 1000 + rank, 0.0, SECRET) for rank in range(WORLD)]
    run = rundir.RunFile(rundir.SCHEMA, run_id, "demo", "job", 0, WORLD, UNIX_NS / 1e9, endpoints)
    return msgspec.structs.replace(run, **changed)


def received(name: str, *, later_s: float = 0.0, upto_s: float | None = None) -> list[Frame]:
    """The frames of a recorded run, shifted in time and cut after a duration."""
    frames = read(HERE / f"{name}.msgpack.gz")
    return [
        frame._replace(received_ns=frame.received_ns + int(later_s * SECOND_NS))
        for frame in frames
        if upto_s is None or frame.received_ns <= upto_s * SECOND_NS
    ]


def record(recorder: Recorder, frames: list[Frame], run_id: str = RUN_ID) -> Monitor:
    """Follow the frames and record them, as `attach --record` does; how the run stood at the end."""
    with closing(RunFollower(run_file(run_id), source=ReceivedFrames(frames), recorder=recorder)) as follower:
        # By the clock of the frames, and not by that of this machine.
        recorder._due_ns = 0
        follower.advance(0)
        while not follower.idle:
            follower.advance(0)
            follower.drain()
            while recorder._backlog and not recorder.write_error:
                # As in real time, where each second is written before the next has come.
                time.sleep(0.001)
        follower.monitor.evaluate_now()
        follower.drain()
        return follower.monitor


def real_frames(name: str = "slow-backward") -> list[Frame]:
    """The same, as if they came from now on."""
    return received(name, later_s=time.monotonic_ns() / SECOND_NS)


def follow(
    recorder: Recorder, frames: list[Frame], run: rundir.RunFile | None = None, ticks_ns: Sequence[int] = ()
) -> list[AlertEvent]:
    """Follow the frames to their end and record them, by the clock of this machine; returns the events."""
    source = ReceivedFrames(frames, ticks_ns)
    with closing(RunFollower(run or run_file(), source=source, recorder=recorder)) as follower:
        while source.left:
            follower.advance()
        follower.monitor.evaluate_now()
        return follower.drain()


def kept(path: Path, frames: list[Frame] | None = None, **options: Any) -> list[AlertEvent]:
    """A finished recording of these frames, or of real ones; returns the events."""
    with closing(Recorder(path, **options)) as recorder:
        return follow(recorder, real_frames() if frames is None else frames)


def copied(path: Path) -> None:
    """What `kept` makes of real frames, made once for all tests that only read it."""
    path.touch(0o600)
    path.write_bytes(_kept_once())


@cache
def _kept_once() -> bytes:
    with tempfile.TemporaryDirectory(prefix="ddpw-tape-") as folder:
        kept(Path(folder) / "run.ddpw")
        return (Path(folder) / "run.ddpw").read_bytes()


def recorder_at(path: Path) -> Recorder:
    """A recorder whose clock says the same every time."""
    recorder = Recorder(path)
    recorder._unix_ns = UNIX_NS
    return recorder


def tape(path: Path, *names: str, upto_s: float | None = None) -> list[Monitor]:
    """Record these runs one after another into a file; how each stood at its end."""
    with closing(recorder_at(path)) as recorder:
        return [
            record(recorder, received(name, later_s=100 * number, upto_s=upto_s), RUN_ID if not number else AGAIN_ID)
            for number, name in enumerate(names)
        ]
