"""The state of one run, as far as its messages tell. The only thing that changes it is `RunState`.

Nothing here reads a clock: time comes in with every message and every tick, so that a recording played back reaches
the same state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NoReturn, TypeAlias

from ddpwatch.core.limits import LivenessLimits
from ddpwatch.core.logs.log_state import LogState
from ddpwatch.core.state.gpu import CROWDED_MOMENTS, KEPT_MOMENTS, RankGpus
from ddpwatch.core.state.ingest import (
    apply_note,
    apply_snap,
    put_tables,
    sanitized_beat,
    sanitized_bye,
    sanitized_hello,
    sanitized_stack,
    without_steps_and_gpus,
)
from ddpwatch.core.state.rank import Place, RankState
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize, sanitized
from ddpwatch.core.state.step_store import CAPACITY_STEPS, CROWDED_STEPS, StepRing, StepStore
from ddpwatch.errors import UnknownMessage, WireError
from ddpwatch.wire import (
    Beat,
    Buckets,
    Bye,
    Checksum,
    Comms,
    Gone,
    Gpus,
    Held,
    Hello,
    Loader,
    LogLines,
    Message,
    Note,
    Relay,
    Snap,
    Stack,
    Steps,
    claimed_rank,
    decode,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_EXPECTED: Final = 8192
"""Ranks that are listed before they were heard; a world that claims to be larger is not taken at its word."""
MANY_RANKS: Final = 256
"""Of more ranks than these fewer steps are kept, and they are judged less often."""

Condition: TypeAlias = Literal["ok", "paused", "ended", "failed", "lost", "silent", "missing"]
"""Of a rank: `ended` = it said goodbye, `failed` = an exception ended it, `lost` = its process has ended without a
word, `silent` = its beats stopped, or its process lives and was never heard, `missing` = expected but never heard."""
RunCondition: TypeAlias = Literal["waiting", "live", "silent", "ended"]
"""Of the run: `waiting` = no rank heard yet, `silent` = all ranks that were heard are silent or ended."""


_OfRank: TypeAlias = (
    Hello | Steps | Comms | Beat | Gpus | Note | Loader | Checksum | Buckets | Stack | Gone | Held | Bye | Snap
)
"""What is about one rank."""


class RunState:
    """Everything known about a run. Memory is bounded by the number of ranks, cost per message by its size."""

    def __init__(self, run_id: str, name: str, world_size: int, places: Iterable[Place] = ()) -> None:
        """Expect all ranks of the world, some of them at `places`. A rank beyond `world_size` is refused."""
        self.run_id = sanitize(run_id, NAME_CHARS)
        self.name = sanitize(name, NAME_CHARS)
        self.world_size = world_size
        self.now_ns = 0
        expected = {place.rank: place for place in places}
        for number in range(min(world_size, MAX_EXPECTED)):
            expected.setdefault(number, Place(number, "", 0))
        store = StepStore(len(expected), self.kept_steps)
        self.ranks: dict[int, RankState] = {
            number: RankState(
                number,
                sanitize(expected[number].host, NAME_CHARS),
                expected[number].pid,
                steps=StepRing(store, row),
                gpus=RankGpus(self._kept_moments),
            )
            for row, number in enumerate(sorted(expected))
        }
        self._packed: list[tuple[RankState, bytes]] = []
        """Steps that have come, and are not kept yet."""
        self.logs = LogState()
        """What the watched log files say."""
        self.relay: Relay | None = None
        """What the relay said last through which the ranks are heard; None = they are heard directly."""
        self.relay_ns = 0
        """Viewer's clock then, or when the last frame of a rank came through it."""
        self.viewer_stalls = (0, 0)
        """Viewer's clock when it last stopped looking, and when it looked again: what it did not hear meanwhile need
        not have been silent."""
        self.first_ns: int | None = None
        """Viewer's clock when the first message came."""
        self.unreachable: dict[int, str] = {}
        """Ranks that the viewer cannot listen to, and why."""
        self.unknown = 0
        """Messages of a kind that this version does not know."""
        self.bad_unassigned = 0
        """Unreadable frames that no rank can be blamed for."""
        self.bad_reason = ""
        """Why the last unreadable frame was refused."""

    @property
    def bad(self) -> int:
        """All frames and steps that could not be used."""
        return self.bad_unassigned + sum(rank.bad for rank in self.ranks.values())

    @property
    def step(self) -> int | None:
        """The furthest step that a rank is in; None = not known."""
        # As `RankState.step` has it, without asking each of thousands of ranks for it several times a second.
        done = max((rank.steps.newest for rank in self.ranks.values()), default=-1) + 1
        under_way = max((rank.beat.step for rank in self.ranks.values() if rank.beat is not None), default=None)
        return max(under_way, done) if under_way is not None else done or None

    def ingest(self, payload: bytes | memoryview, now_ns: int) -> int | None:
        """Read a frame's payload and apply it. Never raises: what cannot be used is counted. Returns the rank that it
        claims to be of; None = it claims none.
        """
        rank = self._ingest(payload, now_ns)
        self._settle()
        return rank

    def ingest_all(self, reported: Iterable[tuple[bytes | memoryview, int]]) -> list[int | None]:
        """The same of many payloads, each with its time, in order: of a large run they are sooner taken in together."""
        take = self._ingest
        ranks = [take(payload, now_ns) for payload, now_ns in reported]
        self._settle()
        return ranks

    def _ingest(self, payload: bytes | memoryview, now_ns: int) -> int | None:
        try:
            message = decode(payload)
        except UnknownMessage:
            self.unknown += 1
            self.tick(now_ns)
            return claimed_rank(payload)
        except WireError as error:
            claimed = claimed_rank(payload)
            self.count_bad(claimed, str(error))
            self.tick(now_ns)
            return claimed
        if type(message) is not Beat:
            self._apply(message, now_ns)
            return message.rank
        # Nearly all that ever comes; with thousands of ranks it is worth a shorter way.
        number = message.rank
        rank = self.ranks.get(number)
        if rank is None or rank.last_received_ns is None:
            self._apply(message, now_ns)
        else:
            if now_ns > self.now_ns:
                self.now_ns = now_ns
            self.relay_ns = now_ns
            if rank.sequence.accept(message.seq):
                self._apply_beat(rank, message, now_ns)
        return number

    def tick(self, now_ns: int, viewer_stall_ns: int = 0) -> None:
        """Let time pass: silence is an event, too. For `viewer_stall_ns` up to now the viewer itself has not looked."""
        self.now_ns = max(self.now_ns, now_ns)
        if viewer_stall_ns:
            self.viewer_stalls = (now_ns - viewer_stall_ns, now_ns)

    def set_unreachable(self, unreachable: Mapping[int, str]) -> None:
        """Take in whom the viewer cannot listen to now, and why."""
        self.unreachable = {rank: sanitize(why, NOTE_CHARS) for rank, why in unreachable.items()}

    def no_heartbeat_ns(self, last_ns: int) -> int:
        """How long something has been silent that was last heard then. If the viewer was held up soon after that, it
        counts from when it looked again.
        """
        from_ns, until_ns = self.viewer_stalls
        return self.now_ns - (until_ns if from_ns - LivenessLimits.NO_HEARTBEAT_NS <= last_ns < until_ns else last_ns)

    def count_bad(self, rank: int | None, reason: str = "") -> None:
        """Count a frame that could not be used, against its rank where that is known."""
        self.bad_reason = sanitize(reason, NOTE_CHARS)
        if rank is not None and rank in self.ranks:
            self.ranks[rank].bad += 1
        else:
            self.bad_unassigned += 1

    def apply(self, message: Message, now_ns: int) -> None:
        """Take one message in. Duplicates, late ones and those covered by a snapshot change nothing."""
        self._apply(message, now_ns)
        self._settle()

    def _apply(self, message: Message, now_ns: int) -> None:
        if now_ns > self.now_ns:
            self.now_ns = now_ns
        if self.first_ns is None and not isinstance(message, (LogLines, Relay)):
            self.first_ns = now_ns
        if message.rank >= self.world_size:
            self.count_bad(None, f"rank {message.rank} in a world of {self.world_size}")
            return
        if isinstance(message, LogLines):
            self.logs.add(message)
            return
        if isinstance(message, Relay):
            self.relay, self.relay_ns = sanitized(message, NAME_CHARS), now_ns
            return
        self._apply_seldom(self._rank(message.rank), message, now_ns)

    def _apply_beat(self, rank: RankState, beat: Beat, now_ns: int) -> None:
        table, steps, gpus = beat.table, beat.steps, beat.gpus
        rank.apply_beat(without_steps_and_gpus(sanitized_beat(beat)), now_ns)
        if table:
            self._packed.append((rank, table))
        elif steps:
            self._settle()
            rank.record(steps)
        if gpus is not None:
            rank.gpus.update(gpus, now_ns)

    def _settle(self) -> None:
        """Keep the packed steps that have come meanwhile: what is told of steps after them comes after them."""
        if self._packed:
            packed, self._packed = self._packed, []
            refused = put_tables([(rank.steps, table) for rank, table in packed])
            if any(refused):
                for (rank, _), bad in zip(packed, refused, strict=True):
                    rank.bad += bad

    def _apply_seldom(self, rank: RankState, message: _OfRank, now_ns: int) -> None:
        if isinstance(message, Gone):
            rank.apply_gone(message, now_ns)
            return
        if isinstance(message, Held):
            rank.held_by = sanitize(message.by, NAME_CHARS)
            rank.held_ns = now_ns if rank.held_ns is None else rank.held_ns
            return
        if isinstance(message, Bye) and message.seq == 0:
            # Outside the numbered stream: a viewer's own word on a rank that had left. It is no sign of life.
            rank.leave(sanitized_bye(message), now_ns)
            return
        self.relay_ns = now_ns
        if rank.last_received_ns is None:
            rank.last_received_ns = now_ns
        match message:
            case Snap():
                self._settle()
                apply_snap(rank, message, now_ns)
            case Buckets():
                # On demand, hence outside the numbered stream.
                rank.keep_buckets(message)
            case Stack():
                rank.keep_stack(sanitized_stack(message), now_ns)
            case _:
                if rank.sequence.accept(message.seq):
                    self._apply_live(rank, message, now_ns)

    def _apply_live(
        self,
        rank: RankState,
        message: Hello | Steps | Comms | Beat | Gpus | Note | Loader | Checksum | Bye,
        now_ns: int,
    ) -> None:
        match message:
            case Hello():
                rank.apply_hello(sanitized_hello(message))
            case Steps():
                self._settle()
                rank.record(message.steps)
            case Comms():
                self._settle()
                rank.amend(message.comms)
            case Gpus():
                rank.gpus.update(message, now_ns)
            case Beat():
                self._apply_beat(rank, message, now_ns)
            case Note():
                apply_note(rank, message, now_ns)
            case Loader():
                rank.load(sanitized(message, NAME_CHARS))
            case Checksum():
                rank.check(sanitized(message, NAME_CHARS))
            case Bye():
                rank.leave(sanitized_bye(message), now_ns)
            case _:
                _never(message)

    def condition(self, rank: RankState) -> Condition:
        """How the rank is doing at `now_ns`."""
        if rank.bye is not None:
            badly = rank.bye.reason == "failed" or (rank.bye.reason == "exit" and (rank.exit_code or 0) > 0)
            return "failed" if badly else "ended"
        if rank.gone_ns is not None:
            return "lost"
        # One whose process is there to be seen has had the time to speak since then.
        since_ns = rank.held_ns if rank.last_received_ns is None else rank.last_received_ns
        limit_ns = LivenessLimits.NO_HEARTBEAT_NS
        if since_ns is not None and self.now_ns - since_ns >= limit_ns <= self.no_heartbeat_ns(since_ns):
            return "silent"
        if rank.last_received_ns is None:
            return "missing"
        return "paused" if rank.beat is not None and rank.beat.pause else "ok"

    def run_condition(self) -> RunCondition:
        """How the run as a whole is doing at `now_ns`."""
        received: set[Condition] = set()
        for rank in self.ranks.values():
            condition = self.condition(rank)
            if condition in {"ok", "paused"}:
                # The first of thousands answers it.
                return "live"
            received.add(condition)
        if not received - {"missing"}:
            return "waiting"
        return "silent" if "silent" in received else "ended"

    @property
    def relay_lost(self) -> bool:
        """Whether there is a relay, and nothing is heard of it: then silence says nothing about the ranks."""
        relay = self.relay
        limit_ns = LivenessLimits.NO_HEARTBEAT_NS
        return relay is not None and not relay.ended and self.no_heartbeat_ns(self.relay_ns) >= limit_ns

    @property
    def spans_hosts(self) -> bool:
        """Whether its ranks are known to be on more than one host."""
        return len({rank.host for rank in self.ranks.values() if rank.host}) > 1

    @property
    def unix_ns(self) -> int:
        """The wall clock now, as the ranks have it; 0 = cannot be told."""
        for rank in self.ranks.values():
            if rank.beat is not None and rank.last_received_ns is not None:
                unix_ns = rank.unix_ns_at(rank.beat.mono_ns)
                if unix_ns:
                    return unix_ns + self.now_ns - rank.last_received_ns
        return 0

    @property
    def beat_ns(self) -> int:
        """How often a rank gives a sign of life."""
        return LivenessLimits.BEAT_NS if self.world_size <= MANY_RANKS else LivenessLimits.MANY_RANKS_BEAT_NS

    @property
    def kept_steps(self) -> int:
        """So many of the latest steps of each rank are known."""
        return CAPACITY_STEPS if self.world_size <= MANY_RANKS else CROWDED_STEPS

    @property
    def _kept_moments(self) -> int:
        return KEPT_MOMENTS if self.world_size <= MANY_RANKS else CROWDED_MOMENTS

    def _rank(self, number: int) -> RankState:
        rank = self.ranks.get(number)
        if rank is None:
            steps, gpus = StepRing(StepStore(1, self.kept_steps)), RankGpus(self._kept_moments)
            rank = RankState(number, steps=steps, gpus=gpus)
            # A new table: somebody may just be walking through the old one.
            self.ranks = dict(sorted({**self.ranks, number: rank}.items()))
        return rank


def _never(message: NoReturn) -> NoReturn:
    """Make mypy prove that every kind of message is handled."""
    raise AssertionError(f"unhandled message {message!r}")
