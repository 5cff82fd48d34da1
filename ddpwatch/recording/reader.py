"""The reader of recordings: attempts, frames in time order, checkpoints, alerts. Damaged parts are skipped and counted.

All uses go through it: `replay` (frames by a pace), `steps` (windows of aligned steps) and `alerts` (a scan of alerts).
It also reads files that another process writes.
"""

from __future__ import annotations

import contextlib
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from ddpwatch.core.alerts.recorded import read_event
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.core.state.step_codec import apply_table
from ddpwatch.errors import WireError
from ddpwatch.recording.recovery import Block, Rows, fits, missing_frames
from ddpwatch.recording.schema import (
    ALERTS,
    ALERTS_TOPIC,
    LATEST_NS,
    MAX_BLOCK_BYTES,
    DamagedPart,
    Entry,
    NoRecording,
    RecordedBy,
    Unreadable,
    recorded_by_of,
    run_of,
    unpack,
    unpack_messages,
)
from ddpwatch.recording.sqlite_open import lacks_wal
from ddpwatch.rundir import RunFile, runs_here
from ddpwatch.wire import NO_MESSAGE, Hello, Snap, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ddpwatch.core.alerts.model import AlertEvent

MAX_ATTEMPTS: Final = 10_000
"""Attempts of a run that are read."""
MAX_ALERTS: Final = 100_000
"""Max changes of alerts that are read; nobody could look at more."""
MAX_BLOCKS: Final = 1_000_000
"""Blocks, and checkpoints, that are searched for missing frames."""
MAX_EVENT_BYTES: Final = 1 << 20
"""Bytes of one recorded change of an alert; a longer one is damage."""
PAGE_ROWS: Final = 512
"""Rows per query. A query that stays open would keep the recorder from truncating its WAL."""
LONGEST_NS: Final = 60_000_000_000
"""Upper bound of a block's duration, in nanoseconds; blocks usually span a second or two."""
HELLO_FRAMES: Final = 4096
"""Max frames and checkpoints that are searched for a run's description if its own is damaged."""


class Attempt(NamedTuple):
    """One run in the recording."""

    id: int
    run: RunFile
    first_ns: int
    last_ns: int
    """Time of the last frame, or of the end of the silence after it."""
    recorded_by: RecordedBy = RecordedBy()

    def new_state(self) -> RunState:
        """The state of this run before any of its frames."""
        run = self.run
        places = [Place(endpoint.rank, endpoint.host, endpoint.pid) for endpoint in run.endpoints]
        return RunState(run.id, run.name, run.world_size, places)


class Checkpoint(NamedTuple):
    """Snapshot of the state, from which reading can start."""

    at_ns: int
    position: int
    """Position of the last frame that it includes."""
    payloads: list[bytes]
    """Messages to be applied to an empty state, in this order."""
    times_ns: list[int]
    """Time of each message: what a rank sent last is as old as it was."""
    tables: list[bytes]
    """Step tables of the ranks (`core.state.step_codec`), to be applied before the messages."""

    def apply(self, state: RunState) -> None:
        """Bring a state to this moment, unless it is further already."""
        for table in self.tables:
            apply_table(state, table)
        state.ingest_all(list(zip(self.payloads, self.times_ns, strict=True)))


class AlertRow(NamedTuple):
    """A recorded change of an alert."""

    attempt: int
    at_ns: int
    event: AlertEvent


class Recording:
    """An open recording. Belongs to one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises `NoRecording` or `Unreadable`."""
        self.path = path
        self._rows = Rows(path)
        self._alerts: list[AlertRow] = []
        self._last_alert = 0
        self._alerts_hurt = False
        self._version = self._rows.version
        self.attempts = self._attempts()
        if not self.attempts:
            writer = self._writer()
            self.close()
            if self.damaged:
                raise Unreadable(f"{path} is damaged, and nothing can be read")
            where = ""
            if lacks_wal(path):
                where = f", or it is in {path.name}-wal, which is missing"
            elif writer is not None:
                where = f" yet: process {writer} is waiting for a run to record"
            raise NoRecording(f"nothing was recorded in {path}{where}")

    @property
    def damaged(self) -> int:
        """Number of unreadable parts found so far."""
        return self._rows.damaged

    @property
    def cut(self) -> float:
        """Fraction of the file that is missing at its end, by its header."""
        return self._rows.cut

    @property
    def alerts_hurt(self) -> bool:
        """Whether alerts may be among the unreadable parts found so far."""
        return self._rows.recovered or self._alerts_hurt

    def refresh(self) -> bool:
        """Update the attempts if the file was written to; returns whether it was."""
        before, self._version = self._version, self._rows.version
        if self._version == before:
            return False
        self.attempts = self._attempts() or self.attempts
        return True

    def entries(
        self,
        attempt: Attempt,
        *,
        from_ns: int | None = None,
        upto_ns: int | None = None,
        after: int = -1,
        shard: int | None = None,
        alerts: bool = False,
        wanted: Callable[[bytes], bool] | None = None,
    ) -> Iterator[Entry]:
        """Frames in the order of arrival, lazily: later than `from_ns`, up to `upto_ns`, and `after` a position; of all
        ranks or of one `shard`, of all topics or of those that are `wanted`. With `alerts`, also the texts of open
        alerts, which have the topic `ALERTS_TOPIC` and ignore `after`.
        """
        chosen = " AND shard = ?" if shard is not None else "" if alerts else " AND shard <> ?"
        value = () if not chosen else (ALERTS if shard is None else shard,)
        for _, blocks in groupby(self._blocks(attempt, from_ns, upto_ns, chosen, value), lambda block: block[1]):
            together: list[Entry] = []
            for block, _ in blocks:
                try:
                    together += unpack(self._data("block", block), wanted)
                except DamagedPart:
                    self._count("block", block)
            together.sort()
            for entry in together:
                if (
                    (entry.position > after or entry.topic == ALERTS_TOPIC)
                    and (from_ns is None or entry.at_ns > from_ns)
                    and (upto_ns is None or entry.at_ns <= upto_ns)
                ):
                    yield entry

    def bridged(self, attempt: Attempt) -> Iterator[Entry | Checkpoint]:
        """All frames in the order of arrival; where frames are missing, the checkpoints of that gap instead."""
        position = -1
        for entry in self.entries(attempt):
            if entry.position != position + 1:
                yield from self.checkpoints(attempt, position, entry.position)
            position = entry.position
            yield entry
        yield from self.checkpoints(attempt, position, LATEST_NS - 1)

    def checkpoint(self, attempt: Attempt, at_ns: int) -> Checkpoint | None:
        """The last readable checkpoint up to a moment; None = start with the first frame."""
        query = (
            "SELECT id, at_ns, position FROM checkpoint WHERE attempt = ? AND at_ns <= ? "
            "ORDER BY at_ns DESC, id DESC LIMIT ?"
        )
        return next(self._read_checkpoints(query, (attempt.id, at_ns, PAGE_ROWS)), None)

    def checkpoints(self, attempt: Attempt, after: int, before: int) -> Iterator[Checkpoint]:
        """The checkpoints between two positions, in order."""
        query = (
            "SELECT id, at_ns, position FROM checkpoint WHERE attempt = ? AND position > ? AND position < ? "
            "ORDER BY position LIMIT ?"
        )
        return self._read_checkpoints(query, (attempt.id, after, before, PAGE_ROWS))

    def restore(self, attempt: Attempt, at_ns: int, state: RunState) -> tuple[int, int]:
        """Apply the last checkpoint up to a moment to an empty state. Returns its time and its position."""
        checkpoint = self.checkpoint(attempt, at_ns)
        if checkpoint is None:
            return attempt.first_ns, -1
        checkpoint.apply(state)
        return checkpoint.at_ns, checkpoint.position

    def is_empty(self, attempt: Attempt) -> bool:
        """Whether only the description of the attempt is left."""
        query = "SELECT 1 FROM {} WHERE attempt = ? LIMIT 1"
        return not any(self._rows.select(query.format(table), (attempt.id,), "i") for table in ("block", "checkpoint"))

    def losses(self, attempt: Attempt) -> tuple[int, int]:
        """Number of frames missing because of damage found so far, by their positions, and of those that are there."""
        query = (
            "SELECT id, portion, position, frames FROM block WHERE attempt = ? AND shard <> ? ORDER BY portion LIMIT ?"
        )
        rows = self._rows.select(query, (attempt.id, ALERTS, MAX_BLOCKS), "iiii")
        blocks = (
            Block(portion, last, count, not self._rows.counted(("block", id_))) for id_, portion, last, count in rows
        )
        query = "SELECT id, position FROM checkpoint WHERE attempt = ? LIMIT ?"
        rows = self._rows.select(query, (attempt.id, MAX_BLOCKS), "ii")
        checkpoints = [position for id_, position in rows if not self._rows.counted(("checkpoint", id_))]
        missing, there = missing_frames(blocks, checkpoints)
        return max(missing - self.dropped(attempt), 0), there

    def alerts(self) -> Sequence[AlertRow]:
        """All recorded changes of alerts in order. Only rows that were added since the last call are read."""
        event = f"CASE WHEN length(event) <= {MAX_EVENT_BYTES} THEN event END"
        query = f"SELECT id, attempt, at_ns, {event} FROM alert WHERE id > ? ORDER BY id LIMIT ?"  # noqa: S608 - our own words
        rows = self._rows.select(query, (self._last_alert, MAX_ALERTS - len(self._alerts)), "i???")
        # Ids are consecutive from the first attempt on; retention removes whole attempts, the oldest first.
        first = [self._last_alert] if self._last_alert or any(attempt.id == 1 for attempt in self.attempts) else []
        ids = [*first, *(row[0] for row in rows)]
        if holes := sum(later - earlier > 1 for earlier, later in pairwise(ids)):
            self._rows.count(("alerts", self._last_alert), holes)
            self._alerts_hurt = True
        for row in rows:
            self._last_alert, attempt, at_ns, text = row
            if fits(row, "iiib") and (change := read_event(text)) is not None:
                self._alerts.append(AlertRow(attempt, at_ns, change))
            else:
                self._rows.count(("alert", self._last_alert))
                self._alerts_hurt = True
        return self._alerts

    def events(self, attempt: Attempt) -> list[tuple[int, AlertEvent]]:
        """Changes of alerts of an attempt, each with its time, in order."""
        return [(row.at_ns, row.event) for row in self.alerts() if row.attempt == attempt.id]

    def dropped(self, attempt: Attempt) -> int:
        """Number of frames that were received and could not be written."""
        return sum(
            count for (count,) in self._rows.select("SELECT frames FROM gap WHERE attempt = ?", (attempt.id,), "i")
        )

    def frames(self, attempt: Attempt) -> int:
        """Number of frames, for progress bars."""
        query = "SELECT coalesce(sum(frames), 0) FROM block WHERE attempt = ? AND shard <> ?"
        return sum(count for (count,) in self._rows.select(query, (attempt.id, ALERTS), "i"))

    def close(self) -> None:
        """Close the file."""
        self._rows.close()

    def _attempts(self) -> list[Attempt]:
        rows = self._rows.select(
            "SELECT id, began_ns, run FROM attempt WHERE length(run) <= ? ORDER BY id LIMIT ?",
            (MAX_BLOCK_BYTES, MAX_ATTEMPTS),
            "iib",
        )
        described = {number: (began_ns, text) for number, began_ns, text in rows}
        # Frames of an attempt may be readable even if its description is not.
        query = "SELECT attempt FROM block UNION SELECT attempt FROM checkpoint LIMIT ?"
        there = {number for (number,) in self._rows.select(query, (MAX_ATTEMPTS,), "i")}
        found = []
        for number in sorted(there | described.keys()):
            began_ns, text = described.get(number, (None, b""))
            if (run := run_of(text)) is None:  # its thresholds are lost too
                self._rows.count(("attempt", number))
                run = self._run_of_frames(number)
            if run is None or (self.damaged and number not in there):
                self._rows.count(("attempt", number))
                continue
            first_ns, last_ns = self._span(number, began_ns)
            found.append(Attempt(number, run, first_ns, max(first_ns, last_ns), recorded_by_of(text)))
        return found

    def _span(self, attempt: int, began_ns: int | None) -> tuple[int, int]:
        # The times of a block that ends before it begins are damaged.
        query = (
            "SELECT first_ns, last_ns FROM block WHERE attempt = ? AND last_ns >= first_ns ORDER BY last_ns {} LIMIT 1"
        )
        first = self._rows.select(query.format("ASC"), (attempt,), "ii")
        last = self._rows.select(query.format("DESC"), (attempt,), "ii")
        until = self._rows.select("SELECT until_ns FROM span WHERE attempt = ?", (attempt,), "i")
        if self._rows.recovered:
            # With frames missing, silence is unknown; and a checkpoint may be all that is left of a part.
            query = "SELECT min(at_ns), max(at_ns) FROM checkpoint WHERE attempt = ? HAVING count(*)"
            kept = self._rows.select(query, (attempt,), "ii")
            times_ns = [at_ns for row in (*first, *last, *kept) for at_ns in row] or [began_ns or 0]
            return min(times_ns), max(times_ns)
        first_ns = first[0][0] if first else began_ns or 0
        return first_ns, max([last[0][1] if last else first_ns, *(until_ns for (until_ns,) in until)])

    def _writer(self) -> int | None:
        """Pid of the process that records into the file; None = none that runs on this node."""
        query = "SELECT node, pid, CAST(1000 * pid_created_s AS INTEGER) FROM writer LIMIT ?"
        found = self._rows.select(query, (1,), "tii")
        return next((pid for node, pid, created_ms in found if runs_here(node, pid, created_ms / 1000)), None)

    def _read_checkpoints(self, query: str, values: Sequence[int]) -> Iterator[Checkpoint]:
        for number, at_ns, position in self._rows.select(query, values, "iii"):
            try:
                messages = unpack_messages(self._data("checkpoint", number))
            except DamagedPart:
                self._count("checkpoint", number)
                continue
            tables = [payload for _, payload in messages if payload.startswith(NO_MESSAGE)]
            messages = [message for message in messages if not message[1].startswith(NO_MESSAGE)]
            times_ns = [min(reported_ns, at_ns) for reported_ns, _ in messages]
            yield Checkpoint(at_ns, position, [payload for _, payload in messages], times_ns, tables)

    def _run_of_frames(self, attempt: int) -> RunFile | None:
        """The run as one of its ranks describes it in a `Hello`."""
        nobody = RunFile(1, "0" * 8, "", "", 0, 1, 0.0, [])
        items = self.bridged(Attempt(attempt, nobody, 0, LATEST_NS))
        for item, _ in zip(items, range(HELLO_FRAMES), strict=False):
            for payload in item.payloads if isinstance(item, Checkpoint) else [item.payload]:
                with contextlib.suppress(WireError, msgspec.ValidationError):
                    message = decode(payload)
                    hello = message.hello if isinstance(message, Snap) else message
                    if isinstance(hello, Hello):
                        fields = {"id": hello.run_id, "name": hello.run_name, "world_size": hello.world_size}
                        return msgspec.convert({**msgspec.to_builtins(nobody), **fields}, RunFile)
        return None

    def _blocks(
        self, attempt: Attempt, from_ns: int | None, upto_ns: int | None, chosen: str, value: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Ids and portions of blocks in time order, by keyset pagination."""
        query = "SELECT id, portion, last_ns, shard FROM block WHERE attempt = ?"
        values: list[int] = [attempt.id]
        if upto_ns is not None:
            query += " AND first_ns <= ? AND last_ns <= ?"
            values += [upto_ns, min(upto_ns + LONGEST_NS, LATEST_NS)]
        query += chosen
        values += value
        query += " AND (last_ns, portion, shard) > (?, ?, ?) ORDER BY last_ns, portion, shard LIMIT ?"
        after = (-LATEST_NS, 0, 0) if from_ns is None else (from_ns, LATEST_NS, 0)
        while rows := self._rows.select(query, (*values, *after, PAGE_ROWS), "iiii"):
            yield from ((block, portion) for block, portion, _, _ in rows)
            _, portion, last_ns, in_shard = rows[-1]
            after = last_ns, portion, in_shard

    def _count(self, table: str, number: int) -> None:
        """Count an unreadable row as damage, unless its writer has deleted it since it was found."""
        query = f"SELECT id FROM {table} WHERE id = ?"  # noqa: S608 - our own names
        if self._rows.select(query, (number,), "i") or not self._rows.written_since:
            self._rows.count((table, number))

    def _data(self, table: str, number: int) -> bytes:
        query = f"SELECT data FROM {table} WHERE id = ? AND length(data) <= {MAX_BLOCK_BYTES}"  # noqa: S608 - our own names
        for (data,) in self._rows.select(query, (number,), "b"):
            return bytes(data)
        raise DamagedPart("it is not there, or too large")
