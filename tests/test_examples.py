"""The examples run with the commands in their docstrings."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.builders.launchers import torchrun
from tests.builders.training import wait_for

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_to_its_end(name, zygote, run_dir):
    arguments = ["--standalone", "--nproc-per-node=2", str(ROOT / "examples" / name)]
    code, printed = torchrun(zygote, arguments, {"EPOCHS": "1", "DDPWATCH_RUN_DIR": str(run_dir)})

    assert code == 0, printed
    assert "\nddpwatch" not in f"\n{printed}", "the agent had something to complain about"
    assert not list(run_dir.iterdir()), "the run left something behind"


def test_the_demo_shows_its_slow_rank_and_leaves_nothing_behind(run_dir):
    result = subprocess.run(
        [sys.executable, "-m", "ddpwatch", "demo", "--ranks", "2", "--for", "9"],
        env={**os.environ, "TMPDIR": str(run_dir)}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    named = [line for line in result.stdout.splitlines() if line.startswith(("▲ straggler", "✖ straggler"))]
    assert any("rank 1 is slow in data" in line for line in named), result.stdout
    assert result.stdout.rstrip().endswith("all ranks have exited")
    assert not list(run_dir.glob("ddpw-demo-*"))
    assert not _processes_of(run_dir)


def test_ctrl_c_is_the_way_to_end_the_demo_and_no_failure(run_dir):
    demo = subprocess.Popen(
        [sys.executable, "-m", "ddpwatch", "demo", "--ranks", "2"],
        env={**os.environ, "TMPDIR": str(run_dir)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: list(run_dir.glob("ddpw-demo-*/run/*/run.json")), timeout_s=90)
        demo.send_signal(signal.SIGINT)
        said = demo.communicate(timeout=60)[1]
    finally:
        demo.kill()

    assert demo.returncode == 0
    assert said.endswith("the demo and its ranks have stopped\n")
    assert not list(run_dir.glob("ddpw-demo-*"))
    assert not _processes_of(run_dir)


def _processes_of(place: Path) -> list[int]:
    """Ranks of a demo that has its store in `place`."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(place) in word for word in process.info["cmdline"] or [])
    ]
