"""When each gradient bucket of a backward pass was ready, and when its all-reduce had ended."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Final

from ddpwatch.agent.guard import guarded
from ddpwatch.wire import Bucket

if TYPE_CHECKING:
    from torch import Tensor

    from ddpwatch.agent.recorder import Recorder

MAX_BUCKETS: Final = 4096


class BucketTimer:
    """Collects the buckets of one backward pass."""

    def __init__(self, recorder: Recorder) -> None:
        self.switch = recorder.switch
        self._recorder = recorder
        self._began_ns = 0
        # [bytes, ready, done]: lists, because the end is filled in by another thread.
        self._buckets: list[list[int]] = []
        self._unseen = False
        """Whether the end of one of them cannot be seen."""

    def backward_began(self) -> None:
        """Forget what an earlier, unfinished pass left."""
        self._began_ns = perf_counter_ns()
        self._buckets = []
        self._unseen = False

    @guarded
    def ready(self, buffer: Tensor) -> list[int] | None:
        """A bucket goes out now; the entry to `stamp` when it has come back, if that can be seen."""
        if len(self._buckets) >= MAX_BUCKETS:
            return None
        entry = [buffer.nbytes, perf_counter_ns(), 0]
        self._buckets.append(entry)
        # On a GPU the future completes when the work is queued, which says nothing about its end.
        if buffer.is_cpu:
            return entry
        self._unseen = True
        return None

    def backward_ended(self) -> None:
        """DDP has waited for all of them: what has no end yet ended just now."""
        if not self._buckets:
            return
        now_ns = perf_counter_ns()
        buckets, self._buckets = self._buckets, []
        busy_ns = end_ns = comm_bytes = 0
        # They go out one after the other, so they are in order: their union is one sweep.
        for entry in buckets:
            size, ready_ns, done_ns = entry
            # Viewers are told that its end was not seen; here DDP has waited for it, so it was busy until now at most.
            done_ns = done_ns or now_ns
            comm_bytes += size
            if done_ns > end_ns:
                busy_ns += done_ns - max(ready_ns, end_ns)
                end_ns = done_ns
        recorder = self._recorder
        # The host's time of work on a GPU would be compared with a `sync` by the GPU's clock.
        recorder.busy_ns += 0 if self._unseen else busy_ns
        recorder.comm_bytes += comm_bytes
        if recorder.want_buckets:
            recorder.event("buckets", buckets=self._described(buckets))

    def _described(self, buckets: list[list[int]]) -> list[Bucket]:
        began_ns = self._began_ns
        return [
            Bucket(index=index, bytes=size, ready_ns=max(0, ready_ns - began_ns), done_ns=max(0, done_ns - began_ns))
            for index, (size, ready_ns, done_ns) in enumerate(buckets)
        ]


def stamp(entry: list[int]) -> None:
    """The bucket of this entry has come back."""
    entry[2] = perf_counter_ns()
