"""Fixtures that run the command line as a process, in this process, or on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from ddpwatch.cli.main import run as main_run
from tests.cli.cli_child import GIVE_UP_S, child_environment


@pytest.fixture
def ddpwatch(start_ddpwatch):
    """Run `ddpwatch ...` to its end, with the test's own run directory."""

    def run(*arguments, **environment):
        child = start_ddpwatch(*arguments, **environment)
        out, err = child.communicate(GIVE_UP_S)
        return subprocess.CompletedProcess(arguments, child.returncode, out, err)

    return run


@pytest.fixture
def started_ddpwatch(run_dir):
    """Run `python -m ddpwatch ...` in a fresh interpreter, for tests of its start."""

    def run(*arguments, **environment):
        return subprocess.run(
            [sys.executable, "-m", "ddpwatch", *arguments],
            env=child_environment(**environment),
            capture_output=True,
            encoding="utf-8",
            timeout=GIVE_UP_S,
            check=False,
        )

    return run


@pytest.fixture
def in_process(run_dir, capsys, monkeypatch):
    """Run `ddpwatch ...` in this process, which is faster than starting one."""
    monkeypatch.delenv("DDPWATCH_DEBUG", raising=False)
    # It would redirect the stdout of the whole test process.
    monkeypatch.setattr("ddpwatch.cli.main._silence_stdout", lambda: None)

    def ran(*arguments):
        code = main_run(arguments)
        written = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, written.out, written.err)

    return ran


@pytest.fixture
def start_ddpwatch(forker, run_dir):
    """Start `ddpwatch ...` in the background; it is killed at the end of the test."""
    children = []

    def start(*arguments, **environment):
        assert not any(name.startswith("PYTHON") for name in environment), "the interpreter already runs"
        children.append(forker.start(arguments, child_environment(**environment)))
        return children[-1]

    yield start
    for child in children:
        child.close()


@pytest.fixture
def ddpwatch_on_a_terminal(run_dir):
    """Run `ddpwatch ...` on a pseudo-terminal; returns exit code and all that was written to it.

    `monitor` is called with what has been written so far, each time there is more.
    """

    def run(*arguments, monitor=lambda written: None, **environment):
        primary, secondary = pty.openpty()
        with subprocess.Popen(
            [sys.executable, "-m", "ddpwatch", *arguments],
            env=child_environment(COLUMNS="100", LINES="30", TERM="xterm", **environment),
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
        ) as child:
            os.close(secondary)
            written = b""
            # Linux ends a pty without a writer with EIO.
            while True:
                try:
                    written += os.read(primary, 65536)
                except OSError:
                    break
                monitor(written)
            os.close(primary)
            return child.wait(GIVE_UP_S), written.decode()

    return run
