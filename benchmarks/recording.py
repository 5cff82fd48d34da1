"""What recording costs, how large it becomes, and how fast a large recording is opened and searched.

python -m benchmarks.recording                # everything; some minutes
python -m benchmarks.recording load           # only the recorder of many ranks, over real sockets
python -m benchmarks.recording large 200      # only the reading of a file of 200 MB
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.crowd import crowd
from benchmarks.pairs import row
from ddpwatch import rundir, wire
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.schema import Columns
from ddpwatch.recording.sqlite_store import RecordingFile
from ddpwatch.recording.writer import Portion, Recorder
from ddpwatch.simulator.workload import SimulatedRun
from ddpwatch.sources.frames import Frame

if TYPE_CHECKING:
    from ddpwatch.recording.reader import Attempt

MANY = 1024
LOAD_S = 60.0
PACE_ROUNDS = 1_000_000
PACE_TRIES = 5
PATTERN_S = 20
"""A large recording repeats this much of a run."""
LARGE_MB = 1000
SEEKS = 21


def load() -> None:
    """Many ranks, ten steps a second, sent four times a second, and once a second as agents of large runs do: CPU
    time of the recorder, and bytes written.
    """
    for flush_ms, rate in ((250, "4 Hz"), (1000, "1 Hz, as agents do")):
        _load(flush_ms, rate)


def _load(flush_ms: float, often: str) -> None:
    with tempfile.TemporaryDirectory(prefix="ddpw-") as folder, crowd(MANY, slow=3, flush_ms=flush_ms) as child:
        file = Path(folder) / "run.ddpw"
        recorder = subprocess.Popen(
            [sys.executable, "-m", "ddpwatch", "record", "-o", str(file)],
            env={**os.environ, "DDPWATCH_RUN_DIR": str(child.base)},
            stderr=subprocess.DEVNULL,
        )
        try:
            if not _has_evaluated(file):
                row(
                    f"recorder, {MANY} ranks at {often}",
                    "not measured",
                    "20 %",
                    holds=False,
                    noise="too busy a machine",
                )
                return
            process = psutil.Process(recorder.pid)
            from_ns, pages, spent_s, began_s = time.time_ns(), _pages(file), _cpu_s(process), time.monotonic()
            time.sleep(LOAD_S / 2)
            pace = pace_ms()
            time.sleep(LOAD_S / 2)
            share = (_cpu_s(process) - spent_s) / (time.monotonic() - began_s)
            upto_ns, grown = time.time_ns(), _pages(file) - pages
            rss = process.memory_info().rss
        finally:
            recorder.send_signal(signal.SIGTERM)
            recorder.wait()
        with closing(Recording(file)) as recorded:
            (attempt,) = recorded.attempts
            steps = sum(
                len(message.table) // wire.STEP_BYTES
                for entry in recorded.entries(attempt, from_ns=from_ns, upto_ns=upto_ns)
                if isinstance(message := wire.decode(entry.payload), wire.Beat)
            )
    each = grown / steps
    rate = f"{steps / LOAD_S / MANY:.1f} steps/s a rank"
    rate += f"; a fixed loop {pace:.0f} ms"
    if child.late_turns:
        rate += "; ranks were late, it does not count"
    row(f"recorder, {MANY} ranks at {often}, of a core", f"{share:.1%}", "20 %", share <= 0.2, rate)
    row("  on disk, a rank-step", f"{each:.0f} bytes", "150", each <= 150, f"{grown / LOAD_S / 1e6:.2f} MB/s")
    row("  memory", f"{rss >> 20} MiB", "-", holds=True)


def large(megabytes: int = LARGE_MB) -> None:
    """Open a large recording, look at its first frame, and go to moments anywhere in it."""
    with tempfile.TemporaryDirectory(prefix="ddpw-") as folder:
        file = Path(folder) / "large.ddpw"
        _make(file, megabytes << 20)
        size = file.stat().st_size
        began_s = time.perf_counter()
        with closing(Recording(file)) as recorded:
            (attempt,) = recorded.attempts
            next(recorded.entries(attempt))
            opened_s = time.perf_counter() - began_s
            chance, took_s = random.Random(0), []
            for _ in range(SEEKS):
                at_ns = chance.randrange(attempt.first_ns + 60_000_000_000, attempt.last_ns)
                began_s = time.perf_counter()
                _seek(recorded, attempt, at_ns)
                took_s.append(time.perf_counter() - began_s)
    took_s.sort()
    hours = (attempt.last_ns - attempt.first_ns) / 3.6e12
    what = f"{size / 1e6:.0f} MB, {MANY} ranks, {hours:.1f} h"
    row(f"open {what}, to its first frame", f"{opened_s * 1e3:.0f} ms", "2000 ms", opened_s <= 2.0)
    row(
        f"  to the state at a moment, median of {SEEKS}",
        f"{took_s[SEEKS // 2] * 1e3:.0f} ms",
        "300 ms",
        took_s[SEEKS // 2] <= 0.3,
        f"{took_s[0] * 1e3:.0f} to {took_s[-1] * 1e3:.0f} ms",
    )


def _seek(recorded: Recording, attempt: Attempt, at_ns: int) -> RunState:
    state = attempt.new_state()
    checkpoint = recorded.checkpoint(attempt, at_ns)
    assert checkpoint is not None
    checkpoint.apply(state)
    entries = recorded.entries(attempt, from_ns=checkpoint.at_ns - 1, upto_ns=at_ns, after=checkpoint.position)
    for entry in entries:
        state.ingest(entry.payload, entry.at_ns)
    assert state.step is not None
    return state


def _state(run: rundir.RunFile) -> RunState:
    places = [Place(endpoint.rank, endpoint.host, endpoint.pid) for endpoint in run.endpoints]
    return RunState(run.id, run.name, run.world_size, places)


def _make(file: Path, size_bytes: int) -> None:
    """Some seconds of a run as a recorder writes them, then the same with later times until it is large enough."""
    pattern = file.with_name("pattern.ddpw")
    run = _record_pattern(pattern)
    with closing(Recording(pattern)) as recorded:
        (attempt,) = recorded.attempts
        entries = list(recorded.entries(attempt))
        checkpoints = []
        at_ns = attempt.last_ns
        while (checkpoint := recorded.checkpoint(attempt, at_ns)) is not None:
            checkpoints.append(checkpoint)
            at_ns = checkpoint.at_ns - 1
    span_ns = attempt.last_ns - attempt.first_ns + wire.BEAT_NS
    shelf = RecordingFile(file, keep_s=None, max_bytes=None)
    number, turn = 0, 0
    while turn < 4 or file.stat().st_size < size_bytes:
        later_ns, further = turn * span_ns, turn * len(entries)
        pending = list(checkpoints)
        portion, due_ns = Portion(run, attempt.first_ns, number), entries[0].at_ns
        for entry in entries:
            if entry.at_ns >= due_ns:
                if pending and pending[-1].at_ns < entry.at_ns:
                    found = pending.pop()
                    messages = list(zip([at_ns + later_ns for at_ns in found.times_ns], found.payloads, strict=True))
                    messages += [(found.at_ns + later_ns, table) for table in found.tables]
                    portion.checkpoint = found.at_ns + later_ns, found.position + further, messages
                shelf.put(portion)
                number += 1
                portion, due_ns = Portion(run, attempt.first_ns, number), entry.at_ns + 900_000_000
            rank = entry.position % MANY
            frames = portion.shards.setdefault(rank // 64, Columns())
            frames.positions.append(entry.position + further)
            frames.times_ns.append(entry.at_ns + later_ns)
            frames.topics.append(entry.topic)
            frames.payloads.append(entry.payload)
        shelf.put(portion)
        number, turn = number + 1, turn + 1
    shelf.close()


def _record_pattern(file: Path) -> rundir.RunFile:
    now_ns = time.monotonic_ns()
    made = SimulatedRun(MANY, now_ns=now_ns, unix_ns=time.time_ns(), flush_ns=wire.BEAT_NS)
    endpoints = [rundir.Endpoint(rank, made.host(rank), "", made.pid(rank), 0.0, "") for rank in range(MANY)]
    run = rundir.RunFile(rundir.SCHEMA, made.run_id, made.name, "job", 0, MANY, time.time(), endpoints)
    state = _state(run)
    with closing(Recorder(file)) as recorder:
        recorder.begin(run)
        for rank in range(MANY):
            frame = Frame(b"snap/0", made.snap(rank, now_ns), now_ns)
            state.ingest(frame.payload, now_ns)
        until_ns = made.due_ns + PATTERN_S * 1_000_000_000
        while made.due_ns < until_ns:
            at_ns = made.due_ns
            for rank, topic, payload in made.next_messages():
                state.ingest(payload, at_ns)
                recorder.add([Frame(topic, payload, at_ns)], [rank])
            recorder.flush(state, at_ns)
        recorder.finish(state, at_ns)
    return run


def _has_evaluated(file: Path, timeout_s: float = 120.0) -> bool:
    """Wait until it has: the histories have been read by then."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with suppress(DdpwatchError), closing(Recording(file)) as recorded:
            if recorded.alerts():
                return True
        time.sleep(0.5)
    return False


def _pages(file: Path) -> int:
    """Bytes in the recording, those in its log included."""
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        return int(database.execute("PRAGMA page_count").fetchone()[0]) * int(
            database.execute("PRAGMA page_size").fetchone()[0]
        )


def pace_ms() -> float:
    """Processor time of always the same work, the least of some: a shared machine is half as fast at times, and all
    that is measured then with it.
    """
    took_s = []
    for _ in range(PACE_TRIES):
        began_s, number = time.thread_time(), 0
        for each in range(PACE_ROUNDS):
            number += each & 7
        took_s.append(time.thread_time() - began_s)
    return min(took_s) * 1e3


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    parts = sys.argv[1:]
    if not parts or "load" in parts:
        load()
    if not parts or "large" in parts:
        large(*[int(part) for part in parts if part.isdigit()][:1])
