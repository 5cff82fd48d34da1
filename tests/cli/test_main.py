"""Start-up, errors and exit codes of the command line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ddpwatch.cli import main
from ddpwatch.cli.main import COMMANDS
from ddpwatch.sources.find_run import NO_RUN_CHECKS
from ddpwatch.version import VERSION
from tests.builders.fake_rank import FakeRun
from tests.cli.cli_child import child_environment

HEAVY = {"numpy", "zmq", "psutil", "msgspec", "textual", "torch", "pynvml"}


def loaded_modules(code):
    """Top-level modules in `sys.modules` after the code has run in a fresh interpreter."""
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    script = f"import atexit\natexit.register(lambda: exec({report!r}))\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", script], env=child_environment(), capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(argument):
    modules = loaded_modules(f"import sys; sys.argv = ['ddpwatch', {argument!r}]; import ddpwatch.__main__")

    assert "click" in modules
    assert modules & HEAVY == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_imports_nothing_heavy(command):
    modules = loaded_modules(f"import sys; sys.argv = ['ddpwatch', {command!r}, '--help']; import ddpwatch.__main__")

    assert modules & HEAVY == set()


def test_the_core_needs_no_sockets_no_screen_and_no_torch():
    modules = loaded_modules(
        "import ddpwatch.core.metrics.live_metrics, ddpwatch.core.monitor, ddpwatch.core.state.run"
    )

    assert "numpy" in modules
    assert modules & {"zmq", "textual", "torch", "click", "psutil"} == set()


def test_watching_never_imports_torch():
    modules = loaded_modules(
        "import ddpwatch.cli._status_loop, ddpwatch.cli._doctor_checks; ddpwatch.cli._doctor_checks._torch()"
    )

    assert "zmq" in modules
    assert "torch" not in modules


def test_every_command_is_listed_with_its_line(started_ddpwatch):
    done = started_ddpwatch("--help")

    assert done.returncode == 0
    for name, line in COMMANDS.items():
        assert f"{name}  " in done.stdout
        assert line in done.stdout


def test_the_version_is_one_line(started_ddpwatch):
    assert started_ddpwatch("--version").stdout == f"ddpwatch {VERSION}\n"


def test_no_command_shows_the_help(started_ddpwatch):
    done = started_ddpwatch()

    assert done.returncode == 2
    assert "Commands:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["status", "./x"], 3, "no run at x: No such file"),
        (["frobnicate"], 2, "No such command 'frobnicate'"),
        (["status", "--frobnicate"], 2, "--frobnicate"),
        (["status", "--every", "nan"], 2, "is not a number of seconds"),
        (["status", "--every", "0"], 2, "is not a number of seconds"),
        (["status", "--timeout", "soon"], 2, "is not a number of seconds"),
        (["status", "a", "b"], 2, "unexpected extra argument"),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(ddpwatch, arguments, exit_code, words):
    done = ddpwatch(*arguments)

    assert done.returncode == exit_code
    assert done.stdout == ""
    assert done.stderr.startswith("ddpwatch: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["attach x", "status", "watch --for 0.1s", "record --for 0.1s", "stacks", "ticket"])
def test_every_command_explains_why_no_run_may_be_found(ddpwatch, run_dir, command):
    done = ddpwatch(*command.split())

    assert (done.returncode, done.stdout) == (3, "")
    assert f"no run found in {run_dir} " in done.stderr
    assert done.stderr.endswith("".join(f"  {check}\n" for check in NO_RUN_CHECKS))


@pytest.mark.parametrize("command", ["status", "runs"])
def test_a_run_directory_open_to_others_is_refused_in_one_line(started_ddpwatch, run_dir, command):
    run_dir.chmod(0o755)
    done = started_ddpwatch(command)

    assert done.returncode == 1
    assert done.stderr.startswith(f"ddpwatch: the run directory {run_dir} is open to other users; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", ["--help", "runs", "runs --json", "doctor"])
@pytest.mark.parametrize(
    ("output", "exit_code", "words"),
    [(">&-", 0, ""), (">/dev/full", 1, "ddpwatch: cannot write the output: No space left on device")],
)
def test_an_output_that_takes_nothing_is_no_traceback(run_dir, arguments, output, exit_code, words):
    with FakeRun(run_dir, 1):
        done = subprocess.run(
            f"{sys.executable} -m ddpwatch {arguments} {output}",
            shell=True, env=child_environment(), stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip

    assert done.returncode == exit_code
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == exit_code


def test_several_runs_are_listed(ddpwatch, run_dir):
    with FakeRun(run_dir, 1), FakeRun(run_dir, 1, run_id="0123456789abcdef", name="other"):
        done = ddpwatch("status")

    assert done.returncode == 2
    assert "ab12cd34 (train)" in done.stderr
    assert "01234567 (other)" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_hostile_run_name_cannot_inject_escapes_into_an_error(ddpwatch, run_dir):
    with FakeRun(run_dir, 1, name="\x1b[2J\x1b]0;owned\x07evil\nname"):
        done = ddpwatch("status", "nope")

    assert done.returncode == 3
    assert done.stderr == "ddpwatch: no run matches 'nope'; live runs: ab12cd34 (evil name)\n"


def test_an_unexpected_error_is_one_line(monkeypatch, capsys):
    def fail():
        raise RuntimeError("the\nsky fell")

    monkeypatch.setattr("ddpwatch.sources.find_run.live_runs", fail)
    monkeypatch.delenv("DDPWATCH_DEBUG", raising=False)

    assert main.run(["runs"]) == 1
    shown = capsys.readouterr().err
    assert shown == "ddpwatch: unexpected RuntimeError: the sky fell (set DDPWATCH_DEBUG=1 for the traceback)\n"

    monkeypatch.setenv("DDPWATCH_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main.run(["runs"])


def test_a_reader_that_went_away_is_no_error(run_dir):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ddpwatch", "doctor"],
            env=child_environment(),
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writing)

    assert (done.returncode, done.stderr) == (main.BROKEN_PIPE, b"")


def test_a_terminal_without_unicode_gets_question_marks(started_ddpwatch):
    done = started_ddpwatch("doctor", PYTHONIOENCODING="latin-1")

    assert done.returncode == 0
    assert "? ok" in done.stdout
