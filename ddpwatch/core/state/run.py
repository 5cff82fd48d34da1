"""State of one run, updated by its messages and by ticks.

No clock is read here: time arrives with every message and tick, so that a replay reaches the same state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ddpwatch import wire
from ddpwatch.core.limits import LivenessLimits
from ddpwatch.core.logs.log_state import LogState
from ddpwatch.core.state import ingest
from ddpwatch.core.state.gpu import KEPT_MOMENTS, MANY_RANKS_MOMENTS, RankGpus
from ddpwatch.core.state.ingest import sanitized_beat, without_steps_and_gpus
from ddpwatch.core.state.rank import Place, RankState
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize, sanitized
from ddpwatch.core.state.step_store import CAPACITY_STEPS, MANY_RANKS_STEPS, StepRing, StepStore, put_tables
from ddpwatch.errors import UnknownMessage, WireError
from ddpwatch.wire import MANY_RANKS, Beat, beat_ns, decode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_EXPECTED: Final = 8192
"""Maximum number of ranks that are listed before a message of theirs arrives, whatever world size is claimed."""

Condition: TypeAlias = Literal["ok", "paused", "ended", "failed", "lost", "silent", "missing"]
"""Of a rank: `ended` = it exited cleanly, `failed` = an exception ended it, `lost` = its process ended without a
message, `silent` = its heartbeats stopped, or its process runs and never sent one, `missing` = expected, nothing is
known."""
ALIVE: Final[frozenset[Condition]] = frozenset({"ok", "paused"})
"""Conditions of a rank that sends heartbeats."""
RunCondition: TypeAlias = Literal["waiting", "live", "silent", "ended"]
"""Of the run: `waiting` = no rank has sent anything, `silent` = all ranks that have are silent or ended."""


_Numbered: TypeAlias = (
    wire.Hello
    | wire.Steps
    | wire.Comms
    | Beat
    | wire.Gpus
    | wire.Note
    | wire.Loader
    | wire.LoaderWorkers
    | wire.SyncPath
    | wire.Checksum
    | wire.Bye
)
"""Messages with sequence numbers, of which duplicates and gaps are detected."""
_OfRank: TypeAlias = _Numbered | wire.Buckets | wire.Stack | wire.Gone | wire.Held | wire.Snap


class RunState:
    """Everything known about a run. Memory is bounded by the number of ranks, cost per message by its size."""

    def __init__(self, run_id: str, name: str, world_size: int, places: Iterable[Place] = ()) -> None:
        """Expect all ranks of the world, some of them at `places`. A rank beyond `world_size` is refused."""
        self.run_id = sanitize(run_id, NAME_CHARS)
        self.name = sanitize(name, NAME_CHARS)
        self.world_size = world_size
        self.now_ns = 0
        expected = {number: Place(number, "", 0) for number in range(min(world_size, MAX_EXPECTED))}
        expected.update((place.rank, place) for place in places)
        store = StepStore(len(expected), self.kept_steps)
        self.ranks = {
            number: self._new_rank(number, StepRing(store, row)) for row, number in enumerate(sorted(expected))
        }
        for number, place in expected.items():
            self.ranks[number].host, self.ranks[number].pid = sanitize(place.host, NAME_CHARS), place.pid
        self._pending_tables: list[tuple[RankState, bytes]] = []
        """Step tables that were received and not stored yet."""
        self.logs = LogState()
        """Findings in the watched log files."""
        self.relay: wire.Relay | None = None
        """Latest message of the relay; None = the ranks are connected directly."""
        self.relay_ns = 0
        """Viewer's clock at that message, or at the latest frame of a rank."""
        self.viewer_stalls = (0, 0)
        """Begin and end of the latest time in which the viewer itself did not run: ranks may have sent heartbeats
        meanwhile."""
        self.first_ns: int | None = None
        """Viewer's clock at the first message."""
        self.unreachable: dict[int, str] = {}
        """Ranks that the viewer cannot connect to, and why."""
        self.unknown = 0
        """Number of messages of a type that this version does not know."""
        self.bad_unassigned = 0
        """Number of invalid frames that name no rank."""
        self.bad_reason = ""
        """Why the latest invalid frame was refused."""
        self.has_sync_points = False
        """Whether steps have sync points outside DDP."""

    @property
    def bad(self) -> int:
        """Number of invalid frames and steps of all ranks."""
        return self.bad_unassigned + sum(rank.bad for rank in self.ranks.values())

    @property
    def step(self) -> int | None:
        """The furthest step of any rank; None = not known."""
        # Equals the maximum of `RankState.step`, without a property call for each of thousands of ranks.
        done = max((rank.steps.newest for rank in self.ranks.values()), default=-1) + 1
        under_way = max((rank.beat.step for rank in self.ranks.values() if rank.beat is not None), default=None)
        return max(under_way, done) if under_way is not None else done or None

    def ingest(self, payload: bytes | memoryview, now_ns: int) -> int | None:
        """Decode and apply a frame; an invalid one is counted. Returns the rank that it claims, or None."""
        rank = self._ingest(payload, now_ns)
        self._store_pending()
        return rank

    def ingest_all(self, frames: Iterable[tuple[bytes | memoryview, int]]) -> list[int | None]:
        """Apply many frames, each with its time, in order: their step tables are stored in one batch."""
        ranks = [self._ingest(payload, now_ns) for payload, now_ns in frames]
        self._store_pending()
        return ranks

    def _ingest(self, payload: bytes | memoryview, now_ns: int) -> int | None:
        try:
            message = decode(payload)
        except UnknownMessage:
            self.unknown += 1
            self.tick(now_ns)
            return wire.claimed_rank(payload)
        except WireError as error:
            claimed = wire.claimed_rank(payload)
            self.count_bad(claimed, str(error))
            self.tick(now_ns)
            return claimed
        if type(message) is not Beat:
            self._apply(message, now_ns)
            return message.rank
        # Fast path for heartbeats, nearly all of the messages; it matters with thousands of ranks.
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
        """Advance the time without a message. For `viewer_stall_ns` up to now the viewer itself did not run."""
        self.now_ns = max(self.now_ns, now_ns)
        if viewer_stall_ns:
            self.viewer_stalls = (now_ns - viewer_stall_ns, now_ns)

    def set_unreachable(self, unreachable: Mapping[int, str]) -> None:
        """Replace the ranks that the viewer cannot connect to, each with the reason."""
        self.unreachable = {rank: sanitize(why, NOTE_CHARS) for rank, why in unreachable.items()}

    def no_heartbeat_ns(self, last_ns: int) -> int:
        """Time since `last_ns`. If the viewer stalled soon after that, time since the end of the stall."""
        from_ns, until_ns = self.viewer_stalls
        return self.now_ns - (until_ns if from_ns - LivenessLimits.NO_HEARTBEAT_NS <= last_ns < until_ns else last_ns)

    def count_bad(self, rank: int | None, reason: str = "") -> None:
        """Count an invalid frame, against its rank if that is known."""
        self.bad_reason = sanitize(reason, NOTE_CHARS)
        if rank is not None and rank in self.ranks:
            self.ranks[rank].bad += 1
        else:
            self.bad_unassigned += 1

    def apply(self, message: wire.Message, now_ns: int) -> None:
        """Apply one message. Duplicates, and messages that a snapshot covers, change nothing."""
        self._apply(message, now_ns)
        self._store_pending()

    def _apply(self, message: wire.Message, now_ns: int) -> None:
        if now_ns > self.now_ns:
            self.now_ns = now_ns
        if self.first_ns is None and not isinstance(message, (wire.LogLines, wire.Relay)):
            self.first_ns = now_ns
        if message.rank >= self.world_size:
            self.count_bad(None, f"rank {message.rank} in a world of {self.world_size}")
            return
        if isinstance(message, wire.LogLines):
            self.logs.add(message)
            return
        if isinstance(message, wire.Relay):
            self.relay, self.relay_ns = sanitized(message, NAME_CHARS), now_ns
            return
        self._apply_to_rank(self._rank(message.rank), message, now_ns)

    def _apply_beat(self, rank: RankState, beat: Beat, now_ns: int) -> None:
        table, steps, gpus = beat.table, beat.steps, beat.gpus
        rank.apply_beat(without_steps_and_gpus(sanitized_beat(beat)), now_ns)
        if table:
            self._pending_tables.append((rank, table))
        elif steps:
            self._store_pending()
            rank.add_steps(steps)
        if gpus is not None:
            rank.gpus.update(gpus, now_ns)

    def _store_pending(self) -> None:
        """Store the pending step tables. Called before messages about later steps, to keep the order."""
        if self._pending_tables:
            packed, self._pending_tables = self._pending_tables, []
            refused = put_tables([(rank.steps, table) for rank, table in packed])
            if any(refused):
                for (rank, _), bad in zip(packed, refused, strict=True):
                    rank.bad += bad

    def _apply_to_rank(self, rank: RankState, message: _OfRank, now_ns: int) -> None:
        # Gone, Held and a Bye without a number come from the viewer's own host: they are not heartbeats.
        if isinstance(message, wire.Gone):
            rank.apply_gone(message, now_ns)
            return
        if isinstance(message, wire.Held):
            rank.held_by = sanitize(message.by, NAME_CHARS)
            rank.held_ns = now_ns if rank.held_ns is None else rank.held_ns
            return
        if isinstance(message, wire.Bye) and message.seq == 0:
            rank.apply_bye(ingest.sanitized_bye(message), now_ns)
            return
        self.relay_ns = now_ns
        if rank.last_received_ns is None:
            rank.last_received_ns = now_ns
        match message:
            case wire.Snap():
                self._store_pending()
                ingest.apply_snap(rank, message, now_ns)
                self.has_sync_points |= bool(message.sync_paths)
            case wire.Buckets():
                rank.apply_buckets(message)
            case wire.Stack():
                rank.apply_stack(ingest.sanitized_stack(message), now_ns)
            case _:
                if rank.sequence.accept(message.seq):
                    self._apply_numbered(rank, message, now_ns)

    def _apply_numbered(self, rank: RankState, message: _Numbered, now_ns: int) -> None:
        match message:
            case wire.Hello():
                rank.apply_hello(ingest.sanitized_hello(message))
            case wire.Steps():
                self._store_pending()
                rank.add_steps(message.steps)
            case wire.Comms():
                self._store_pending()
                rank.amend(message.comms)
            case wire.Gpus():
                rank.gpus.update(message, now_ns)
            case Beat():
                self._apply_beat(rank, message, now_ns)
            case wire.SyncPath():
                self.has_sync_points = True
                rank.add_sync_path(ingest.sanitized_path(message))
            case wire.Bye():
                rank.apply_bye(ingest.sanitized_bye(message), now_ns)
            case _:
                ingest.apply_event(rank, message, now_ns)

    def condition(self, rank: RankState) -> Condition:
        """Condition of the rank at `now_ns`."""
        if rank.bye is not None:
            badly = rank.bye.reason == "failed" or (rank.bye.reason == "exit" and (rank.exit_code or 0) > 0)
            return "failed" if badly else "ended"
        if rank.gone_ns is not None:
            return "lost"
        # A rank that never sent anything counts from when its running process was seen.
        since_ns = rank.held_ns if rank.last_received_ns is None else rank.last_received_ns
        limit_ns = LivenessLimits.NO_HEARTBEAT_NS
        if since_ns is not None and self.now_ns - since_ns >= limit_ns <= self.no_heartbeat_ns(since_ns):
            return "silent"
        if rank.last_received_ns is None:
            return "missing"
        return "paused" if rank.beat is not None and rank.beat.pause else "ok"

    def run_condition(self) -> RunCondition:
        """Condition of the run at `now_ns`."""
        conditions: set[Condition] = {"missing"}
        for rank in self.ranks.values():
            condition = self.condition(rank)
            if condition in ALIVE:
                return "live"
            conditions.add(condition)
        if conditions == {"missing"}:
            return "waiting"
        return "silent" if "silent" in conditions else "ended"

    def sync_path(self, path: int) -> wire.SyncPath | None:
        """Description of a sequence of sync points by `Step.sync_path`, from the first rank that sent one."""
        found = (rank.sync_paths[path] for rank in self.ranks.values() if path in rank.sync_paths)
        return next(found, None)

    @property
    def relay_lost(self) -> bool:
        """Whether there is a relay without heartbeats: then silence proves nothing about the ranks."""
        relay = self.relay
        limit_ns = LivenessLimits.NO_HEARTBEAT_NS
        return relay is not None and not relay.ended and self.no_heartbeat_ns(self.relay_ns) >= limit_ns

    @property
    def spans_hosts(self) -> bool:
        """Whether the ranks are known to be on several hosts."""
        return self.host_count > 1

    @property
    def host_count(self) -> int:
        """Number of hosts that the ranks run on, as far as they are known; at least 1."""
        return max(1, len({rank.host for rank in self.ranks.values() if rank.host}))

    @property
    def unix_ns(self) -> int:
        """Wall clock of the ranks' hosts at `now_ns`; 0 = not known."""
        for rank in self.ranks.values():
            if rank.beat is not None and rank.last_received_ns is not None:
                unix_ns = rank.unix_ns_at(rank.beat.mono_ns)
                if unix_ns:
                    return unix_ns + self.now_ns - rank.last_received_ns
        return 0

    @property
    def beat_ns(self) -> int:
        """Heartbeat interval of the ranks in ns."""
        return beat_ns(self.world_size)

    @property
    def kept_steps(self) -> int:
        """Number of latest steps that are kept of each rank."""
        return CAPACITY_STEPS if self.world_size <= MANY_RANKS else MANY_RANKS_STEPS

    def _new_rank(self, number: int, steps: StepRing) -> RankState:
        moments = KEPT_MOMENTS if self.world_size <= MANY_RANKS else MANY_RANKS_MOMENTS
        return RankState(number, steps=steps, gpus=RankGpus(moments))

    def _rank(self, number: int) -> RankState:
        rank = self.ranks.get(number)
        if rank is None:
            rank = self._new_rank(number, StepRing(StepStore(1, self.kept_steps)))
            # A new dict: another thread may be iterating over the old one.
            self.ranks = dict(sorted({**self.ranks, number: rank}.items()))
        return rank
