"""Training processes that may die, in milliseconds each: forked from one process that has torch imported.

A child runs a plain function of a test module and then ends as any script does, through the interpreter's own exit.
What it prints is kept; the test that starts it discards it, which kills and reaps it. None outlives the zygote.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

PR_SET_PDEATHSIG = 1


class Child:
    """One process."""

    def __init__(self, zygote: Zygote, pid: int, output: str) -> None:
        self._zygote = zygote
        self._output = Path(output)
        self.pid = pid
        self.code: int | None = None
        """Its exit code, minus the signal if one killed it; known after `ended`."""

    def ended(self) -> bool:
        if self.code is None:
            self.code = self._zygote.ask("reap", self.pid)
        return self.code is not None

    def wait(self, timeout_s: float = 30.0) -> int:
        deadline_s = time.monotonic() + timeout_s
        while not self.ended():
            assert time.monotonic() < deadline_s, f"process {self.pid} does not end"
            time.sleep(0.01)
        return self.code

    def output(self) -> str:
        """All that it has printed, on stdout and stderr."""
        return self._output.read_text()

    def kill(self, number: int = signal.SIGKILL) -> None:
        if not self.ended():
            os.kill(self.pid, number)

    def discard(self) -> None:
        self.kill()
        self.wait()
        self._output.unlink(missing_ok=True)


class Zygote:
    """Forks on request."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        theirs.close()
        self._ready = False

    def start(self, function, *args, env: dict[str, str] | None = None) -> Child:
        """Begin `function(*args)` in a process of its own."""
        handle, output = tempfile.mkstemp(prefix="ddpw-out-")
        os.close(handle)
        pid = self.ask("fork", function.__module__, function.__name__, args, env or {}, output)
        return Child(self, pid, output)

    @contextmanager
    def family(self, env: dict[str, str]):
        """A way to start processes that are gone when it ends."""
        children: list[Child] = []
        common = env

        def start(function, *args, env: dict[str, str] | None = None) -> Child:
            children.append(self.start(function, *args, env={**common, **(env or {})}))
            return children[-1]

        try:
            yield start
        finally:
            while children:
                children.pop().discard()

    def ask(self, *order):
        if not self._ready:
            self._await()
        self._pipe.send(order)
        assert self._pipe.poll(60), "the zygote does not answer"
        return self._pipe.recv()

    def _await(self) -> None:
        """Wait for torch to be imported: more than a minute on a busy machine. The timeout of the test limits it."""
        while not self._pipe.poll(1):
            assert self._process.poll() is None, "the zygote could not import what its children need"
        self._ready = self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def _serve(pipe: Connection):
    """Answer orders; returns only in a child, with what it has to run."""
    while True:
        try:
            kind, *rest = pipe.recv()
        except EOFError:
            os._exit(0)
        if kind == "reap":
            pid, status = os.waitpid(rest[0], os.WNOHANG)
            pipe.send(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        pid = os.fork()
        if not pid:
            pipe.close()
            return rest
        pipe.send(pid)


def _become(module: str, name: str, args: tuple, env: dict[str, str], output: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(env)
    handle = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    getattr(import_module(module), name)(*args)


if __name__ == "__main__":
    # What the children need is imported once, here.
    import psutil  # noqa: F401
    import pytest  # noqa: F401
    import torch

    import ddpwatch.agent
    import ddpwatch.outputs.headless
    import ddpwatch.session.run_follower  # noqa: F401

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    # The first step of an optimizer imports half of torch. No backward: autograd must not have run before a fork.
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight]).step()
    gc.freeze()  # or each child would look through all of torch when it ends
    pipe = Connection(int(sys.argv[1]))
    pipe.send(True)
    _become(*_serve(pipe))
