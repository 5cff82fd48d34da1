"""Ranks without torch: builders of wire messages, and a thread that plays one rank on a real ZeroMQ socket."""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import threading
import time
from pathlib import Path

import psutil
import zmq

from ddpwatch import rundir, wire

MS = 1_000_000
RUN_ID = "ab12cd34ab12cd34"
PHASES_MS = {"data": 1, "forward": 8, "backward": 16, "sync": 2, "optimizer": 2, "other": 1}


def make_step(index: int, **changed) -> wire.Step:
    """A step of 30 ms; `changed` takes phases in ms by name (`backward=20`) and any field of `Step`."""
    phases = {f"{name}_ns": changed.pop(name, value) * MS for name, value in PHASES_MS.items()}
    return wire.Step(
        **{"index": index, "end_ns": (index + 1) * 30 * MS, "samples": 32, "batch": 32, **phases, **changed}
    )


def make_hello(rank: int = 0, seq: int = 1, **changed) -> wire.Hello:
    fields = {
        "wire_version": wire.WIRE_VERSION,
        "agent_version": "0.1.0",
        "run_id": RUN_ID,
        "run_name": "train",
        "attempt": 0,
        "world_size": 4,
        "local_rank": rank,
        "host": "node-a",
        "pid": 1000 + rank,
        "started_unix_ns": 1,
        "mono_ns": 1,
        "backend": "gloo",
        "kind": "ddp",
    }
    return wire.Hello(rank=rank, seq=seq, **{**fields, **changed})


def make_beat(rank: int = 0, seq: int = 1, **changed) -> wire.Beat:
    fields = {"mono_ns": seq, "step": 0, "phase": 3, "phase_ns": MS, "cpu_percent": 98.0, "rss_bytes": 812 << 20}
    fields["table_columns"] = len(wire.STEP_COLUMNS)
    return wire.Beat(rank=rank, seq=seq, **{**fields, **changed})


def make_snap(rank: int = 0, seq: int = 0, steps=(), hello=None, beat=None, **changed) -> wire.Snap:
    return wire.Snap(
        rank=rank,
        seq=seq,
        hello=hello or make_hello(rank, seq),
        beat=beat or make_beat(rank, seq, step=len(steps)),
        steps=list(steps),
        **changed,
    )


class FakeRank:
    """Owns an XPUB in a thread of its own, answers `snap/<nonce>` subscriptions, publishes what the test gives it."""

    def __init__(self, address: str, rank: int, *, hello: wire.Hello, answers: bool = True, beats: bool = True) -> None:
        self.rank = rank
        self.hello = hello
        self.steps: list[wire.Step] = []
        self.notes: list[wire.Note] = []
        self.seq = 0
        self.followed = threading.Event()
        """Set once a viewer has subscribed to steps."""
        self._answers, self._beats = answers, beats
        self._inbox: queue.Queue = queue.Queue()
        self._stop = threading.Event()
        bound = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address, bound), daemon=True)
        self._thread.start()
        assert bound.wait(10)

    def finish(self, *steps: wire.Step) -> None:
        """Publish finished steps, and keep them for snapshots."""

        def send(socket):
            self.steps.extend(steps)
            self.seq += 1
            self._send(socket, wire.Steps(rank=self.rank, seq=self.seq, steps=list(steps)))

        self._do(send)

    def say_bye(self, reason: str = "closed") -> None:
        def send(socket):
            self.seq += 1
            self._send(socket, wire.Bye(rank=self.rank, seq=self.seq, reason=reason, text="", mono_ns=self.seq))

        self._do(send)

    def lose(self, messages: int) -> None:
        """Number messages that are never sent."""
        self._do(lambda socket: setattr(self, "seq", self.seq + messages))

    def send_raw(self, *parts: bytes) -> None:
        self._do(lambda socket: socket.send_multipart(parts))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _do(self, action) -> None:
        """Have the thread do it, and wait until it is done."""
        done = threading.Event()
        self._inbox.put((action, done))
        assert done.wait(10)

    def _run(self, address: str, bound: threading.Event) -> None:
        with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
            bound.set()
            beat_due_s = 0.0
            while not self._stop.is_set():
                while socket.poll(5):
                    self._subscription(socket, socket.recv())
                with contextlib.suppress(queue.Empty):
                    while True:
                        action, done = self._inbox.get_nowait()
                        action(socket)
                        done.set()
                if self._beats and time.monotonic() > beat_due_s:
                    beat_due_s = time.monotonic() + 0.1
                    self.seq += 1
                    self._send(socket, self._beat())

    def _subscription(self, socket, message: bytes) -> None:
        if message == b"\x01step":
            self.followed.set()
        if message.startswith(b"\x01" + wire.SNAP_PREFIX) and self._answers:
            steps = self.steps[-wire.MAX_SNAP_STEPS :]
            snap = make_snap(self.rank, self.seq, steps, self.hello, self._beat(), notes=list(self.notes))
            socket.send_multipart([message[1:], wire.encode(snap)])

    def _beat(self) -> wire.Beat:
        return make_beat(self.rank, self.seq, step=len(self.steps), mono_ns=time.monotonic_ns())

    def _send(self, socket, message: wire.Message) -> None:
        socket.send_multipart([wire.TOPICS[type(message)], wire.encode(message)])


class FakeRun:
    """A run of fake ranks with its run.json in `base`. Use it in a `with` block."""

    def __init__(
        self, base: Path, world: int = 4, *, run_id: str = RUN_ID, name: str = "train", **rank_options
    ) -> None:
        self.base, self.run_id, self.name = base, run_id, name
        rundir.ensure_base(base)
        (base / run_id).mkdir(mode=0o700, exist_ok=True)
        self.file = make_run_file(base, world, run_id=run_id, name=name)
        self.ranks: list[FakeRank] = []
        self._options = rank_options

    def __enter__(self):
        for endpoint in self.file.endpoints:
            hello = make_hello(endpoint.rank, world_size=self.file.world_size, pid=endpoint.pid, run_name=self.name)
            options = {"hello": hello, **self._options.get(f"rank{endpoint.rank}", {})}
            self.ranks.append(FakeRank(endpoint.address, endpoint.rank, **options))
        rundir.write(self.base, self.file)
        return self

    def __exit__(self, *_) -> None:
        for rank in self.ranks:
            rank.stop()

    def train(self, first: int, count: int, slow_rank: int | None = None) -> None:
        """Finish steps on all ranks; a slow rank takes 10 ms more in backward, for which the others wait."""
        for rank in self.ranks:
            late = {"backward": 26} if rank.rank == slow_rank else {"sync": 12} if slow_rank is not None else {}
            rank.finish(*(make_step(index, **late) for index in range(first, first + count)))


def make_run_file(
    base: Path, world: int, *, run_id: str = RUN_ID, name: str = "train", pid: int | None = None, **changed
):
    """The run.json of a run whose ranks all are this very process, or `pid`."""
    process = psutil.Process(pid or os.getpid())
    endpoints = [
        rundir.Endpoint(
            rank=rank,
            host="node-a",
            node=rundir.node_id(),
            pid=process.pid,
            pid_created_s=rundir.created_s(process.pid),
            address=f"ipc://{rundir.socket_path(base, run_id, rank)}",
        )
        for rank in range(world)
    ]
    fields = {"schema": 1, "name": name, "job": "job", "attempt": 0, "started_unix_s": time.time()}
    return rundir.RunFile(id=run_id, world_size=world, endpoints=endpoints, **{**fields, **changed})


@contextlib.contextmanager
def short_directory():
    """A private directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ddpw-", dir="/tmp") as path:
        yield Path(path)


def make_group(enqueued: int = 42, wait_s: float = 0, **changed) -> wire.Group:
    """A group of four ranks in which nothing is in flight, or the last operation is for `wait_s`."""
    fields = {"name": "0", "size": 4, "enqueued": enqueued, "completed": enqueued}
    if wait_s:
        fields |= {"completed": enqueued - 1, "op": "all_reduce", "bytes": 4 << 20, "shape": "[1048576] Float"}
        fields |= {"age_ns": int(wait_s * 1e9)}
    return wire.Group(**{**fields, **changed})


def make_stack(rank: int = 0, *frames: tuple[str, str, int], mono_ns: int = 1, **changed) -> wire.Stack:
    """The training thread of a rank in these calls, the innermost first: function, file, line."""
    thread = wire.ThreadStack("MainThread", True, [wire.StackFrame(*frame) for frame in frames])
    return wire.Stack(**{"rank": rank, "seq": 3, "step": 90, "mono_ns": mono_ns, "threads": [thread], **changed})


def make_gpu(**changed) -> wire.Gpu:
    """A healthy GPU that works."""
    fields = {
        "device": "cuda:0", "uuid": "GPU-0a", "name": "Stand-in 80GB", "util_percent": 95, "memory_util_percent": 40,
        "used_bytes": 30 << 30, "total_bytes": 80 << 30, "own_bytes": 29 << 30, "temperature_c": 60,
        "power_mw": 400_000, "power_limit_mw": 700_000, "sm_mhz": 1980, "sm_max_mhz": 1980, "memory_mhz": 2619,
        "memory_max_mhz": 2619, "ecc_corrected": 0, "ecc_uncorrected": 0, "allocated_bytes": 20 << 30,
        "reserved_bytes": 27 << 30, "peak_bytes": 25 << 30,
    }  # fmt: skip
    return wire.Gpu(**{**fields, **changed})


def make_gpus(rank: int = 0, gpus=None, seq: int = 1, mono_ns: int = 1, **changed) -> wire.Gpus:
    """A reading of a rank's GPUs: one that works, unless the test changes it."""
    return wire.Gpus(rank=rank, seq=seq, mono_ns=mono_ns, gpus=[make_gpu()] if gpus is None else gpus, **changed)


def steps_of(message: wire.Message) -> list[wire.Step]:
    """The finished steps that a message brings, packed or not."""
    return [*message.steps, *(wire.step_of(row) for row in wire.unpack_steps(getattr(message, "table", b"")))]
