"""Progress of this rank in its process groups: sequence numbers, and the operation in flight from the flight recorder.

Called from the agent's thread. Sequence numbers need no lock; torch's flight recorder has what has completed, and the
details of an operation. Nothing here waits, and nothing joins a collective.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
import weakref
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch.distributed as dist

from ddpwatch.agent.registration import joined
from ddpwatch.agent.torch_private import backend_of, flight_recorders, sequence_number, timeout_s, world
from ddpwatch.wire import MAX_COLLECTIVES, Collective, Group, fit, ranges

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

LOOKUP_AFTER_NS: Final = 400_000_000
"""Nanoseconds in flight after which an operation is looked up in the flight recorder, which takes up to 40 ms."""
LOOKUP_AGAIN_NS: Final = 2_000_000_000
"""Nanoseconds until the next lookup if the training thread has moved: the operation may be done although the count has
gone back."""
LOOKUP_ANYWAY_NS: Final = 30_000_000_000
"""Nanoseconds until the next lookup if the training thread has not moved: reading the recorder holds the GIL."""
GROUP_IDS_NS: Final = 2_000_000_000
"""Nanoseconds between attempts to find the id of a group, which also reads the whole recorder."""
MAX_GROUPS: Final = 64
"""Process groups whose progress is read."""
BARRIER_FRAMES: Final = 8
"""Frames of the training thread to search for a `monitored_barrier`."""
DTYPE_BYTES: Final = {
    "Double": 8, "Long": 8, "ComplexFloat": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2,
}  # fmt: skip


@dataclass
class _InFlight:
    """The oldest operation of a group that has not completed."""

    seq: int
    since_ns: int
    op: str = ""
    bytes: int = 0
    shape: str = ""
    timeout_ns: int = 0
    created_unix_ns: int = 0
    looked_up_ns: int = 0
    """Time of the last lookup; 0 = none."""
    place: tuple[int, int] | None = None
    """Position of the training thread at that time."""

    def is_lookup_due(self, now_ns: int, place: tuple[int, int] | None) -> bool:
        """Whether it is time to look it up in the flight recorder."""
        if not self.looked_up_ns:
            return now_ns >= self.since_ns + LOOKUP_AFTER_NS
        is_stalled = place is not None and place == self.place
        return now_ns >= self.looked_up_ns + (LOOKUP_ANYWAY_NS if is_stalled else LOOKUP_AGAIN_NS)


class Collectives:
    """Reads the progress of all process groups of this process."""

    def __init__(self, training_thread: Callable[[], int | None] = lambda: None) -> None:
        self._training_thread = training_thread
        self._dumps = flight_recorders()
        self._ids: dict[str, int] = {}
        """By name of a group, its id in the flight recorder."""
        self._next_ids_ns: dict[str, int] = {}
        """By name of a group without an id, the time of the next attempt to find it."""
        self._in_flight: dict[str, _InFlight] = {}
        self._done: dict[str, int] = {}
        """By name of a group, the last operation that was found done although the recorder counts fewer."""
        self._job: Callable[[], Any] = lambda: None
        """Weak reference to the default group."""

    def groups(self, now_ns: int) -> list[Group]:
        """Progress in each group of this process, the default group first."""
        if not joined():
            return []
        tables = world()
        job = None if tables is None else tables.default_pg
        if job is None:
            return []  # the training thread has destroyed it meanwhile
        if self._job() is not job:
            # New groups have the names of earlier ones, but other ids.
            self._job = weakref.ref(job)
            self._ids.clear()
            self._next_ids_ns.clear()
            self._in_flight.clear()
            self._done.clear()
        status = self._status()
        groups = []
        for group in list(tables.pg_map)[:MAX_GROUPS]:
            numbered = sequence_number(group)
            if numbered is None:
                continue
            name = str(tables.pg_names.get(group, ""))
            enqueued, completed = self._progress(name, numbered, status, now_ns)
            if group is job and completed == enqueued and enqueued < numbered and self._in_barrier():
                enqueued += 1
            waits = self._waits(group, name, enqueued, completed, now_ns)
            if completed is not None:
                completed = enqueued if waits is None else waits.seq - 1
            members = tables.pg_group_ranks.get(group, {})
            listed = "" if len(members) == job.size() else ranges(members)
            message = Group(name=fit(name), size=group.size(), enqueued=enqueued, completed=completed, members=listed)
            groups.append(message if waits is None else _with_operation(message, group, waits, now_ns))
        return groups

    def recent(self) -> list[Collective]:
        """The last collectives of this process, oldest first, without point-to-point operations."""
        return [
            Collective(
                group=fit(entry_group(entry)), seq=max(0, entry["collective_seq_id"]), op=fit(_op(entry)),
                shape=fit(_shape(entry)), done=_is_done(entry), bytes=entry_bytes(entry),
            )
            for entry in [each for each in self._entries() if not each.get("is_p2p")][-MAX_COLLECTIVES:]
        ]  # fmt: skip

    def _status(self) -> dict[int, tuple[int, int]]:
        """By id of a group, its last enqueued and completed operations. Empty if nothing is recorded."""
        counted: dict[int, tuple[int, int]] = {}
        for dump in self._dumps:
            with contextlib.suppress(Exception):  # an older torch takes other arguments
                statuses = pickle.loads(dump(False, False, False)).get("pg_status", {})  # noqa: S301 - from this process
                for number, status in statuses.items():
                    enqueued, completed = status["last_enqueued_collective"], status["last_completed_collective"]
                    counted[int(number)] = max(0, int(enqueued)), max(0, int(completed))
        return counted

    def _progress(
        self, name: str, numbered: int, status: dict[int, tuple[int, int]], now_ns: int
    ) -> tuple[int, int | None]:
        """Enqueued and completed operations by the flight recorder, if it knows the group.

        Gloo's own number also counts point-to-point operations, which differ between ranks.
        """
        if not status or not numbered:
            return numbered, None
        if name not in self._ids and now_ns >= self._next_ids_ns.get(name, 0):
            # Only recorded operations have both the name and the id of a group.
            self._ids |= {entry_group(entry): int(entry["pg_id"]) for entry in self._entries()}
            self._next_ids_ns[name] = now_ns + GROUP_IDS_NS
        if (counted := status.get(self._ids.get(name, -1))) is None:
            return numbered, None
        enqueued, completed = counted
        return enqueued, max(completed, self._done.get(name, 0))

    def _frame(self) -> FrameType | None:
        thread = self._training_thread()
        return None if thread is None else sys._current_frames().get(thread)

    def _place(self) -> tuple[int, int] | None:
        """Position of the training thread; if it is the same again, the thread has most likely not moved."""
        frame = self._frame()
        return None if frame is None else (id(frame), frame.f_lasti)

    def _in_barrier(self) -> bool:
        """Whether the training thread is in a `monitored_barrier`, which is not recorded."""
        frame = self._frame()
        for _ in range(BARRIER_FRAMES):
            if frame is None:
                break
            if frame.f_code is dist.monitored_barrier.__code__:
                return True
            frame = frame.f_back
        return False

    def _waits(self, group: Any, name: str, enqueued: int, completed: int | None, now_ns: int) -> _InFlight | None:
        if completed is None or completed >= enqueued:
            self._in_flight.pop(name, None)
            return None
        waits = self._in_flight.get(name)
        if waits is None or waits.seq != completed + 1:
            waits = self._in_flight[name] = _InFlight(completed + 1, now_ns)
        elif waits.is_lookup_due(now_ns, self._place()):
            waits = self._look_up(group, name, waits, now_ns)
            if waits.seq > enqueued:
                del self._in_flight[name]
                return None
            self._in_flight[name] = waits
        return waits

    def _look_up(self, group: Any, name: str, waits: _InFlight, now_ns: int) -> _InFlight:
        """Add the details of an operation; if it is done, of the next one in flight."""
        waits.looked_up_ns, waits.place = now_ns, self._place()
        if self._in_barrier():
            # Its timeout is its own, and unknown.
            waits.op = "monitored_barrier"
            return waits
        # By id: an earlier group may have had the same name.
        number = self._ids.get(name)
        own = (each for each in self._entries() if each["pg_id"] == number and not each.get("is_p2p"))
        by_seq = {entry["collective_seq_id"]: entry for entry in own}
        # Each of gloo's threads writes the number that it has completed: the slower of two sets the count back, and a
        # rank that has left its last operation would seem to wait in it.
        seq = waits.seq
        while (entry := by_seq.get(seq)) is not None and _is_done(entry):
            self._done[name] = seq
            seq += 1
        if seq > waits.seq:
            # Counts as looked up: the rank must not seem to have arrived just now.
            waits = _InFlight(seq, now_ns, looked_up_ns=now_ns, place=waits.place)
        waits.timeout_ns = waits.timeout_ns or _timeout_ns(group)
        if entry is not None:
            waits.op, waits.shape, waits.bytes = _op(entry), _shape(entry), entry_bytes(entry)
            waits.created_unix_ns = int(entry.get("time_created_ns") or 0)
            waits.timeout_ns = int(entry.get("timeout_ms") or 0) * 1_000_000 or waits.timeout_ns
        return waits

    def _entries(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        for dump in self._dumps:
            with contextlib.suppress(Exception):
                entries += pickle.loads(dump(True, False, False)).get("entries", [])  # noqa: S301 - from this process
        return entries


def _with_operation(message: Group, group: Any, waits: _InFlight, now_ns: int) -> Group:
    # By the wall clock if the recorder has the start: the agent sees an operation only at the next heartbeat.
    age_ns = time.time_ns() - waits.created_unix_ns if waits.created_unix_ns else now_ns - waits.since_ns
    return msgspec.structs.replace(
        message, op=fit(waits.op), bytes=waits.bytes, shape=fit(waits.shape), age_ns=max(0, age_ns),
        timeout_ns=waits.timeout_ns, error=_error(group) if waits.looked_up_ns else "",
    )  # fmt: skip


def _timeout_ns(group: Any) -> int:
    with contextlib.suppress(Exception):
        return max(0, int(timeout_s(group) * 1e9))
    return 0


def _error(group: Any) -> str:
    """Error of the backend's watchdog, which it has up to a minute before it ends the process."""
    with contextlib.suppress(Exception):
        error = str(backend_of(group).get_error()).rpartition(".")[2]
        return "" if error == "SUCCESS" else fit(error)
    return ""


def entry_group(entry: dict[str, Any]) -> str:
    """Name of the process group of a flight recorder entry."""
    group = entry.get("process_group")
    return str(group[0]) if group else ""


def _is_done(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _op(entry: dict[str, Any]) -> str:
    return str(entry.get("profiling_name", "")).rpartition(":")[2]


def _shape(entry: dict[str, Any]) -> str:
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    return f"{', '.join(map(str, sizes))} {', '.join(dict.fromkeys(map(str, dtypes)))}".strip()


def entry_bytes(entry: dict[str, Any]) -> int:
    """Input bytes of a flight recorder entry."""
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    return sum(
        prod(size) * DTYPE_BYTES.get(str(dtypes[k]) if k < len(dtypes) else "", 1) for k, size in enumerate(sizes)
    )
