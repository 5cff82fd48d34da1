"""Source that plays a synthetic run in real time, with the interface of a live one."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from ddpwatch import rundir
from ddpwatch.simulator.workload import SimulatedRun
from ddpwatch.sources.frames import Frame, Tick
from ddpwatch.wire import SNAP_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddpwatch.simulator.scenario import Segment

TICK_MS: Final = 100
"""Default time without a frame after which a tick is returned."""
MAX_RANKS: Final = 8192
"""Ranks of a simulated run, at most."""
HISTORY_STEPS: Final = 300
"""Steps of the history that a viewer finds when it attaches."""
HISTORY_CELLS: Final = 1 << 19
"""Maximum steps times ranks of the history: with many ranks it is shorter, or the first view would take many seconds.
"""
MAX_BEHIND_NS: Final = 2_000_000_000
"""Without a poll for this long, the run and its clocks pause instead of queuing frames."""
_SNAP_TOPIC: Final = SNAP_PREFIX + b"simulated"


class SimulatedSource:
    """A run as a late viewer finds it: with the history of every rank, and with a fault in progress.

    Frames carry the time at which they were due, so that a viewer that is too slow sees a run that lags, not ranks
    without heartbeats.
    """

    def __init__(
        self,
        world_size: int,
        *,
        speed: float = 1.0,
        step_ms: float = 100.0,
        schedule: Sequence[Segment] | None = None,
        seed: int = 0,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], object] = time.sleep,
        unix: Callable[[], int] = time.time_ns,
    ) -> None:
        """A `speed` of 2 plays two seconds in one. `clock` and `unix` return nanoseconds, `sleep` takes seconds."""
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"a simulated run has 1 to {MAX_RANKS} ranks, not {world_size}")
        if not speed > 0:
            raise ValueError(f"a simulated run cannot be played at a speed of {speed}")
        self._clock, self._sleep, self._speed = clock, sleep, speed
        began_ns = clock()
        history = min(HISTORY_STEPS, HISTORY_CELLS // world_size)
        self._run = SimulatedRun(
            world_size, now_ns=began_ns, unix_ns=unix(), schedule=schedule, step_ms=step_ms, history_steps=history,
            seed=seed,
        )  # fmt: skip
        self._zero_ns, self._zero_run_ns = began_ns, self._run.due_ns
        """The same moment on the viewer's clock and on the ranks'."""
        self._paused_ns = 0
        """Total time of pauses."""
        self._frames_ns = began_ns
        """When the queued frames were due."""
        self._queue: deque[tuple[int, bytes, bytes]] = deque()
        self._unsnapped = iter(range(world_size))
        self.known: set[int] = set(range(world_size))
        """All ranks."""
        self.here: set[int] = set()
        """Empty: simulated ranks have no processes."""
        self.refused: dict[int, str] = {}
        """Always empty."""
        self.run = self._as_run_file(unix())
        """Contents of a `run.json`."""

    def poll(self, timeout_ms: int = TICK_MS) -> Frame | Tick:
        """The next frame, or a tick if none is due in time."""
        if not self._queue:
            rank = next(self._unsnapped, None)
            if rank is not None:
                return Frame(_SNAP_TOPIC, self._run.snap(rank, self._zero_run_ns), self._frames_ns)
            now_ns = self._await(timeout_ms)
            if now_ns < (due_ns := self._due_ns):
                return Tick(now_ns)
            self._frames_ns = due_ns
            self._queue.extend(self._run.next_messages())
        _, topic, payload = self._queue.popleft()
        return Frame(topic, payload, self._frames_ns)

    def poll_ready(self, most: int) -> list[Frame]:
        """More frames that are due."""
        ready = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
        return [Frame(topic, payload, self._frames_ns) for _, topic, payload in ready]

    def __iter__(self) -> Iterator[Frame | Tick]:
        """Frames and ticks, without end."""
        while True:
            yield self.poll()

    def want_stacks(self, ranks: frozenset[int]) -> None:
        """Ignored: simulated ranks have no stacks."""

    def want_buckets(self, wanted: bool) -> None:
        """Publish gradient buckets, or stop."""
        self._run.buckets_wanted = wanted

    def close(self) -> None:
        """Drop queued frames."""
        self._queue.clear()

    def _await(self, timeout_ms: int) -> int:
        """Sleep until frames are due, at most for the timeout. Returns the viewer's clock without pauses."""
        ahead_ns = self._due_ns - (self._clock() - self._paused_ns)
        if ahead_ns < -MAX_BEHIND_NS:
            self._paused_ns -= ahead_ns
        elif ahead_ns > 0 and timeout_ms > 0:
            self._sleep(min(timeout_ms / 1e3, ahead_ns / 1e9))
        return self._clock() - self._paused_ns

    @property
    def _due_ns(self) -> int:
        """When the next frames are due, on that clock."""
        return self._zero_ns + int((self._run.due_ns - self._zero_run_ns) / self._speed)

    def _as_run_file(self, unix_ns: int) -> rundir.RunFile:
        endpoints = [
            rundir.Endpoint(rank, self._run.host(rank), "simulated", self._run.pid(rank), 0.0, "")
            for rank in range(self._run.world_size)
        ]
        run = self._run
        return rundir.RunFile(
            rundir.SCHEMA, run.run_id, run.name, "simulated", 0, run.world_size, unix_ns / 1e9, endpoints
        )
