"""Recordings of real runs, for tests that need no torch: four gloo ranks, received over their real sockets.

    python -m tests.recordings.make                    # record all runs anew, and write what is found in them
    python -m tests.recordings.make slow-backward      # only this one
    python -m tests.recordings.make --golden           # leave the recordings, write only what is found in them

A recording is the msgpack of a list of frames `[topic, payload, received_ns]` in a gzip. Names of the host, process
numbers and the date are replaced on the way.

The healthy run is a chosen one: ten were recorded on two shared cores, in five of them a rank was blamed and in eight
a slowdown alert, and the one without either was kept. It shows when a change makes the rules find something new; how
often a busy machine is mistaken for a slow rank it does not show.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import msgspec

from ddpwatch import rundir, wire
from ddpwatch.cli._demo_processes import training
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.sources.frames import Frame, Tick
from ddpwatch.sources.live import Live

HERE = Path(__file__).parent
WORLD = 4
SLOW_RANK = 2
HANG = "hang"
HANGS = HERE / "hangs"
REPORTED = HANGS / "reported.json"
NAMING = frozenset({"stall", "desync", "rank-lost", "rank-failed", "uneven-batch", "timeout"})
"""Rules that name a rank for a hang or an end."""
RUNS = {"slow-backward": SLOW_RANK, "healthy": -1, HANG: SLOW_RANK}
"""The guilty rank of each; -1 = none."""
HANG_S = 8.0
TRAIN_S = 12.0
MAX_S = 90.0
MAX_BYTES = 150_000
RUN_ID = "5ec0de5ec0de5ec0"
UNIX_NS = 1_700_000_000_000_000_000
DIRECTORIES = r"(?<![\w.])/(?:[\w.+-]+/)+"
"""Of a path, all but its last part."""


def record(slow_rank: int) -> list[Frame]:
    """All frames of a run from its start until every rank has said goodbye, without a trace of this machine."""
    frames: list[Frame] = []
    left: set[int] = set()
    with training(ranks=WORLD, slow_rank=slow_rank, seconds=TRAIN_S) as run, closing(Live(run)) as live:
        for event in live:
            if not isinstance(event, Frame):
                continue
            message = wire.decode(event.payload)
            frames.append(anonymous(event, message))
            if isinstance(message, wire.Bye):
                left.add(message.rank)
            if len(left) == WORLD:
                break
            if event.received_ns - frames[0].received_ns > MAX_S * 1e9:
                raise SystemExit(f"the run did not end within {MAX_S:.0f} s")
    first_ns = frames[0].received_ns
    return [frame._replace(received_ns=frame.received_ns - first_ns) for frame in frames]


def record_hang() -> list[Frame]:
    """All frames of a run whose rank 2 is stuck, from its start until some time after that was reported."""
    frames: list[Frame] = []
    with tempfile.TemporaryDirectory(prefix="ddpw-") as folder:
        os.environ["DDPWATCH_RUN_DIR"] = f"{folder}/run"
        command = [sys.executable, str(HERE / "train.py")]
        ranks = [subprocess.Popen([*command, str(rank), str(WORLD), f"{folder}/store"]) for rank in range(WORLD)]
        try:
            source = _Received(Live(_started()), frames)
            with closing(RunFollower(source.run, source=source)) as follower:
                reported_ns = 0
                while not reported_ns or follower.advance() < reported_ns + HANG_S * 1e9:
                    now_ns = follower.advance()
                    if not reported_ns and any(rank.stack for rank in follower.monitor.state.ranks.values()):
                        reported_ns = now_ns
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    first_ns = frames[0].received_ns
    return [frame._replace(received_ns=frame.received_ns - first_ns) for frame in frames]


def _started() -> rundir.RunFile:
    deadline_s = time.monotonic() + MAX_S
    while time.monotonic() < deadline_s:
        runs = rundir.scan(rundir.base_path())[0]
        if runs and len(runs[0].endpoints) == WORLD:
            return runs[0]
        time.sleep(0.1)
    raise SystemExit("the run did not start")


class _Received:
    """A source that keeps what comes, without a trace of this machine."""

    def __init__(self, live: Live, frames: list[Frame]) -> None:
        self._live, self._frames = live, frames
        self.run = live._run

    def __getattr__(self, name):
        return getattr(self._live, name)

    def poll(self, timeout_ms: int) -> Frame | Tick:
        item = self._live.poll(timeout_ms)
        if isinstance(item, Frame):
            self._frames.append(anonymous(item, wire.decode(item.payload)))
        return item

    def poll_ready(self, _most: int) -> list[Frame]:
        return []


def write(path: Path, frames: list[Frame], most_bytes: int = MAX_BYTES) -> None:
    """The frames as a file; its bytes depend on them alone."""
    data = gzip.compress(msgspec.msgpack.encode(frames), 9, mtime=0)
    if len(data) > most_bytes:
        raise SystemExit(f"{path.name} would have {len(data)} bytes; train for less than {TRAIN_S} s")
    path.write_bytes(data)


def read(path: Path) -> list[Frame]:
    """The frames of a recording, in the order in which they came."""
    return msgspec.msgpack.decode(gzip.decompress(path.read_bytes()), type=list[Frame])


def events_of(frames: list[Frame]) -> list[dict]:
    """The alert events of the run, in order."""
    monitor = monitor_of(frames)
    reported = []
    for event in monitor.book.drain():
        alert = event.alert
        reported.append(
            {
                "kind": event.kind,
                "rule": alert.finding.rule,
                "subject": alert.finding.subject,
                "phase": alert.finding.phase,
                "since_step": alert.since.step,
            }
        )
    return reported


def monitor_of(frames: list[Frame]) -> Monitor:
    """The run as it is known after all of the frames."""
    monitor = Monitor(RunState(RUN_ID, "demo", WORLD))
    for frame in frames:
        monitor.ingest(frame.payload, frame.received_ns)
    monitor.evaluate_now()
    return monitor


def reported_in(frames: list[Frame], world_size: int) -> list[list]:
    """The ranks named for a hang or an end when the frames are replayed, and by which rule: each once."""
    monitor = Monitor(RunState(RUN_ID, "hang", world_size))
    for frame in frames:
        if frame.payload:
            monitor.ingest(frame.payload, frame.received_ns)
        else:
            monitor.tick(frame.received_ns)
    monitor.evaluate_now()
    findings = [alert.finding for alert in monitor.book.open.values() if alert.finding.severity > Severity.INFO]
    named = {(each.rule, each.ranks) for each in findings if each.rule in NAMING}
    return [[rule, list(ranks)] for rule, ranks in sorted(named)]


def anonymous(frame: Frame, message: wire.Message) -> Frame:
    topic = frame.topic
    if isinstance(message, wire.Hello):
        message = _anonymous_hello(message)
    elif isinstance(message, wire.Snap):
        topic, message = b"snap/0", msgspec.structs.replace(message, hello=_anonymous_hello(message.hello))
    elif isinstance(message, wire.Stack):
        topic, message = (
            b"stack/0",
            msgspec.structs.replace(message, threads=[*map(_anonymous_thread, message.threads)]),
        )
    elif isinstance(message, wire.Bye | wire.Note):
        message = msgspec.structs.replace(message, text=re.sub(DIRECTORIES, "", message.text))
    return Frame(topic, wire.encode(message), frame.received_ns)


def _anonymous_thread(thread: wire.ThreadStack) -> wire.ThreadStack:
    """Only the part of a path that is the same everywhere."""

    def shorter(file: str) -> str:
        for mark in ("/site-packages/", "/lib/python", "/ddpwatch/"):
            if mark in file:
                return mark + file.rpartition(mark)[2]
        return Path(file).name

    frames = [wire.StackFrame(frame.function, shorter(frame.file), frame.line) for frame in thread.frames]
    return wire.ThreadStack(thread.name, thread.training, frames)


def _anonymous_hello(hello: wire.Hello) -> wire.Hello:
    return msgspec.structs.replace(
        hello,
        host="node-a",
        pid=1000 + hello.rank,
        run_id=RUN_ID,
        command="",
        environment={},
        started_unix_ns=UNIX_NS,
        unix_ns=UNIX_NS + hello.unix_ns - hello.started_unix_ns,
    )


def main() -> None:
    """Write the files that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help=f"which of {', '.join(RUNS)}; without one, all")
    parser.add_argument("--golden", action="store_true", help="record nothing, write only what is found")
    arguments = parser.parse_args()
    for name in arguments.runs or RUNS:
        path = HERE / f"{name}.msgpack.gz"
        if not arguments.golden:
            write(path, record_hang() if name == HANG else record(RUNS[name]))
        frames = read(path)
        golden = HERE / f"{name}.golden.json"
        events = events_of(frames)
        golden.write_text("[\n" + ",\n".join(f"  {json.dumps(event)}" for event in events) + "\n]\n")
        print(f"{path.name}: {path.stat().st_size} bytes, {len(frames)} frames\n{golden.read_text()}")


if __name__ == "__main__":
    main()
