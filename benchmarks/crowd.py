"""Many simulated ranks on real sockets: what a viewer of a large run is measured against, and developed with.

    python -m benchmarks.crowd --ranks 1024 --for 600 --slow 3
    python -m benchmarks.crowd --ranks 1024 --tcp     # as if on other hosts: TCP with CURVE on loopback

One process with one XPUB for each rank, each of which answers snapshots, beats and publishes its steps as an agent
does. Prints the run directory to look into. It ends after its time, or with the process that has started it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from ddpwatch import encryption, rundir, wire
from ddpwatch.simulator.scenario import Fault, Segment
from ddpwatch.simulator.workload import SimulatedRun

if TYPE_CHECKING:
    from collections.abc import Iterator

SEND_QUEUE = 256
"""As an agent has it."""
FILES_PER_RANK = 6
"""Listening socket, mailbox, and a few viewers."""
SPARE_FILES = 128
MAX_BEHIND_NS = 1_000_000_000
CATCH_UP_S = 5.0
"""Seconds after the last history in which messages may be late: one thread makes the histories of all ranks."""
SLOW_SIZE = 0.3
ANSWERED_AT_ONCE = 16
"""Requests answered before it is checked whether messages are due, so that many viewers do not delay them."""
START_S = 60.0
PR_SET_PDEATHSIG = 1


class Crowd:
    """All ranks of a run, in one thread."""

    def __init__(
        self,
        base: Path,
        ranks: int,
        *,
        steps_per_s: float,
        flush_ms: float,
        schedule: list[Segment] | None,
        tcp: bool = False,
    ) -> None:
        """Bind all sockets, then write their addresses."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = ranks * FILES_PER_RANK + SPARE_FILES
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, wanted)), hard))
        self._run_id = secrets.token_hex(8)
        self._base = base
        rundir.ensure_base(base)
        (base / self._run_id).mkdir(mode=0o700)
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, ranks + 16)
        viewer_public_key, self._viewer_secret_key = encryption.new_keys()
        self._keeper = encryption.ZapHandler(self._context, viewer_public_key)
        self._places: dict[int, tuple[str, str]] = {}
        """By rank, its TCP address and the public key it listens with."""
        self._sockets = [self._bind(rank, tcp=tcp) for rank in range(ranks)]
        self._rank_of = {socket.getsockopt(zmq.FD): rank for rank, socket in enumerate(self._sockets)}
        # ZeroMQ's own poll looks at a thousand sockets each time. This one returns only those that have input;
        # what a socket takes in while it sends is found when its rank has had its turn.
        self._poller = select.epoll()
        for handle in (self._keeper.socket.getsockopt(zmq.FD), *self._rank_of):
            self._poller.register(handle, select.EPOLLIN | select.EPOLLET)
        self.run = SimulatedRun(
            ranks, now_ns=time.monotonic_ns(), unix_ns=time.time_ns(), schedule=schedule, run_id=self._run_id,
            name="crowd", pid=os.getpid(), step_ms=1000 / steps_per_s, history_steps=wire.MAX_SNAP_STEPS,
            flush_ns=int(flush_ms * 1e6),
        )  # fmt: skip
        self.late_turns = 0
        """Turns that came so late that the crowd is not what it claims to be: the machine was too busy."""
        self._asked_s = 0.0
        """When a history was last requested, in seconds."""
        rundir.write(base, self._run_file(ranks))

    def serve(self, until_s: float) -> None:
        """Publish and answer until then, and say goodbye."""
        while time.monotonic() < until_s:
            while (left_ns := self.run.due_ns - time.monotonic_ns()) > 0:
                self._answer_requests(max(1, left_ns // 1_000_000))
            self._answer_requests(0)
            self.late_turns += -left_ns > MAX_BEHIND_NS and time.monotonic() > self._asked_s + CATCH_UP_S
            reported = self.run.next_messages()
            for rank, topic, payload in reported:
                self._send(rank, topic, payload)
            for rank in {rank for rank, _, _ in reported}:
                self._answer(rank)
            self._keeper.answer(len(self._sockets))
        for rank in range(len(self._sockets)):
            self._send(rank, wire.TOPICS[wire.Bye], self.run.bye(rank, time.monotonic_ns()))

    def _answer_requests(self, timeout_ms: int) -> None:
        for handle, _ in self._poller.poll(timeout_ms / 1000, ANSWERED_AT_ONCE):
            if (rank := self._rank_of.get(handle)) is not None:
                self._answer(rank)
            self._keeper.answer(len(self._sockets))

    def close(self) -> None:
        """Take everything away."""
        self._poller.close()
        self._context.destroy(linger=200)
        shutil.rmtree(self._base / self._run_id, ignore_errors=True)

    def _bind(self, rank: int, *, tcp: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.XPUB)
        socket.sndhwm = SEND_QUEUE
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.bind(f"ipc://{rundir.socket_path(self._base, self._run_id, rank)}")
        if tcp:
            public_key, secret_key = encryption.new_keys()
            encryption.listen_with(socket, secret_key)
            socket.bind("tcp://127.0.0.1:*")
            self._places[rank] = socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode(), public_key
        return socket

    def _send(self, rank: int, topic: bytes, payload: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self._sockets[rank].send_multipart((topic, payload), flags=zmq.NOBLOCK, copy=True)

    def _answer(self, rank: int) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                asked = self._sockets[rank].recv(zmq.NOBLOCK)
                subscribed, topic = asked[:1] == b"\x01", asked[1:]
                if topic == wire.TOPICS[wire.Buckets]:
                    self.run.buckets_wanted = subscribed
                elif subscribed and topic.startswith(wire.SNAP_PREFIX):
                    self._asked_s = time.monotonic()
                    self._send(rank, topic, self.run.snap(rank, time.monotonic_ns()))
                    # A thousand agents would answer at once; one thread for all of them must not let a viewer wait.
                    self._keeper.answer(len(self._sockets))

    def _run_file(self, ranks: int) -> rundir.RunFile:
        created_s = rundir.created_s(os.getpid())
        assert created_s is not None
        # On a node that a viewer takes for another one, it has to use TCP.
        node = "elsewhere" if self._places else rundir.node_id()
        endpoints = [
            rundir.Endpoint(
                rank, self.run.host(rank), node, os.getpid(), created_s,
                f"ipc://{rundir.socket_path(self._base, self._run_id, rank)}", *self._places.get(rank, ()),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        return rundir.RunFile(
            rundir.SCHEMA, self._run_id, "crowd", "crowd", 0, ranks, time.time(), endpoints, self._viewer_secret_key
        )


@dataclass
class Child:
    """A crowd in a process of its own."""

    base: Path
    """Its run directory, for DDPWATCH_RUN_DIR."""
    pid: int
    late_turns: int | None = None
    """See `Crowd.late_turns`; known when it has ended in order. Above 0, nothing that was measured with it counts."""


@contextlib.contextmanager
def crowd(
    ranks: int,
    *,
    seconds: float = 600.0,
    steps_per_s: float = 10.0,
    flush_ms: float = 250.0,
    slow: int | None = None,
    tcp: bool = False,
) -> Iterator[Child]:
    """A crowd that listens, for the length of the block."""
    base = Path(tempfile.mkdtemp(prefix="ddpw-crowd-"))
    options = [f"--ranks={ranks}", f"--for={seconds}", f"--steps-per-s={steps_per_s}", f"--flush-ms={flush_ms}"]
    options += [] if slow is None else [f"--slow={slow}"]
    options += ["--tcp"] if tcp else []
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.crowd", *options],
        env={**os.environ, "DDPWATCH_RUN_DIR": str(base)},
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    reported = Child(base, child.pid)
    try:
        deadline_s = time.monotonic() + START_S
        while not rundir.scan(base)[0]:
            assert child.poll() is None, f"the crowd has ended with code {child.returncode}"
            assert time.monotonic() < deadline_s, f"no crowd of {ranks} ranks within {START_S:.0f} s"
            time.sleep(0.02)
        yield reported
    finally:
        child.terminate()
        try:
            said, _ = child.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            said, _ = child.communicate()
        if ended := re.search(r"(\d+) turns came late", said):
            reported.late_turns = int(ended[1])
        shutil.rmtree(base, ignore_errors=True)


def main() -> None:
    """Be a crowd for a while."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--for", dest="seconds", type=float, default=600.0, help="seconds until it ends by itself")
    parser.add_argument("--steps-per-s", type=float, default=10.0)
    parser.add_argument("--flush-ms", type=float, default=250.0, help="how often each rank publishes")
    parser.add_argument("--slow", type=int, help="a rank that is slow in backward throughout; without it, nobody is")
    parser.add_argument("--schedule", action="store_true", help="play the schedule of `demo --simulated` instead")
    parser.add_argument("--tcp", action="store_true", help="listen on TCP with CURVE, too, and be on other hosts")
    options = parser.parse_args()
    _end_with(os.getppid())
    faults = () if options.slow is None else (Fault((options.slow,), "backward", SLOW_SIZE, onset=0),)
    schedule = None if options.schedule else [Segment(1000, faults)]
    chosen = os.environ.get("DDPWATCH_RUN_DIR")
    base = Path(chosen or tempfile.mkdtemp(prefix="ddpw-crowd-"))
    began = Crowd(
        base,
        options.ranks,
        steps_per_s=options.steps_per_s,
        flush_ms=options.flush_ms,
        schedule=schedule,
        tcp=options.tcp,
    )
    print(f"export DDPWATCH_RUN_DIR={base}", flush=True)
    try:
        began.serve(time.monotonic() + options.seconds)
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        began.close()
        if not chosen:
            shutil.rmtree(base, ignore_errors=True)
        print(f"{began.late_turns} turns came late", flush=True)


def _end_with(parent: int) -> None:
    """Be signaled when the parent process ends, and clean up as at any other end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)


if __name__ == "__main__":
    main()
