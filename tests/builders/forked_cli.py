"""`ddpwatch ...` as a process of its own that need not import everything first: forked from one that has.

What is imported when, and how long that takes, has tests of its own, on processes that are started as users start them.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1
MAX_BYTES = 1 << 20
GIVE_UP_S = 60.0


class Forked:
    """One process, with what tests use of `subprocess.Popen`. Its streams are pipes, and text."""

    def __init__(self, pid: int, status: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = os.fdopen(stdout, encoding="utf-8")
        self.stderr = os.fdopen(stderr, encoding="utf-8")
        self._status = os.fdopen(status, "rb")

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if self._look(timeout) is None:
            raise subprocess.TimeoutExpired("ddpwatch", timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of both streams, when it has ended."""
        rest: dict[str, str] = {}

        def read(name: str) -> None:
            rest[name] = getattr(self, name).read()

        readers = [threading.Thread(target=read, args=(name,), daemon=True) for name in ("stdout", "stderr")]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return rest["stdout"], rest["stderr"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill and reap it, if it is still there."""
        self.kill()
        self.wait(GIVE_UP_S)
        for stream in (self.stdout, self.stderr, self._status):
            stream.close()

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            self.returncode = int(self._status.read())
        return self.returncode


class Forker:
    """Forks on request."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                    "PYTHONIOENCODING": "utf-8",
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )

    def start(self, arguments: list[str], env: dict[str, str]) -> Forked:
        ours, theirs = zip(*(os.pipe() for _ in range(3)), strict=True)
        order = json.dumps([list(map(str, arguments)), env, os.getcwd()]).encode()
        socket.send_fds(self._socket, [len(order).to_bytes(4, "little") + order], theirs)
        for handle in theirs:
            os.close(handle)
        answer = self._socket.recv(MAX_BYTES)
        assert answer, "what forks has ended"
        return Forked(int(answer), *ours)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(GIVE_UP_S)


def _serve(orders: socket.socket) -> list[str]:
    """Fork as ordered and send exit codes back until the orders end; returns only in a child."""
    children: dict[int, int] = {}
    looking, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([orders, looking], [], [])
        if looking in ready:
            os.read(looking, 4096)
            _tell_ends(children)
        if orders not in ready:
            continue
        order, (status, *streams) = _taken(orders)
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            for handle in (status, looking, waking, *children.values()):
                os.close(handle)
            return _become(order, streams)
        for handle in streams:
            os.close(handle)
        children[pid] = status
        orders.send(str(pid).encode())


def _taken(orders: socket.socket) -> tuple[bytes, list[int]]:
    data, handles, _, _ = socket.recv_fds(orders, MAX_BYTES, 3)
    if not data:
        os._exit(0)
    while len(data) < 4 + int.from_bytes(data[:4], "little"):
        data += orders.recv(MAX_BYTES)
    return data[4:], handles


def _tell_ends(children: dict[int, int]) -> None:
    """The exit codes of those that have ended since, each into its own pipe."""
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            handle = children.pop(pid)
            os.write(handle, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(handle)


def _become(order: bytes, streams: list[int]) -> list[str]:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    arguments, env, place = json.loads(order)
    for number, handle in enumerate(streams, 1):
        os.dup2(handle, number)
        os.close(handle)
    # As an interpreter has them at its start: the existing ones are bound to the parent's descriptors.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as it lives
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.chdir(place)
    return arguments


if __name__ == "__main__":
    # What the commands need is imported once, here. Not what a dashboard needs: that is shown on terminals only.
    from importlib import import_module

    from ddpwatch.cli.main import COMMANDS

    for name in COMMANDS:
        import_module(f"ddpwatch.cli.{name}")
    for name in ("cli._follow_run", "cli._status_loop", "outputs.headless", "recording.writer", "view.status"):
        import_module(f"ddpwatch.{name}")
    gc.freeze()  # or each child would look through all of it when it ends
    with socket.socket(fileno=int(sys.argv[1])) as taken:
        sys.argv = ["ddpwatch", *_serve(taken)]
    runpy.run_module("ddpwatch", run_name="__main__", alter_sys=True)
