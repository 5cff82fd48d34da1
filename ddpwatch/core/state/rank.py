"""Everything known about one rank: latest messages, recent steps, memory, CPU starvation, lost messages."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np

from ddpwatch.core.state.gpu import RankGpus
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.state.step_store import MAX_STEP_NS, StepRing
from ddpwatch.wire import AGENT_OFF, MAX_PATHS, MAX_QUEUED, Queued

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.wire import (
        Beat,
        Buckets,
        Bye,
        Checksum,
        Comm,
        Gone,
        Hello,
        Loader,
        LoaderWorkers,
        Note,
        Stack,
        Step,
        SyncPath,
    )

RSS_SAMPLES_KEPT: Final = 360
"""Samples of the resident memory kept of each rank."""
RSS_SAMPLE_NS: Final = 10_000_000_000
"""Interval of these samples in ns; all of them span an hour."""


class RssHistory:
    """Resident memory of a rank, sampled every ten seconds, by the viewer's clock."""

    __slots__ = ("_samples", "due_ns")

    def __init__(self) -> None:
        self._samples = array("q")
        """Time and bytes in turn: 16 bytes a sample, because there may be thousands of ranks."""
        self.due_ns = 0
        """Time of the next sample."""

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._samples) // 2

    def copy(self) -> RssHistory:
        """An independent copy."""
        other = RssHistory()
        other._samples, other.due_ns = self._samples[:], self.due_ns
        return other

    def put(self, now_ns: int, resident_bytes: int) -> None:
        """Add a sample if one is due. Zero bytes = not known."""
        if now_ns < self.due_ns or not resident_bytes:
            return
        self.due_ns = now_ns + RSS_SAMPLE_NS
        if len(self) == RSS_SAMPLES_KEPT:
            # A new array: another thread may be reading the old one.
            self._samples = self._samples[2:]
        self._samples.extend((now_ns, resident_bytes))

    @property
    def span(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """The first and the last sample, each as time and bytes; None if there are fewer than two."""
        samples = self._samples
        return ((samples[0], samples[1]), (samples[-2], samples[-1])) if len(samples) > 2 else None

    def spread(self, about: int) -> tuple[list[int], list[int]]:
        """Times and bytes of about `about` samples, evenly spaced and ending with the last."""
        samples = self._samples
        every = max(len(samples) // 2 // about, 1)
        first = (len(samples) // 2 - 1) % every
        return samples[2 * first :: 2 * every].tolist(), samples[2 * first + 1 :: 2 * every].tolist()


CPU_SAMPLES_KEPT: Final = 64
"""Samples of the time that a rank waited for a CPU core: half a minute."""
CPU_SAMPLE_NS: Final = 500_000_000
"""Shortest interval of these samples in ns."""
LATELY_NS: Final = 10_000_000_000
"""Time in ns over which the current share of waiting is computed."""
MIN_SPAN_NS: Final = 250_000_000
"""Shortest time over which a share is computed, one heartbeat interval."""


class CpuStarvation:
    """Time that a rank's training thread waited for a CPU core, over the latest half minute by the rank's clock."""

    __slots__ = ("_queued_ns", "_times_ns")

    def __init__(self) -> None:
        self._times_ns = array("q")
        self._queued_ns = array("q")

    def copy(self) -> CpuStarvation:
        """An independent copy."""
        other = CpuStarvation()
        other._times_ns, other._queued_ns = self._times_ns[:], self._queued_ns[:]
        return other

    def put(self, mono_ns: int, queued_ns: int) -> None:
        """Add a sample of the cumulative waiting time. It replaces the one before if that is less than `CPU_SAMPLE_NS`
        after its predecessor; one that runs backwards is ignored.
        """
        times_ns, kept_ns = self._times_ns, self._queued_ns
        if times_ns and (mono_ns <= times_ns[-1] or queued_ns < kept_ns[-1]):
            return
        if len(times_ns) >= 2 and times_ns[-1] - times_ns[-2] < CPU_SAMPLE_NS:
            times_ns[-1], kept_ns[-1] = mono_ns, queued_ns
            return
        if len(times_ns) == CPU_SAMPLES_KEPT:
            del times_ns[0], kept_ns[0]
        times_ns.append(mono_ns)
        kept_ns.append(queued_ns)

    def moments(self) -> list[Queued]:
        """The samples, oldest first."""
        return [Queued(*moment) for moment in zip(self._times_ns, self._queued_ns, strict=False)][-MAX_QUEUED:]

    @property
    def lately(self) -> float | None:
        """Fraction of the last `LATELY_NS` spent waiting for a core; None = not known."""
        return self.share(self._times_ns[-1] - LATELY_NS, self._times_ns[-1]) if self._times_ns else None

    def share(self, first_ns: int, last_ns: int) -> float | None:
        """Fraction of a time span spent waiting for a core; None = not known."""
        # Copies: the feed thread may append meanwhile.
        times_ns, queued_ns = self._times_ns[:], self._queued_ns[:]
        if len(times_ns) < 2 or len(times_ns) != len(queued_ns):
            return None
        first_ns, last_ns = max(first_ns, times_ns[0]), min(last_ns, times_ns[-1])
        if last_ns - first_ns < MIN_SPAN_NS:
            return None
        begin_ns, end_ns = np.interp([first_ns, last_ns], times_ns, queued_ns).tolist()
        return float((end_ns - begin_ns) / (last_ns - first_ns))

    def shares_before(self, last_ns: int) -> NDArray[np.float64]:
        """The fraction in each interval between samples up to a moment, oldest first."""
        # The sample after the moment ends the interval that it is in.
        upto = bisect_left(self._times_ns, last_ns) + 1
        shares: NDArray[np.float64] = np.diff(self._queued_ns[:upto]) / np.diff(self._times_ns[:upto])
        return shares


WINDOW: Final = 1024
"""How far back late messages are distinguished from duplicates, in messages."""
_MASK: Final = (1 << WINDOW) - 1


class SequenceTracker:
    """Counts gaps in sequence numbers that may arrive duplicated or out of order (sliding-window bitmap).

    Bit k of `_seen` stands for the number `_newest - _in_order - k`; numbers that arrived in order since, as nearly all
    do, are only counted.
    """

    __slots__ = ("_covered", "_first", "_in_order", "_newest", "_seen", "lost")

    def __init__(self) -> None:
        self._newest: int | None = None
        self._first = 0
        self._seen = 0
        self._in_order = 0
        self._covered = -1
        self.lost = 0
        """Numbers missing since the last snapshot, or since the first message if there was none."""

    @property
    def newest(self) -> int:
        """The largest number so far; 0 = none has arrived."""
        return self._newest or 0

    def accept(self, seq: int) -> bool:
        """Whether to use this message: it is not a duplicate, and no snapshot covers it."""
        # Fast path: a snapshot never covers numbers beyond the newest.
        if self._newest is not None and seq == self._newest + 1:
            self._newest = seq
            self._in_order += 1
            return True
        if seq <= self._covered:
            return False
        if self._newest is None:
            self._newest, self._first, self._seen = seq, seq, 1
            return True
        self._count_in_order()
        ahead = seq - self._newest
        if ahead > 0:
            self.lost += ahead - 1
            self._seen = ((self._seen << ahead) | 1) & _MASK if ahead < WINDOW else 1
            self._newest = seq
            return True
        return self._accept_late(seq, 1 << -ahead if -ahead < WINDOW else 0)

    def _accept_late(self, seq: int, bit: int) -> bool:
        if not bit or self._seen & bit:
            return False
        self._seen |= bit
        if seq > self._first:
            self.lost -= 1
        else:
            self.lost += self._first - seq - 1
            self._first = seq
        return True

    def _count_in_order(self) -> None:
        came, self._in_order = self._in_order, 0
        self._seen = ((self._seen << came) | ((1 << came) - 1)) & _MASK if came < WINDOW else _MASK

    def cover(self, seq: int) -> None:
        """A snapshot holds everything up to `seq`: numbers missing before it do not count as lost."""
        if seq <= self._covered:
            return
        self._count_in_order()
        self._covered = self._first = seq
        if self._newest is None or seq >= self._newest:
            self._newest, self._seen, self.lost = seq, 1, 0
            return
        span = min(self._newest - seq, WINDOW)
        self.lost = span - (self._seen & ((1 << span) - 1)).bit_count()


PARTS: Final = " · "
"""Separates an exception and the lines of its traceback in a rank's exit message."""
# How many of these are kept of each rank.
MAX_NOTES: Final = 64
MAX_LOADERS: Final = 16
MAX_CHECKSUMS: Final = 64
MAX_LOGGED: Final = 16

KeyT = TypeVar("KeyT", bound=tuple[Any, ...])
ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class Place:
    """Where a rank is expected to run."""

    rank: int
    host: str
    pid: int


@dataclass(slots=True)
class RankState:
    """Latest messages of one rank and its recent history. Stores values only, without evaluating them."""

    rank: int
    host: str = ""
    pid: int = 0
    hello: Hello | None = None
    beat: Beat | None = None
    last_received_ns: int | None = None
    """Viewer's clock at the last heartbeat, or at the first message before any heartbeat; None = no message."""
    bye: Bye | None = None
    bye_ns: int | None = None
    """Viewer's clock at its exit message."""
    failing: tuple[Bye, int] | None = None
    """The exit message that a note announced, and the viewer's clock then; None = none was announced."""
    gone_ns: int | None = None
    """Viewer's clock when its process was found ended, with or without an exit message; None = it was not."""
    exit_code: int | None = None
    """Of its process, negative for a signal; None = not known."""
    ended_ns: int | None = None
    """Viewer's clock when its process ended; None = that was not observed."""
    oom_kills: int = 0
    """Processes of its cgroup that the kernel had killed for memory, counted when its process was gone."""
    held_by: str = ""
    """What keeps its process from running, as in `Held`; empty = not known."""
    held_ns: int | None = None
    """Viewer's clock at the first `Held`; None = there was none."""
    snapped: bool = False
    """Whether a snapshot, and with it the history, has arrived."""
    bad: int = 0
    """Number of invalid frames and steps."""
    steps: StepRing = field(default_factory=StepRing)
    sequence: SequenceTracker = field(default_factory=SequenceTracker)
    notes: dict[tuple[int, str, str], Note] = field(default_factory=dict)
    loaders: dict[tuple[int, int, str], Loader] = field(default_factory=dict)
    workers: LoaderWorkers | None = None
    """Latest CPU use of its DataLoader's workers; None = it has none, or they were not measured."""
    checksums: dict[tuple[int, str, int], Checksum] = field(default_factory=dict)
    sync_paths: dict[int, SyncPath] = field(default_factory=dict)
    """Sequences of sync points outside DDP, by `Step.sync_path`."""
    rss_history: RssHistory = field(default_factory=RssHistory)
    cpu_starvation: CpuStarvation = field(default_factory=CpuStarvation)
    gpus: RankGpus = field(default_factory=RankGpus)
    stack: Stack | None = None
    """Latest stacks of its threads; None = never requested, or not answered."""
    stack_ns: int | None = None
    """Viewer's clock at these stacks."""
    collectives_ns: int | None = None
    """Viewer's clock at the latest stacks that came with collectives."""
    buckets: Buckets | None = None
    """Gradient buckets of the latest step that reported them; None = never reported."""
    logged: tuple[int, dict[str, float]] | None = None
    """The latest step in which the script logged values, and the values; None = it never did."""

    @property
    def lost(self) -> int:
        """Number of messages that were sent and did not arrive."""
        return self.sequence.lost

    @property
    def dropped(self) -> int:
        """Number of records that the agent overwrote before it could send them."""
        return self.beat.dropped if self.beat else 0

    @property
    def step(self) -> int | None:
        """The step in progress, which equals the number of finished steps; None = not known."""
        done = self.steps.newest + 1
        return max(self.beat.step, done) if self.beat is not None else done or None

    def finished_ns(self, index: int) -> int | None:
        """Viewer's clock at the end of a step; None = not known."""
        end_ns = self._end_ns(index)
        if self.beat is None or self.last_received_ns is None or end_ns is None:
            return None
        return self.last_received_ns - (self.beat.mono_ns - end_ns)

    def _end_ns(self, index: int) -> int | None:
        return int(self.steps.column("end_ns", np.array([index]))[0]) if index >= 0 and self.steps.has(index) else None

    @property
    def agent_off(self) -> bool:
        """Whether its agent switched itself off, so that how its training went on is not known."""
        return self.bye is not None and self.bye.reason == AGENT_OFF

    @property
    def loader(self) -> Loader | None:
        """The latest pass over the data; None = not reported."""
        return max(self.loaders.values(), key=lambda loader: (loader.step, loader.epoch), default=None)

    @property
    def at_end_of_data(self) -> bool:
        """Whether it has trained on all batches of its latest pass over the data."""
        loader = self.loader
        if loader is None or not loader.length:
            return False
        indices = self.steps.indices()
        batches = np.maximum(self.steps.column("backwards", indices[indices >= loader.step]), 1)
        return int(batches.sum()) >= loader.length

    def apply_hello(self, hello: Hello) -> None:
        """Update the identity of the rank; an older message is ignored."""
        if self.hello is None or hello.mono_ns > self.hello.mono_ns:
            self.hello, self.host, self.pid = hello, hello.host, hello.pid

    def apply_beat(self, beat: Beat, now_ns: int) -> None:
        """Apply a heartbeat. A late one proves that the rank is alive, but does not set figures back."""
        self.last_received_ns = now_ns
        if self.beat is None or beat.mono_ns > self.beat.mono_ns:
            self.beat = beat
            if now_ns >= self.rss_history.due_ns:
                self.rss_history.put(now_ns, beat.rss_bytes)
            if beat.queued_ns:
                self.cpu_starvation.put(beat.mono_ns, beat.queued_ns)

    def add_steps(self, steps: list[Step]) -> None:
        """Store finished steps; invalid and contradicting ones are counted and dropped."""
        kept = self.steps.store.capacity
        if len(steps) > kept and steps[-kept].index == steps[-1].index - kept + 1:
            # The beginning of a history longer than the ring would be overwritten by its end.
            steps = steps[-kept:]
        self.bad += self.steps.put_all(steps)
        logged = next((step for step in reversed(steps) if step.values), None)
        if logged is not None and logged.values and (self.logged is None or logged.index >= self.logged[0]):
            named = list(logged.values.items())[:MAX_LOGGED]
            self.logged = logged.index, {sanitize(name, NAME_CHARS): value for name, value in named}

    def amend(self, comms: list[Comm]) -> None:
        """Add the all-reduce figures of earlier steps, as far as those are still stored."""
        for comm in comms:
            if comm.busy_ns <= MAX_STEP_NS:
                self.steps.amend(comm.index, comm.busy_ns, comm.bytes)
            else:
                self.bad += 1

    def apply_buckets(self, buckets: Buckets) -> None:
        """Keep the buckets of the latest step."""
        if self.buckets is None or buckets.step >= self.buckets.step:
            self.buckets = buckets

    def apply_stack(self, stack: Stack, now_ns: int) -> None:
        """Keep the latest stacks. Collectives come with the first answer only and are carried over."""
        if self.stack is not None and stack.mono_ns < self.stack.mono_ns:
            return
        self.stack_ns = now_ns
        if stack.collectives:
            self.collectives_ns = now_ns
        elif self.stack is not None:
            stack = msgspec.structs.replace(stack, collectives=self.stack.collectives)
        self.stack = stack

    def unix_ns_of_step(self, index: int) -> int:
        """Wall clock of the rank's host at the end of a step; 0 = not known."""
        end_ns = self._end_ns(index)
        return 0 if end_ns is None else self.unix_ns_at(end_ns)

    @property
    def starved_share(self) -> float | None:
        """Fraction of its life that the training thread has waited for a core; None = not known."""
        hello, beat = self.hello, self.beat
        if hello is None or beat is None or not beat.queued_ns:
            return None
        age_ns = beat.mono_ns - hello.mono_ns + max(0, hello.unix_ns - hello.started_unix_ns)
        return beat.queued_ns / max(age_ns, beat.queued_ns)

    def unix_ns_at(self, mono_ns: int) -> int:
        """Wall clock of the rank's host at a time of its monotonic clock; 0 = not known."""
        hello = self.hello
        return hello.unix_ns + mono_ns - hello.mono_ns if hello is not None and hello.unix_ns else 0

    def apply_bye(self, bye: Bye, now_ns: int) -> None:
        """Apply an exit message; the first one counts."""
        if self.bye is None:
            self.bye, self.bye_ns = bye, now_ns

    def apply_gone(self, gone: Gone, now_ns: int) -> None:
        """Its process has ended; the first report counts. An announced exit message counts as sent."""
        if self.failing is not None:
            self.apply_bye(*self.failing)
        if self.gone_ns is None:
            self.gone_ns, self.oom_kills, self.exit_code = now_ns, gone.oom_kills, gone.exit_code
            self.ended_ns = now_ns - gone.ago_ns if gone.ago_ns else None

    def add_note(self, note: Note) -> None:
        """Keep a note, once."""
        _keep(self.notes, (note.mono_ns, note.kind, note.text), note, MAX_NOTES)

    def add_loader(self, loader: Loader) -> None:
        """Keep the start of a pass over the data, once."""
        _keep(self.loaders, (loader.step, loader.epoch, loader.sampler), loader, MAX_LOADERS)

    def apply_workers(self, workers: LoaderWorkers) -> None:
        """Keep the latest CPU use of the DataLoader's workers."""
        if self.workers is None or workers.mono_ns > self.workers.mono_ns:
            self.workers = workers

    def add_sync_path(self, path: SyncPath) -> None:
        """Keep the description of a sequence of sync points, once."""
        if len(self.sync_paths) < MAX_PATHS:
            self.sync_paths.setdefault(path.path, path)

    def add_checksum(self, checksum: Checksum) -> None:
        """Keep a checksum, once."""
        _keep(self.checksums, (checksum.step, checksum.parameter, checksum.offset), checksum, MAX_CHECKSUMS)


def _keep(items: dict[KeyT, ItemT], key: KeyT, item: ItemT, limit: int) -> None:
    """Keep the `limit` items with the largest keys: these begin with a time or a step, so the oldest are dropped."""
    items.setdefault(key, item)
    if len(items) > limit:
        del items[min(items)]


def frozen_rank(rank: RankState) -> RankState:
    """Shallow snapshot of a RankState, for paused views. Shares finished steps and everything that is only replaced as
    a whole: such snapshots of thousands of ranks are taken at every key press.
    """
    frozen = _shallow_copy(rank)
    frozen.steps, frozen.sequence = _shallow_copy(rank.steps), _shallow_copy(rank.sequence)
    frozen.cpu_starvation, frozen.rss_history = rank.cpu_starvation.copy(), rank.rss_history.copy()
    frozen.notes, frozen.loaders = dict(rank.notes), dict(rank.loaders)
    frozen.gpus = _shallow_copy(rank.gpus)
    frozen.gpus.histories = {device: _shallow_copy(history) for device, history in rank.gpus.histories.items()}
    return frozen


def _shallow_copy(original: ItemT) -> ItemT:
    """Copy an object with slots, ten times as fast as `copy.copy`."""
    copied = object.__new__(type(original))
    for name in type(original).__slots__:  # type: ignore[attr-defined]
        setattr(copied, name, getattr(original, name))
    return copied
