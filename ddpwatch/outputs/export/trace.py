"""Export as a trace in the trace-event format, for ui.perfetto.dev and chrome://tracing.

A process for each host, a thread for each rank, slices for steps and their phases, counters for the all-reduce share,
throughput, GPUs and logged values, instants for alerts, and an arrow from the last rank to arrive to each rank that
waited long for it.

Clocks of different hosts are never compared. The timeline is the clock of the lowest rank: a step ends at the same
moment for all ranks, as it does in synchronous training but for the optimizer. A rank whose step took longer than there
is room since the step before is drawn shorter; its figures are in the arguments. Only the durations of phases are
known: they are drawn in their usual order, from one `optimizer.step()` to the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from ddpwatch.core.metrics.window import SYNC
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize
from ddpwatch.recording.alerts import reported
from ddpwatch.version import VERSION
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.core.alerts.model import AlertEvent
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.step_store import IntArray
    from ddpwatch.outputs.export.step_range import Exported

PIECES: Final = ("other", "data", "waiting", "wire", "forward", "backward", "waiting", "wire", "optimizer")
"""Pieces of a step in drawing order; ranks synchronize before forward (buffers) and after backward (gradients)."""
UNSPLIT: Final = "sync"
"""Name instead of waiting where a rank is missing, so that wire and waiting cannot be split."""
ARRIVAL: Final = 6
"""Index of the cut where a rank enters the all-reduce and begins to wait."""
RELEASE: Final = 7
"""Index of the cut where the last rank has arrived and the transfer begins."""
MIN_STEP_NS: Final = 1000
"""Min. time between the ends of two steps, in ns: the resolution of a trace is 1 µs."""
ALERTS: Final = 1
"""Thread id of the alerts, in the process of the job. Perfetto does not accept 0."""
LONG_WAIT: Final = 0.05
"""Minimum wait, as a fraction of the step, of a rank that gets an arrow."""
MAX_ARROWS: Final = 32
"""Maximum number of arrows in a step."""
ABOUT: Final = (
    "One timeline for all ranks, by the clock of the lowest rank; ranks are aligned by step, never by wall clock. "
    "Phases are as long as they were measured, in their usual order inside the step."
)


@dataclass(frozen=True)
class Layout:
    """Begin and end of the pieces of some steps, in nanoseconds from the beginning of the trace."""

    ends_ns: IntArray
    """(step)"""
    cuts_ns: IntArray
    """(rank, piece + 1, step): from the beginning of the step to its end."""


class TraceTimeline:
    """Places consecutive windows on one timeline."""

    def __init__(self) -> None:
        """Begin at 0."""
        self.end_ns = 0
        """End of the last step placed."""
        self._rank: int | None = None
        self._offset_ns = 0

    def lay(self, window: Window) -> Layout:
        """Place the next steps."""
        ends_ns = self._ends(window)
        before_ns = np.concatenate([[self.end_ns], ends_ns[:-1]])
        begins_ns = np.maximum(before_ns, ends_ns - window.step_ns)
        pieces_ns = _pieces(window)
        done = np.cumsum(pieces_ns, axis=1) / np.maximum(window.step_ns, 1)[:, None]
        room_ns = ends_ns - begins_ns
        cuts_ns = begins_ns[:, None] + np.rint(done * room_ns[:, None]).astype(np.int64)
        cuts_ns[:, -1] = ends_ns
        self.end_ns = int(ends_ns[-1])
        return Layout(ends_ns, np.concatenate([begins_ns[:, None], cuts_ns], axis=1))

    def _ends(self, window: Window) -> IntArray:
        clock_ns = window.column("end_ns")[0]
        if window.ranks[0] != self._rank:
            # Another rank has another clock: its first step follows the last one placed.
            self._rank = window.ranks[0]
            self._offset_ns = self.end_ns + max(int(window.step_ns[0, 0]), MIN_STEP_NS) - int(clock_ns[0])
        min_ns = MIN_STEP_NS * np.arange(1, len(window) + 1)
        ends_ns: IntArray = np.maximum.accumulate(
            np.maximum(clock_ns + self._offset_ns, self.end_ns + MIN_STEP_NS) - min_ns
        )
        return ends_ns + min_ns


def _pieces(window: Window) -> IntArray:
    """(rank, piece, step), adding up to the steps. While a rank is missing all sync counts as waiting."""
    pieces_ns = {name: [window.phases_ns[:, place]] for place, name in enumerate(PHASES)}
    pieces_ns |= {"waiting": [], "wire": []}
    before_ns = window.column("presync_ns")
    after_ns = window.phases_ns[:, SYNC] - before_ns
    wait_before_ns, wait_after_ns = before_ns, after_ns
    if window.complete:
        wait_before_ns = window.presync_wait_ns
        wait_after_ns = window.wait_ns - wait_before_ns
    for sync_ns, wait_ns in ((before_ns, wait_before_ns), (after_ns, wait_after_ns)):
        pieces_ns["waiting"].append(wait_ns)
        pieces_ns["wire"].append(sync_ns - wait_ns)
    return np.stack([pieces_ns[name].pop(0) for name in PIECES], axis=1)


def write_trace(exported: Exported, file: IO[str]) -> None:
    """Write the trace."""
    about = {"made by": f"ddpwatch {VERSION}", "run": sanitize(exported.state.name, NAME_CHARS), "timeline": ABOUT}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {_json(about)}, "traceEvents": [\n')
    for place, event in enumerate(_Tracer(exported).events()):
        file.write(f",\n{event}" if place else event)
    file.write("\n]}\n")


class _Tracer:
    def __init__(self, exported: Exported) -> None:
        self._exported = exported
        self._state = exported.state
        # Above all thread ids: a thread with the id of its process would be drawn first as its main thread.
        self._job = exported.state.world_size + 1
        self._timeline = TraceTimeline()
        self._flow = 0
        self._alert_events = [event for _, event in reported(exported.recorded, exported.attempt)]
        self._gpus_done_ns: dict[tuple[int, str], int] = {}
        self._processes: dict[str, int] = {}

    def events(self) -> Iterator[str]:
        first = True
        for window in self._exported.windows():
            layout = self._timeline.lay(window)
            yield from self._slices(window, layout)
            yield from _counters(window, layout, self._job)
            if window.complete and len(window.ranks) > 1:
                yield from self._arrows(window, layout)
            yield from self._gpus(window, layout)
            yield from self._logged(window, layout)
            yield from self._alerts(window, layout, first=first)
            first = False
        # Alert events after the last step or without a step.
        for event in self._alert_events if self._exported.whole else ():
            yield _alert(event, self._job, self._timeline.end_ns)
        yield from self._names()

    def _process(self, host: str) -> int:
        """Process id of a host, in the order of appearance."""
        return self._processes.setdefault(host, self._job + 1 + len(self._processes))

    def _slices(self, window: Window, layout: Layout) -> Iterator[str]:
        names = PIECES if window.complete else tuple(UNSPLIT if name == "waiting" else name for name in PIECES)
        table = zip(window.ranks, window.hosts, layout.cuts_ns, window.step_ns, window.self_ns, strict=True)
        for row, (rank, host, cuts_ns, step_ns, self_ns) in enumerate(table):
            where = f'"pid":{self._process(host)},"tid":{rank + 1}'
            samples, flags = (window.column(name)[row].tolist() for name in ("samples", "flags"))
            for place, cuts in enumerate(cuts_ns.T.tolist()):
                args = (
                    f'{{"step":{window.indices[place]},"step_ms":{step_ns[place] / 1e6:.3f},'
                    f'"self_ms":{self_ns[place] / 1e6:.3f},"samples":{samples[place]},"flags":{flags[place]}}}'
                )
                yield _slice(f"step {window.indices[place]}", "step", where, cuts[0], cuts[-1], args)
                for name, begin_ns, end_ns in zip(names, cuts, cuts[1:]):  # noqa: B905 - one cut more than pieces
                    if end_ns > begin_ns:
                        yield _slice(name, "phase", where, begin_ns, end_ns)

    def _arrows(self, window: Window, layout: Layout) -> Iterator[str]:
        """Arrows from the arrival of the last rank to the release of those that waited for it."""
        sync_ns = window.after_backward_ns
        last = sync_ns.argmin(axis=0)
        waited_ns = sync_ns - sync_ns.min(axis=0)
        long = (waited_ns >= LONG_WAIT * np.maximum(window.step_ns, 1)) & ~window.mixed_clocks
        for place in np.flatnonzero(long.any(axis=0)).tolist():
            source = int(last[place])
            begin_ns, arrival_ns = layout.cuts_ns[source, [0, ARRIVAL], place].tolist()
            waiters = np.flatnonzero(long[:, place])
            for row in waiters[np.argsort(-waited_ns[waiters, place])][:MAX_ARROWS].tolist():
                from_ns, to_ns = layout.cuts_ns[row, [ARRIVAL, RELEASE], place].tolist()
                if to_ns <= from_ns:
                    continue
                self._flow += 1
                left_ns = max(begin_ns, min(arrival_ns, to_ns) - 1)
                yield self._arrow("s", window, source, left_ns)
                yield self._arrow("f", window, row, max(to_ns - 1, left_ns))

    def _arrow(self, kind: str, window: Window, row: int, at_ns: int) -> str:
        where = f'"pid":{self._process(window.hosts[row])},"tid":{window.ranks[row] + 1},"ts":{_us(at_ns)}'
        return f'{{"ph":"{kind}","bp":"e","name":"waited for","cat":"waiting","id":{self._flow},{where}}}'

    def _gpus(self, window: Window, layout: Layout) -> Iterator[str]:
        """Readings are by the rank's own clock: each is put beside the step that it was taken in."""
        ends_ns = window.column("end_ns")
        for row, number in enumerate(window.ranks):
            rank = self._state.ranks[number]
            for device, history in rank.gpus.histories.items():
                after_ns = self._gpus_done_ns.get((number, device), int(ends_ns[row, 0] - window.step_ns[row, 0]) - 1)
                times_ns = history.times_ns()
                new = (times_ns > after_ns) & (times_ns <= ends_ns[row, -1])
                util = history.curve("util_percent")[new]
                times_ns = times_ns[new]
                if not len(times_ns):
                    continue
                self._gpus_done_ns[number, device] = int(times_ns[-1])
                steps = np.minimum(np.searchsorted(ends_ns[row], times_ns), len(window) - 1)
                at_ns = np.maximum(times_ns - ends_ns[row, steps] + layout.ends_ns[steps], 0)
                name = _json(f"GPU {sanitize(device, NAME_CHARS)} of rank {number} (%)")
                pid = self._process(window.hosts[row])
                for one_ns, percent in zip(at_ns.tolist(), util.tolist(), strict=True):
                    if math.isfinite(percent):
                        yield _counter(name, pid, one_ns, f'{{"busy":{percent:.0f}}}')

    def _logged(self, window: Window, layout: Layout) -> Iterator[str]:
        """A counter for each name and rank, at the end of the step in which it was logged."""
        for rank, host in zip(window.ranks, window.hosts, strict=True):
            for step, at_ns in zip(window.indices.tolist(), layout.ends_ns.tolist(), strict=True):
                for name, value in self._exported.logged.at(rank, step).items():
                    if math.isfinite(value):
                        track = _json(f"{name} of rank {rank}")
                        yield _counter(track, self._process(host), at_ns, f'{{"logged":{_json(value)}}}')

    def _alerts(self, window: Window, layout: Layout, *, first: bool) -> Iterator[str]:
        later = []
        for event in self._alert_events:
            step = _step_of(event)
            if step is None or step > window.indices[-1]:
                later.append(event)
            elif step >= window.indices[0] or not first or self._exported.whole:
                place = min(int(np.searchsorted(window.indices, step)), len(window) - 1)
                yield _alert(event, self._job, int(layout.ends_ns[place]))
        self._alert_events = later

    def _names(self) -> Iterator[str]:
        yield _named("process_name", self._job, 0, "job")
        yield _metadata("process_sort_index", self._job, 0, {"sort_index": 0})
        yield _named("thread_name", self._job, ALERTS, "alerts")
        for rank in self._state.ranks.values():
            pid, tid = self._process(rank.host), rank.rank + 1
            yield _named("thread_name", pid, tid, f"rank {rank.rank}")
            yield _metadata("thread_sort_index", pid, tid, {"sort_index": rank.rank})
        for host, pid in self._processes.items():
            yield _named("process_name", pid, 0, f"host {sanitize(host, NAME_CHARS)}" if host else "host not known")
            yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})


def _counters(window: Window, layout: Layout, pid: int) -> Iterator[str]:
    """All-reduce share in percent, split if all ranks are there, and samples per second if known."""
    step_ns = np.maximum(window.job_step_ns, 1.0)
    sync = window.job_sync_ns / step_ns * 100
    wire = window.wire_ns / step_ns * 100
    for at_ns, both, one, rate in zip(
        layout.ends_ns.tolist(), sync.tolist(), wire.tolist(), window.samples_per_s.tolist(), strict=True
    ):
        parts = f'"wire":{one:.2f},"waiting":{both - one:.2f}' if window.complete else f'"sync":{both:.2f}'
        yield _counter('"all-reduce share (%)"', pid, at_ns, f"{{{parts}}}")
        if window.complete and math.isfinite(rate):
            yield _counter('"samples/s"', pid, at_ns, f'{{"all ranks":{rate:.1f}}}')


def _step_of(event: AlertEvent) -> int | None:
    alert = event.alert
    moment = {"opened": alert.since, "changed": alert.last, "closed": alert.closed or alert.last}[event.kind]
    # An alert that ended with its recorder has no step; it is drawn where it was last found.
    return alert.last.step if moment.step is None else moment.step


def _alert(event: AlertEvent, pid: int, at_ns: int) -> str:
    finding = event.alert.finding
    args = {
        "severity": finding.severity.word,
        "message": sanitize(finding.message, NOTE_CHARS),
        "advice": sanitize(finding.advice, NOTE_CHARS),
        "ranks": list(finding.ranks),
        "phase": finding.phase,
    }
    name = _json(f"{finding.rule} {event.kind}: {sanitize(finding.subject, NAME_CHARS)}")
    where = f'"pid":{pid},"tid":{ALERTS},"ts":{_us(at_ns)}'
    # Scope "t" (thread), whose track has a name; instants of a process or global ones have none.
    return f'{{"ph":"i","s":"t","name":{name},"cat":"alert",{where},"args":{_json(args)}}}'


def _slice(name: str, kind: str, where: str, begin_ns: int, end_ns: int, args: str = "") -> str:
    more = f',"args":{args}' if args else ""
    took = _us(end_ns - begin_ns)
    return f'{{"ph":"X","name":"{name}","cat":"{kind}",{where},"ts":{_us(begin_ns)},"dur":{took}{more}}}'


def _counter(name: str, pid: int, at_ns: int, args: str) -> str:
    return f'{{"ph":"C","name":{name},"pid":{pid},"tid":{pid},"ts":{_us(at_ns)},"args":{args}}}'


def _named(kind: str, pid: int, tid: int, name: str) -> str:
    return _metadata(kind, pid, tid, {"name": name})


def _metadata(kind: str, pid: int, tid: int, args: dict[str, Any]) -> str:
    return f'{{"ph":"M","name":"{kind}","pid":{pid},"tid":{tid},"ts":0,"args":{_json(args)}}}'


def _us(ns: int) -> str:
    """Microseconds, exact to the nanosecond."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
