"""All that is known about one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np

from ddpwatch.core.cores import Queueing
from ddpwatch.core.gpu import RankGpus
from ddpwatch.core.resident import Resident
from ddpwatch.core.ring import MAX_STEP_NS, StepRing
from ddpwatch.core.sequence import Sequence
from ddpwatch.core.text import NAME_CHARS, tame

if TYPE_CHECKING:
    from ddpwatch.wire import Beat, Buckets, Bye, Checksum, Comm, Gone, Hello, Loader, Note, Stack, Step

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
    sign_ns: int | None = None
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
    sequence: Sequence = field(default_factory=Sequence)
    notes: dict[tuple[int, str, str], Note] = field(default_factory=dict)
    loaders: dict[tuple[int, int, str], Loader] = field(default_factory=dict)
    checksums: dict[tuple[int, str, int], Checksum] = field(default_factory=dict)
    resident: Resident = field(default_factory=Resident)
    queueing: Queueing = field(default_factory=Queueing)
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
        if self.beat is None or self.sign_ns is None or index < 0 or not self.steps.has(index):
            return None
        end_ns = int(self.steps.column("end_ns", np.array([index]))[0])
        return self.sign_ns - (self.beat.mono_ns - end_ns)

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

    def meet(self, hello: Hello) -> None:
        """Take the rank's own word on who it is; an older one changes nothing."""
        if self.hello is None or hello.mono_ns > self.hello.mono_ns:
            self.hello, self.host, self.pid = hello, hello.host, hello.pid

    def hear(self, beat: Beat, now_ns: int) -> None:
        """Take a sign of life; one that arrives late is still a sign, but does not turn the figures back."""
        self.sign_ns = now_ns
        if self.beat is None or beat.mono_ns > self.beat.mono_ns:
            self.beat = beat
            if now_ns >= self.resident.due_ns:
                self.resident.put(now_ns, beat.rss_bytes)
            if beat.queued_ns:
                self.queueing.put(beat.mono_ns, beat.queued_ns)

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
            self.logged = logged.index, {tame(name, NAME_CHARS): value for name, value in named}

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

    def vanish(self, gone: Gone, now_ns: int) -> None:
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
