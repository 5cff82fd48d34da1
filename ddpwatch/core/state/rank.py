"""All that is known about one rank.

The resident memory of a rank now and then, for an hour: sixteen bytes a moment, since there may be thousands.

How long a rank's training thread waited for a core, over the latest half minute.

Which of one rank's numbered messages have come, and how many are missing.

Ranks as they are at one moment, for who looks at them for longer than until the next message.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np

from ddpwatch.core.state.gpu import RankGpus
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.state.step_store import MAX_STEP_NS, StepRing

if TYPE_CHECKING:
    from ddpwatch.wire import Beat, Buckets, Bye, Checksum, Comm, Gone, Hello, Loader, Note, Stack, Step

RSS_SAMPLES_KEPT: Final = 360
RSS_SAMPLE_NS: Final = 10_000_000_000


class RssHistory:
    """Bytes at some moments of the viewer's clock, oldest first. Takes one now and then, and passes the others over."""

    __slots__ = ("_reported", "due_ns")

    def __init__(self) -> None:
        self._reported = array("q")
        """Time and bytes by turns."""
        self.due_ns = 0
        """Before this no moment is taken."""

    def __len__(self) -> int:
        """How many moments are known."""
        return len(self._reported) // 2

    def copy(self) -> RssHistory:
        """Another one, which takes its own moments from now on."""
        other = RssHistory()
        other._reported, other.due_ns = self._reported[:], self.due_ns
        return other

    def put(self, now_ns: int, resident_bytes: int) -> None:
        """Take a moment, if it is time for another one. None of them is zero."""
        if now_ns < self.due_ns or not resident_bytes:
            return
        self.due_ns = now_ns + RSS_SAMPLE_NS
        if len(self) == RSS_SAMPLES_KEPT:
            # Into another one: somebody may be looking at this.
            self._reported = self._reported[2:]
        self._reported.extend((now_ns, resident_bytes))

    @property
    def span(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """The first and the last moment, each as time and bytes; None = there are not two."""
        reported = self._reported
        return ((reported[0], reported[1]), (reported[-2], reported[-1])) if len(reported) > 2 else None

    def spread(self, about: int) -> tuple[list[int], list[int]]:
        """Times and bytes of about so many moments, evenly spread and the last among them."""
        reported = self._reported
        every = max(len(reported) // 2 // about, 1)
        first = (len(reported) // 2 - 1) % every
        return reported[2 * first :: 2 * every].tolist(), reported[2 * first + 1 :: 2 * every].tolist()


CPU_SAMPLES_KEPT: Final = 64
CPU_SAMPLE_NS: Final = 500_000_000
LATELY_NS: Final = 10_000_000_000
MIN_SPAN_NS: Final = 250_000_000
"""Over less than a beat nothing can be told."""


class CpuStarvation:
    """The time without a core at some moments, by the rank's own clock. Refuses what runs backwards."""

    __slots__ = ("_queued_ns", "_times_ns")

    def __init__(self) -> None:
        self._times_ns = array("q")
        self._queued_ns = array("q")

    def copy(self) -> CpuStarvation:
        """Another one, which takes its own moments from now on."""
        other = CpuStarvation()
        other._times_ns, other._queued_ns = self._times_ns[:], self._queued_ns[:]
        return other

    def put(self, mono_ns: int, queued_ns: int) -> None:
        """Take a moment: in place of the one before, unless that is long enough after its own."""
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

    @property
    def lately(self) -> float | None:
        """Part of the last seconds that went into waiting for a core; None = it is not known."""
        return self.share(self._times_ns[-1] - LATELY_NS, self._times_ns[-1]) if self._times_ns else None

    def share(self, first_ns: int, last_ns: int) -> float | None:
        """Part of a span of time that went into waiting for a core; None = it is not known."""
        # Copies: the intake may go on while somebody draws.
        times_ns, queued_ns = self._times_ns[:], self._queued_ns[:]
        if len(times_ns) < 2 or len(times_ns) != len(queued_ns):
            return None
        first_ns, last_ns = max(first_ns, times_ns[0]), min(last_ns, times_ns[-1])
        if last_ns - first_ns < MIN_SPAN_NS:
            return None
        begin_ns, end_ns = np.interp([first_ns, last_ns], times_ns, queued_ns).tolist()
        return float((end_ns - begin_ns) / (last_ns - first_ns))


WINDOW: Final = 1024
"""How far back a late message is still told from a duplicate."""
_MASK: Final = (1 << WINDOW) - 1


class SequenceTracker:
    """Counts gaps in a stream of sequence numbers that may arrive doubled or out of order.

    Bit k of `_seen` stands for the number `_newest - _in_order - k`, so memory and cost do not grow with the stream;
    numbers that came in order since are only counted, which nearly all do.
    """

    __slots__ = ("_covered", "_first", "_in_order", "_newest", "_seen", "lost")

    def __init__(self) -> None:
        """Begin with whichever number comes first."""
        self._newest: int | None = None
        self._first = 0
        self._seen = 0
        self._in_order = 0
        self._covered = -1
        self.lost = 0
        """Numbers missing since the last snapshot, or since the first message if there was none."""

    @property
    def newest(self) -> int:
        """The largest number so far; 0 = none has come."""
        return self._newest or 0

    def accept(self, seq: int) -> bool:
        """Whether this message is to be used: it is no duplicate and no snapshot covers it."""
        # What a snapshot covers is never newer than the newest.
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
        """A snapshot holds everything up to `seq`: what is missing before it was not lost after all."""
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
"""In last words: between an exception and the places that it came through."""
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
    """What one rank has said so far. Holds values only; what they mean is worked out elsewhere."""

    rank: int
    host: str = ""
    pid: int = 0
    hello: Hello | None = None
    beat: Beat | None = None
    last_received_ns: int | None = None
    """Viewer's clock at the last beat, or at the first message while no beat has come; None = never heard."""
    bye: Bye | None = None
    bye_ns: int | None = None
    """Viewer's clock when its goodbye came."""
    failing: tuple[Bye, int] | None = None
    """The goodbye that it was about to say, and when it was announced; None = none was."""
    gone_ns: int | None = None
    """Viewer's clock when its process was found ended, after its goodbye or without one; None = it was not."""
    exit_code: int | None = None
    """Of its process, minus the signal if one ended it; None = not known."""
    ended_ns: int | None = None
    """Viewer's clock when its process ended; None = that was not seen as it happened."""
    oom_kills: int = 0
    """Processes of its control group that the kernel has killed for their memory, as counted when it was gone."""
    held_by: str = ""
    """What keeps its process from running, as `Held` tells; empty = it cannot be seen from here."""
    held_ns: int | None = None
    """Viewer's clock when that was told for the first time; None = it was not."""
    snapped: bool = False
    """Whether a snapshot has come, and with it the history."""
    bad: int = 0
    """Frames and steps of this rank that could not be used."""
    steps: StepRing = field(default_factory=StepRing)
    sequence: SequenceTracker = field(default_factory=SequenceTracker)
    notes: dict[tuple[int, str, str], Note] = field(default_factory=dict)
    loaders: dict[tuple[int, int, str], Loader] = field(default_factory=dict)
    checksums: dict[tuple[int, str, int], Checksum] = field(default_factory=dict)
    rss_history: RssHistory = field(default_factory=RssHistory)
    cpu_starvation: CpuStarvation = field(default_factory=CpuStarvation)
    gpus: RankGpus = field(default_factory=RankGpus)
    stack: Stack | None = None
    """What its threads did when it was last asked; None = nobody asked, or it could not answer."""
    stack_ns: int | None = None
    """Viewer's clock when it told that; None = it has not."""
    collectives_ns: int | None = None
    """Viewer's clock when it last told its operations with that; None = it has not."""
    buckets: Buckets | None = None
    """The gradient buckets of the latest step that told them; None = it never did, or nobody asked."""
    logged: tuple[int, dict[str, float]] | None = None
    """The latest step in which the script logged something, and what; None = it never did."""

    @property
    def lost(self) -> int:
        """Messages that were sent and did not arrive."""
        return self.sequence.lost

    @property
    def dropped(self) -> int:
        """Records that the agent overwrote before it could send them."""
        return self.beat.dropped if self.beat else 0

    @property
    def step(self) -> int | None:
        """The step under way, which is also the number of steps done; None = not known."""
        done = self.steps.newest + 1
        return max(self.beat.step, done) if self.beat is not None else done or None

    def finished_ns(self, index: int) -> int | None:
        """Viewer's clock when a step ended; None = cannot be told."""
        if self.beat is None or self.last_received_ns is None or index < 0 or not self.steps.has(index):
            return None
        end_ns = int(self.steps.column("end_ns", np.array([index]))[0])
        return self.last_received_ns - (self.beat.mono_ns - end_ns)

    @property
    def loader(self) -> Loader | None:
        """The latest pass over the data; None = not told."""
        return max(self.loaders.values(), key=lambda loader: (loader.step, loader.epoch), default=None)

    @property
    def at_end_of_data(self) -> bool:
        """Whether it has trained on as many batches as its latest pass over the data has."""
        loader = self.loader
        if loader is None or not loader.length:
            return False
        indices = self.steps.indices()
        batches = np.maximum(self.steps.column("backwards", indices[indices >= loader.step]), 1)
        return int(batches.sum()) >= loader.length

    def apply_hello(self, hello: Hello) -> None:
        """Take the rank's own word on who it is; an older one changes nothing."""
        if self.hello is None or hello.mono_ns > self.hello.mono_ns:
            self.hello, self.host, self.pid = hello, hello.host, hello.pid

    def apply_beat(self, beat: Beat, now_ns: int) -> None:
        """Take a sign of life; one that arrives late is still a sign, but does not turn the figures back."""
        self.last_received_ns = now_ns
        if self.beat is None or beat.mono_ns > self.beat.mono_ns:
            self.beat = beat
            if now_ns >= self.rss_history.due_ns:
                self.rss_history.put(now_ns, beat.rss_bytes)
            if beat.queued_ns:
                self.cpu_starvation.put(beat.mono_ns, beat.queued_ns)

    def record(self, steps: list[Step]) -> None:
        """Keep finished steps; one that is impossible, or that was told differently before, is counted and dropped."""
        kept = self.steps.store.capacity
        if len(steps) > kept and steps[-kept].index == steps[-1].index - kept + 1:
            # A history that is longer than what is kept: its beginning would only be overwritten by its end.
            steps = steps[-kept:]
        self.bad += self.steps.put_all(steps)
        logged = next((step for step in reversed(steps) if step.values), None)
        if logged is not None and logged.values and (self.logged is None or logged.index >= self.logged[0]):
            named = list(logged.values.items())[:MAX_LOGGED]
            self.logged = logged.index, {sanitize(name, NAME_CHARS): value for name, value in named}

    def amend(self, comms: list[Comm]) -> None:
        """Add what is told of the all-reduces of steps that came before; that of a step no longer kept is let go."""
        for comm in comms:
            if comm.busy_ns <= MAX_STEP_NS:
                self.steps.amend(comm.index, comm.busy_ns, comm.bytes)
            else:
                self.bad += 1

    def keep_buckets(self, buckets: Buckets) -> None:
        """Keep them in place of earlier ones; those of an older step change nothing."""
        if self.buckets is None or buckets.step >= self.buckets.step:
            self.buckets = buckets

    def keep_stack(self, stack: Stack, now_ns: int) -> None:
        """Keep it in place of an earlier one; the last operations come with the first answer only."""
        if self.stack is not None and stack.mono_ns < self.stack.mono_ns:
            return
        self.stack_ns = now_ns
        if stack.collectives:
            self.collectives_ns = now_ns
        elif self.stack is not None:
            stack = msgspec.structs.replace(stack, collectives=self.stack.collectives)
        self.stack = stack

    def unix_ns_of_step(self, index: int) -> int:
        """Wall clock of the rank's host at the end of a step; 0 = cannot be told."""
        if index < 0 or not self.steps.has(index):
            return 0
        return self.unix_ns_at(int(self.steps.column("end_ns", np.array([index]))[0]))

    def unix_ns_at(self, mono_ns: int) -> int:
        """Wall clock of the rank's host at a moment of its monotonic one; 0 = cannot be told."""
        hello = self.hello
        return hello.unix_ns + mono_ns - hello.mono_ns if hello is not None and hello.unix_ns else 0

    def leave(self, bye: Bye, now_ns: int) -> None:
        """Take its goodbye; the first one counts."""
        if self.bye is None:
            self.bye, self.bye_ns = bye, now_ns

    def apply_gone(self, gone: Gone, now_ns: int) -> None:
        """Its process has ended; the first word on that counts. A goodbye that was announced and never came is taken as
        said.
        """
        if self.failing is not None:
            self.leave(*self.failing)
        if self.gone_ns is None:
            self.gone_ns, self.oom_kills, self.exit_code = now_ns, gone.oom_kills, gone.exit_code
            self.ended_ns = now_ns - gone.ago_ns if gone.ago_ns else None

    def note(self, note: Note) -> None:
        """Keep a note, once."""
        _keep(self.notes, (note.mono_ns, note.kind, note.text), note, MAX_NOTES)

    def load(self, loader: Loader) -> None:
        """Keep the start of a pass over the data, once."""
        _keep(self.loaders, (loader.step, loader.epoch, loader.sampler), loader, MAX_LOADERS)

    def check(self, checksum: Checksum) -> None:
        """Keep a checksum, once."""
        _keep(self.checksums, (checksum.step, checksum.parameter, checksum.offset), checksum, MAX_CHECKSUMS)


def _keep(items: dict[KeyT, ItemT], key: KeyT, item: ItemT, limit: int) -> None:
    """Keep the `limit` items with the largest keys; keys begin with a time, so the oldest go."""
    items.setdefault(key, item)
    if len(items) > limit:
        del items[min(items)]


ThingT = TypeVar("ThingT")


def frozen_rank(rank: RankState) -> RankState:
    """A copy that stays as it is, whatever is heard of the rank later. What is only ever replaced as a whole, and steps
    that have ended, are shared: of thousands of ranks there are such copies with every key.
    """
    kept = _shared(rank)
    kept.steps, kept.sequence, kept.cpu_starvation = (
        _shared(rank.steps),
        _shared(rank.sequence),
        rank.cpu_starvation.copy(),
    )
    kept.notes, kept.loaders, kept.rss_history = dict(rank.notes), dict(rank.loaders), rank.rss_history.copy()
    kept.gpus = _frozen_gpus(rank.gpus)
    return kept


def _frozen_gpus(gpus: RankGpus) -> RankGpus:
    kept = _shared(gpus)
    kept.histories = {device: _shared(history) for device, history in gpus.histories.items()}
    return kept


def _shared(thing: ThingT) -> ThingT:
    """Another one that holds the same things. Python's own way to copy takes ten times as long."""
    kept = object.__new__(type(thing))
    for name in type(thing).__slots__:  # type: ignore[attr-defined]
        setattr(kept, name, getattr(thing, name))
    return kept
