"""Heartbeats: the state of a rank, read without the training thread."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from time import monotonic, perf_counter_ns, process_time, thread_time_ns
from typing import TYPE_CHECKING, Final

from ddpwatch.agent.clock import EVALUATING, OTHER, PRESYNC, SAVING, SYNC
from ddpwatch.agent.process_groups import Collectives
from ddpwatch.agent.step_recorder import COST_EVERY
from ddpwatch.wire import MAX_QUEUED, STEP_COLUMNS, Beat, Queued, pack_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.agent.step_recorder import Recorder
    from ddpwatch.wire import Gpus, Step


QUEUED_EVERY_NS: Final = 500_000_000
"""Time in ns between the moments of CPU starvation that are kept."""


class HeartbeatReader:
    """Collects the content of heartbeats, in the agent's thread. Takes no lock that a hung rank could hold."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.collectives = Collectives(lambda: recorder.thread)
        # Kept open: reading again costs a tenth, and needs no descriptor when none is left.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._schedstat: int | None = None
        with contextlib.suppress(OSError):  # not every kernel has it
            self._schedstat = os.open(f"/proc/self/task/{recorder.thread_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._cpu_s = process_time()
        self._at_s = monotonic()
        self._cpu_percent = 0.0
        self.queued: deque[Queued] = deque(maxlen=MAX_QUEUED)
        """CPU starvation of the training thread lately, for viewers that attach late."""

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._statm)
        if self._schedstat is not None:
            os.close(self._schedstat)

    def beat(self, rank: int, seq: int, steps: Sequence[Step] = (), gpus: Gpus | None = None) -> Beat:
        """The current state of this rank, with finished steps and a new GPU reading if there are any."""
        recorder = self._recorder
        logged = any(step.values for step in steps)
        phase, activity, since_ns = self.phase, self.activity, recorder.clock.since_ns
        now_ns = perf_counter_ns()
        return Beat(
            rank=rank,
            seq=seq,
            mono_ns=now_ns,
            step=recorder.index,
            phase=phase,
            phase_ns=max(0, now_ns - since_ns),
            pause=recorder.pause,
            groups=self.collectives.groups(now_ns),
            cpu_percent=self._measure_cpu(),
            rss_bytes=int(os.pread(self._statm, 200, 0).split()[1]) * self._page_bytes,
            dropped=recorder.steps.dropped + recorder.events.dropped,
            agent_cpu_ns=thread_time_ns(),
            hook_ns=recorder.switch.cost_ns * COST_EVERY,
            queued_ns=self._measure_queue(now_ns),
            steps=list(steps) if logged else [],
            table=b"" if logged else pack_steps(steps),
            gpus=gpus,
            table_columns=len(STEP_COLUMNS),
            activity=activity,
        )

    def _measure_queue(self, now_ns: int) -> int:
        queued_ns = self._queued_ns()
        if queued_ns and (not self.queued or now_ns - self.queued[-1].mono_ns >= QUEUED_EVERY_NS):
            self.queued.append(Queued(now_ns, queued_ns))
        return queued_ns

    def _queued_ns(self) -> int:
        """Time that the training thread has waited for a core; 0 = not counted by the kernel, or the thread is gone."""
        if self._schedstat is None:
            return 0
        try:
            return int(os.pread(self._schedstat, 100, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return 0

    @property
    def phase(self) -> int:
        """The current phase of the training thread."""
        phase = self._recorder.clock.phase
        return SYNC if phase >= PRESYNC else min(phase, OTHER)

    @property
    def activity(self) -> str:
        """What the training thread does in `other`, if that is known."""
        phase = self._recorder.clock.phase
        return self._recorder.save_name if phase == SAVING else "evaluation" if phase == EVALUATING else ""

    def _measure_cpu(self) -> float:
        """CPU use of the process since the last heartbeat, in percent of one core."""
        now_s = monotonic()
        if now_s - self._at_s > 0.1:  # a snapshot right after a heartbeat would divide noise by almost nothing
            used_s = process_time()
            self._cpu_percent = max(0.0, 100 * (used_s - self._cpu_s) / (now_s - self._at_s))
            self._cpu_s, self._at_s = used_s, now_s
        return round(self._cpu_percent, 1)
