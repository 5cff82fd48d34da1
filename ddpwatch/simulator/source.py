"""A large run that nobody has to own: made up, played in real time, with the same surface as a live one."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from ddpwatch import rundir
from ddpwatch.simulator.workload import Endless
from ddpwatch.sources.frames import Frame, Tick
from ddpwatch.wire import SNAP_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddpwatch.simulator.scenario import Chapter

TICK_MS: Final = 100
"""A tick comes after this much silence."""
MAX_RANKS: Final = 8192
HISTORY_STEPS: Final = 300
HISTORY_CELLS: Final = 1 << 19
"""Steps of all ranks in the history: many ranks begin with less of it, or the first look would take many seconds."""
MAX_BEHIND_NS: Final = 2_000_000_000
"""Who does not ask for so long finds the run where it was left: it has stood still, its clocks, too, and nothing has
piled up."""
_SNAP_TOPIC: Final = SNAP_PREFIX + b"simulated"


class Simulated:
    """Begins as a late viewer finds a run: with the history of every rank at once, and a fault just under way.

    Frames carry the time at which they were due. So a viewer that is too slow for it sees a run that lags, and no ranks
    that have fallen silent.
    """

    def __init__(
        self,
        world_size: int,
        *,
        speed: float = 1.0,
        step_ms: float = 100.0,
        story: Sequence[Chapter] | None = None,
        seed: int = 0,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], object] = time.sleep,
        unix: Callable[[], int] = time.time_ns,
    ) -> None:
        """A `speed` of 2 plays two seconds in one. `clock` and `unix` give nanoseconds, `sleep` takes seconds."""
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"a simulated run has 1 to {MAX_RANKS} ranks, not {world_size}")
        if not speed > 0:
            raise ValueError(f"a simulated run cannot be played at a speed of {speed}")
        self._clock, self._sleep, self._speed = clock, sleep, speed
        began_ns = clock()
        history = min(HISTORY_STEPS, HISTORY_CELLS // world_size)
        self._run = Endless(
            world_size, now_ns=began_ns, unix_ns=unix(), story=story, step_ms=step_ms, history_steps=history, seed=seed
        )
        self._zero_ns, self._zero_run_ns = began_ns, self._run.due_ns
        """The same moment on the viewer's clock and on the ranks'."""
        self._stood_ns = 0
        """For how long it has stood still."""
        self._reported_ns = began_ns
        """When what is being told was due."""
        self._queue: deque[tuple[int, bytes, bytes]] = deque()
        self._unsnapped = iter(range(world_size))
        self.known: set[int] = set(range(world_size))
        """All ranks."""
        self.here: set[int] = set()
        """None: there are no processes whose end could be seen."""
        self.refused: dict[int, str] = {}
        """None of them, ever."""
        self.run = self._as_run_file(unix())
        """What a `run.json` would say."""

    def poll(self, timeout_ms: int = TICK_MS) -> Frame | Tick:
        """The next frame, or a tick if none comes in time."""
        if not self._queue:
            rank = next(self._unsnapped, None)
            if rank is not None:
                return Frame(_SNAP_TOPIC, self._run.snap(rank, self._zero_run_ns), self._reported_ns)
            now_ns = self._await(timeout_ms)
            if now_ns < (due_ns := self._due_ns):
                return Tick(now_ns)
            self._reported_ns = due_ns
            self._queue.extend(self._run.turn())
        _, topic, payload = self._queue.popleft()
        return Frame(topic, payload, self._reported_ns)

    def poll_ready(self, most: int) -> list[Frame]:
        """More frames of the turn that is being told."""
        reported = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
        return [Frame(topic, payload, self._reported_ns) for _, topic, payload in reported]

    def __iter__(self) -> Iterator[Frame | Tick]:
        """Frames and ticks, for ever."""
        while True:
            yield self.poll()

    def want_stacks(self, ranks: frozenset[int]) -> None:
        """Nobody is there who could answer."""

    def want_buckets(self, wanted: bool) -> None:
        """Have the gradient buckets told, or no longer."""
        self._run.buckets_wanted = wanted

    def close(self) -> None:
        """There is nothing to let go of."""
        self._queue.clear()

    def _await(self, timeout_ms: int) -> int:
        """Let the time pass until the next turn, but not more than the timeout. Returns what time it is then, on the
        viewer's clock less what it has stood still.
        """
        ahead_ns = self._due_ns - (self._clock() - self._stood_ns)
        if ahead_ns < -MAX_BEHIND_NS:
            self._stood_ns -= ahead_ns
        elif ahead_ns > 0 and timeout_ms > 0:
            self._sleep(min(timeout_ms / 1e3, ahead_ns / 1e9))
        return self._clock() - self._stood_ns

    @property
    def _due_ns(self) -> int:
        """When the next turn is, on the same clock."""
        return self._zero_ns + int((self._run.due_ns - self._zero_run_ns) / self._speed)

    def _as_run_file(self, unix_ns: int) -> rundir.RunFile:
        endpoints = [
            rundir.Endpoint(rank, self._run.host(rank), "simulated", self._run.pid(rank), 0.0, "")
            for rank in range(self._run.world_size)
        ]
        return rundir.RunFile(
            rundir.SCHEMA,
            self._run.run_id,
            self._run.name,
            "simulated",
            0,
            self._run.world_size,
            unix_ns / 1e9,
            endpoints,
        )
